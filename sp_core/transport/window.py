"""Shared memory of the ranks of one node: slots for what travels, flags that say how far each rank is, tensors that live in it.

A rank's flag is the number of steps that it has made. Operations are lists of steps, carried out in
the order in which they were started, which is the same on all ranks; a step begins when every rank
has made those before it. The first step of an operation only writes into a slot that nobody reads
any more (see `sp_core.schedules.window`), so it need not wait for the last step of the operation
before it.

The slots may lie in memory of a device. Then the copies of a step are launched on a stream of their
own, after those of the steps before, and the flag, which stays in host memory, goes up when the
device has carried them out:

    host      launch 0 .......... | flag 1, launch 1 .......... | flag 2
    device             copies of 0                   copies of 1

A rank launches step t + 1 when the OTHERS have made step t; that its own copies are in order is the
stream's business.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from sp_core.observer import observer_of
from sp_core.schedules import SLOTS
from sp_core.transport.base import Handle, Transfer, wait
from sp_core.transport.shared import HOST, Memory, Rooms, Work, demand, give_back, shaped, share

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

SLOT_BYTES = 1 << 19
"""A chunk: half of a core's second-level cache, so that it is still there when it is read."""
FLAG_BYTES = 128
"""Flags are so far apart, because cores fetch cache lines in pairs."""
DEVICE_SLOT_BYTES = 1 << 23
"""A chunk: large, because each costs a look at the flags of the others, and little beside the memory of a GPU."""
PINNED_SLOT_BYTES = 1 << 21
"""Smaller, so that one rank reads a chunk while another writes the next."""

Steps = Sequence[Sequence[Work]]


