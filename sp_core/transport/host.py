"""Move tensors in host memory by the MPI library, and hold code that other transports use, too.

`HostTransport` passes the memory of a tensor to MPI without a copy. MPI gets a flat NumPy view,
never a torch tensor: mpi4py would send a transposed tensor in storage order, and sum bfloat16 as
bytes. Types that MPI cannot sum are summed in float32 and rounded once. `OverHost` is the base of
transports that send through another transport. `MpiCounter` hands out numbers to the ranks.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from sp_core.observer import observer_of
from sp_core.programs import HALF, Operation
from sp_core.scratch import used
from sp_core.transport.base import Bound, Handle, Intracomm, Messages, Transfer, Transport, at_once

MAX_COUNT = 2**30
"""Most elements per MPI call. Open MPI 5.0 has no large-count calls, so counts and displacements
must fit a C int."""

TAG = 0
"""Tag of the messages of `exchange`. All ranks post these messages in the same order, on a
communicator that only this transport uses, and MPI keeps the order."""
Array = np.ndarray[Any, Any]
Calls = Sequence[Callable[[], object]]
"""Functions to call one after the other."""
_SUMMABLE = {
    torch.float32,
    torch.float64,
    torch.int32,
    torch.int64,
    torch.int16,
    torch.int8,
    torch.uint8,
}
"""Dtypes that MPI can sum."""
WIDER = dict.fromkeys(HALF, torch.float32)
"""For each half type, the dtype in which MPI sums it."""
_WORDS = torch.uint8, torch.int16, torch.int32, torch.int64, torch.complex128
_SAME_WIDTH = {dtype.itemsize: dtype for dtype in _WORDS}
"""For each size of an element in bytes, a dtype of that size that MPI and NumPy have."""


def as_numpy(x: Tensor) -> Array:
    """Return a flat CPU tensor as a NumPy array over the same memory.

    Types that MPI or NumPy lacks, such as bfloat16, become integers of the same width.
    """
    x = x.detach()
    if x.dtype not in _SUMMABLE:
        x = x.view(_SAME_WIDTH[x.itemsize])
    return x.numpy()


class HostTransport(Transport):
    """Move CPU tensors by the MPI library's own collectives and point-to-point messages.

    Args:
        comm: an mpi4py communicator on which only this transport sends.
        name: "host", or "window" if the communicator also has a shared-memory `Window`.
        max_count: most elements per MPI call; longer vectors are moved in several calls (chunks).
    """

    def __init__(self, comm: Intracomm, name: str = "host", *, max_count: int = MAX_COUNT) -> None:
        self.name = name
        self._comm = comm
        self._observer = observer_of(comm)
        self._max_count = max_count
        self._first: Calls = ()  # calls to make before MPI may read memory

    def prepare(
        self, operation: Operation, send: Tensor | None, recv: Tensor | None
    ) -> Callable[[], object]:
        """Return a function that makes the blocking MPI call of this collective on these buffers.

        A vector too long for one call is moved in chunks, through temporary memory.
        """
        if not self._fits(operation):
            return partial(self._run_in_chunks, operation, send, recv)
        return self._whole(operation, send, recv)

    def start(self, operation: Operation, send: Tensor | None, recv: Tensor | None) -> Handle:
        """Begin the non-blocking MPI call of this collective and return its handle.

        A vector too long for one call is moved at once, by blocking calls that wait for the other
        ranks.
        """
        if not self._fits(operation):
            return at_once(partial(self._run_in_chunks, operation, send, recv))
        before, call, after = self._steps(operation, send, recv, blocking=False)
        in_turn(*before)
        return Transfer([call().Test], call, partial(in_turn, *after))

    def start_early(self, operation: Operation, send: Tensor | None, recv: Tensor | None) -> Handle:
        """Tell the observer that other ranks may begin this collective later, then `start`."""
        self._observer.announce_early()
        return self.start(operation, send, recv)

    def exchange(self, sends: Messages, recvs: Messages) -> Handle:
        """Begin point-to-point messages of any length, and return one handle for all of them."""
        self._say(sends, recvs, later=False)
        return self.post(self.bind(sends), self.bind(recvs), TAG)

    def announce(self, sends: Messages, recvs: Messages) -> Handle:
        """Tell the communicator's observer which messages this rank will post later.

        Nothing is sent. `Transport.announce` says which observers look at it.
        """
        return self.in_order(partial(self._say, sends, recvs, later=True))

    def bind(self, messages: Messages) -> Bound:
        """Return (rank of the peer, NumPy view) for each message.

        Long tensors are cut so that one MPI call can move each view.
        """
        return [(peer, self._memory(part)) for peer, part in self._parts(messages)]

    def post(self, sends: Bound, recvs: Bound, tag: int) -> Handle:
        """Begin the receives, then the sends, and return one handle for all of them."""
        in_turn(*self._first)
        requests = [self._comm.Irecv(x, peer, tag) for peer, x in recvs]
        requests += [self._comm.Isend(x, peer, tag) for peer, x in sends]
        return Transfer([request.Test for request in requests], (sends, recvs))

    def _memory(self, x: Tensor) -> Array:
        """Return the array that MPI gets in place of a flat tensor."""
        return as_numpy(x)

    def _parts(self, messages: Messages) -> Iterator[tuple[int, Tensor]]:
        """Yield (peer, part) of all messages, with at most `max_count` elements per part."""
        yield from ((peer, part) for peer, x in messages for part in x.split(self._max_count))

    def _say(self, sends: Messages, recvs: Messages, *, later: bool) -> None:
        """Tell the communicator's observer which messages this rank posts. Nothing is sent.

        Sizes are given as generators, so `Notices`, which ignores them, never computes them.

        Args:
            sends, recvs: the messages.
            later: whether other calls may come before these messages are posted.
        """
        sent, received = (
            ((peer, x.nbytes) for peer, x in self._parts(messages)) for messages in (sends, recvs)
        )
        self._observer.announce_exchange(sent, received, later=later)

    def _fits(self, operation: Operation) -> bool:
        """Return whether one MPI call can move this collective. All ranks get the same answer."""
        return operation.elements <= self._max_count

    def _run_in_chunks(
        self, operation: Operation, send: Tensor | None, recv: Tensor | None
    ) -> None:
        """Run a collective by several blocking MPI calls, through temporary memory."""
        for offset, chunk in operation.chunks(max(self._max_count // operation.pieces, 1)):
            sent = received = None
            if send is not None:
                sent = torch.cat(pieces(send, operation.send, offset, chunk.send))
            if recv is not None:
                received = recv.new_empty(sum(chunk.recv))
            self._whole(chunk, sent, received)()
            if recv is not None and received is not None:
                for place, part in beside(recv, operation.recv, offset, chunk.recv, received):
                    place.copy_(part)

    def _whole(
        self, operation: Operation, send: Tensor | None, recv: Tensor | None
    ) -> Callable[[], object]:
        """Return a function that runs a collective by a single blocking MPI call."""
        before, call, after = self._steps(operation, send, recv, blocking=True)
        return partial(in_turn, *before, call, *after) if before or after else call

    def _steps(
        self, operation: Operation, send: Tensor | None, recv: Tensor | None, *, blocking: bool
    ) -> tuple[Calls, Callable[[], Any], Calls]:
        """Return (calls to make before MPI's call, MPI's call, calls to make after it).

        The calls before and after copy half types to and from float32. With `blocking`, MPI's call
        returns when it is complete, else it returns a request (`Iallgatherv` for `Allgatherv`).
        """
        before: Calls = ()
        after: Calls = ()
        if operation.reduces:
            assert send is not None
            send, recv, before, after = widened(send, recv)
        name, arguments = (_EVEN_METHODS if are_equal(operation) else _METHODS)[operation.op]
        keywords: dict[str, Any] = {}
        if operation.op in ("broadcast", "reduce"):
            keywords["root"] = operation.root
        if operation.reduction != "sum":  # MPI's own default is a sum
            from mpi4py import MPI

            keywords["op"] = {"max": MPI.MAX, "min": MPI.MIN}[operation.reduction]
        method = getattr(self._comm, name if blocking else "I" + name.lower())
        memory = [None if x is None else self._memory(x) for x in (send, recv)]
        call = partial(method, *arguments(operation, *memory), **keywords)
        return [*before, *self._first], call, after


class OverHost(Transport):
    """Pass `announce` calls and messages on to another transport, `_host`.

    This class is the base of the transports that copy device tensors to host memory, and of
    `DistributedTransport`.
    """

    _host: Transport

    def announce(self, sends: Messages, recvs: Messages) -> Handle:
        """Tell the communicator's observer which messages this rank will post later.

        Nothing is sent. `Transport.announce` says which observers look at it.
        """
        return self.in_order(partial(self._host.announce, sends, recvs))

    def close(self, *, together: bool) -> None:
        """Release the resources of the transport that moves the bytes; see `Transport.close`."""
        self._host.close(together=together)

    def blocking(self, operation: Operation, send: Tensor | None, recv: Tensor | None) -> Handle:
        """Run a collective between buffers in host memory to its end; return a complete handle."""
        return at_once(self._host.prepare(operation, send, recv))

    def on_host(self, tag: int, sends: Messages, recvs: Messages) -> Handle:
        """Begin messages between buffers in host memory and return their handle.

        Args:
            tag: the tag of all these messages, as in `Transport.post`.
            sends, recvs: messages of CPU tensors.
        """
        return self._host.post(self._host.bind(sends), self._host.bind(recvs), tag)


def widened(
    send: Tensor, recv: Tensor | None, wider: Mapping[torch.dtype, torch.dtype] = WIDER
) -> tuple[Tensor, Tensor | None, Calls, Calls]:
    """Return buffers that can be summed, and the calls that copy into and out of them.

    MPI can sum float32 but no half type, so half types are summed in float32 buffers. The result is
    rounded only once, at the end.

    Args:
        send, recv: flat buffers; `recv` may be None.
        wider: for each dtype that cannot be summed, the dtype to sum in.

    Returns:
        (send, recv, before, after): buffers that can be summed, if possible the given ones; then
        the calls to make before the sum (copy send) and after it (round into recv).
    """
    if send.dtype not in wider:
        return send, recv, (), ()
    wide_send = torch.empty_like(send, dtype=wider[send.dtype])
    before = [partial(wide_send.copy_, send)]
    if recv is None:
        return wide_send, None, before, ()
    wide_recv = torch.empty_like(recv, dtype=wide_send.dtype)
    return wide_send, wide_recv, before, [lambda: recv.copy_(used(wide_recv))]


def are_equal(operation: Operation) -> bool:
    """Return whether the pieces of all ranks have one length. All ranks get the same answer.

    A chunk of a longer collective (`Operation.chunks`, which sets `segment`) counts as uneven: a
    rank does not know whether the pieces of all other ranks in it have one length, too.
    """
    return operation.segment is None and {*operation.send, *operation.recv} == {operation.longest}


def in_turn(*calls: Callable[[], object]) -> None:
    """Call functions one after the other."""
    for call in calls:
        call()


def pieces(flat: Tensor, sizes: Sequence[int], offset: int, lengths: Sequence[int]) -> list[Tensor]:
    """Return one range of elements from every piece of a flat vector, as views.

    Args:
        flat: the vector; its pieces lie one after the other.
        sizes: elements of each piece.
        offset: where the range begins, counted from the start of each piece.
        lengths: for each piece, the number of elements in its range.
    """
    return [
        piece[offset : offset + n]
        for piece, n in zip(flat.split(list(sizes)), lengths, strict=True)
    ]


def beside(
    flat: Tensor, sizes: Sequence[int], offset: int, lengths: Sequence[int], packed: Tensor
) -> Iterator[tuple[Tensor, Tensor]]:
    """Pair each range of `pieces` with its place in `packed`, which holds one after the other."""
    return zip(pieces(flat, sizes, offset, lengths), packed.split(list(lengths)), strict=True)


_METHODS: dict[str, tuple[str, Callable[[Operation, Any, Any], tuple[Any, ...]]]] = {
    "all_gather": ("Allgatherv", lambda o, send, recv: (send, [recv, list(o.recv)])),
    "reduce_scatter": ("Reduce_scatter", lambda o, send, recv: (send, recv, list(o.send))),
    "all_reduce": ("Allreduce", lambda o, send, recv: (send, recv)),
    "all_to_all": (
        "Alltoallv",
        lambda o, send, recv: ([send, list(o.send)], [recv, list(o.recv)]),
    ),
    "broadcast": ("Bcast", lambda o, send, recv: (send if o.rank == o.root else recv,)),
    "reduce": ("Reduce", lambda o, send, recv: (send, recv if o.rank == o.root else None)),
}
"""For each collective, mpi4py's method and a function that returns its arguments.

