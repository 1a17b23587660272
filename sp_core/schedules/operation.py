"""One collective as one rank sees it, as plain integers: how many elements of which piece go where.

A buffer of a collective is a flat vector cut into pieces, one per rank (or a single one). A
transport that moves a vector in chunks takes elements [k*c, (k+1)*c) of EVERY piece in step k, so
that each step is again an operation of the same kind, and ranks whose pieces are short take part
with nothing in their hands.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from enum import StrEnum
from typing import Any, NamedTuple


class Op(StrEnum):
    """Name the collectives."""

    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_REDUCE = "all_reduce"
    ALL_TO_ALL = "all_to_all"
    BROADCAST = "broadcast"
    REDUCE = "reduce"
    SHIFT = "shift"


class Operation(NamedTuple):
    """One collective as seen by one rank, with sizes in elements.

    Args:
        op: which collective.
        rank, size: the rank, and the number of ranks.
        send: sizes of the pieces that this rank sends (empty where it sends nothing, as off the
            root of a broadcast).
        recv: sizes of the pieces that it receives.
        longest: size of the largest piece on ANY rank, so that all ranks make the same number of
            chunks.
        root: rank of the root, for broadcast and reduce; by how many ranks a shift goes.
        reduction: "sum", "max" or "min".
        itemsize: bytes per element.
        segment: elements per segment, for algorithms that cut pieces.
        nodes: by rank, the node that it is on; all on one where it is empty.
        slot: elements of a slot of shared memory.
        first: number of the step that a program in shared memory begins with, modulo the number of
            slots.
        resident: the input lives in shared memory on every rank, at the same place.
        in_place: the result takes the place of the input.
    """

    op: Op
    rank: int
    size: int
    send: tuple[int, ...]
    recv: tuple[int, ...]
    longest: int
    root: int = 0
    reduction: str = "sum"
    itemsize: int = 1
    segment: int | None = None
    nodes: tuple[int, ...] = ()
    slot: int = 0
    first: int = 0
    resident: bool = False
    in_place: bool = False

    @property
    def elements(self) -> int:
        """Elements of the whole vector, the same on every rank; an all-to-all counts as if all pieces were the longest."""
        match self.op:
            case Op.ALL_GATHER:
                return sum(self.recv)
            case Op.REDUCE_SCATTER:
                return sum(self.send)
        return self.longest * (self.size if self.op is Op.ALL_TO_ALL else 1)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole vector, the same on every rank."""
        return self.elements * self.itemsize

    @property
    def reduces(self) -> bool:
        """Whether elements are combined, not only moved."""
        return self.op in (Op.REDUCE_SCATTER, Op.ALL_REDUCE, Op.REDUCE)

    @property
    def bytes_sent(self) -> int:
        """Bytes of this rank's input that other ranks need."""
        needed = sum(self.send)
        if self.op in (Op.ALL_GATHER, Op.BROADCAST):
            needed *= self.size - 1
        elif self.op in (Op.REDUCE_SCATTER, Op.ALL_TO_ALL):
            needed -= self.send[self.rank]
        elif self.size == 1 or (self.op is Op.REDUCE and self.rank == self.root):
            needed = 0
        return needed * self.itemsize

    def chunks(self, length: int) -> Iterator[tuple[int, Operation]]:
        """Cut into operations of at most `length` elements of each piece, with the offset of each in its pieces."""
        for offset in range(0, max(self.longest, 1), length):
            send, recv = (
                tuple(min(max(n - offset, 0), length) for n in sizes)
                for sizes in (self.send, self.recv)
            )
            yield (
                offset,
                self._replace(send=send, recv=recv, longest=min(self.longest - offset, length)),
            )


def operation(
    op: str, rank: int, size: int, counts: tuple[int, ...], root: int = 0, **more: Any
) -> Operation:
    """Return one rank's view of a collective other than an all-to-all.

    Args:
        op, rank, size, root: as in `Operation`.
        counts: of an all-gather and a shift the elements that each rank contributes, of a
            reduce-scatter those that each gets; of the others pieces of the vector that is summed
            or sent.
        more: other fields of the operation.
    """
    send, recv, longest = _PIECES[op](counts, rank, root)
    return Operation(Op(op), rank, size, send, recv, longest, root % size, **more)


_PIECES: dict[
    str, Callable[[tuple[int, ...], int, int], tuple[tuple[int, ...], tuple[int, ...], int]]
] = {
    "all_gather": lambda counts, rank, _: ((counts[rank],), counts, max(counts)),
    "reduce_scatter": lambda counts, rank, _: (counts, (counts[rank],), max(counts)),
    "shift": lambda counts, rank, offset: (
        (counts[rank],),
        (counts[(rank - offset) % len(counts)],),
        max(counts),
    ),
    "all_reduce": lambda counts, _, __: ((sum(counts),), (sum(counts),), sum(counts)),
    "broadcast": lambda counts, rank, root: (
        (sum(counts),) if rank == root else (),
        () if rank == root else (sum(counts),),
        sum(counts),
    ),
    "reduce": lambda counts, rank, root: (
        (sum(counts),),
        (sum(counts),) if rank == root else (),
        sum(counts),
    ),
}
"""By collective, what a rank sends and receives and the longest piece, from the arguments of `operation`."""