class Window:
    """Shared memory of the ranks of a communicator. All of them make it.

    Args:
        comm: an mpi4py communicator.
        slot_bytes: bytes of a slot, of which each rank has `SLOTS`; at least 8 per rank,
            `SLOT_BYTES` if not given.
        memory: in which the slots lie, of the host or of this rank's device.

    Attributes:
        has_rooms: whether schemes may compute on what others have put there. On a device only the
            window's copies are in order.
        blocks: rooms for what all ranks read in place; two, so that nobody waits until the others
            have read.
        sums: a room for sums that ranks add to in turn.

    Raises:
        NotShared: the ranks have no memory in common, or cannot map each other's; on every rank.
    """

    def __init__(
        self, comm: Intracomm, slot_bytes: int | None = None, memory: Memory = HOST
    ) -> None:
        self.slot_bytes = max(slot_bytes or SLOT_BYTES, 8 * comm.size) // 8 * 8
        self._comm, self._memory, self.has_rooms = comm, memory, memory is HOST
        self.blocks, self.sums = Rooms(comm, 2), Rooms(comm, 1)
        flags = [part.numpy().data.cast("q") for part in share(comm, HOST, FLAG_BYTES)]
        self.slots = share(comm, memory, SLOTS * self.slot_bytes)
        self._mine = flags[comm.rank]
        self._others = [flag for rank, flag in enumerate(flags) if rank != comm.rank]
        self._begun = 0  # steps of all operations started so far
        self._reached = 0  # steps that all ranks are known to have made
        self._queue: deque[WindowRun] = deque()
        self._launched = 0  # steps of the first operation in the queue
        self._under_way: deque[tuple[WindowRun, Handle]] = deque()
        self._numbers = itertools.count()  # of allocations; the same on all ranks
        self._allocations: dict[int, Allocation] = {}
        self._announce, self._watch = observer_of(comm).announce_call, observer_of(comm).watch

    @property
    def begun(self) -> int:
        """Steps of all operations started so far; the number of the first step of the next one."""
        return self._begun

    def start(self, steps: Steps, what: str) -> WindowRun:
        """Begin an operation, on a device after what has been computed so far; every rank calls this, for as many steps.

        Args:
            steps: what is done in each.
            what: what it is, the same on every rank.
        """
        self._memory.begin()
        self._announce(what)
        operation = WindowRun(self, steps, self._begun, what)
        self._begun += len(steps)
        self._queue.append(operation)
        self.advance()
        return operation

    def make(self, steps: Steps, what: str, poll: Callable[[], None]) -> None:
        """Carry an operation out, as `start` and a wait do, but with less work if nothing else is under way."""
        if self._queue or not self.has_rooms:
            wait(self.start(steps, what), poll)
            return
        self._announce(what)
        number = self._begun
        self._begun += len(steps)
        for place, step in enumerate(steps):
            reached = number if place else number - 1
            if not self.have_made(reached):
                wait(Transfer([partial(self._watched, reached, what)]), poll)
            for work in step:
                work()
            number += 1
            self._mine[0] = number

    def advance(self) -> None:
        """Make the steps that can be made now, on a device launch them, and say which ones are complete."""
        while True:
            while self._under_way and self._under_way[0][1].test():
                operation, _ = self._under_way.popleft()
                operation.made += 1
                self._mine[0] = operation.first + operation.made
            if not self._queue:
                return
            operation = self._queue[0]
            number = operation.first + self._launched
            if not self.have_made(number if self._launched else number - 1):
                return
            self._under_way.append(
                (operation, self._memory.launch(operation.steps[self._launched]))
            )
            self._launched += 1
            if self._launched == len(operation.steps):
                self._queue.popleft()
                self._launched = 0

    def watch(self, what: str) -> None:
        """Notice that a rank has left, where the communicator can tell."""
        self._watch(what)

    def _watched(self, steps: int, what: str) -> bool:
        if self.have_made(steps):
            return True
        self._watch(what)
        return False

    def allocate(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Make a tensor of zeros in shared memory; every rank calls this, shapes may differ."""
        shapes = self._comm.allgather(tuple(shape))
        parts = demand(self._comm, self._memory, math.prod(shape) * dtype.itemsize)
        tensors = [shaped(*each, dtype) for each in zip(parts, shapes, strict=True)]
        self._allocations = {
            number: found for number, found in self._allocations.items() if found.is_alive
        }
        self._allocations[next(self._numbers)] = Allocation(tensors, self._comm.rank)
        return tensors[self._comm.rank]

    def peers(self, x: Tensor) -> list[Tensor]:
        """For a flat tensor in shared memory, return the memory of every rank from the same place on."""
        number, offset = divmod(self.place(x), 1 << 40)
        return [tensor.view(-1)[offset:] for tensor in self._allocations[number].tensors(x)]

    def tensors(self, x: Tensor) -> list[Tensor]:
        """Return the tensors of all ranks that were allocated together with x; none if it was not allocated here."""
        return next(
            (found.tensors(x) for found in self._allocations.values() if found.is_whole(x)), []
        )

    def number(self, x: Tensor) -> int:
        """Return the index of the allocation that starts at a flat tensor, or -1. Ranks number their allocations alike."""
        number, offset = divmod(self.place(x), 1 << 40)
        return -1 if offset else number

    def place(self, x: Tensor | None) -> int:
        """Return a number for the place of a flat tensor in shared memory, or -1. It is the same for corresponding places."""
        for number, found in self._allocations.items():
            offset = -1 if x is None else found.offset(x)
            if offset >= 0:
                return number << 40 | offset
        return -1

    def close(self, *, together: bool) -> None:
        """Let go of slots, rooms and flags. What `allocate` gave lives as long as a tensor in it.

        On a device it stays until the process ends, as do slots if other ranks may still look
        there.
        """
        if together and self.slots:
            give_back(self._comm, self._memory, self.slots[self._comm.rank], self.slots)
        self.blocks.clear()
        self.sums.clear()
        self._queue.clear()
        self.slots, self._others, self._mine = [], [], memoryview(bytes(8)).cast("q")

    def copying(self, into: Tensor, part: Tensor) -> Work:
        """Return a copy between tensors, to be made in a step."""
        return self._memory.copying(into, part)

    def have_made(self, steps: int) -> bool:
        """Return whether every other rank has made so many steps."""
        if self._reached < steps:
            for flag in self._others:
                if flag[0] < steps:
                    return False
            self._reached = steps
        return True


class WindowRun:
    """Steps under way in a window; a handle.

    Attributes:
        first: number of its first step.
        made: how many of them this rank has made.
    """

    def __init__(self, window: Window, steps: Steps, first: int, what: str) -> None:
        self.steps, self.first, self.made = steps, first, 0
        self._window, self._what = window, what

    def test(self) -> bool:
        """Make the steps that can be made now, also of operations before it; True once all of its own are made."""
        if self.made < len(self.steps):
            self._window.advance()
            if self.made < len(self.steps):
                self._window.watch(self._what)
                return False
        return True


class Allocation:
    """Tensors of all ranks that one call of `allocate` has made. It does not keep their memory.

    This rank's memory keeps the tensors of the others, as an attribute.
    """

    def __init__(self, tensors: list[Tensor], rank: int) -> None:
        own = tensors[rank]
        storage: Any = own.untyped_storage()
        storage.others = [*tensors[:rank], None, *tensors[rank + 1 :]]
        self._start, self._storage = _address(own), StorageWeakRef(storage)
        self._layout, self._dtype, self._nbytes = (own.shape, own.stride()), own.dtype, own.nbytes

    @property
    def is_alive(self) -> bool:
        """Whether this rank has a tensor there."""
        return not self._storage.expired()

    def offset(self, x: Tensor) -> int:
        """Return the element of this rank's tensor at which a flat tensor begins; -1 if it lies elsewhere."""
        start = _address(x) - self._start
        inside = start >= 0 and start + x.nbytes <= self._nbytes
        return start // x.itemsize if inside and x.dtype == self._dtype and self.is_alive else -1

    def is_whole(self, x: Tensor) -> bool:
        """Return whether a tensor is this rank's, and not a part of it."""
        return (
            x.layout is torch.strided
            and (x.shape, x.stride()) == self._layout
            and self.offset(x) == 0
        )

    def tensors(self, x: Tensor) -> list[Tensor]:
        """Return the tensors of all ranks, from any tensor of this rank that lies there."""
        storage: Any = x.untyped_storage()
        own = x.detach().as_strided(*self._layout, 0)
        return [own if other is None else other for other in storage.others]


def _address(x: Tensor) -> int:
    """Return where a tensor begins; torch says so itself only of tensors that have elements."""
    return x.untyped_storage().data_ptr() + int(x.storage_offset()) * x.itemsize
