"""What each collective does, written over the contributions of all ranks in one process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from sp_core.testing.signatures import Array, array, op_name, with_counts

_UFUNCS: dict[str, np.ufunc] = {
    "SUM": np.add,
    "PROD": np.multiply,
    "MAX": np.fmax,  # an MPI library may lose a NaN, so this one does
    "MIN": np.fmin,
    "LAND": np.logical_and,
    "LOR": np.logical_or,
    "BAND": np.bitwise_and,
    "BOR": np.bitwise_or,
}


def contribution(op: str, rank: int, size: int, args: Sequence[Any]) -> list[Array]:
    """A copy of what a rank gives: one piece for each rank where they differ, else one for all."""
    if op == "Barrier":
        return []
    if op == "Alltoallv":
        flat, counts = with_counts(args[0], size)
        return [piece.copy() for piece in np.split(flat, np.cumsum(counts)[:-1])]
    return [array(args[0]).copy()]


def deliver(op: str, rank: int, size: int, parts: Sequence[list[Array]], args: Sequence[Any]) -> None:
    """Write what a rank gets into its buffers."""
    if op in _DELIVERIES:
        _DELIVERIES[op](rank, size, parts, *args)


def receives(op: str, rank: int, args: Sequence[Any]) -> Array | None:
    """The buffer that a rank receives into, if it has one."""
    if op == "Barrier":
        return None
    if op == "Bcast":
        return None if rank == args[1] else array(args[0])
    if op == "Reduce" and rank != args[3]:
        return None
    spec = args[1]
    return array(spec[0] if isinstance(spec, list | tuple) else spec)


def _reduced(parts: Sequence[list[Array]], op: Any, piece: slice = slice(None)) -> Array:
    """The reduction in rank order, so that it is the same on every run."""
    total = parts[0][0][piece].copy()
    for part in parts[1:]:
        total = _UFUNCS[op_name(op)](total, part[0][piece]).astype(total.dtype)
    return total


def _bcast(rank: int, size: int, parts: Sequence[list[Array]], buf: Any, root: int) -> None:
    if rank != root:
        array(buf)[:] = parts[root][0]


def _gather(rank: int, size: int, parts: Sequence[list[Array]], send: Any, recv: Any) -> None:
    array(recv[0] if isinstance(recv, list | tuple) else recv)[:] = np.concatenate([part[0] for part in parts])


def _allreduce(rank: int, size: int, parts: Sequence[list[Array]], send: Any, recv: Any, op: Any) -> None:
    array(recv)[:] = _reduced(parts, op)


def _reduce(rank: int, size: int, parts: Sequence[list[Array]], send: Any, recv: Any, op: Any, root: int) -> None:
    if rank == root:
        array(recv)[:] = _reduced(parts, op)


def _reduce_scatter(rank: int, size: int, parts: Sequence[list[Array]], send: Any, recv: Any, counts: Any, op: Any) -> None:
    received = array(recv)
    start = rank * received.size if counts is None else sum(counts[:rank])
    received[:] = _reduced(parts, op, slice(start, start + received.size))


def _alltoallv(rank: int, size: int, parts: Sequence[list[Array]], send: Any, recv: Any) -> None:
    array(recv[0])[:] = np.concatenate([part[rank] for part in parts])


def _sendrecv(rank: int, size: int, parts: Sequence[list[Array]], *args: Any) -> None:
    received = array(args[3])
    received[:] = parts[args[4]][0].view(received.dtype)


_DELIVERIES: dict[str, Callable[..., None]] = {
    "Bcast": _bcast,
    "Allgather": _gather,
    "Allgatherv": _gather,
    "Allreduce": _allreduce,
    "Reduce": _reduce,
    "Reduce_scatter": _reduce_scatter,
    "Alltoallv": _alltoallv,
    "Sendrecv": _sendrecv,
}
