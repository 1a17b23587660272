"""Advance transfers that copy between a device and the host in the order in which they began."""

from collections import deque
from collections.abc import Iterator
from contextlib import nullcontext
from threading import Lock

import torch

from sp_core.transport.base import Handle
from sp_core.transport.cuda import CudaStreams


class Queue(deque["Steps"]):
    """Hold transfers in the order in which they began, and a lock for the thread that advances."""

    def __init__(self) -> None:
        super().__init__()
        self.lock = Lock()


class Steps:
    """Represent a transfer in a queue, whose transfers advance in order; a `Handle`.

    A transfer advances only in `test` of its handle, or of a handle behind it in the queue. It may
    begin on one CUDA stream, advance in a poll, and be read on another stream. The stream on which
    `test` returns True waits for the copies.

    Args:
        steps: a generator that yields while it waits, and ends when the transfer is complete.
        queue: the transfers in order; the caller appends this one.
        streams: run the copies.
    """

    def __init__(self, steps: Iterator[None], queue: Queue, streams: CudaStreams) -> None:
        self._steps = steps
        self._queue = queue
        self._streams = streams
        self._inference = torch.is_inference_mode_enabled()  # a poll may come from outside of it
        self._error: BaseException | None = None

    def test(self) -> bool:
        """Advance the queue. Once this transfer is complete, let the current stream wait for it."""
        if not self.advance():
            return False
        self._streams.finish()
        return True

    def advance(self) -> bool:
        """Advance the queue as far as possible, and return whether this transfer is complete.

        Return False if another thread advances the queue.

        Raises:
            BaseException: the error of this transfer, or of one before it in the queue.
        """
        if not self._queue.lock.acquire(False):
            return False
        try:
            while self in self._queue:
                first = self._queue[0]
                try:
                    with torch.inference_mode() if first._inference else nullcontext():
                        next(first._steps)
                except StopIteration:
                    self._queue.popleft()
                except BaseException as error:  # noqa: BLE001  # raised in `test` of each of them
                    for broken in self._queue:  # after a failure the others cannot be in order
                        broken._error = error
                    self._queue.clear()
                else:
                    return False
        finally:
            self._queue.lock.release()
        if self._error is not None:
            raise self._error
        return True


def until(event: Handle) -> Iterator[None]:
    """Yield again and again until `event` is complete, so that its queue can do other work."""
    while not event.test():
        yield
