"""Run collectives in memory that the ranks of one node share.

A `Window` holds slots, one flag per rank, and tensors that callers have allocated. A slot is a
buffer of fixed size for data in transit to other ranks; each of several ranks has `SLOTS`. In host
memory a slot takes only the pages that some operation has written.

An operation (a collective, or a set of messages) is a list of steps. A step is a list of copies and
sums that one rank makes. All ranks start operations in the same order, with equally many steps. A
rank's flag is the number of steps that it has made since the window was made. A step begins when
every rank has made all steps before it. The first step of an operation is an exception: it only
writes into slots that nobody reads any more (see `sp_core.programs.window`). So it need not wait
for the last step of the operation before it.

The slots may lie in memory of a device. Then the copies of a step are queued on a CUDA stream of
their own, after those of the steps before. The flags stay in host memory. A rank raises its flag
when the device has completed the copies:

    host      launch 0 .......... | flag 1, launch 1 .......... | flag 2
    device             copies of 0                   copies of 1

A rank launches step t + 1 when the OTHER ranks have made step t. The stream keeps the rank's own
copies in order.
"""

import itertools
import math
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from threading import Lock
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from sp_core.errors import PeerFailed, ShapeError
from sp_core.observer import observer_of
from sp_core.programs import SLOTS
from sp_core.transport.base import Broken, Handle, Intracomm, Messages, Transfer, at_once, wait
from sp_core.transport.shared import (
    GROWING,
    HOST,
    HostMemory,
    Regions,
    Work,
    demand,
    give_back,
    shaped,
    share,
)

SLOT_BYTES = 1 << 19
"""Bytes of a slot in host memory: half of a core's L2 cache, where readers then find the data."""
FLAG_BYTES = 128
"""Bytes of the memory of each flag, since cores fetch cache lines in pairs."""
DEVICE_SLOT_BYTES = 1 << 26
"""Bytes of a slot in device memory. Slots are large, because the ranks wait for each other in each.

Two processes on one H200 need 0.3 ms for a slot. To gather 336 MiB from each takes 12.3 ms with
slots of 8 MiB, 4.0 ms with 32 MiB and 1.9 ms with 128 MiB."""
PINNED_SLOT_BYTES = 1 << 22
"""Bytes of a slot in pinned memory: smaller, so that reads overlap with the next writes."""

Steps = Sequence[Sequence[Work]]
"""For each step of an operation, the functions that this rank calls."""


class Allocation(NamedTuple):
    """Record the tensors of all ranks that one call of `Window.allocate` has made.

    The storage of this rank's own tensor has this record as an attribute, which keeps the tensors
    of the other ranks alive.

    Args:
        window: an object that identifies the window.
        number: how many calls of `allocate` came before, the same on every rank.
        address: the address of this rank's own memory. torch may move the tensor elsewhere.
        shape: the shape of this rank's tensor.
        dtype: the dtype of all tensors.
        others: other rank -> that rank's tensor.
    """

    window: object
    number: int
    address: int
    shape: torch.Size
    dtype: torch.dtype
    others: dict[int, Tensor]


