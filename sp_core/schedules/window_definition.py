"""What a collective in shared memory is: for every rank, what it puts where in which step. Plain data; `window` makes it.

Every rank has the buffers IN, OUT and TMP as in `definition`, and can read the TMP of all, which is cut into `SLOTS` slots; IN and
OUT too where they live in shared memory. In step t a rank may read what the others have written before their step t.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from sp_core.schedules.definition import Buffer, Region
from sp_core.schedules.figures import WIDE_BLOCK
from sp_core.schedules.replay import HALF

SLOTS = 4


@dataclass(frozen=True)
class Place:
    """A region of a buffer of some rank."""

    rank: int
    region: Region


@dataclass(frozen=True)
class Gather:
    """`into`, of the own rank, becomes ((p0 + p1) + p2) + ... of `parts`; a copy where there is one."""

    into: Region
    parts: tuple[Place, ...]


Stage = tuple[Gather, ...]


@dataclass(frozen=True)
class InWindow:
    """What one rank does.

    Args:
        rank: whose program it is.
        steps: in order; all ranks have as many.
        slot: elements of a slot.
    """

    rank: int
    steps: tuple[Stage, ...]
    slot: int


@dataclass(frozen=True)
class WindowTask:
    """A collective as one rank sees it: sizes in elements.

    Args:
        op: the collective, or "shift", whose `send` and `recv` have one piece each.
        rank, size: of the caller, and number of ranks.
        send, recv: sizes of its pieces.
        longest: size of the largest piece on any rank.
        root: of a broadcast or a reduction; by how many ranks a shift goes.
        itemsize: bytes per element.
        slot: elements of a slot.
        first: number of the step that the program begins with, modulo `SLOTS`.
        resident: IN lives in shared memory on every rank, at the same place.
        in_place: OUT is IN.
    """

    op: str
    rank: int
    size: int
    send: tuple[int, ...]
    recv: tuple[int, ...]
    longest: int
    root: int
    itemsize: int
    slot: int
    first: int = 0
    resident: bool = False
    in_place: bool = False

    @property
    def others(self) -> list[int]:
        """The other ranks, the next one first: not all begin with the same."""
        return [(self.rank + k) % self.size for k in range(1, self.size)]

    @property
    def count(self) -> int:
        """Elements of the whole vector, where all ranks have the same."""
        return sum(self.send) or sum(self.recv)

    def chunks(self, length: int) -> Iterator[tuple[int, range]]:
        """Elements of every piece that go together, with the place of their slot. Of resident tensors one step goes before."""
        for number, start in enumerate(range(0, max(self.longest, 1), length)):
            yield (self.first + number + self.resident) % SLOTS * self.slot, range(start, start + length)


@dataclass(frozen=True)
class WindowCost:
    """What a program costs one rank.

    Attributes:
        messages: regions that it reads from other ranks' memory.
        bytes_read: in these.
        scratch: bytes of the own slots that it uses, and of room for sums in float32.
    """

    messages: int
    bytes_read: int
    scratch: int


def window_cost(program: InWindow, dtype: torch.dtype) -> WindowCost:
    """What a program costs with elements of `dtype`."""
    gathers = [gather for step in program.steps for gather in step]
    read = [place for gather in gathers for place in gather.parts if place.rank != program.rank]
    used: dict[int, int] = {}
    for gather in gathers:
        if gather.into.buffer is Buffer.TMP:
            slot, start = divmod(gather.into.start, program.slot)
            used[slot] = max(used.get(slot, 0), start + len(gather.into))
    return WindowCost(
        messages=len(read),
        bytes_read=sum(len(place.region) for place in read) * dtype.itemsize,
        scratch=sum(used.values()) * dtype.itemsize + 2 * torch.float32.itemsize * widest_sum(program, dtype),
    )


def widest_sum(program: InWindow, dtype: torch.dtype) -> int:
    """Elements of each of the two float32 buffers that sums of more than two parts need in a half type."""
    if dtype not in HALF:
        return 0
    return min(max((len(g.into) for step in program.steps for g in step if len(g.parts) > 2), default=0), WIDE_BLOCK)
