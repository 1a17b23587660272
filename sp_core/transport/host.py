"""Tensors in host memory, moved by the MPI library.

Nothing is copied on the way to MPI: it reads and writes tensor memory.

MPI never sees a torch tensor. mpi4py would take one, and send a transposed tensor in storage order
or sum bfloat16 as bytes; so MPI gets NumPy views of flat memory, and types that MPI cannot sum are
summed in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import Tensor

from sp_core.observer import observer_of
from sp_core.schedules import Operation
from sp_core.transport.base import Bound, Done, Handle, Messages, Transfer, Transport

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

MAX_COUNT = 2**30
"""Elements per MPI call. Open MPI 5.0 has no large-count calls, and a displacement must fit an int
as well."""

# of messages that all ranks post in the same order: the communicator is the transport's own, and
# MPI keeps their order
TAG = 0
Array = np.ndarray[Any, Any]
Calls = Sequence[Callable[[], object]]
_EMPTY = np.empty(0, np.uint8)
_SUMMABLE = {
    torch.float32,
    torch.float64,
    torch.int32,
    torch.int64,
    torch.int16,
    torch.int8,
    torch.uint8,
}
WIDER = {torch.bfloat16: torch.float32, torch.float16: torch.float32}
_SAME_WIDTH = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def as_numpy(x: Tensor | None) -> Array:
    """View a flat tensor as an array.

    Types that MPI or NumPy lacks become integers of the same width.
    """
    if x is None:
        return _EMPTY
    x = x.detach()
    if x.dtype not in _SUMMABLE:
        x = x.view(_SAME_WIDTH[x.itemsize])
    return x.numpy()


class HostTransport(Transport):
    """Moves CPU tensors by the MPI library's own collectives and point-to-point messages.

    Args:
        comm: an mpi4py communicator that nobody else sends on.
        name: "host", or "window" where the communicator has a window beside it.
        max_count: elements per MPI call; larger vectors are moved in chunks.
    """

    def __init__(self, comm: Intracomm, name: str = "host", *, max_count: int = MAX_COUNT) -> None:
        self.name = name
        self._comm = comm
        self._observer = observer_of(comm)
        self._max_count = max_count
        self._first: Calls = ()  # what MPI's reading of memory waits for

    def prepare(
        self, operation: Operation, send: Tensor | None, recv: Tensor | None
    ) -> Callable[[], object]:
        """Prepare the library's call with its arguments.

        Vectors too long for one call are moved in chunks.
        """
        if not self._fits(operation):
            return partial(self._run_in_chunks, operation, send, recv)
        return self._whole(operation, send, recv)

    def start(self, operation: Operation, send: Tensor | None, recv: Tensor | None) -> Handle:
        """Begin a collective. One too long for a single call is carried out at once."""
        if not self._fits(operation):
            self._run_in_chunks(operation, send, recv)
            return Done()
        before, call, after = self._steps(operation, send, recv, blocking=False)
        in_turn(*before)
        return Transfer([call().Test], call, partial(in_turn, *after))

    def exchange(self, sends: Messages, recvs: Messages) -> Handle:
        """Begin point-to-point messages, of any length."""
        self._say(sends, recvs, later=False)
        return self.post(self.bind(sends), self.bind(recvs), TAG)

    def announce(self, sends: Messages, recvs: Messages) -> None:
        """Say which messages will be posted."""
        self._say(sends, recvs, later=True)

    def bind(self, messages: Messages) -> Bound:
        """View the tensors as memory, in parts that one call can move."""
        return [(peer, self._memory(part)) for peer, part in self._parts(messages)]

    def post(self, sends: Bound, recvs: Bound, tag: int) -> Handle:
        """Begin messages."""
        in_turn(*self._first)
        requests = [self._comm.Irecv(x, peer, tag) for peer, x in recvs]
        requests += [self._comm.Isend(x, peer, tag) for peer, x in sends]
        return Transfer([request.Test for request in requests], (sends, recvs))

    def _memory(self, x: Tensor | None) -> Array:
        """Return what MPI gets in place of a flat tensor."""
        return as_numpy(x)

    def _parts(self, messages: Messages) -> Iterator[tuple[int, Tensor]]:
        yield from ((peer, part) for peer, x in messages for part in x.split(self._max_count))

    def _say(self, sends: Messages, recvs: Messages, *, later: bool) -> None:
        """Announce messages. Their sizes are computed only if somebody listens."""
        sent, received = (
            ((peer, x.nbytes) for peer, x in self._parts(messages)) for messages in (sends, recvs)
        )
        self._observer.announce_exchange(sent, received, later=later)

    def _fits(self, operation: Operation) -> bool:
        """Return whether one call will do.

        The answer is the same on all ranks, because `longest` is.
        """
        return self._comm.size * operation.longest <= self._max_count

    def _run_in_chunks(
        self, operation: Operation, send: Tensor | None, recv: Tensor | None
    ) -> None:
        for offset, chunk in operation.chunks(max(self._max_count // self._comm.size, 1)):
            sent = received = None
            if send is not None:
                sent = torch.cat(pieces(send, operation.send, offset, chunk.send))
            if recv is not None:
                received = recv.new_empty(sum(chunk.recv))
            self._whole(chunk, sent, received)()
            if recv is not None and received is not None:
                places = pieces(recv, operation.recv, offset, chunk.recv)
                for place, part in zip(places, received.split(list(chunk.recv)), strict=True):
                    place.copy_(part)

    def _whole(
        self, operation: Operation, send: Tensor | None, recv: Tensor | None
    ) -> Callable[[], object]:
        before, call, after = self._steps(operation, send, recv, blocking=True)
        return partial(in_turn, *before, call, *after) if before or after else call

    def _steps(
        self, operation: Operation, send: Tensor | None, recv: Tensor | None, *, blocking: bool
    ) -> tuple[Calls, Callable[[], Any], Calls]:
        """Return what comes before MPI's call, the call, and what comes after it.

        `Iallgatherv` is the non-blocking `Allgatherv`.
        """
        before: Calls = ()
        after: Calls = ()
        if operation.reduces:
            send, recv, before, after = widened(send, recv)
        name, arguments = _METHODS[operation.op]
        keywords: dict[str, Any] = {}
        if operation.op in ("broadcast", "reduce"):
            keywords["root"] = operation.root
        if operation.reduction != "sum":  # a sum is what every library does by default
            from mpi4py import MPI

            keywords["op"] = {"max": MPI.MAX, "min": MPI.MIN}[operation.reduction]
        method = getattr(self._comm, name if blocking else "I" + name.lower())
        given = arguments(operation, self._memory(send), self._memory(recv))
        return [*before, *self._first], partial(method, *given, **keywords), after


class OverHost(Transport):
    """Let the transport of host tensors move what this one has brought to the host."""

    _host: Transport

    def announce(self, sends: Messages, recvs: Messages) -> None:
        """Say which messages will be posted."""
        self._host.announce(sends, recvs)

    def close(self, *, together: bool) -> None:
        """Give back what the host holds."""
        self._host.close(together=together)

    def on_host(self, tag: int, sends: Messages, recvs: Messages) -> Handle:
        """Post messages of host memory."""
        return self._host.post(self._host.bind(sends), self._host.bind(recvs), tag)


def widened(
    send: Tensor | None, recv: Tensor | None, wider: Mapping[torch.dtype, torch.dtype] = WIDER
) -> tuple[Tensor | None, Tensor | None, Calls, Calls]:
    """Return buffers of a type that can be summed, and the copies before and after.

    A half type is rounded once, at the end.
    """
    given = send if send is not None else recv
    if given is None or given.dtype not in wider:
        return send, recv, [], []
    wide_send, wide_recv = (
        None if x is None else torch.empty_like(x, dtype=wider[given.dtype]) for x in (send, recv)
    )
    before = [] if send is None or wide_send is None else [partial(wide_send.copy_, send)]
    after = [] if recv is None or wide_recv is None else [partial(recv.copy_, wide_recv)]
    return wide_send, wide_recv, before, after


def in_turn(*calls: Callable[[], object]) -> None:
    """Make calls one after the other."""
    for call in calls:
        call()


def pieces(flat: Tensor, sizes: Sequence[int], offset: int, lengths: Sequence[int]) -> list[Tensor]:
    """Return `lengths[i]` elements of piece i of a flat vector, from `offset` in the piece on."""
    whole = flat.split(list(sizes))
    return [piece[offset : offset + n] for piece, n in zip(whole, lengths, strict=True)]


_METHODS: dict[str, tuple[str, Callable[[Operation, Array, Array], tuple[Any, ...]]]] = {
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
"""By collective, the communicator's method and its arguments. A shift is messages, no collective of
the library."""


HOME = 0
"""The rank whose memory holds the number."""


class MpiCounter:
    """Give 0, 1, 2, ... to whichever rank asks next.

    The MPI library adds atomically in a window of eight bytes.

    Args:
        comm: an mpi4py communicator; all its ranks make this together.

    Source: MPI 4.1, section 12.3.4, MPI_Fetch_and_op.
    """

    def __init__(self, comm: Intracomm) -> None:
        from mpi4py import MPI

        self._sum = MPI.SUM
        self._window = MPI.Win.Allocate(8 if comm.rank == HOME else 0, 8, comm=comm)
        if comm.rank == HOME:
            self._window.Lock(HOME, MPI.LOCK_EXCLUSIVE)
            np.frombuffer(cast("bytes", self._window.tomemory()), np.int64)[:] = 0
            self._window.Unlock(HOME)
        comm.Barrier()
        self._window.Lock_all(MPI.MODE_NOCHECK)

    def take(self) -> int:
        """Return the next number, which no other rank gets."""
        one, got = np.ones(1, np.int64), np.empty(1, np.int64)
        self._window.Fetch_and_op(one, got, HOME, 0, self._sum)
        self._window.Flush(HOME)
        return int(got[0])

    def free(self) -> None:
        """Give the memory back; every rank calls this."""
        self._window.Unlock_all()
        self._window.Free()
