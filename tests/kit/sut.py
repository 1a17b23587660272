"""A small system under test, on any communicator: attention, with faults to switch on.

The rows of the input are split over ranks. Each row of the result is a weighted mean of all rows.
"""

import os
import signal
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

Array = np.ndarray[Any, Any]


def split(length: int, size: int) -> list[int]:
    """Split a length over ranks as evenly as possible; the first ranks get one more."""
    return [length // size + (rank < length % size) for rank in range(size)]


def rows(n: int, d: int, seed: int) -> Array:
    """Return the whole input, the same on every rank."""
    return np.random.default_rng(seed).standard_normal((n, d))


def reference(x: Array) -> Array:
    """Compute the whole result on one process."""
    weights = np.exp(x @ x.T / np.sqrt(x.shape[1]))
    result: Array = weights @ x / weights.sum(1, keepdims=True)
    return result


def gather(comm: Any, local: Array, lengths: list[int]) -> Array:
    """Return the rows of all ranks; `lengths` are the numbers of rows."""
    whole = np.empty((sum(lengths), local.shape[1]))
    comm.Allgatherv(local, [whole, [n * local.shape[1] for n in lengths]])
    return whole


def attention(comm: Any, x: Array, fault: str = "") -> Array:
    """Return this rank's rows of the result, with a fault switched on if it is named."""
    n, last = len(x), comm.rank == comm.size - 1 > 0
    lengths = split(n, comm.size)
    start = sum(lengths[: comm.rank])
    local = np.ascontiguousarray(x[start : start + lengths[comm.rank]])
    if comm.rank == 1 and n >= 7 and fault in ENDS:
        ENDS[fault](n)
    if fault == "mismatch" and n % comm.size and last:
        comm.Barrier()
        comm.Barrier()
        return local
    if fault == "swapped" and n >= 3 and last:
        norm = _norm(comm, 0)
        whole = gather(comm, local, lengths)
    else:
        whole = gather(comm, local, lengths)
        norm = (
            1.0
            if fault == "skipped" and n >= 2 and last
            else _norm(comm, 1 if fault == "root" and last else 0)
        )
    weights = np.exp(local @ whole.T / np.sqrt(x.shape[1]))
    out: Array = weights @ whole / weights.sum(1, keepdims=True)
    if fault == "value" and comm.rank == 1 and n >= 5 and x.shape[1] >= 3:
        out = out + 1e-3
    return out * norm


def _norm(comm: Any, root: int) -> float:
    """Return 1.0, after a broadcast from `root`."""
    one = np.ones(1)
    comm.Bcast(one, root)
    return float(one[0])


def _refuse(n: int) -> None:
    raise ValueError(f"rank 1 refuses n={n}")


def _loop(n: int) -> None:
    while True:
        pass


ENDS: dict[str, Callable[[int], object]] = {
    "raise": _refuse,
    "skip": lambda _: pytest.skip("not on rank 1"),
    "leave": lambda _: sys.exit(0),
    "exit": lambda _: os._exit(1),
    "exit 0": lambda _: os._exit(0),
    "segv": lambda _: os.kill(os.getpid(), signal.SIGSEGV),
    "loop": _loop,
}
"""By fault, a function with which rank 1 ends or hangs."""
