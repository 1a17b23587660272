"""Recursive doubling: in step m every rank exchanges all it has with the rank at distance 2^m. Fewest steps, many bytes.

Four ranks; groups of ranks whose parts a rank has after each step:

    rank       0       1       2       3
    0 <-> 1, 2 <-> 3
              01      01      23      23
    0 <-> 2, 1 <-> 3
             0123    0123    0123    0123

For other numbers of ranks a few are folded into their neighbours before and served after (see `folding`). An all-reduce sends the
whole vector in each of its log2 P steps; an all-gather sends what it has, P-1 pieces together. The lower ranks' partial sum is
always the left operand, so that all ranks get the same bits. A half type is rounded at every addition, log2 P times (one more
where ranks are folded).

Source: Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH", IJHPCA 19 (2005),
sections 4.1 and 4.5.
"""

from __future__ import annotations

from collections.abc import Sequence

from sp_core.schedules.definition import Combine, Message, Program, Region, Step, copy, inp, joined, out, program, spans, tmp
from sp_core.schedules.folding import Fold


def all_reduce(rank: int, size: int, count: int) -> Program:
    """Every step exchanges the whole vector."""
    fold, whole = Fold(size), range(count)
    place = fold.place(rank)
    if place is None:
        return folded(rank, count)
    steps, have = [], inp(whole)
    landed = tmp(0, count)
    if fold.carries(rank):
        steps.append(Step(receives=(Message(rank - 1, landed),), then=(Combine(out(whole), (landed, have)),)))
        have = out(whole)
    for m in range(fold.core.bit_length() - 1):
        other = place ^ (1 << m)
        peer = fold.rank(other)
        parts = (landed, have) if other < place else (have, landed)
        steps.append(Step((Message(peer, have),), (Message(peer, landed),), (Combine(out(whole), parts),)))
        have = out(whole)
    if size == 1:
        steps.append(Step(then=(copy(have, out(whole)),)))
    return program([*steps, *served(fold, rank, out(whole))], count if size > 1 else 0)


def all_gather(rank: int, counts: Sequence[int]) -> Program:
    """Every step exchanges the pieces of a group of consecutive ranks."""
    size, pieces = len(counts), spans(counts)
    fold, everything = Fold(size), joined(pieces[0], pieces[-1])
    place = fold.place(rank)
    own = inp(range(counts[rank]))
    if place is None:
        return program([Step((Message(rank + 1, own),)), Step((), (Message(rank + 1, out(everything)),))])
    steps = [Step(then=(copy(own, out(pieces[rank])),))]
    if fold.carries(rank):
        steps.append(Step(receives=(Message(rank - 1, out(pieces[rank - 1])),)))
    for m in range(fold.core.bit_length() - 1):
        width = 1 << m
        mine, theirs = (place >> m) * width, (place >> m ^ 1) * width
        peer = fold.rank(place ^ width)
        going, coming = (_pieces(pieces, fold.ranks(first, first + width)) for first in (mine, theirs))
        steps.append(Step((Message(peer, out(going)),), (Message(peer, out(coming)),)))
    return program([*steps, *served(fold, rank, out(everything))])


def folded(rank: int, count: int) -> Program:
    """A rank that is taken along: it gives what it has and gets the result."""
    whole = range(count)
    return program([Step((Message(rank + 1, inp(whole)),)), Step((), (Message(rank + 1, out(whole)),))])


def served(fold: Fold, rank: int, result: Region) -> list[Step]:
    """The result for the rank that was taken along."""
    return [Step((Message(rank - 1, result),))] if fold.carries(rank) else []


def _pieces(pieces: Sequence[range], ranks: range) -> range:
    return joined(pieces[ranks.start], pieces[ranks.stop - 1])
