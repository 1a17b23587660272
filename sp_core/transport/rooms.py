"""Rooms: memory that all ranks of a node see, kept from one use to the next.

Rooms take turns. In a use of a room every rank writes its part in a step of the window; when all have made it, each reads what it
needs where it is. With two rooms nobody waits until the others have read:

    use     room
    1       0       write, fence, read
    2       1                           write, fence, read
    3       0                                               write: all have begun use 2, so nobody reads what use 1 has left here
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sp_core.transport.shared import demand

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

ALIGNMENT = 128
"""Tensors begin so many bytes apart, because cores fetch cache lines in pairs."""

Spec = tuple[Sequence[int], torch.dtype]
"""Shape and dtype of a tensor."""


class Rooms:
    """Some rooms that take turns.

    Args:
        comm: an mpi4py communicator whose ranks have memory in common.
        count: how many rooms.
    """

    def __init__(self, comm: Intracomm, count: int) -> None:
        self._comm = comm
        self._rooms = [torch.empty(0, dtype=torch.uint8) for _ in range(count)]
        self._uses = 0

    def enter(self, specs: Sequence[Spec]) -> list[Tensor]:
        """Tensors in the next room, the same memory on every rank, with anything in them; every rank calls this.

        Args:
            specs: the same on every rank.

        Raises:
            RankError: there is not so much memory; on every rank.
        """
        sizes = [math.prod(shape) * dtype.itemsize for shape, dtype in specs]
        starts = list(accumulate((-(-size // ALIGNMENT) * ALIGNMENT for size in sizes), initial=0))
        number, self._uses = self._uses % len(self._rooms), self._uses + 1
        if self._rooms[number].numel() < starts[-1]:
            self._rooms[number] = self._made(starts[-1])  # the old one lives as long as anybody reads there
        room, found = self._rooms[number], zip(specs, starts, sizes, strict=False)
        return [room[start : start + size].view(dtype).view(tuple(shape)) for (shape, dtype), start, size in found]

    def clear(self) -> None:
        """Let go of all memory; it lives as long as a tensor in it."""
        self._rooms = [torch.empty(0, dtype=torch.uint8)] * len(self._rooms)

    def _made(self, nbytes: int) -> Tensor:
        """Memory of all ranks in one piece, of which each has made a part."""
        parts = demand(self._comm, -(-nbytes // self._comm.size))
        return parts[0].as_strided((nbytes,), (1,))
