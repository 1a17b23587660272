"""Carry out collectives in memory that the ranks of one node share.

It holds slots for what travels, a flag of how far each rank is, and tensors of the caller.

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
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from sp_core.observer import observer_of
from sp_core.schedules import SLOTS
from sp_core.transport.base import Handle, Messages, Transfer, wait
from sp_core.transport.shared import HOST, HostMemory, Rooms, Work, demand, give_back, shaped, share

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

SLOT_BYTES = 1 << 19
"""A chunk: half of a core's second-level cache, so that it is still there when it is read."""
FLAG_BYTES = 128
"""Flags are so far apart, because cores fetch cache lines in pairs."""
DEVICE_SLOT_BYTES = 1 << 23
"""A chunk: large, because each costs a look at the flags of the others, and little beside the
memory of a GPU."""
PINNED_SLOT_BYTES = 1 << 21
"""Smaller, so that one rank reads a chunk while another writes the next."""

Steps = Sequence[Sequence[Work]]


class Allocation(NamedTuple):
    """Tensors that one call of `allocate` has made.

    The storage of this rank's own tensor holds it, and so keeps the others.
    """

    window: object
    number: int
    shape: torch.Size
    dtype: torch.dtype
    others: dict[int, Tensor]


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
        self, comm: Intracomm, slot_bytes: int | None = None, memory: HostMemory = HOST
    ) -> None:
        self.slot_bytes = max(slot_bytes or SLOT_BYTES, 8 * comm.size) // 8 * 8
        self._comm, self._memory, self.has_rooms = comm, memory, memory is HOST
        self.blocks, self.sums = Rooms(comm, 2), Rooms(comm, 1)
        flags = [part.numpy().data.cast("q") for part in share(comm, HOST, FLAG_BYTES)]
        self.slots = share(comm, memory, SLOTS * self.slot_bytes)
        self._mine = flags[comm.rank]
        self._others = [flag for rank, flag in enumerate(flags) if rank != comm.rank]
        self.begun = 0  # steps of all operations started so far
        self.made = 0  # steps that this rank has made
        self._launched = 0
        self._reached = 0  # steps that all ranks are known to have made
        self._queue: deque[tuple[int, Sequence[Work]]] = deque()  # steps, by place in the operation
        self._under_way: deque[Handle] = deque()  # steps that were launched
        self._numbers = itertools.count()  # of allocations; the same on all ranks
        self._lent: dict[int, tuple[list[Tensor], list[StorageWeakRef]]] = {}  # what is to be freed
        self._token = object()  # by which its allocations are known
        self._announce, self.watch = observer_of(comm).announce_call, observer_of(comm).watch

    def start(self, steps: Steps, what: str) -> WindowRun:
        """Begin an operation; every rank calls this, for as many steps.

        On a device it begins after what has been computed so far.

        Args:
            steps: what is done in each.
            what: what it is, the same on every rank.
        """
        self._memory.begin()
        self._announce(what)
        self.begun += len(steps)
        self._queue.extend(enumerate(steps))
        self.advance()
        return WindowRun(self, self.begun, what)

    def exchange(self, sends: Messages, recvs: Messages, longest: int) -> Handle:
        """Begin messages, of which each rank sends one at most; every rank calls this.

        Args:
            sends, recvs: as of a transport.
            longest: at least the bytes of the longest one; the same on every rank.
        """
        starts = range(0, longest, self.slot_bytes)
        steps: list[list[Work]] = [[] for _ in range(len(starts) + 1)]
        writes = [(0, self._comm.rank, x.view(torch.uint8)) for _, x in sends]
        reads = [(1, source, x.view(torch.uint8)) for source, x in recvs]
        for number, start in enumerate(starts):
            place = (self.begun + number) % SLOTS * self.slot_bytes
            for later, rank, x in writes + reads:
                piece = x[start : start + self.slot_bytes]
                slot = self.slots[rank][place : place + len(piece)]
                sides = (piece, slot) if later else (slot, piece)
                steps[number + later] += [self.copying(*sides)] * bool(len(piece))
        run = self.start(steps, f"messages of at most {longest} bytes in a window")
        return Transfer([run.test], keep=(sends, recvs))

    def make(self, steps: Steps, what: str, poll: Callable[[], None]) -> None:
        """Carry an operation out."""
        wait(self.start(steps, what), poll)

    def advance(self) -> None:
        """Launch the steps whose inputs are ready, and publish how many steps are complete.

        Other ranks read that number from this rank's flag.
        """
        while True:
            while self._under_way and self._under_way[0].test():
                self._under_way.popleft()
                self.made += 1
                self._mine[0] = self.made
            if not self._queue:
                return
            place, step = self._queue[0]
            reached = self._launched if place else self._launched - 1
            if reached > self._reached and not self._have_made(reached):
                return
            self._queue.popleft()
            self._launched += 1
            self._under_way.append(self._memory.launch(step))

    def allocate(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Make a tensor of zeros in shared memory; every rank calls this, shapes may differ."""
        self._give_back_unused()
        shapes, number = self._comm.allgather(tuple(shape)), next(self._numbers)
        parts = demand(self._comm, self._memory, math.prod(shape) * dtype.itemsize)
        lent = list(map(self._memory.lend, parts))
        if lent[0] is not parts[0]:
            self._lent[number] = parts, [StorageWeakRef(x.untyped_storage()) for x in lent]
        tensors = [shaped(*each, dtype) for each in zip(lent, shapes, strict=True)]
        own, others = tensors[self._comm.rank], dict(enumerate(tensors))
        del others[self._comm.rank]  # or its memory would keep itself
        storage: Any = own.untyped_storage()
        storage.allocation = Allocation(self._token, number, own.shape, dtype, others)
        return own

    def _give_back_unused(self) -> None:
        """Give back memory of a device in which no rank has a tensor; every rank calls this."""
        if not self._lent:  # on every rank
            return
        unused = {
            number for number, (_, uses) in self._lent.items() if all(use.expired() for use in uses)
        }
        self._memory.begin()
        wait(self._memory.launch(()))  # what was asked of those tensors is done
        for number in sorted(set.intersection(*self._comm.allgather(unused))):
            parts, _ = self._lent.pop(number)
            give_back(self._comm, self._memory, parts[self._comm.rank], parts)

    def peers(self, x: Tensor) -> list[Tensor]:
        """Return each rank's memory of an allocation, from the offset of the flat tensor x on."""
        return [tensor.view(-1)[x.storage_offset() :] for tensor in self._all_of(x)]

    def tensors(self, x: Tensor) -> list[Tensor]:
        """Return the tensors of all ranks that were allocated together with x.

        There are none if x was not allocated here.
        """
        found = self._allocation(x)
        is_whole = found and x.shape == found.shape and x.is_contiguous() and self.place(x) >= 0
        return self._all_of(x) if is_whole and x.storage_offset() == 0 else []

    def number(self, x: Tensor) -> int:
        """Return the index of the allocation that starts at a flat tensor, or -1.

        Ranks number their allocations alike.
        """
        return -1 if x.storage_offset() else self.place(x) >> 40

    def place(self, x: Tensor | None) -> int:
        """Return a number for the place of a flat tensor in shared memory, or -1.

        It is the same for corresponding places.
        """
        found = self._allocation(x)
        if x is None or found is None or found.dtype != x.dtype:
            return -1
        return found.number << 40 | int(x.storage_offset())

    def _allocation(self, x: Tensor | None) -> Allocation | None:
        if x is None or x.layout is not torch.strided:
            return None
        found: Allocation | None = getattr(x.untyped_storage(), "allocation", None)
        return found if found and found.window is self._token else None

    def _all_of(self, x: Tensor) -> list[Tensor]:
        """Return the tensors of all ranks, from any tensor of this rank that lies there."""
        found = self._allocation(x)
        assert found is not None
        own = shaped(
            x.detach().as_strided((found.shape.numel(),), (1,), 0).view(torch.uint8),
            found.shape,
            x.dtype,
        )
        return [found.others.get(rank, own) for rank in range(self._comm.size)]

    def close(self, *, together: bool) -> None:
        """Let go of slots, rooms and flags. What `allocate` gave lives as long as a tensor in it.

        On a device what is still used stays until the process ends, as do slots if other ranks may
        still look there.
        """
        if together:
            self._give_back_unused()
        if together and self.slots:
            give_back(self._comm, self._memory, self.slots[self._comm.rank], self.slots)
        self.blocks.clear()
        self.sums.clear()
        self._queue.clear()
        self.slots, self._others, self._mine = [], [], memoryview(bytes(8)).cast("q")

    def copying(self, into: Tensor, part: Tensor) -> Work:
        """Return a copy between tensors, to be made in a step."""
        return self._memory.copying(into, part)

    def _have_made(self, steps: int) -> bool:
        """Return whether every other rank has made so many steps."""
        for flag in self._others:
            if flag[0] < steps:
                return False
        self._reached = steps
        return True


class WindowRun(NamedTuple):
    """Steps under way in a window; a handle.

    Attributes:
        end: number of the step after its last one.
        what: what it is.
    """

    window: Window
    end: int
    what: str

    def test(self) -> bool:
        """Make the steps that can be made now, also of operations before it.

        Return True once all of its own are made.
        """
        if self.window.made < self.end:
            self.window.advance()
            if self.window.made < self.end:
                self.window.watch(self.what)  # notices that a rank has left, where it can
                return False
        return True
