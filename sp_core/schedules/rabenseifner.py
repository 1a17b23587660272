"""Rabenseifner's all-reduce: halve the vector while summing, then double it while gathering. Few steps and few bytes.

Four ranks, the vector in four pieces; what each rank has summed, and over how many ranks:

    rank             0          1          2          3
    0 <-> 2, 1 <-> 3 exchange halves and add
                01 over 2  01 over 2  23 over 2  23 over 2
    0 <-> 1, 2 <-> 3 exchange quarters and add
                 0 over 4   1 over 4   2 over 4   3 over 4
    the same way back: 0 <-> 1, 2 <-> 3, then 0 <-> 2, 1 <-> 3
                 0123       0123       0123       0123

Bytes per rank 2 (P-1)/P n in 2 log2 P steps. For other numbers of ranks a few are folded into their neighbours before and served
after (see `folding`), which costs those the whole vector twice. The lower ranks' partial sum is always the left operand, so that
all ranks get the same bits. A half type is rounded at every addition, log2 P times (one more where ranks are folded).

Source: Rabenseifner, "Optimization of collective reduction operations", ICCS 2004, section 3; Thakur et al., IJHPCA 19 (2005),
section 4.5.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from sp_core.schedules.definition import Combine, Message, Program, Step, copy, inp, joined, out, program, spans, tmp
from sp_core.schedules.folding import Fold
from sp_core.schedules.recursive_doubling import folded, served
from sp_core.segments import split_sizes


def all_reduce(rank: int, size: int, count: int) -> Program:
    """Recursive halving, then recursive doubling, over the ranks of the fold."""
    fold, whole = Fold(size), range(count)
    place = fold.place(rank)
    if place is None:
        return folded(rank, count)
    steps, have = [], inp
    if fold.carries(rank):
        landed = tmp(0, count)
        steps.append(Step(receives=(Message(rank - 1, landed),), then=(Combine(out(whole), (landed, inp(whole))),)))
        have = out
    back = []
    for peer, keep, give in _halves(fold, place, spans(split_sizes(count, fold.core))):
        landed = tmp(0, len(keep))
        parts = (landed, have(keep)) if peer < rank else (have(keep), landed)
        steps.append(Step((Message(peer, have(give)),), (Message(peer, landed),), (Combine(out(keep), parts),)))
        back.append(Step((Message(peer, out(keep)),), (Message(peer, out(give)),)))
        have = out
    if size == 1:
        steps.append(Step(then=(copy(inp(whole), out(whole)),)))
    scratch = max((len(message.region) for step in steps for message in step.receives), default=0)
    return program([*steps, *reversed(back), *served(fold, rank, out(whole))], scratch)


def _halves(fold: Fold, place: int, pieces: Sequence[range]) -> Iterator[tuple[int, range, range]]:
    """With whom each step exchanges, what this rank keeps and what it gives away."""
    first, stop = 0, fold.core
    while stop - first > 1:
        middle = (first + stop) // 2
        low, high = joined(pieces[first], pieces[middle - 1]), joined(pieces[middle], pieces[stop - 1])
        peer = fold.rank(place ^ (middle - first))
        if place < middle:
            yield peer, low, high
            stop = middle
        else:
            yield peer, high, low
            first = middle
