"""Tensors in host memory, moved by the MPI library. Nothing is copied on the way to MPI: it reads and writes tensor memory.

MPI never sees a torch tensor. mpi4py would take one, and send a transposed tensor in storage order
or sum bfloat16 as bytes; so MPI gets NumPy views of flat memory, and types that MPI cannot sum are
summed in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from sp_core.observer import observer_of
from sp_core.schedules import Op, Operation
from sp_core.transport.base import Bound, Done, Handle, Messages, Transport

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

MAX_COUNT = 2**30
"""Elements per MPI call. Open MPI 5.0 has no large-count calls, and a displacement must fit an int as well."""

# of messages that all ranks post in the same order: the communicator is the transport's own, and
# MPI keeps their order
TAG = 0
Array = np.ndarray[Any, Any]
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
    """View a flat tensor as an array; types that MPI or NumPy lacks become integers of the same width."""
    if x is None:
        return _EMPTY
    x = x.detach()
    if x.dtype not in _SUMMABLE:
        x = x.view(_SAME_WIDTH[x.itemsize])
    return x.numpy()


class Request:
    """An MPI request, with what must happen after it (such as rounding a float32 sum into a bfloat16 result)."""

    def __init__(
        self,
        requests: Sequence[Any],
        keep: tuple[object, ...] = (),
        after: Callable[[], object] | None = None,
    ) -> None:
        self._requests = list(requests)
        self._keep = keep  # MPI holds only the address of these buffers
        self._after = after

    def test(self) -> bool:
        self._requests = [request for request in self._requests if not request.Test()]
        if self._requests:
            return False
        if self._after is not None:
            self._after()
        self._after, self._keep = None, ()
        return True


class HostTransport(Transport):
    """Moves CPU tensors by the MPI library's own collectives and point-to-point messages.

    Args:
        comm: an mpi4py communicator that nobody else sends on.
        max_count: elements per MPI call; larger vectors are moved in chunks.
    """

    name = "host"

    def __init__(self, comm: Intracomm, *, max_count: int = MAX_COUNT) -> None:
        self._comm = comm
        self._observer = observer_of(comm)
        self._max_count = max_count

    def run(self, operation: Operation, send: Tensor | None, recv: Tensor | None) -> None:
        """Carry out a collective, in chunks where its vectors are too long for one call."""
        if self._fits(operation):
            self._call(operation, send, recv, blocking=True)
        else:
            self._run_in_chunks(operation, send, recv)

    def start(self, operation: Operation, send: Tensor | None, recv: Tensor | None) -> Handle:
        """Begin a collective. One too long for a single call is carried out at once."""
        if self._fits(operation):
            return self._call(operation, send, recv, blocking=False)
        self._run_in_chunks(operation, send, recv)
        return Done()

    def prepare(
        self, operation: Operation, send: Tensor | None, recv: Tensor | None
    ) -> Callable[[], object]:
        """Prepare the library's call with its arguments. Half types are added in wider memory."""
        if not self._fits(operation):
            return partial(self.run, operation, send, recv)
        wide_send, wide_recv, after = (
            widened(send, recv) if operation.reduces else (send, recv, None)
        )
        call = _bound(
            self._comm, operation, self._memory(wide_send), self._memory(wide_recv), blocking=True
        )
        if send is None or wide_send is None or wide_send is send:
            return call
        return partial(in_turn, partial(wide_send.copy_, send), call, *([after] if after else []))

    def exchange(self, sends: Messages, recvs: Messages) -> Handle:
        """Begin point-to-point messages; empty ones and those above the limit of one call included."""
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
        self._settle()
        requests = [self._comm.Irecv(x, peer, tag) for peer, x in recvs]
        requests += [self._comm.Isend(x, peer, tag) for peer, x in sends]
        return Request(requests, (sends, recvs))

    def _memory(self, x: Tensor | None) -> Array:
        """Return what MPI gets in place of a flat tensor."""
        return as_numpy(x)

    def _settle(self) -> None:
        """Wait until everything that MPI may read has been written. In host memory it has."""

    def _parts(self, messages: Messages) -> Iterator[tuple[int, Tensor]]:
        yield from ((peer, part) for peer, x in messages for part in x.split(self._max_count))

    def _say(self, sends: Messages, recvs: Messages, *, later: bool) -> None:
        """Announce messages. Their sizes are computed only if somebody listens."""
        sent, received = (
            ((peer, x.nbytes) for peer, x in self._parts(messages)) for messages in (sends, recvs)
        )
        self._observer.announce_exchange(sent, received, later=later)

    def _fits(self, operation: Operation) -> bool:
        """Return whether one call will do. The answer is the same on all ranks, because `longest` is."""
        return self._comm.size * operation.longest <= self._max_count

    def _run_in_chunks(
        self, operation: Operation, send: Tensor | None, recv: Tensor | None
    ) -> None:
        length = max(self._max_count // self._comm.size, 1)
        for offset, chunk in operation.chunks(length):
            sent = _packed(send, operation.send, offset, chunk.send)
            received = None if recv is None else recv.new_empty(sum(chunk.recv))
            self._call(chunk, sent, received, blocking=True)
            _unpack(received, recv, operation.recv, offset, chunk.recv)

    def _call(
        self, operation: Operation, send: Tensor | None, recv: Tensor | None, *, blocking: bool
    ) -> Handle:
        after = None
        if operation.reduces:
            send, recv, after = widened(send, recv)
        call = _bound(
            self._comm, operation, self._memory(send), self._memory(recv), blocking=blocking
        )
        self._settle()
        request = call()
        handle = Request([] if request is None else [request], (send, recv), after)
        if blocking:
            handle.test()
        return handle


class OverHost(Transport):
    """What transports that bring tensors to the host and let it move them have in common: messages bound when they are posted."""

    _host: HostTransport

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
) -> tuple[Tensor | None, Tensor | None, Callable[[], object] | None]:
    """Buffers in a type that can be summed, and how to bring the sum back: a half type is rounded once, at the end."""
    given = send if send is not None else recv
    if given is None or given.dtype not in wider:
        return send, recv, None
    wide = wider[given.dtype]
    wide_send = None if send is None else send.to(wide)
    if recv is None:
        return wide_send, None, None
    wide_recv = torch.empty_like(recv, dtype=wide)
    return wide_send, wide_recv, lambda: recv.copy_(wide_recv)