class Window:
    """Hold the memory that the ranks of a communicator share, and run operations in it.

    An operation is a list of steps, each a list of copies and sums that one rank makes. All ranks
    make the window together, and start operations in the same order. `advance` drives the
    operations; nothing runs in the background.

    Args:
        comm: an mpi4py communicator.
        slot_bytes: bytes of a slot, a buffer for data in transit; each rank has `SLOTS`. The size
            is rounded down to a multiple of 8, but is at least 8 bytes per rank. The default is
            `SLOT_BYTES`.
        memory: allocates and maps the slots, in host memory or on this rank's device.
        in_order: calls a function after the MPI calls of earlier collectives
            (`Transport.in_order`).

    Attributes:
        memory: as given; its `copying` makes the copies of a step.
        has_regions: whether `blocks` and `sums` can be used. On a device they cannot, because only
            the window's own copies are in order there.
        blocks: two regions, used in turn (`Regions`), for tensors that all ranks read in place.
        sums: one region (`Regions`) for sums to which one rank after the other adds.
        slots: for each rank its slots, as one uint8 vector. A single rank has none: its vector has
            8 unused bytes. The list is empty after `close`.
        slot_bytes: bytes of one slot.
        begun: steps of all operations started so far, the same on every rank.
        made: steps that this rank has completed.

    Raises:
        NotShared: on every rank: the ranks have no memory in common, or cannot map each other's.
    """

    def __init__(
        self,
        comm: Intracomm,
        slot_bytes: int | None = None,
        memory: HostMemory = HOST,
        in_order: Callable[[Callable[[], object]], Handle] = at_once,
    ) -> None:
        self.slot_bytes = 8 * max((slot_bytes or SLOT_BYTES) // 8, comm.size)
        self._comm, self.memory, self.has_regions = comm, memory, memory is HOST
        self.blocks, self.sums = Regions(comm, 2), Regions(comm, 1)
        flags = [part.numpy().data.cast("q") for part in share(comm, HOST, FLAG_BYTES)]
        slots = SLOTS * self.slot_bytes * (comm.size > 1)
        self.slots = share(comm, GROWING if memory is HOST else memory, slots)
        self._mine = flags[comm.rank]
        self._others = [flag for rank, flag in enumerate(flags) if rank != comm.rank]
        self.begun = 0  # steps of all operations started so far
        self.made = 0  # steps that this rank has completed
        self._launched, self._advancing = 0, Lock()
        # to launch: (step, work, whether it began in inference mode)
        self._queue: deque[tuple[int, Sequence[Work], bool]] = deque()
        self._under_way: deque[Handle] = deque()  # launched steps that are not complete
        self._numbers = itertools.count()  # of allocations; the same on all ranks
        self._lent: dict[int, tuple[list[Tensor], list[StorageWeakRef]]] = {}  # on a device
        self._token = object()  # identifies its allocations
        self._in_order = in_order
        self._announce, self.watch = observer_of(comm).announce_call, observer_of(comm).watch

    def start(
        self,
        steps: Steps,
        what: str,
        *,
        keep: object = None,
        after: Callable[[], object] | None = None,
    ) -> Transfer:
        """Begin an operation and return its handle, without waiting. Every rank calls this.

        On a device the copies begin after the work queued on the current stream so far.

        Args:
            steps: for each step, the functions that this rank calls. All ranks pass the same number
                of steps.
            what: names the operation in errors and checks; the same on every rank.
            keep, after: as in `Transfer`.
        """
        self.memory.begin()
        told = self._in_order(partial(self._announce, what))
        self.begun += len(steps)
        mode = torch.is_inference_mode_enabled()  # a later call may advance them outside of it
        self._queue.extend((place, step, mode) for place, step in enumerate(steps))
        self.advance()
        return Transfer([partial(self._is_made, self.begun, what, told)], keep, after)

    def _is_made(self, end: int, what: str, told: Handle) -> bool:
        """Make the copies and additions that can be made now, first those of earlier operations.

        Return True once this rank has made all steps of one operation, else False at once. In tests
        the communicator's observer raises `PeerFailed` here if a rank has been lost and steps are
        missing.

        Args:
            end: how many steps this rank has made then, including those of earlier operations.
            what: names the operation in errors.
            told: complete once the communicator's observer knows of the operation.
        """
        self.advance()
        is_told = told.test()
        if self.made < end:
            try:
                self.watch(what)  # may raise if a rank has left
            except PeerFailed:
                self.advance()
                if self.made < end:  # else that rank left after its part
                    raise
            else:
                return False
        return is_told

    def exchange(self, sends: Messages, recvs: Messages, longest: int) -> Handle:
        """Begin messages through the slots and return their handle. Every rank calls this.

        Each rank sends at most one message and reads each message that it receives from the
        sender's slots.

        Args:
            sends, recvs: (rank of the peer, flat tensor); at most one in `sends`, whose peer is not
                used, since any rank can read the slots.
            longest: bytes of the longest message of all ranks, or more; the same on every rank.

        Raises:
            ShapeError: on this rank: several messages to send, or a message longer than `longest`.
        """
        most = max((x.nbytes for _, x in (*sends, *recvs)), default=0)
        if most > longest or len(sends) > 1:
            raise ShapeError(
                f"{len(sends)} messages to send were given, and messages of up to {most} bytes, "
                f"with longest={longest}. Pass the bytes of the longest message of all ranks, and "
                "at most one message to send."
            )
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
                steps[number + later] += [self.memory.copying(*sides)] * bool(len(piece))
        what = f"messages of at most {longest} bytes in a window"
        return self.start(steps, what, keep=(sends, recvs))

    def advance(self) -> None:
        """Launch the steps that are ready, and publish how many steps this rank has made.

        A step is ready when the other ranks have made all steps before it. For the first step of an
        operation, they may lack the last of these. The call does not wait. Other ranks read the
        number from this rank's flag. The call does nothing while another thread makes it.
        """
        if not (self._queue or self._under_way) or not self._advancing.acquire(False):
            return
        try:
            while True:
                while self._under_way and self._under_way[0].test():
                    self._under_way.popleft()
                    self.made += 1
                    self._mine[0] = self.made
                if not self._queue:
                    return
                place, step, inference = self._queue[0]
                reached = self._launched if place else self._launched - 1
                for flag in self._others:
                    if flag[0] < reached:
                        return
                self._queue.popleft()
                self._launched += 1
                try:
                    with torch.inference_mode() if inference else nullcontext():
                        self._under_way.append(self.memory.launch(step))
                except BaseException:
                    self._under_way.append(Broken())
                    raise
        finally:
            self._advancing.release()

    def allocate(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return a zeroed tensor in shared memory. Every rank calls this.

        Other ranks can read the tensor (`peers`, `tensors`). Memory of a device is freed in a later
        call of `allocate` or in `close`, once no rank uses the tensors of this call.

        Args:
            shape: the shape of this rank's tensor; may differ between ranks.
            dtype: the tensor's dtype, the same on every rank.

        Communication:
            Three all-gathers of a few bytes; one more on a device after the first call.

        Raises:
            RankError: there is not enough memory; on every rank.
        """
        self._give_back_unused()
        shapes, number = self._comm.allgather(tuple(shape)), next(self._numbers)
        parts = demand(self._comm, self.memory, math.prod(shape) * dtype.itemsize)
        lent = list(map(self.memory.lend, parts))
        if lent[0] is not parts[0]:
            self._lent[number] = parts, [StorageWeakRef(x.untyped_storage()) for x in lent]
        tensors = [shaped(*each, dtype) for each in zip(lent, shapes, strict=True)]
        own, others = tensors[self._comm.rank], dict(enumerate(tensors))
        del others[self._comm.rank]  # a tensor that refers to itself is never freed
        storage: Any = own.untyped_storage()
        storage.allocation = Allocation(
            *(self._token, number, storage.data_ptr(), own.shape, dtype, others)
        )
        return own

    def _give_back_unused(self) -> None:
        """Free the device memory of allocations whose tensors no rank uses any more.

        Every rank calls this.
        """
        if not self._lent:  # then it is empty on every rank
            return
        unused = {
            number for number, (_, uses) in self._lent.items() if all(use.expired() for use in uses)
        }
        self.memory.begin()
        wait(self.memory.launch(()))  # wait for the copies on those tensors
        for number in sorted(set.intersection(*self._comm.allgather(unused))):
            parts, _ = self._lent.pop(number)
            give_back(self._comm, self.memory, parts[self._comm.rank], parts)

    def peers(self, x: Tensor) -> list[Tensor]:
        """Return each rank's memory of the allocation in which x lies, as flat tensors.

        Args:
            x: a flat tensor of this rank. Every result begins at the offset of x.
        """
        return [tensor.view(-1)[x.storage_offset() :] for tensor in self._all_of(x)]

    def tensors(self, x: Tensor) -> list[Tensor]:
        """Return the tensors of all ranks, in rank order, that one `allocate` call made with x.

        Return an empty list if x was not allocated in this window, or is only a part of a tensor
        that was.
        """
        found = self._allocation(x)
        is_whole = found and (x.shape, x.dtype, x.storage_offset(), x.is_contiguous()) == (
            *(found.shape, found.dtype, 0, True),
        )
        return self._all_of(x) if is_whole else []

    def number(self, x: Tensor) -> int:
        """Return the index of the allocation at whose start the flat tensor x begins, or -1.

        Corresponding allocations have the same index on every rank.
        """
        return -1 if x.storage_offset() else self.place(x) >> 40

    def place(self, x: Tensor | None) -> int:
        """Return a number that identifies where the flat tensor x begins in shared memory, or -1.

        The number combines the index of the allocation and the offset. It is the same on ranks
        whose tensors are at the same offset of the same allocation. The number is -1 if x is None,
        was not allocated in this window, or has a different dtype than its allocation.
        """
        found = self._allocation(x)
        if x is None or found is None or found.dtype != x.dtype:
            return -1
        return found.number << 40 | int(x.storage_offset())

    def _allocation(self, x: Tensor | None) -> Allocation | None:
        """Return the record of the allocation in which x lies, or None."""
        if x is None or x.layout is not torch.strided:
            return None
        storage = x.untyped_storage()
        found: Allocation | None = getattr(storage, "allocation", None)
        is_here = found and (found.window, found.address) == (self._token, storage.data_ptr())
        return found if is_here else None

    def _all_of(self, x: Tensor) -> list[Tensor]:
        """Return the tensors of all ranks of the allocation in which x lies, in rank order."""
        found = self._allocation(x)
        assert found is not None
        own = shaped(
            x.detach().as_strided((found.shape.numel(),), (1,), 0).view(torch.uint8),
            found.shape,
            x.dtype,
        )
        return [found.others.get(rank, own) for rank in range(self._comm.size)]

    def close(self, *, together: bool) -> None:
        """Release slots, regions and flags. The window cannot be used afterwards.

        A tensor of `allocate` stays valid. On a device, memory still in use then stays until the
        process ends.

        Args:
            together: True if all ranks call this, with no operation unfinished. If False, slots on
                a device are not freed either, because other ranks may still read them.
        """
        if together:
            self._give_back_unused()
            give_back(self._comm, self.memory, self.slots[self._comm.rank], self.slots)
        self.blocks.clear()
        self.sums.clear()
        self._queue.clear()
        self.slots, self._others, self._mine = [], [], memoryview(bytes(8)).cast("q")
