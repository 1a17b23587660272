"""Move device tensors over an MPI that cannot read device memory, by copies through host memory.

`StagedTransport` is the simple one: copy all to the host, communicate, copy everything back.
Each call uses new pageable memory. Most programs do this, and it is here for comparison.

`PipelinedTransport` cuts the vector of a collective into chunks and overlaps three kinds of work.
While MPI moves chunk k, one copy engine copies chunk k+1 to the host ("down") and another copies
chunk k-1 to the device ("up"). The chunks use two pairs of page-locked buffers in turn. These
buffers are made once.

    down   | 0 | 1 | 2 | 3 |
    MPI        | 0 | 1 | 2 | 3 |
    up             | 0 | 1 | 2 | 3 |
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import cast

import torch
from torch import Tensor

from sp_core.programs import Operation
from sp_core.progress import of_this_rank
from sp_core.transport.base import (
    Bound,
    Done,
    Handle,
    Messages,
    Transfer,
    Transport,
    ordered,
    wait,
)
from sp_core.transport.cuda import CudaStreams
from sp_core.transport.host import OverHost, beside, in_turn
from sp_core.transport.queue import Queue, Steps, until

PIECE_BYTES, MOST_BYTES = 1 << 20, 1 << 23
"""The most bytes of a piece of a chunk, and of a host buffer.

