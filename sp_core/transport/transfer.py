"""What one collective moves, as plain integers: how many elements of which piece go where.

A buffer of a collective is a flat vector cut into pieces, one per rank (or a single one). A transport that moves a vector in
chunks takes elements [k*c, (k+1)*c) of EVERY piece in step k, so that each step is again a transfer of the same kind, and ranks
whose pieces are short take part with nothing in their hands.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum

from torch import Tensor


class Op(StrEnum):
    """The collectives of a transport."""

    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_REDUCE = "all_reduce"
    ALL_TO_ALL = "all_to_all"
    BROADCAST = "broadcast"
    REDUCE = "reduce"
    SHIFT = "shift"

    @property
    def reduces(self) -> bool:
        """Whether elements are combined, not only moved."""
        return self in (Op.REDUCE_SCATTER, Op.ALL_REDUCE, Op.REDUCE)


@dataclass(frozen=True)
class Transfer:
    """One collective as seen by one rank: sizes of its pieces, in elements.

    Args:
        op: which collective.
        send: sizes of the pieces that this rank sends (empty where it sends nothing, as off the root of a broadcast).
        recv: sizes of the pieces that it receives.
        steps: size of the largest piece on ANY rank, so that all ranks make the same number of chunks.
        reduction: "sum", "max" or "min".
        root: rank of the root, for broadcast and reduce; by how many ranks a shift goes.
    """

    op: Op
    send: tuple[int, ...]
    recv: tuple[int, ...]
    steps: int
    reduction: str = "sum"
    root: int = 0

    def chunks(self, length: int) -> Iterator[tuple[int, Transfer]]:
        """Cut into transfers of at most `length` elements of each piece, with the offset of each in its pieces."""
        for offset in range(0, max(self.steps, 1), length):
            yield offset, self._chunk(offset, length)

    def _chunk(self, offset: int, length: int) -> Transfer:
        def cut(sizes: tuple[int, ...]) -> tuple[int, ...]:
            return tuple(min(max(size - offset, 0), length) for size in sizes)

        return replace(self, send=cut(self.send), recv=cut(self.recv), steps=min(self.steps - offset, length))

    def needed_elsewhere(self, rank: int, size: int) -> int:
        """Elements of the buffer of `rank` that other ranks need."""
        if self.op is Op.ALL_GATHER or self.op is Op.BROADCAST:
            return sum(self.send) * (size - 1)
        if self.op in (Op.REDUCE_SCATTER, Op.ALL_TO_ALL):
            return sum(self.send) - self.send[rank]
        contributes = size > 1 and not (self.op is Op.REDUCE and rank == self.root)
        return sum(self.send) if contributes else 0


def pieces(flat: Tensor | None, sizes: tuple[int, ...]) -> tuple[Tensor, ...]:
    """The pieces of a flat vector, as views."""
    return () if flat is None else flat.split(list(sizes))


def all_gather(counts: tuple[int, ...], rank: int) -> Transfer:
    """Every rank receives the piece of every rank."""
    return Transfer(Op.ALL_GATHER, (counts[rank],), counts, max(counts))


def reduce_scatter(counts: tuple[int, ...], rank: int) -> Transfer:
    """Rank r receives the sum of everybody's piece r."""
    return Transfer(Op.REDUCE_SCATTER, counts, (counts[rank],), max(counts))


def all_reduce(count: int, reduction: str = "sum") -> Transfer:
    """Every rank receives the sum (or max, min) of everybody's vector."""
    return Transfer(Op.ALL_REDUCE, (count,), (count,), count, reduction)


def all_to_all(send: tuple[int, ...], recv: tuple[int, ...], steps: int) -> Transfer:
    """Rank r receives everybody's piece r."""
    return Transfer(Op.ALL_TO_ALL, send, recv, steps)


def broadcast(count: int, rank: int, root: int) -> Transfer:
    """Every rank receives the root's vector."""
    return Transfer(Op.BROADCAST, (count,) if rank == root else (), () if rank == root else (count,), count, root=root)


def reduce(count: int, rank: int, root: int, reduction: str = "sum") -> Transfer:
    """The root receives the sum of everybody's vector."""
    return Transfer(Op.REDUCE, (count,), (count,) if rank == root else (), count, reduction, root)


def shift(sizes: tuple[int, ...], rank: int, offset: int) -> Transfer:
    """Rank r's vector, of `sizes[r]` elements, goes `offset` ranks on."""
    return Transfer(Op.SHIFT, (sizes[rank],), (sizes[(rank - offset) % len(sizes)],), max(sizes), root=offset % len(sizes))
