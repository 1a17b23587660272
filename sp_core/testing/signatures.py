"""What each operation must agree on over the ranks, and what a rank's own buffers must satisfy before it may call it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from sp_core.testing.lockstep import Call, Message

Array = np.ndarray[Any, Any]
_REDUCTIONS = ("SUM", "MAX", "MIN", "PROD", "LAND", "LOR", "BAND", "BOR")


def array(buffer: Any) -> Array:
    """The memory of a buffer as a flat array.

    Raises:
        ValueError: it is not contiguous, so MPI would take its elements in another order.
    """
    flat = buffer if isinstance(buffer, np.ndarray) else np.asarray(memoryview(buffer))
    if not flat.flags.c_contiguous:
        raise ValueError(f"a buffer of shape {flat.shape} and strides {flat.strides} is not contiguous. Pass a contiguous copy.")
    return flat.reshape(-1)


def with_counts(spec: Any, size: int) -> tuple[Array, tuple[int, ...]]:
    """The buffer and counts of `[buffer, counts]`, packed one after the other."""
    if not isinstance(spec, list | tuple) or len(spec) != 2:
        raise ValueError(f"expected [buffer, counts], got {spec!r}")
    buffer, counts = array(spec[0]), tuple(int(count) for count in spec[1])
    _require(len(counts) == size, f"{len(counts)} counts for {size} ranks")
    _require(buffer.size == sum(counts), f"the buffer has {buffer.size} elements, its counts add up to {sum(counts)}")
    return buffer, counts


def op_name(op: Any) -> str:
    """The name of a reduction: None is the sum, a string or an mpi4py operation is its name."""
    reduced = op if isinstance(op, str) or op is None else op.__reduce__()
    name = "SUM" if reduced is None else reduced.upper() if isinstance(reduced, str) else ""
    _require(name in _REDUCTIONS, f"the reduction {op!r} is not one of {_REDUCTIONS}")
    return name


def messages(
    rank: int, size: int, sends: Iterable[tuple[int, int]], receives: Iterable[tuple[int, int]]
) -> tuple[tuple[Message, ...], ...]:
    """The messages (peer, bytes) that a rank sends and receives."""
    sent, received = list(sends), list(receives)
    for peer, _ in (*sent, *received):
        _require(0 <= peer < size, f"rank {peer} is not one of the {size} ranks of this communicator")
    return _turns(sent, lambda p: (rank, p)), _turns(received, lambda p: (p, rank))


def _turns(pairs: Sequence[tuple[int, int]], ends: Callable[[int], tuple[int, int]]) -> tuple[Message, ...]:
    seen: Counter[int] = Counter()
    result = []
    for peer, nbytes in pairs:
        result.append(Message(*ends(peer), turn=seen[peer], nbytes=int(nbytes)))
        seen[peer] += 1
    return tuple(result)


def _require(condition: bool, problem: str) -> None:
    if not condition:
        raise ValueError(problem)


def _apart(*buffers: Array) -> None:
    """MPI forbids that the buffers of one call overlap."""
    for i, one in enumerate(buffers):
        for other in buffers[:i]:
            _require(not np.may_share_memory(one, other), "two buffers of this call share memory")


def _barrier(op: str, rank: int, size: int) -> Call:
    return Call(op)


def _bcast(op: str, rank: int, size: int, buffer: Any, root: int = 0) -> Call:
    flat = array(buffer)
    _root(root, size)
    return Call(op, (flat.size, flat.dtype.str, root), text=f"{flat.size} x {flat.dtype}, root={root}")


def _allgather(op: str, rank: int, size: int, send: Any, recv: Any) -> Call:
    sent, received = array(send), array(recv)
    _apart(sent, received)
    _require(
        received.size == sent.size * size, f"sends {sent.size} elements on each of {size} ranks, but receives into {received.size}"
    )
    _require(received.dtype == sent.dtype, f"sends {sent.dtype} but receives {received.dtype}")
    return Call(op, (sent.size, sent.dtype.str), text=f"{sent.size} x {sent.dtype}")


def _allgatherv(op: str, rank: int, size: int, send: Any, recv: Any) -> Call:
    sent = array(send)
    received, counts = with_counts(recv, size)
    _apart(sent, received)
    _require(sent.size == counts[rank], f"sends {sent.size} elements, but counts[{rank}] is {counts[rank]}")
    _require(received.dtype == sent.dtype, f"sends {sent.dtype} but receives {received.dtype}")
    return Call(op, (counts, sent.dtype.str), text=f"counts={counts} of {sent.dtype}")


def _allreduce(op: str, rank: int, size: int, send: Any, recv: Any, reduction: Any = None) -> Call:
    sent, received, name = array(send), array(recv), op_name(reduction)
    _apart(sent, received)
    _require(sent.size == received.size and sent.dtype == received.dtype, f"sends {_size(sent)} but receives {_size(received)}")
    return Call(op, (sent.size, sent.dtype.str, name), text=f"{_size(sent)}, op={name}")


def _reduce(op: str, rank: int, size: int, send: Any, recv: Any, reduction: Any = None, root: int = 0) -> Call:
    _root(root, size)
    sent, name = array(send), op_name(reduction)
    if rank == root:
        _require(recv is not None, "the root of a reduction needs a buffer to receive into")
        _allreduce(op, rank, size, send, recv, reduction)
    return Call(op, (sent.size, sent.dtype.str, name, root), text=f"{_size(sent)}, op={name}, root={root}")


def _reduce_scatter(op: str, rank: int, size: int, send: Any, recv: Any, counts: Any = None, reduction: Any = None) -> Call:
    received, name = array(recv), op_name(reduction)
    sent, sizes = with_counts([send, [received.size] * size if counts is None else counts], size)
    _apart(sent, received)
    _require(received.size == sizes[rank], f"receives {received.size} elements, but counts[{rank}] is {sizes[rank]}")
    _require(received.dtype == sent.dtype, f"sends {sent.dtype} but receives {received.dtype}")
    return Call(op, (sizes, sent.dtype.str, name), text=f"counts={sizes} of {sent.dtype}, op={name}")


def _alltoallv(op: str, rank: int, size: int, send: Any, recv: Any) -> Call:
    (sent, send_counts), (received, recv_counts) = with_counts(send, size), with_counts(recv, size)
    _apart(sent, received)
    going, coming = messages(
        rank,
        size,
        [(peer, count * sent.itemsize) for peer, count in enumerate(send_counts)],
        [(peer, count * received.itemsize) for peer, count in enumerate(recv_counts)],
    )
    text = f"send_counts={send_counts} of {sent.dtype}, recv_counts={recv_counts} of {received.dtype}"
    return Call(op, (sent.dtype.str,), going, coming, text)


def _sendrecv(op: str, rank: int, size: int, send: Any, dest: int, sendtag: int, recv: Any, source: int, recvtag: int) -> Call:
    sent, received = array(send), array(recv)
    _apart(sent, received)
    going, coming = messages(rank, size, [(dest, sent.nbytes)], [(source, received.nbytes)])
    return Call(
        op,
        (sendtag, recvtag),
        going,
        coming,
        f"{_size(sent)} to {dest}, {_size(received)} from {source}, tags {sendtag}, {recvtag}",
    )


def _exchange(
    op: str, rank: int, size: int, sends: Iterable[tuple[int, int]], recvs: Iterable[tuple[int, int]], later: bool = False
) -> Call:
    going, coming = messages(rank, size, sends, recvs)
    text = f"sends={[(m.dest, m.nbytes) for m in going]}, recvs={[(m.source, m.nbytes) for m in coming]}"
    return Call(op, (later,), going, coming, text)


def _announced(op: str, rank: int, size: int, what: str) -> Call:
    return Call(op, (what,), text=what)


def _object(op: str, rank: int, size: int, root: int | None = None, reduction: Any = None) -> Call:
    _root(root or 0, size)
    name = op_name(reduction)
    return Call(op, (root, name), text="" if root is None else f"root={root}")


def _root(root: int, size: int) -> None:
    _require(0 <= root < size, f"root {root} is not one of the {size} ranks of this communicator")


def _size(flat: Array) -> str:
    return f"{flat.size} x {flat.dtype}"


_RULES: dict[str, Callable[..., Call]] = {
    "Barrier": _barrier,
    "Bcast": _bcast,
    "Allgather": _allgather,
    "Allgatherv": _allgatherv,
    "Allreduce": _allreduce,
    "Reduce": _reduce,
    "Reduce_scatter": _reduce_scatter,
    "Alltoallv": _alltoallv,
    "Sendrecv": _sendrecv,
    "announce_exchange": _exchange,
    "announce_call": _announced,
    "Dup": _barrier,
    "Split": _barrier,
    "Free": _barrier,
    "make_counter": _barrier,
    "barrier": _barrier,
    "bcast": _object,
    "gather": _object,
    "allgather": _object,
    "allreduce": _object,
}


def call(op: str, rank: int, size: int, *args: Any, blocking: bool = True) -> Call:
    """The call that a rank is about to make.

    Args:
        op: the mpi4py name of the blocking form.
        rank: of the caller.
        size: of the communicator.
        args: the buffers and arguments, in mpi4py's order.
        blocking: False for the form that returns a request; ranks must not mix the two.

    Raises:
        ValueError: this rank's own arguments contradict each other; the text says which operation.
    """
    name = op if blocking else "I" + op.lower()
    try:
        return _RULES[op](name, rank, size, *args)
    except (ValueError, TypeError) as problem:
        raise ValueError(f"{name} on rank {rank} of {size}: {problem}") from problem


def listed(messages: Counter[tuple[str, int, int]]) -> str:
    """Messages (method, peer, bytes) as text."""
    return ", ".join(f"{op} of {nbytes} bytes with rank {peer}" for op, peer, nbytes in messages)