A host buffer holds all pieces of a chunk. Each piece is one copy. The best chunk of a vector of n
bytes has sqrt(n * overhead * bandwidth / 2) bytes, with the overhead of a chunk in seconds and the
bandwidth in bytes/s. For n = 16 MiB and 25 to 400 Gbit/s this is 0.5 to 2 MiB."""


class StagedTransport(OverHost):
    """Copy whole vectors to the host and back synchronously.

    Each call uses new pageable memory.

    Args:
        host: sends between buffers in host memory.
        device: where the tensors live.
    """

    name = "staged"

    def __init__(self, host: Transport, device: torch.device) -> None:
        self._host, self._device = host, device

    def prepare(
        self, operation: Operation, send: Tensor | None, recv: Tensor | None
    ) -> Callable[[], object]:
        """Return a function that runs the collective on copies in host memory.

        The function copies `send` to the host, and the result into `recv`. It returns when `recv`
        is complete.
        """
        return lambda: self._collective(partial(self.blocking, operation), send, recv).test()

    def start(self, operation: Operation, send: Tensor | None, recv: Tensor | None) -> Handle:
        """Copy the input to the host, begin the collective there, and return its handle.

        The `test` that finds the transfer complete copies the result back to the device.
        """
        return self._collective(partial(self._host.start, operation), send, recv)

    def exchange(self, sends: Messages, recvs: Messages) -> Handle:
        """Copy the data to be sent into host memory, begin the messages, and return a handle."""
        return self._messages(self._host.exchange, sends, recvs)

    def post(self, sends: Bound, recvs: Bound, tag: int) -> Handle:
        """Copy the data to be sent into host memory, begin the messages, and return a handle."""
        return self._messages(partial(self.on_host, tag), sends, recvs)

    def _collective(
        self,
        on_host: Callable[[Tensor | None, Tensor | None], Handle],
        send: Tensor | None,
        recv: Tensor | None,
    ) -> Handle:
        """Copy the input of a collective into host memory, begin it, and return a handle.

        Args:
            on_host: begins the collective on (send, recv) in host memory.
            send, recv: device tensors, or None.
        """

        def alone(sends: Messages, recvs: Messages) -> Handle:
            return on_host(*(next((x for _, x in found), None) for found in (sends, recvs)))

        return self._messages(alone, *([] if x is None else [(0, x)] for x in (send, recv)))

    def _messages(
        self, on_host: Callable[[Messages, Messages], Handle], sends: Messages, recvs: Messages
    ) -> Handle:
        """Copy the data to be sent into host memory, begin the messages, and return a handle.

        The copies are complete on return. Once the handle is complete, the received data have been
        copied to the device.

        Args:
            on_host: begins (sends, recvs) between buffers in host memory.
            sends, recvs: messages of device tensors.
        """
        host_recvs = [
            (peer, torch.empty(x.shape, dtype=x.dtype, device="cpu")) for peer, x in recvs
        ]
        handle = on_host([(peer, x.detach().cpu()) for peer, x in sends], host_recvs)
        back = [partial(x.copy_, host) for (_, x), (_, host) in zip(recvs, host_recvs, strict=True)]
        return ordered(Transfer([handle.test], after=partial(in_turn, *back)), self._device)


@dataclass
class _Slot:
    """Hold the page-locked buffers of one chunk, and handles that say when they are free again.

    Args:
        send, recv: uint8 buffers in host memory.
        downloaded: complete once the copy from the device into `send` is done.
        uploaded: complete once the copy from `recv` to the device is done.
    """

    send: Tensor
    recv: Tensor
    downloaded: Handle = field(default_factory=Done)
    uploaded: Handle = field(default_factory=Done)


class PipelinedTransport(OverHost):
    """Move the chunks of a collective through page-locked buffers, copying while MPI sends.

    There are two pairs of buffers, each with one buffer to send and one to receive. Chunks use the
    pairs in turn. Point-to-point messages are not cut: each goes through page-locked memory of its
    own length.

    Args:
        host: sends between buffers in host memory.
        streams: copy between device and host.
        size: the number of ranks.
        name: "pipelined"; or "ipc" or "pinned" if a shared-memory `Window` of that kind carries the
            collectives, and this transport does the rest.
        chunk_bytes: bytes of each of the four buffers; 0 for 1 MiB per rank, at most 8 MiB. A piece
            of a chunk has at most 1 MiB.
        poll: called while a prepared collective waits, so that other transfers make progress.
    """

    def __init__(
        self,
        host: Transport,
        streams: CudaStreams,
        size: int,
        *,
        name: str = "pipelined",
        chunk_bytes: int = 0,
        poll: Callable[[], None] = lambda: None,
    ) -> None:
        self.name, self._host, self._streams, self._poll = name, host, streams, poll
        # at least one element of the widest type per piece
        self._chunk_bytes = nbytes = max(
            chunk_bytes or min(PIECE_BYTES * size, MOST_BYTES), size * 8
        )
        self._slots = [_Slot(streams.buffer(nbytes), streams.buffer(nbytes)) for _ in range(2)]
        self._queue, self._posts = Queue(), Queue()
        self._of_this_rank = of_this_rank().posting
        self._of_this_rank.add(self)

    def prepare(
        self, operation: Operation, send: Tensor | None, recv: Tensor | None
    ) -> Callable[[], object]:
        """Return a function that runs the collective and waits for its end.

        That function first completes the transfers that this rank began before.
        """

        def run() -> None:
            steps = self._collective(operation, send, recv, self.blocking)
            wait(self._enqueue(steps, self._queue), self._poll)

        return run

    def start(self, operation: Operation, send: Tensor | None, recv: Tensor | None) -> Handle:
        """Begin a collective and return its handle, without waiting for other ranks.

        Transfers of this transport advance in the order in which they began, one after the other.
        The reason is that all ranks must call MPI in the same order. Transfers advance only in
        `test` of a handle.
        """
        steps = self._collective(operation, send, recv, self._host.start_early)
        return self._enqueue(steps, self._queue)

    def exchange(self, sends: Messages, recvs: Messages) -> Handle:
        """Begin messages and return their handle.

        The messages advance after all transfers of this transport that began before.
        """
        steps = self._messages(sends, recvs, self._host.exchange, Queue())
        return self._enqueue(steps, self._queue)

    def in_order(self, call: Callable[[], object]) -> Handle:
        """Call a function after all transfers in the queue, or at once if the queue is empty."""

        def steps() -> Iterator[None]:
            call()
            yield from ()

        if self._queue:
            return self._enqueue(steps(), self._queue)
        return super().in_order(call)

    def post(self, sends: Bound, recvs: Bound, tag: int) -> Handle:
        """Begin messages that each rank posts when it is ready, and return their handle.

        The messages do not wait for transfers that began before, so ranks may call this at
        different times. MPI gets messages in the order of the calls, because it matches those of
        one tag in that order. So each waits until the data of those before are in host memory.
        """
        steps = self._messages(sends, recvs, partial(self.on_host, tag), self._posts)
        return self._enqueue(steps, Queue())

    def is_posted(self) -> bool:
        """Return whether MPI has all messages of `post`; give it those that are in host memory."""
        return not self._posts or self._posts[-1].advance()

    def close(self, *, together: bool) -> None:
        """Close the transport that sends and, with `together`, release the host buffers.

        Without `together`, MPI may still use the buffers.
        """
        super().close(together=together)
        self._of_this_rank.discard(self)
        if together:
            self._slots.clear()

    def _enqueue(self, steps: Iterator[None], queue: Queue) -> Steps:
        """Put a transfer into a queue, behind those that began before. Return its handle.

        It advances as far as it can without waiting. Its copies wait for the current stream.
        """
        self._streams.begin()
        queue.append(handle := Steps(steps, queue, self._streams))
        handle.advance()
        return handle

    def _collective(
        self,
        operation: Operation,
        send: Tensor | None,
        recv: Tensor | None,
        on_host: Callable[[Operation, Tensor | None, Tensor | None], Handle],
    ) -> Iterator[None]:
        """Move all chunks of a collective. Yield whenever the next chunk would have to wait.

        Args:
            operation: this rank's view of the collective.
            send, recv: flat device tensors, or None.
            on_host: begins the collective of one chunk between buffers in host memory.
        """
        given = cast("Tensor", recv if send is None else send)  # every rank has one of them
        # the same on all ranks: the number of chunks must be equal
        nbytes = min(PIECE_BYTES, self._chunk_bytes // operation.pieces)
        chunks = list(operation.chunks(nbytes // given.itemsize))
        self._download(0, chunks, operation, send)
        for index, (offset, chunk) in enumerate(chunks):
            # chunk index - 1 is complete, so MPI no longer reads the other send buffer
            self._download(index + 1, chunks, operation, send)
            slot = self._slots[index % 2]
            yield from until(slot.downloaded)
            yield from until(slot.uploaded)  # of chunk index - 2, or of an earlier call
            # the call may block, while another rank needs these messages before it makes the call
            yield from until(Transfer([made.is_posted for made in self._of_this_rank]))
            host_recv = _prefix(slot.recv, recv, chunk.recv)
            yield from until(on_host(chunk, _prefix(slot.send, send, chunk.send), host_recv))
            if recv is not None and host_recv is not None:
                for place, part in beside(recv, operation.recv, offset, chunk.recv, host_recv):
                    self._streams.upload(place, part)
                slot.uploaded = self._streams.uploaded()

    def _download(
        self,
        index: int,
        chunks: Sequence[tuple[int, Operation]],
        operation: Operation,
        send: Tensor | None,
    ) -> None:
        """Begin to copy the data that this rank sends in chunk `index` to the host.

        Do nothing if there is no such chunk.

        Args:
            index: the index of the chunk.
            chunks: (offset in each piece, operation) of every chunk.
            operation: the whole collective.
            send: flat device tensor, or None.
        """
        if send is None or index == len(chunks):
            return
        offset, chunk = chunks[index]
        slot = self._slots[index % 2]
        parts = slot.send[: sum(chunk.send) * send.itemsize].view(send.dtype)
        for place, part in beside(send, operation.send, offset, chunk.send, parts):
            self._streams.download(part, place)
        slot.downloaded = self._streams.downloaded()

    def _messages(
        self,
        sends: Messages,
        recvs: Messages,
        on_host: Callable[[Messages, Messages], Handle],
        posts: Queue,
    ) -> Iterator[None]:
        """Copy messages into host memory, send them, and copy what arrives to the device.

        Yield instead of waiting.

        Args:
            sends, recvs: messages of device tensors.
            on_host: begins messages between buffers in host memory.
            posts: the queue in whose order `on_host` is called.
        """
        host_sends = [(peer, self._pinned_like(x)) for peer, x in sends]
        host_recvs = [(peer, self._pinned_like(x)) for peer, x in recvs]
        for (_, host), (_, x) in zip(host_sends, sends, strict=True):
            self._streams.download(host, x)
        begun: list[Handle] = []

        def begin(downloaded: Handle) -> Iterator[None]:
            yield from until(downloaded)
            begun.append(on_host(host_sends, host_recvs))

        posts.append(post := Steps(begin(self._streams.downloaded()), posts, self._streams))
        while not post.advance():
            yield
        yield from until(begun[0])
        for (_, host), (_, x) in zip(host_recvs, recvs, strict=True):
            self._streams.upload(x, host)
        yield from until(self._streams.uploaded())  # the host buffers are released on return

    def _pinned_like(self, x: Tensor) -> Tensor:
        return self._streams.buffer(x.nbytes).view(x.dtype).view(x.shape)


def _prefix(buffer: Tensor, like: Tensor | None, sizes: tuple[int, ...]) -> Tensor | None:
    """Return a view of a buffer of bytes: its first `sum(sizes)` elements in the dtype of `like`.

    Return None if `like` is None.
    """
    if like is None:
        return None
    return buffer[: sum(sizes) * like.itemsize].view(like.dtype)
