"""Imitate a device without hardware: its work runs late, and until then memory holds NaN.

On a real device a copy runs some time after it was asked for. Code that reads its result too early,
or overwrites or frees its source too early, is right most of the time. Here a copy runs only when
the code waits for it, so that such code is wrong every time.
"""

import ctypes
from collections import deque
from collections.abc import Callable, Sequence
from itertools import cycle

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from sp_core.transport.base import Transfer
from sp_core.transport.cuda import CudaStreams
from sp_core.transport.shared import HostMemory

POLLS = 2


class _Queue:
    """Hold the work of one stream, and run it in order."""

    def __init__(self) -> None:
        self._waiting: deque[Callable[[], object]] = deque()
        self.asked = 0
        self._carried_out = 0

    def add(self, work: Callable[[], object]) -> None:
        self._waiting.append(work)
        self.asked += 1

    def run_to(self, point: int) -> None:
        while self._carried_out < point:
            self._waiting.popleft()()
            self._carried_out += 1


class _Event(Transfer):
    def __init__(self, queue: _Queue, polls: int) -> None:
        self._queue = queue
        self._point = queue.asked
        self._polls = polls

    def test(self) -> bool:
        self._polls -= 1
        if self._polls < 0:
            self._queue.run_to(self._point)
        return self._polls < 0


class _Computing:
    """Compute late: work that is asked for runs in `begin`."""

    _computing: _Queue

    def compute(self, work: Callable[[], object]) -> None:
        """Ask the device to run some work."""
        self._computing.add(work)

    def begin(self) -> None:
        """Run all work that `compute` was given, so that later copies see its results."""
        self._computing.run_to(self._computing.asked)


class DelayedStreams(_Computing, CudaStreams):
    """Replace the product's copy streams; the device's memory is host memory.

    The destination of a copy is filled with NaN when the copy is asked for. Copies see the results
    of work that `compute` was given only after `begin`.

    Args:
        polls: how often an event answers "not yet" before its copies run; let it differ between
            ranks. If there are several numbers, the events take them in turn.
        lazy: whether the uploads that `finish` makes the device wait for run only in `settle`, as
            if for the device's next work. Otherwise `finish` runs them, so that the results can be
            used like any tensor.
    """

    def __init__(self, *polls: int, lazy: bool = False) -> None:
        self._polls = cycle(polls or (POLLS,))
        self._lazy = lazy
        self._computing, self._downs, self._ups = _Queue(), _Queue(), _Queue()
        self._awaited = 0

    def buffer(self, nbytes: int) -> Tensor:
        """Return host memory whose bytes are all 0xFF, which is NaN in every floating type."""
        return torch.full((nbytes,), 0xFF, dtype=torch.uint8)

    def download(self, host: Tensor, device: Tensor) -> None:
        """Ask for a copy to the host."""
        _poison(host)
        self._downs.add(lambda: host.copy_(device))

    def upload(self, device: Tensor, host: Tensor) -> None:
        """Ask for a copy to the device; it gives NaN if the host memory is freed before it runs."""
        _poison(device)
        if host.numel():
            memory, address = StorageWeakRef(host.untyped_storage()), host.data_ptr()
            self._ups.add(
                lambda: (
                    None
                    if memory.expired()
                    else _bytes(device).copy_(_memory(address, device.nbytes))
                )
            )

    def downloaded(self) -> _Event:
        """Return an event after the downloads asked for so far."""
        return _Event(self._downs, next(self._polls))

    def uploaded(self) -> _Event:
        """Return an event after the uploads asked for so far."""
        return _Event(self._ups, next(self._polls))

    def finish(self) -> None:
        """Make the device's next work wait for the uploads asked for so far."""
        self._awaited = self._ups.asked
        if not self._lazy:
            self.settle()

    def settle(self) -> None:
        """Run the uploads that the device waits for."""
        self._ups.run_to(self._awaited)


class DelayedMemory(_Computing, HostMemory):
    """Replace the product's memory of a device by host memory of the node.

    Launched work runs when its event has been polled often enough. Work that `compute` was given
    runs in `begin`.

    Args:
        polls: how often an event answers "not yet" before its work runs; let it differ between
            ranks.
    """

    def __init__(self, *, polls: int = POLLS) -> None:
        super().__init__()
        self._polls = polls
        self._computing, self._launched = _Queue(), _Queue()

    def launch(self, work: Sequence[Callable[[], object]]) -> _Event:
        """Put work at the end of the device's queue, and return the event of its end."""
        for item in work:
            self._launched.add(item)
        return _Event(self._launched, self._polls)

    def copying(self, into: Tensor, part: Tensor) -> Callable[[], object]:
        """Return a function that copies `part` into `into`."""
        return lambda: into.copy_(part)


def _bytes(x: Tensor) -> Tensor:
    """Return the bytes of a contiguous vector. The stride of a single element may be any."""
    return x.as_strided(x.shape, (1,)).view(torch.uint8)


def _memory(address: int, nbytes: int) -> Tensor:
    return torch.frombuffer((ctypes.c_uint8 * nbytes).from_address(address), dtype=torch.uint8)


def _poison(x: Tensor) -> None:
    """Fill x with 0xFF bytes: NaN in floating types, an unlikely number in integer types."""
    _bytes(x).fill_(0xFF)
