"""Count what this process holds, and find what grows with every call."""

import ctypes
import gc
import mmap
import sys
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import Tensor, UntypedStorage

from sp_core.testing.comm import LockstepComm
from sp_core.testing.threads import ThreadComm

PRODUCT, KIT = "sp_core", ("sp_core.testing", "sp_core.launch")
WATCHED = (Tensor, UntypedStorage, mmap.mmap, threading.Thread)
"""Types of other packages whose objects are counted beside those of the product."""
MEMORY, COMMUNICATORS = "pages of malloc's memory", "communicators"
GROWING = (dict, list, set, deque)


class _Malloc(ctypes.Structure):
    """Ten numbers of glibc's `mallinfo2`. The fifth and the eighth are the bytes in use."""

    _fields_ = [("numbers", ctypes.c_size_t * 10)]


def left_behind(comm: Any, call: Callable[[], object], rounds: int) -> list[str]:
    """Return everything that grows in every round of calls, with its first and last count.

    Args:
        comm: the communicator, all of whose ranks call this.
        call: makes one round of calls.
        rounds: the number of rounds. It is less if nothing grows any more.
    """
    first = last = held(comm)
    growing = set(first)
    for _ in range(rounds):
        call()
        now = held(comm)
        more = {name for name in now if now[name] > last[name]}
        growing, last = more if last is first else growing & more, now
        if not any(comm.allgather(bool(growing))):
            break
    return [f"{name}: {first[name]} to {last[name]}" for name in sorted(growing)]


def held(comm: Any) -> Counter[str]:
    """Count what this process holds now; every rank of the communicator calls this.

    Ranks that are threads share a process: rank 0 counts for all.
    """
    comm.Barrier()
    found = Counter[str]() if isinstance(comm, ThreadComm) and comm.rank else _process()
    comm.Barrier()
    if counts(comm, COMMUNICATORS):
        found[COMMUNICATORS] = len(comm.family.members)
    if counts(comm, MEMORY):
        found[MEMORY] = _malloc_bytes() // mmap.PAGESIZE
        found.update(f"any {type(x).__qualname__} objects" for x in gc.get_objects())
    return found


def counts(comm: Any, kind: str) -> bool:
    """Return whether `held` counts a kind on this rank.

    Communicators are counted only on the kit's. Memory is counted only on others, because the
    kit's records grow.
    """
    if kind == COMMUNICATORS:
        return isinstance(comm, LockstepComm)
    if kind == MEMORY or kind.startswith("any "):
        return not isinstance(comm, LockstepComm)
    return comm.rank == 0 or not isinstance(comm, ThreadComm)


def outside() -> Counter[str]:
    """Count what the operating system lends to this process."""
    maps = Path("/proc/self/maps").read_text().splitlines()
    shared = sum(line.split()[1].endswith("s") for line in maps)
    descriptors, threads = (
        len(list(Path(f"/proc/self/{kind}").iterdir())) for kind in ("fd", "task")
    )
    return Counter({"file descriptors": descriptors, "threads": threads, "shared mappings": shared})


def caches() -> dict[str, Any]:
    """Find the `lru_cache` functions of the product's modules, by their full names."""
    found = {}
    for module in _modules():
        cached = {name: x for name, x in vars(module).items() if hasattr(x, "cache_info")}
        found.update({f"{module.__name__}.{name}": x for name, x in cached.items()})
    return found


def _process() -> Counter[str]:
    """Count objects, entries and system resources of this process, with bounded caches emptied."""
    for cache in caches().values():
        cache.cache_clear()
    gc.collect()
    found = outside()
    for module in _modules():
        found.update(dict(_lengths(module.__name__, vars(module))))
    for x in gc.get_objects():
        kind = type(x)
        if isinstance(x, WATCHED) or _of_product(getattr(kind, "__module__", "")):
            found[f"{kind.__module__}.{kind.__qualname__} objects"] += 1
            found.update(dict(_lengths(kind.__qualname__, getattr(x, "__dict__", {}))))
    return found


def _lengths(owner: str, values: dict[str, Any]) -> Iterator[tuple[str, int]]:
    for name, value in list(values.items()):
        if type(value) in GROWING:
            yield f"{owner}.{name} entries", len(value)


def _modules() -> list[ModuleType]:
    return [module for name, module in sorted(sys.modules.items()) if _of_product(name)]


def _of_product(name: object) -> bool:
    return isinstance(name, str) and name.split(".")[0] == PRODUCT and not name.startswith(KIT)


def _malloc_bytes() -> int:
    library = ctypes.CDLL(None)
    library.mallinfo2.restype = _Malloc
    numbers = library.mallinfo2().numbers
    return int(numbers[4] + numbers[7])
