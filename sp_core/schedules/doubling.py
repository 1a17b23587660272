"""Algorithms of ceil(log2 P) steps: recursive doubling and halving, Bruck, binomial trees.

Recursive doubling. In step m every rank exchanges all it has with the rank at distance 2^m. Groups
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

Bytes per rank 2 (P-1)/P n in 2 log2 P steps. For numbers of ranks that are no power of two a few
are folded into their neighbours before and served after (see `Fold`), which costs those the whole
vector twice. The lower ranks' partial sum is always the left operand, so that all ranks get the
same bits. A half type is rounded at every addition, log2 P times (one more where ranks are folded).

Bruck's all-gather sends ever more pieces ever farther, for any number of ranks. Five ranks; pieces
that each rank has, its own first, after the messages to the rank 1, 2 and 4 before:

    rank           0        1        2        3        4
               0        1        2        3        4
    r <- r+1   01       12       23       34       40
    r <- r+2   0123     1234     2340     3401     4012
    r <- r+4   01234    12340    23401    34012    40123

The last step sends only what is missing. The pieces are collected in scratch, in this order, and
put into rank order at the end. Bytes per rank: P-1 pieces.

Binomial trees: a broadcast, and a reduction the other way round. Six ranks, numbered from the root;
who sends to whom in the steps of a broadcast:

    step 0      0 ------------> 4
    step 1      0 ----> 2       4 (----> 6)
    step 2      0 -> 1  2 -> 3  4 -> 5

A reduction runs the arrows backwards, last step first, and adds what arrives to what is there.
Messages: P-1 in all, each of the whole vector. The addends are in the order of their numbers; a
half type is rounded at every addition.

Source: Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in
MPICH", IJHPCA 19 (2005), sections 4.1, 4.2, 4.5 and 4.6; Rabenseifner, "Optimization of collective
reduction operations", ICCS 2004, section 3; Bruck, Ho, Kipnis, Upfal and Weathersby, "Efficient
algorithms for all-to-all communications in multiport message-passing systems", IEEE TPDS 8 (1997),
section 4.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sp_core.schedules.program import (
    Combine,
    Message,
    Operation,
    Program,
    Region,
    Step,
    copy,
    exchange,
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
    """Any number of ranks as a power of two.

    Of the first 2 * extra ranks, each odd one takes the even one before it along. Places 0 to
    core - 1 are the ranks that take part in the exchange, in the order of their ranks. For 7 ranks
    the core is 4 and three ranks are taken along:

        rank    0 -> 1    2 -> 3    4 -> 5    6
        place        0         1         2    3
    """

    size: int

    @property
    def levels(self) -> int:
        """The number of exchanges: log2 of the core."""
        return self.size.bit_length() - 1

    @property
    def extra(self) -> int:
        """How many ranks are taken along."""
        return self.size - (1 << self.levels)

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
        """Return the step that sends the result to the extra rank that `rank` stands in for."""
        return [Step((Message(rank - 1, result),))] if self.carries(rank) else []


def _folded(rank: int, own: Region, result: Region) -> Program:
    """Return the program of an extra rank beyond a power of two: send, then receive the result."""
    return program([Step((Message(rank + 1, own),)), Step((), (Message(rank + 1, result),))])


def all_reduce(t: Operation) -> Program:
    """Exchange the whole vector in every step."""
    return _all_reduce(t, [range(t.elements)] * t.size, halving=False)


def rabenseifner(t: Operation) -> Program:
    """Halve the vector recursively, then double it, over the ranks of the fold."""
    return _all_reduce(t, spans(split_sizes(t.elements, 1 << Fold(t.size).levels)), halving=True)


def _all_reduce(t: Operation, pieces: Sequence[range], *, halving: bool) -> Program:
    """Exchange and add the pieces that two ranks share. With `halving`, gather the pieces after."""
    fold, whole = Fold(t.size), range(t.elements)
    place = fold.place(t.rank)
    if place is None:
        return _folded(t.rank, inp(whole), out(whole))
    have: Callable[[range], Region] = inp
    steps, back, landed = [], [], tmp(0, t.elements)
    if fold.carries(t.rank):
        summed = Combine(out(whole), (landed, inp(whole)))
        steps.append(Step((), (Message(t.rank - 1, landed),), (summed,)))
        have = out
    for m in reversed(range(fold.levels)) if halving else range(fold.levels):
        peer, width = fold.rank(place ^ (1 << m)), 1 << m if halving else 1
        keep, give = (
            joined(pieces[first], pieces[first + width - 1])
            for first in ((place >> m) << m, (place >> m ^ 1) << m)
        )
        landed = tmp(0, len(keep))
        parts = (landed, have(keep)) if peer < t.rank else (have(keep), landed)
        steps.append(exchange(peer, have(give), peer, landed, Combine(out(keep), parts)))
        back.append(exchange(peer, out(keep), peer, out(give)))
        have = out
    scratch = max((len(message.region) for step in steps for message in step.receives), default=0)
    gathers = reversed(back) if halving else ()
    return program([*steps, *gathers, *fold.served(t.rank, out(whole))], scratch)


def all_gather(t: Operation) -> Program:
    """Exchange the pieces of a group of consecutive ranks in every step."""
    fold, pieces = Fold(t.size), spans(t.recv)
    everything, own = out(joined(pieces[0], pieces[-1])), inp(range(t.recv[t.rank]))
    place = fold.place(t.rank)
    if place is None:
        return _folded(t.rank, own, everything)
    steps = [Step(then=(copy(own, out(pieces[t.rank])),))]
    if fold.carries(t.rank):
        steps.append(Step(receives=(Message(t.rank - 1, out(pieces[t.rank - 1])),)))
    for m in range(fold.levels):
        width = 1 << m
        peer = fold.rank(place ^ width)
        going, coming = (
            out(fold.pieces(pieces, (place >> m ^ other) * width, width)) for other in (0, 1)
        )
        steps.append(exchange(peer, going, peer, coming))
    return program([*steps, *fold.served(t.rank, everything)])


def bruck(t: Operation) -> Program:
    """Collect pieces in scratch, where place i holds the piece of rank + i."""
    rank, size, counts = t.rank, t.size, t.recv
    places = spans([*counts[rank:], *counts[:rank]])
    steps = [Step(then=(copy(inp(range(counts[rank])), tmp(0, counts[rank])),))]
    have = 1
    while have < size:
        more = min(have, size - have)
        going, coming = (joined(places[first], places[first + more - 1]) for first in (0, have))
        sent, received = (tmp(places.start, len(places)) for places in (going, coming))
        steps.append(exchange((rank - have) % size, sent, (rank + have) % size, received))
        have += more
    total, before = sum(counts), sum(counts[:rank])
    rotated = (
        copy(tmp(0, total - before), out(range(before, total))),
        copy(tmp(total - before, before), out(range(before))),
    )
    return program([*steps, Step(then=rotated)], total)


def broadcast(t: Operation) -> Program:
    """Receive from the parent, then serve the children, those with the largest families first."""
    whole = range(t.elements)
    parents, children = _family(t)
    have = out(whole) if parents else inp(whole)
    received = [Step((), (Message(parent, have),)) for parent in parents]
    return program([*received, *(Step((Message(child, have),)) for child in reversed(children))])


def reduce(t: Operation) -> Program:
    """Add what the children have, those with the smallest families first, then serve the parent."""
    whole, count = range(t.elements), t.elements
    parents, children = _family(t)
    have, landed, steps = inp(whole), tmp(0, count), []
    more = 1 if not parents or len(children) == 1 else 2  # vectors of scratch
    total = tmp((more - 1) * count, count) if parents else out(whole)
    for child in children:
        summed = Combine(total, (have, landed))
        steps.append(Step((), (Message(child, landed),), (summed,)))
        have = total
    sent = [Step((Message(parent, have),)) for parent in parents]
    return program([*steps, *sent], more * count if children else 0)


def _family(t: Operation) -> tuple[list[int], list[int]]:
    """Return the parent of a rank, if it has one, and its children, the smallest subtree first.

    Ranks are numbered from the root. The number of a child is that of its parent with one more bit
    set, below the parent's lowest one.
    """
    number = (t.rank - t.root) % t.size
    lowest = number & -number if number else 1 << t.size.bit_length()
    found = [number + (1 << bit) for bit in range(lowest.bit_length() - 1)]
    children = [(child + t.root) % t.size for child in found if child < t.size]
    return [((number & (number - 1)) + t.root) % t.size] if number else [], children
