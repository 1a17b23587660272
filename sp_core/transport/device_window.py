"""The window of `sp_core.transport.window` with its slots in memory of a device: ranks that share a node, or one GPU.

The steps are those of any window. What differs is when a step is made: its copies are launched on a stream of their own, after
those of the steps before, and the flag, which stays in host memory, goes up when the device has carried them out.

    host      launch 0 .......... | flag 1, launch 1 .......... | flag 2
    device             copies of 0                   copies of 1

A rank launches step t + 1 when the OTHERS have made step t; that its own copies are in order is the stream's business.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from torch import Tensor

from sp_core.transport.base import wait
from sp_core.transport.device import Event
from sp_core.transport.node_memory import NodeMemory, give_back, share_on_device
from sp_core.transport.shared import share
from sp_core.transport.window import FLAG_BYTES, Steps, Window, WindowRun, Work

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

DEVICE_SLOT_BYTES = 1 << 23
"""A chunk: large, because each costs a look at the flags of the others, and little beside the memory of a GPU."""
PINNED_SLOT_BYTES = 1 << 21
"""Smaller, so that one rank reads a chunk while another writes the next."""


class DeviceWindow(Window):
    """Memory of a device that the ranks of a communicator share. All of them make it.

    Args:
        comm: an mpi4py communicator.
        memory: of this rank's device.
        slot_bytes: bytes of a slot, of which each rank has `SLOTS`.

    Raises:
        NotShared: the ranks cannot map each other's memory; on every rank.
    """

    has_rooms = False
    keeps_memory = True

    def __init__(self, comm: Intracomm, memory: NodeMemory, slot_bytes: int = DEVICE_SLOT_BYTES) -> None:
        self._memory = memory
        self._under_way: deque[tuple[WindowRun, Event]] = deque()
        self._launched = 0  # steps of the first operation in the queue
        super().__init__(comm, slot_bytes)

    def start(self, steps: Steps, what: str) -> WindowRun:
        """Begin an operation, on what has been computed so far."""
        self._memory.begin()
        return super().start(steps, what)

    def make(self, steps: Steps, what: str, poll: Callable[[], None]) -> None:
        """An operation to its end."""
        wait(self.start(steps, what), poll)

    def advance(self) -> None:
        """Launch the steps that can be launched now, and say which ones the device has made."""
        while True:
            while self._under_way and self._under_way[0][1].test():
                operation, _ = self._under_way.popleft()
                operation.made += 1
                self._mine[0] = operation.first + operation.made
            if not self._queue or not self._may_launch(self._queue[0]):
                return
            operation = self._queue[0]
            self._under_way.append((operation, self._memory.launch(operation.steps[self._launched])))
            self._launched += 1
            if self._launched == len(operation.steps):
                self._queue.popleft()
                self._launched = 0

    def close(self, *, together: bool) -> None:
        """Give the slots back. Where others may still look into them, and what `allocate` gave, stays until the process ends."""
        if together and self.slots:
            give_back(self._comm, self._memory, self.slots[self._comm.rank], self.slots)
        super().close(together=together)

    def copying(self, into: Tensor, part: Tensor) -> Work:
        """A copy between tensors, to be launched in a step."""
        return self._memory.copying(into, part)

    def _may_launch(self, operation: WindowRun) -> bool:
        number = operation.first + self._launched
        return self.have_made(number if self._launched else number - 1)

    def _flags_and_slots(self, nbytes: int) -> tuple[list[Tensor], list[Tensor]]:
        return share(self._comm, FLAG_BYTES), [part[:nbytes] for part in self._share(nbytes)]

    def _share(self, nbytes: int) -> list[Tensor]:
        return share_on_device(self._comm, self._memory, nbytes)
