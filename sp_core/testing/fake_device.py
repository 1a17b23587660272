"""A device without hardware: copies that happen late, and memory that holds NaN until they do.

On a real device a copy runs some time after it was asked for, so code that reads its result too early, or overwrites its source
too early, is right most of the time. Here a copy runs only when somebody has waited for it: such code is wrong every time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import torch
from torch import Tensor

POLLS = 2  # tests that an event answers with "not yet" before its copies run


class _Queue:
    """Copies of one direction, carried out in order."""

    def __init__(self) -> None:
        self._waiting: deque[Callable[[], object]] = deque()
        self._asked = 0
        self._carried_out = 0

    def add(self, copy: Callable[[], object]) -> None:
        self._waiting.append(copy)
        self._asked += 1

    def run_to(self, point: int) -> None:
        while self._carried_out < point:
            self._waiting.popleft()()
            self._carried_out += 1

    def event(self) -> _Event:
        return _Event(self, self._asked)


class _Event:
    def __init__(self, queue: _Queue, point: int) -> None:
        self._queue = queue
        self._point = point
        self._polls = 0

    def test(self) -> bool:
        self._polls += 1
        if self._polls > POLLS:
            self._queue.run_to(self._point)
        return self._polls > POLLS


class DelayedStreams:
    """Copy streams of a device that is really host memory; implements `sp_core.transport.device.Streams`.

    The destination of a copy is poisoned when the copy is asked for. Uploads still under way when `finish` is called are carried
    out then, as the device would before it computes on; without `finish` they never are.
    """

    def __init__(self) -> None:
        self._down = _Queue()
        self._up = _Queue()

    def buffer(self, nbytes: int) -> Tensor:
        """Poisoned host memory."""
        return torch.full((nbytes,), 0xFF, dtype=torch.uint8)

    def begin(self) -> None:
        """Nothing: what has been computed is there."""

    def download(self, host: Tensor, device: Tensor) -> None:
        """Ask for a copy to the host."""
        _poison(host)
        self._down.add(lambda: host.copy_(device))

    def upload(self, device: Tensor, host: Tensor) -> None:
        """Ask for a copy to the device."""
        _poison(device)
        self._up.add(lambda: device.copy_(host))

    def downloaded(self) -> _Event:
        """The point after the downloads asked for so far."""
        return self._down.event()

    def uploaded(self) -> _Event:
        """The point after the uploads asked for so far."""
        return self._up.event()

    def finish(self) -> None:
        """Carry out the uploads."""
        self._up.run_to(self._up._asked)


def _poison(x: Tensor) -> None:
    """NaN in every floating type, an unlikely number in the others."""
    x.view(torch.uint8).fill_(0xFF)