A shift is missing, because MPI has no such collective: it is sent as messages."""

_EVEN_METHODS = _METHODS | {
    "all_gather": ("Allgather", lambda _, send, recv: (send, recv)),
    "reduce_scatter": ("Reduce_scatter_block", lambda _, send, recv: (send, recv)),
    "all_to_all": ("Alltoall", lambda _, send, recv: (send, recv)),
}
"""The same for collectives whose pieces all have one length. MPICH is up to ten times as fast with
these methods."""


HOME = 0
"""The rank in whose memory an `MpiCounter` counts."""


class MpiCounter:
    """Hand out the numbers 0, 1, 2, ..., each to only one rank: the one that asks next.

    The next number lives in the memory of rank 0, in an MPI window with eight bytes of each rank.
    `take` reads it and adds 1 by one-sided communication.

    Args:
        comm: an mpi4py communicator; all ranks of it make the counter together.

    Source: MPI 4.1, section 12.3.4, MPI_Fetch_and_op.
    """

    def __init__(self, comm: Intracomm) -> None:
        from mpi4py import MPI

        self._window = MPI.Win.Allocate(8, comm=comm)
        self._window.Lock(comm.rank)
        np.frombuffer(cast("bytes", self._window.tomemory()), np.int64)[:] = 0
        self._window.Unlock(comm.rank)
        comm.Barrier()
        self._window.Lock_all(MPI.MODE_NOCHECK)

    def take(self) -> int:
        """Return the next number, which no other rank gets. Other ranks need not call anything."""
        # Fetch_and_op adds, by mpi4py's default
        one, got = np.ones(1, np.int64), np.empty(1, np.int64)
        self._window.Fetch_and_op(one, got, HOME)
        self._window.Flush(HOME)
        return int(got.item())

    def free(self) -> None:
        """Free the MPI window. Every rank calls this and waits for the others."""
        self._window.Unlock_all()
        self._window.Free()