def in_turn(*calls: Callable[[], object]) -> None:
    """Make calls one after the other."""
    for call in calls:
        call()


def _packed(
    flat: Tensor | None, sizes: tuple[int, ...], offset: int, chunk: tuple[int, ...]
) -> Tensor | None:
    if flat is None:
        return None
    return torch.cat(
        [
            piece[offset : offset + n]
            for piece, n in zip(flat.split(list(sizes)), chunk, strict=True)
        ]
    )


def _unpack(
    packed: Tensor | None,
    flat: Tensor | None,
    sizes: tuple[int, ...],
    offset: int,
    chunk: tuple[int, ...],
) -> None:
    if packed is None or flat is None:
        return
    for piece, part, n in zip(
        flat.split(list(sizes)), packed.split(list(chunk)), chunk, strict=True
    ):
        piece[offset : offset + n] = part


_METHODS: dict[Op, tuple[str, Callable[[Operation, Array, Array], tuple[Any, ...]]]] = {
    Op.ALL_GATHER: ("Allgatherv", lambda o, send, recv: (send, [recv, list(o.recv)])),
    Op.REDUCE_SCATTER: ("Reduce_scatter", lambda o, send, recv: (send, recv, list(o.send))),
    Op.ALL_REDUCE: ("Allreduce", lambda o, send, recv: (send, recv)),
    Op.ALL_TO_ALL: (
        "Alltoallv",
        lambda o, send, recv: ([send, list(o.send)], [recv, list(o.recv)]),
    ),
    Op.BROADCAST: ("Bcast", lambda o, send, recv: (send if o.rank == o.root else recv,)),
    Op.REDUCE: ("Reduce", lambda o, send, recv: (send, recv if o.rank == o.root else None)),
}
"""By collective, the communicator's method and its arguments. A shift is messages, no collective of the library."""


def _bound(
    comm: Intracomm, operation: Operation, send: Array, recv: Array, *, blocking: bool
) -> Callable[[], Any]:
    """Return the call of a collective; `Iallgatherv` is the non-blocking `Allgatherv`, and so on."""
    name, arguments = _METHODS[operation.op]
    keywords: dict[str, Any] = (
        {"root": operation.root} if operation.op in (Op.BROADCAST, Op.REDUCE) else {}
    )
    if operation.reduction != "sum":  # a sum is what every library does by default
        from mpi4py import MPI

        keywords["op"] = {"max": MPI.MAX, "min": MPI.MIN}[operation.reduction]
    return partial(
        getattr(comm, name if blocking else "I" + name.lower()),
        *arguments(operation, send, recv),
        **keywords,
    )
