"""Facts about the machine from the operating system alone."""

from __future__ import annotations

import hashlib
import os
import platform
import re
import socket
import time
from pathlib import Path

_QUOTA = Path("/sys/fs/cgroup/cpu.max")
_CPUINFO = Path("/proc/cpuinfo")
_STAT = Path("/proc/stat")
_BOOT = Path("/proc/sys/kernel/random/boot_id")


def cores() -> int:
    """Return how many cores this process may use, by its affinity and its container's quota."""
    if not hasattr(os, "sched_getaffinity"):
        return node_cores()
    return _within_quota(len(os.sched_getaffinity(0)))


def node_cores() -> int:
    """Return the number of cores of the machine within its container's quota.

    Binding of this process does not change it.
    """
    return _within_quota(os.cpu_count() or 1)


def cpu_model() -> str:
    """Return the name of the processor."""
    found = re.search(r"^model name\s*:\s*(.*)$", _text(_CPUINFO), re.MULTILINE)
    return found[1] if found else platform.processor() or platform.machine()


def node_name() -> str:
    """Return the host name."""
    return socket.gethostname()


def loaded_library(name: str) -> str | None:
    """Return the path of a shared library that this process has loaded, such as "libmpi"."""
    found = re.search(rf"(/\S*/{name}(-\w+)?\.so\S*)", _text(Path("/proc/self/maps")))
    return found[1] if found else None


def node_number() -> int:
    """Identify the node by a number below 2^48, made of its host name and its boot id."""
    name = f"{node_name()} {_text(_BOOT)}".encode()
    return int.from_bytes(hashlib.blake2b(name, digest_size=6).digest(), "little")


def busy_share(seconds: float = 0.3) -> float:
    """Return the share of all processor time that is in use, measured for a moment.

    Return 0 if the system does not tell.
    """
    before = _processor_times()
    time.sleep(seconds)
    total, idle = (
        after - earlier for after, earlier in zip(_processor_times(), before, strict=True)
    )
    return 1 - idle / total if total > 0 else 0.0


def _processor_times() -> tuple[int, int]:
    """Return all ticks since boot, and those in which nothing ran."""
    ticks = [int(word) for word in _text(_STAT).partition("\n")[0].split()[1:9]]
    return (sum(ticks), ticks[3] + ticks[4]) if ticks else (0, 0)  # idle, and waiting for a disk


def _within_quota(cores: int) -> int:
    """Return at most the container's quota of processor time in whole cores, 1 or more."""
    quota, _, period = _text(_QUOTA).strip().partition(" ")
    if not (quota.isdecimal() and period.isdecimal()):  # "max", or no container
        return cores
    return min(cores, max(1, int(quota) // int(period)))


def _text(path: Path) -> str:
    """Read a file of the system; it is empty where there is none."""
    try:
        return path.read_text()
    except OSError:
        return ""
