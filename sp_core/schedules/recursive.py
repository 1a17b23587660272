"""Recursive doubling and halving: rank pairs at distances of powers of two exchange what they have. Few steps.

Recursive doubling: in step m every rank exchanges all it has with the rank at distance 2^m. Groups
of ranks whose parts each of four ranks has after each step:

    rank       0       1       2       3
    0 <-> 1, 2 <-> 3
              01      01      23      23
    0 <-> 2, 1 <-> 3
             0123    0123    0123    0123

An all-reduce sends the whole vector in each of its log2 P steps; an all-gather sends what it has,
P-1 pieces together.

Rabenseifner's all-reduce: halve the vector while summing, then double it while gathering. The
vector in four pieces; what each rank has summed, and over how many ranks:

    rank             0          1          2          3
    0 <-> 2, 1 <-> 3 exchange halves and add
                01 over 2  01 over 2  23 over 2  23 over 2
    0 <-> 1, 2 <-> 3 exchange quarters and add
                 0 over 4   1 over 4   2 over 4   3 over 4
    the same way back: 0 <-> 1, 2 <-> 3, then 0 <-> 2, 1 <-> 3
                 0123       0123       0123       0123

Bytes per rank 2 (P-1)/P n in 2 log2 P steps.

For numbers of ranks that are no power of two a few are folded into their neighbours before and
served after (see `Fold`), which costs those the whole vector twice. The lower ranks' partial sum is
always the left operand, so that all ranks get the same bits. A half type is rounded at every
addition, log2 P times (one more where ranks are folded).

Source: Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in
MPICH", IJHPCA 19 (2005), sections 4.1 and 4.5; Rabenseifner, "Optimization of collective reduction
operations", ICCS 2004, section 3.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from sp_core.schedules.program import (
    Combine,
    Message,
    Program,
    Region,
    Step,
    copy,
    inp,
    joined,
    out,
    program,
    spans,
    tmp,
)
from sp_core.segments import split_sizes


@dataclass(frozen=True)
class Fold:
    """Any number of ranks as a power of two: of the first 2 * extra ranks, each odd one takes the even one before it along.

    Places 0 to core - 1 are the ranks that take part in the exchange, in the order of their ranks.
    For 7 ranks the core is 4 and three ranks are taken along:

        rank    0 -> 1    2 -> 3    4 -> 5    6
        place        0         1         2    3
    """

    size: int

    @property
    def core(self) -> int:
        """The largest power of two that is not more than the number of ranks."""
        return 1 << (self.size.bit_length() - 1)

    @property
    def extra(self) -> int:
        """How many ranks are taken along."""
        return self.size - self.core

    def place(self, rank: int) -> int | None:
        """Return the place of a rank; None for one that is taken along."""
        if rank >= 2 * self.extra:
            return rank - self.extra
        return rank // 2 if rank % 2 else None

    def rank(self, place: int) -> int:
        """Return the rank at a place."""
        return 2 * place + 1 if place < self.extra else place + self.extra

    def carries(self, rank: int) -> bool:
        """Return whether this rank takes the one before it along."""
        return rank < 2 * self.extra and rank % 2 == 1

    def pieces(self, pieces: Sequence[range], first: int, count: int) -> range:
        """Join the pieces of all ranks that `count` places from `first` on stand for."""
        begin, end = (
            2 * place if place < self.extra else place + self.extra
            for place in (first, first + count)
        )
        return joined(pieces[begin], pieces[end - 1])

    def served(self, rank: int, result: Region) -> list[Step]:
        """Send the result to the rank that was taken along, if there is one."""
        return [Step((Message(rank - 1, result),))] if self.carries(rank) else []


def _folded(rank: int, own: Region, result: Region) -> Program:
    """Return the program of a rank that is taken along: it sends its input and receives the result."""
    return program([Step((Message(rank + 1, own),)), Step((), (Message(rank + 1, result),))])


def _joined_by(fold: Fold, rank: int, whole: range) -> tuple[list[Step], Callable[[range], Region]]:
    """Add the input of the rank that is taken along, if there is one. Return the steps and the buffer that holds the sum."""
    if not fold.carries(rank):
        return [], inp
    landed = tmp(0, len(whole))
    return [
        Step(
            receives=(Message(rank - 1, landed),), then=(Combine(out(whole), (landed, inp(whole))),)
        )
    ], out


def all_reduce(rank: int, size: int, count: int) -> Program:
    """Exchange the whole vector in every step."""
    fold, whole = Fold(size), range(count)
    place = fold.place(rank)
    if place is None:
        return _folded(rank, inp(whole), out(whole))
    steps, buffer = _joined_by(fold, rank, whole)
    have, landed = buffer(whole), tmp(0, count)
    for m in range(fold.core.bit_length() - 1):
        other = place ^ (1 << m)
        peer = fold.rank(other)
        parts = (landed, have) if other < place else (have, landed)
        steps.append(
            Step((Message(peer, have),), (Message(peer, landed),), (Combine(out(whole), parts),))
        )
        have = out(whole)
    return program([*steps, *fold.served(rank, out(whole))], count)


def all_gather(rank: int, counts: Sequence[int]) -> Program:
    """Exchange the pieces of a group of consecutive ranks in every step."""
    size, pieces = len(counts), spans(counts)
    fold, everything = Fold(size), joined(pieces[0], pieces[-1])
    place, own = fold.place(rank), inp(range(counts[rank]))
    if place is None:
        return _folded(rank, own, out(everything))
    steps = [Step(then=(copy(own, out(pieces[rank])),))]
    if fold.carries(rank):
        steps.append(Step(receives=(Message(rank - 1, out(pieces[rank - 1])),)))
    for m in range(fold.core.bit_length() - 1):
        width = 1 << m
        peer = fold.rank(place ^ width)
        going, coming = (
            fold.pieces(pieces, (place >> m ^ other) * width, width) for other in (0, 1)
        )
        steps.append(Step((Message(peer, out(going)),), (Message(peer, out(coming)),)))
    return program([*steps, *fold.served(rank, out(everything))])


def rabenseifner(rank: int, size: int, count: int) -> Program:
    """Halve the vector recursively, then double it, over the ranks of the fold."""
    fold, whole = Fold(size), range(count)
    place = fold.place(rank)
    if place is None:
        return _folded(rank, inp(whole), out(whole))
    steps, have = _joined_by(fold, rank, whole)
    back = []
    for peer, keep, give in _halves(fold, place, spans(split_sizes(count, fold.core))):
        landed = tmp(0, len(keep))
        parts = (landed, have(keep)) if peer < rank else (have(keep), landed)
        steps.append(
            Step(
                (Message(peer, have(give)),), (Message(peer, landed),), (Combine(out(keep), parts),)
            )
        )
        back.append(Step((Message(peer, out(keep)),), (Message(peer, out(give)),)))
        have = out
    scratch = max((len(message.region) for step in steps for message in step.receives), default=0)
    return program([*steps, *reversed(back), *fold.served(rank, out(whole))], scratch)


def _halves(fold: Fold, place: int, pieces: Sequence[range]) -> Iterator[tuple[int, range, range]]:
    """Yield with whom each step exchanges, what this rank keeps and what it gives away."""
    first, stop = 0, fold.core
    while stop - first > 1:
        middle = (first + stop) // 2
        low, high = (
            joined(pieces[first], pieces[middle - 1]),
            joined(pieces[middle], pieces[stop - 1]),
        )
        peer = fold.rank(place ^ (middle - first))
        if place < middle:
            yield peer, low, high
            stop = middle
        else:
            yield peer, high, low
            first = middle
