"""Device tensors over an MPI that cannot read device memory: device -> host -> MPI -> host -> device.

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

import functools
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from sp_core.schedules import Operation
from sp_core.transport.base import Bound, Done, Handle, Messages, wait
from sp_core.transport.host import HostTransport, OverHost

CHUNK_BYTES = 1 << 20
"""Bytes per host buffer. c* = sqrt(n * overhead * bandwidth / 2) is 0.5 to 2 MiB for 16 MiB over 25 to 400 Gbit/s."""


class Streams(Protocol):
    """Two streams of copies, one in each direction, beside the stream that computes."""

    def buffer(self, nbytes: int) -> Tensor:
        """Host memory, uint8 `(nbytes,)`, that the device can copy from and to asynchronously."""
        ...

    def begin(self) -> None:
        """Let the copies that follow wait for what has been computed so far."""
        ...

    def download(self, host: Tensor, device: Tensor) -> None:
        """Begin a copy from device to host."""
        ...

    def upload(self, device: Tensor, host: Tensor) -> None:
        """Begin a copy from host to device."""
        ...

    def downloaded(self) -> Handle:
        """Return the point after the downloads begun so far."""
        ...

    def uploaded(self) -> Handle:
        """Return the point after the uploads begun so far."""
        ...

    def finish(self) -> None:
        """Let what is computed next wait for the uploads begun so far."""
        ...


class _Finishing:
    """A handle that does something once another handle is complete."""

    def __init__(self, handle: Handle, finish: Callable[[], object]) -> None:
        self._handle = handle
        self._finish: Callable[[], object] | None = finish

    def test(self) -> bool:
        if not self._handle.test():
            return False
        if self._finish is not None:
            self._finish()
        self._finish = None
        return True


class StagedTransport(OverHost):
    """The plain staged path: whole vectors, synchronous copies, new pageable host memory in every call."""

    name = "staged"

    def __init__(self, host: HostTransport) -> None:
        self._host = host

    def run(self, operation: Operation, send: Tensor | None, recv: Tensor | None) -> None:
        """Carry out a collective."""
        host_send, host_recv = _to_host(send), _like_on_host(recv)
        self._host.run(operation, host_send, host_recv)
        _to_device(recv, host_recv)

    def start(self, operation: Operation, send: Tensor | None, recv: Tensor | None) -> Handle:
        """Begin a collective; the copy back is made by whoever tests the handle."""
        host_send, host_recv = _to_host(send), _like_on_host(recv)
        handle = self._host.start(operation, host_send, host_recv)
        return _Finishing(handle, lambda: _to_device(recv, host_recv))

    def exchange(self, sends: Messages, recvs: Messages) -> Handle:
        """Begin point-to-point messages."""
        return self._messages(sends, recvs, self._host.exchange)

    def post(self, sends: Bound, recvs: Bound, tag: int) -> Handle:
        """Begin announced messages."""
        return self._messages(sends, recvs, functools.partial(self.on_host, tag))

    def _messages(
        self, sends: Messages, recvs: Messages, on_host: Callable[[Messages, Messages], Handle]
    ) -> Handle:
        host_recvs = [(peer, torch.empty(x.shape, dtype=x.dtype)) for peer, x in recvs]
        handle = on_host([(peer, x.cpu()) for peer, x in sends], host_recvs)

        def finish() -> None:
            for (_, x), (_, host) in zip(recvs, host_recvs, strict=True):
                x.copy_(host)

        return _Finishing(handle, finish)


def _to_host(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.detach().cpu()


def _like_on_host(x: Tensor | None) -> Tensor | None:
    return None if x is None else torch.empty(x.shape, dtype=x.dtype)


def _to_device(x: Tensor | None, host: Tensor | None) -> None:
    if x is not None and host is not None:
        x.copy_(host)


@dataclass
class _Slot:
    """Host memory for one chunk on its way, and the events that say when it may be used again."""

    send: Tensor
    recv: Tensor
    downloaded: Handle = field(default_factory=Done)
    uploaded: Handle = field(default_factory=Done)


class PipelinedTransport(OverHost):
    """The staged path in chunks through two sets of page-locked buffers, with copies and communication at the same time.

    Point-to-point messages go through page-locked memory whole, without chunks.

    Args:
        host: moves the chunks.
        streams: copies between device and host.
        size: ranks of the communicator.
        chunk_bytes: bytes per host buffer; there are four.
        poll: called while waiting.
    """

    name = "pipelined"

    def __init__(
        self,
        host: HostTransport,
        streams: Streams,
        size: int,
        *,
        chunk_bytes: int = CHUNK_BYTES,
        poll: Callable[[], None] = lambda: None,
    ) -> None:
        self._host = host
        self._streams = streams
        self._size = size
        self._chunk_bytes = max(
            chunk_bytes, size * 8
        )  # at least one element of the widest type per piece
        self._poll = poll
        self._slots = [
            _Slot(streams.buffer(self._chunk_bytes), streams.buffer(self._chunk_bytes))
            for _ in range(2)
        ]
        self._queue: deque[_Steps] = deque()

    def run(self, operation: Operation, send: Tensor | None, recv: Tensor | None) -> None:
        """Carry out a collective, after those that were started before it."""
        wait(self._enqueue(self._collective(operation, send, recv, self._run_on_host)), self._poll)

    def start(self, operation: Operation, send: Tensor | None, recv: Tensor | None) -> Handle:
        """Begin a collective. Those under way advance one after the other, because MPI wants the same order on all ranks."""
        handle = self._enqueue(self._collective(operation, send, recv, self._host.start))
        handle.test()
        return handle

    def exchange(self, sends: Messages, recvs: Messages) -> Handle:
        """Begin point-to-point messages, after the collectives that were started before them."""
        handle = self._enqueue(self._messages(sends, recvs, self._host.exchange))
        handle.test()
        return handle

    def post(self, sends: Bound, recvs: Bound, tag: int) -> Handle:
        """Begin announced messages, beside all others: their tag keeps them apart, and ranks may be ready for them at any time."""
        alone: deque[_Steps] = deque()
        handle = _Steps(
            self._messages(sends, recvs, functools.partial(self.on_host, tag)), alone, self._streams
        )
        alone.append(handle)
        handle.test()
        return handle

    def close(self, *, together: bool) -> None:
        """Give back the host buffers, too."""
        super().close(together=together)
        if together:
            self._slots.clear()

    def _run_on_host(
        self, operation: Operation, send: Tensor | None, recv: Tensor | None
    ) -> Handle:
        self._host.run(operation, send, recv)
        return Done()

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
        chunks = list(operation.chunks(self._chunk_len(send, recv)))
        self._download(0, chunks[0], operation, send)
        for index, (offset, chunk) in enumerate(chunks):
            if index + 1 < len(
                chunks
            ):  # MPI has left the other slot's send buffer: chunk index - 1 is complete
                self._download(index + 1, chunks[index + 1], operation, send)
            slot = self._slots[index % 2]
            yield from _until(slot.downloaded)
            yield from _until(slot.uploaded)  # of chunk index - 2, or of an earlier call
            host_recv = _prefix(slot.recv, recv, chunk.recv)
            yield from _until(on_host(chunk, _prefix(slot.send, send, chunk.send), host_recv))
            self._upload(slot, offset, chunk, operation, recv, host_recv)

    def _chunk_len(self, send: Tensor | None, recv: Tensor | None) -> int:
        """Return the elements of each piece per chunk, the same on all ranks, so that all make as many chunks."""
        given = send if send is not None else recv
        itemsize = 1 if given is None else given.itemsize
        return self._chunk_bytes // itemsize // self._size

    def _download(
        self, index: int, step: tuple[int, Operation], operation: Operation, send: Tensor | None
    ) -> None:
        offset, chunk = step
        slot = self._slots[index % 2]
        host = _prefix(slot.send, send, chunk.send)
        if host is None or send is None:
            return
        for piece, part in zip(
            send.split(list(operation.send)), host.split(list(chunk.send)), strict=True
        ):
            self._streams.download(part, piece[offset : offset + part.numel()])
        slot.downloaded = self._streams.downloaded()

    def _upload(
        self,
        slot: _Slot,
        offset: int,
        chunk: Operation,
        operation: Operation,
        recv: Tensor | None,
        host: Tensor | None,
    ) -> None:
        if host is None or recv is None:
            return
        for piece, part in zip(
            recv.split(list(operation.recv)), host.split(list(chunk.recv)), strict=True
        ):
            self._streams.upload(piece[offset : offset + part.numel()], part)
        slot.uploaded = self._streams.uploaded()

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


class IpcTransport(PipelinedTransport):
    """Messages, and what goes beyond a node, as in the pipeline; the communicator has a window of device memory beside it."""

    name = "ipc"


class PinnedTransport(PipelinedTransport):
    """As "ipc", but with a window of host memory that is registered with the device."""

    name = "pinned"


class _Steps:
    """A transfer that advances when it is tested, after those that were started before it.

    It may be started on one stream, advanced by whoever polls, and read on another stream: its
    copies wait for the stream that it was started on, and whoever is told that it is complete waits
    for its copies.
    """

    def __init__(self, steps: Iterator[None], queue: deque[_Steps], streams: Streams) -> None:
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
            except BaseException as error:  # noqa: BLE001  # it is raised again from every transfer that it broke
                for (
                    broken
                ) in self._queue:  # what comes behind a failed transfer cannot keep its order
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
