"""Bruck's all-gather: ceil(log2 P) steps for any number of ranks, by sending ever more pieces ever farther.

Five ranks; pieces that each rank has, its own first, after the messages to the rank 1, 2 and 4
before:

    rank           0        1        2        3        4
               0        1        2        3        4
    r <- r+1   01       12       23       34       40
    r <- r+2   0123     1234     2340     3401     4012
    r <- r+4   01234    12340    23401    34012    40123       the last step sends only what is
    missing

The pieces are collected in scratch, in this order, and put into rank order at the end. Bytes per
rank: P-1 pieces.

Source: Bruck, Ho, Kipnis, Upfal and Weathersby, "Efficient algorithms for all-to-all communications
in multiport message-passing systems", IEEE TPDS 8 (1997), section 4; Thakur et al., IJHPCA 19
(2005), section 4.1.
"""

from __future__ import annotations

from collections.abc import Sequence

from sp_core.schedules.program import (
    Message,
    Program,
    Step,
    copy,
    inp,
    joined,
    out,
    program,
    spans,
    tmp,
)


def all_gather(rank: int, counts: Sequence[int]) -> Program:
    """Collect pieces in scratch, where place i holds the piece of rank + i."""
    size, pieces = len(counts), spans(counts)
    places = spans([*counts[rank:], *counts[:rank]])
    steps = [Step(then=(copy(inp(range(counts[rank])), tmp(0, counts[rank])),))]
    have = 1
    while have < size:
        more = min(have, size - have)
        going, coming = (
            joined(places[0], places[more - 1]),
            joined(places[have], places[have + more - 1]),
        )
        steps.append(
            Step(
                (Message((rank - have) % size, tmp(going.start, len(going))),),
                (Message((rank + have) % size, tmp(coming.start, len(coming))),),
            )
        )
        have += more
    total, before = sum(counts), pieces[rank].start
    rotated = [
        copy(tmp(0, total - before), out(range(before, total))),
        copy(tmp(total - before, before), out(range(before))),
    ]
    return program([*steps, Step(then=tuple(rotated))], total)
