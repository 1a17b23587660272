"""Move device tensors over an MPI that cannot read device memory: through the host.

`StagedTransport` is the plain form: copy everything down, communicate, copy everything up, one
after the other, through fresh pageable memory. It is what most programs do, and it is here to be
measured against.

`PipelinedTransport` cuts the vector into chunks and keeps three things going at once: while MPI
moves chunk k, the copy engines bring chunk k+1 down and chunk k-1 up, through two sets of
page-locked buffers that are made once.

    down   | 0 | 1 | 2 | 3 |
    MPI        | 0 | 1 | 2 | 3 |
    up             | 0 | 1 | 2 | 3 |
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from sp_core.schedules import Operation
from sp_core.transport.base import Bound, Done, Handle, Messages, Transfer, wait
from sp_core.transport.cuda import CudaStreams
from sp_core.transport.host import HostTransport, OverHost, in_turn, pieces

PIECE_BYTES, MOST_BYTES = 1 << 20, 1 << 23
"""Bytes of each rank's piece of a chunk, which is a copy of its own, and of a host buffer at most.

c* = sqrt(n * overhead * bandwidth / 2) is 0.5 to 2 MiB for 16 MiB over 25 to 400 Gbit/s."""


class StagedTransport(OverHost):
    """Copy whole vectors synchronously, through new pageable host memory in every call."""

    name = "staged"

    def __init__(self, host: HostTransport) -> None:
        self._host = host

    def prepare(
        self, operation: Operation, send: Tensor | None, recv: Tensor | None
    ) -> Callable[[], object]:
        """Prepare a collective."""

        def run(host_send: Tensor | None, host_recv: Tensor | None) -> Handle:
            self._host.prepare(operation, host_send, host_recv)()
            return Done()

        return lambda: self._collective(run, send, recv).test()

    def start(self, operation: Operation, send: Tensor | None, recv: Tensor | None) -> Handle:
        """Begin a collective; the copy back is made by whoever tests the handle."""
        return self._collective(partial(self._host.start, operation), send, recv)

    def exchange(self, sends: Messages, recvs: Messages) -> Handle:
        """Begin point-to-point messages."""
        return self._messages(self._host.exchange, sends, recvs)

    def post(self, sends: Bound, recvs: Bound, tag: int) -> Handle:
        """Begin announced messages."""
        return self._messages(partial(self.on_host, tag), sends, recvs)

    def _collective(
        self,
        on_host: Callable[[Tensor | None, Tensor | None], Handle],
        send: Tensor | None,
        recv: Tensor | None,
    ) -> Handle:
        """Carry out what the ranks do together as if its buffers were messages of nobody."""

        def alone(sends: Messages, recvs: Messages) -> Handle:
            return on_host(*(next((x for _, x in found), None) for found in (sends, recvs)))

        return self._messages(alone, *([] if x is None else [(0, x)] for x in (send, recv)))

    def _messages(
        self, on_host: Callable[[Messages, Messages], Handle], sends: Messages, recvs: Messages
    ) -> Handle:
        host_recvs = [(peer, torch.empty(x.shape, dtype=x.dtype)) for peer, x in recvs]
        handle = on_host([(peer, x.detach().cpu()) for peer, x in sends], host_recvs)
        back = [partial(x.copy_, host) for (_, x), (_, host) in zip(recvs, host_recvs, strict=True)]
        return Transfer([handle.test], after=partial(in_turn, *back))


@dataclass
class _Slot:
    """Host memory for one chunk on its way, and the events that say when it may be used again."""

    send: Tensor
    recv: Tensor
    downloaded: Handle = field(default_factory=Done)
    uploaded: Handle = field(default_factory=Done)


class PipelinedTransport(OverHost):
    """Move chunks through two sets of page-locked buffers, copying and communicating at once.

    Point-to-point messages go through page-locked memory whole, without chunks.

    Args:
        host: moves the chunks.
        streams: copies between device and host.
        size: ranks of the communicator.
        name: "pipelined"; "ipc" or "pinned" where the communicator has a window beside it.
        chunk_bytes: bytes per host buffer, of which there are four; 0: chosen by `size`.
        poll: called while waiting.
    """

    def __init__(
        self,
        host: HostTransport,
        streams: CudaStreams,
        size: int,
        *,
        name: str = "pipelined",
        chunk_bytes: int = 0,
        poll: Callable[[], None] = lambda: None,
    ) -> None:
        self.name, self._host, self._streams, self._size = name, host, streams, size
        self._poll = poll
        # at least one element of the widest type per piece
        chosen = chunk_bytes or min(PIECE_BYTES * size, MOST_BYTES)
        self._chunk_bytes = nbytes = max(chosen, size * 8)
        self._slots = [_Slot(streams.buffer(nbytes), streams.buffer(nbytes)) for _ in range(2)]
        self._queue: deque[_Steps] = deque()

    def prepare(
        self, operation: Operation, send: Tensor | None, recv: Tensor | None
    ) -> Callable[[], object]:
        """Prepare a collective, which runs after those that were started before it."""

        def on_host(*chunk: Any) -> Handle:
            self._host.prepare(*chunk)()
            return Done()

        return lambda: wait(
            self._enqueue(self._collective(operation, send, recv, on_host)), self._poll
        )

    def start(self, operation: Operation, send: Tensor | None, recv: Tensor | None) -> Handle:
        """Begin a collective.

        Collectives that are under way advance one after the other, because all ranks must call
        MPI in the same order.
        """
        handle = self._enqueue(self._collective(operation, send, recv, self._host.start))
        handle.test()
        return handle

    def exchange(self, sends: Messages, recvs: Messages) -> Handle:
        """Begin point-to-point messages, after the collectives that were started before them."""
        handle = self._enqueue(self._messages(sends, recvs, self._host.exchange))
        handle.test()
        return handle

    def post(self, sends: Bound, recvs: Bound, tag: int) -> Handle:
        """Begin announced messages, beside all others.

        Their tag keeps them apart, and ranks may be ready for them at any time.
        """
        alone: deque[_Steps] = deque()
        handle = _Steps(
            self._messages(sends, recvs, partial(self.on_host, tag)), alone, self._streams
        )
        alone.append(handle)
        handle.test()
        return handle

    def close(self, *, together: bool) -> None:
        """Give back the host buffers, too."""
        super().close(together=together)
        if together:
            self._slots.clear()

    def _enqueue(self, steps: Iterator[None]) -> _Steps:
        handle = _Steps(steps, self._queue, self._streams)
        self._queue.append(handle)
        return handle

    def _collective(
        self,
        operation: Operation,
        send: Tensor | None,
        recv: Tensor | None,
        on_host: Callable[[Operation, Tensor | None, Tensor | None], Handle],
    ) -> Iterator[None]:
        """Move all chunks of a collective; yield while waiting."""
        given = send if send is not None else recv
        itemsize = 1 if given is None else given.itemsize
        # the same on all ranks, so that all make as many chunks
        chunks = list(operation.chunks(self._chunk_bytes // itemsize // self._size))
        self._download(0, chunks, operation, send)
        for index, (offset, chunk) in enumerate(chunks):
            # MPI has left the other slot's send buffer: chunk index - 1 is complete
            self._download(index + 1, chunks, operation, send)
            slot = self._slots[index % 2]
            yield from _until(slot.downloaded)
            yield from _until(slot.uploaded)  # of chunk index - 2, or of an earlier call
            host_recv = _prefix(slot.recv, recv, chunk.recv)
            yield from _until(on_host(chunk, _prefix(slot.send, send, chunk.send), host_recv))
            if recv is not None and host_recv is not None:
                places = pieces(recv, operation.recv, offset, chunk.recv)
                parts = host_recv.split(list(chunk.recv))
                for place, part in zip(places, parts, strict=True):
                    self._streams.upload(place, part)
                slot.uploaded = self._streams.uploaded()

    def _download(
        self,
        index: int,
        chunks: Sequence[tuple[int, Operation]],
        operation: Operation,
        send: Tensor | None,
    ) -> None:
        """Begin to bring down what this rank sends in a chunk, if there is such a chunk."""
        if send is None or index == len(chunks):
            return
        offset, chunk = chunks[index]
        slot = self._slots[index % 2]
        parts = slot.send[: sum(chunk.send) * send.itemsize].view(send.dtype)
        places = pieces(send, operation.send, offset, chunk.send)
        for place, part in zip(places, parts.split(list(chunk.send)), strict=True):
            self._streams.download(part, place)
        slot.downloaded = self._streams.downloaded()

    def _messages(
        self, sends: Messages, recvs: Messages, on_host: Callable[[Messages, Messages], Handle]
    ) -> Iterator[None]:
        host_sends = [(peer, self._pinned_like(x)) for peer, x in sends]
        host_recvs = [(peer, self._pinned_like(x)) for peer, x in recvs]
        for (_, host), (_, x) in zip(host_sends, sends, strict=True):
            self._streams.download(host, x)
        yield from _until(self._streams.downloaded())
        yield from _until(on_host(host_sends, host_recvs))
        for (_, host), (_, x) in zip(host_recvs, recvs, strict=True):
            self._streams.upload(x, host)
        yield from _until(self._streams.uploaded())  # the host buffers are released on return

    def _pinned_like(self, x: Tensor) -> Tensor:
        return self._streams.buffer(x.nbytes).view(x.dtype).view(x.shape)


class _Steps:
    """A transfer that advances when it is tested, after those that were started before it.

    It may be started on one stream, advanced by whoever polls, and read on another stream: its
    copies wait for the stream that it was started on, and whoever is told that it is complete waits
    for its copies.
    """

    def __init__(self, steps: Iterator[None], queue: deque[_Steps], streams: CudaStreams) -> None:
        self._steps = steps
        self._queue = queue
        self._streams = streams
        self._error: BaseException | None = None
        streams.begin()

    def test(self) -> bool:
        while self in self._queue:
            head = self._queue[0]
            try:
                next(head._steps)
            except StopIteration:
                self._queue.popleft()
            except BaseException as error:  # noqa: BLE001  # raised by each transfer that it broke
                for broken in self._queue:  # those behind a failed transfer cannot keep their order
                    broken._error = error
                self._queue.clear()
            else:
                return False
        if self._error is not None:
            raise self._error
        self._streams.finish()
        return True


def _until(event: Handle) -> Iterator[None]:
    while not event.test():
        yield


def _prefix(buffer: Tensor, like: Tensor | None, sizes: tuple[int, ...]) -> Tensor | None:
    """View the part of a byte buffer that a chunk needs, in the dtype of the vector."""
    if like is None:
        return None
    return buffer[: sum(sizes) * like.itemsize].view(like.dtype)
