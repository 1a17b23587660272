"""Pairwise exchange: in step k every rank sends to the rank k further on and receives from the rank k before.

Four ranks; `a>b` is the piece of rank a that is meant for rank b:

    step        rank 0     rank 1     rank 2     rank 3
      1          0>1        1>2        2>3        3>0
      2          0>2        1>3        2>0        3>1
      3          0>3        1>0        2>1        3>2

Reduce-scatter. Rank b keeps all addends of its piece in scratch, and adds them in the order of
their ranks once it has them all: the result is bitwise that of a loop over the ranks, for any size
and number of ranks; a half type is summed in float32 and rounded once. With segments the scratch is
2 (P-1) of them. All-reduce: a ring passes the sums round (see `ring`). Bytes per rank: those of the
other ranks' pieces, the least possible.

Source: Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in
MPICH", IJHPCA 19 (2005), sections 4.3 and 4.4.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from sp_core.schedules.program import (
    Combine,
    Message,
    Program,
    Step,
    copy,
    inp,
    out,
    program,
    spans,
    tmp,
)
from sp_core.schedules.ring import Cut, cut, gathered
from sp_core.segments import moved, split_sizes

WINDOW = 4
"""Messages under way at once where none depends on another."""


def reduce_scatter(rank: int, counts: Sequence[int], segment: int | None = None) -> Program:
    """Exchange and add all addends of a segment, then those of the next one."""
    parts = cut(counts, segment)
    steps = _sums(rank, parts, -parts.parts[rank][0].start)
    return program(steps, parts.depth * (len(counts) - 1) * parts.longest, parts.depth)


def all_reduce(rank: int, size: int, count: int, segment: int | None = None) -> Program:
    """Add all segments, then pass the sums round a ring."""
    parts = cut(split_sizes(count, size), segment)
    steps = [*_sums(rank, parts, 0), *gathered(rank, parts)]
    return program(steps, parts.depth * (size - 1) * parts.longest, parts.depth)


def all_to_all(rank: int, send: Sequence[int], recv: Sequence[int]) -> Program:
    """Send every piece to its rank in one message."""
    size, going, coming = len(send), spans(send), spans(recv)
    steps = [Step(then=(copy(inp(going[rank]), out(coming[rank])),))]
    for k in range(1, size):
        dest, source = (rank + k) % size, (rank - k) % size
        steps.append(
            Step((Message(dest, inp(going[dest])),), (Message(source, out(coming[source])),))
        )
    return program(steps, depth=WINDOW)


def _sums(rank: int, parts: Cut, shift: int) -> list[Step]:
    """Add each segment of this rank's piece, into OUT at its place in IN moved by `shift`."""
    size = len(parts.parts)
    steps: list[Step] = []
    for g, mine in enumerate(parts.parts[rank]):
        first = g % parts.depth * (size - 1) * parts.longest
        landed = {
            (rank - k) % size: tmp(first + (k - 1) * parts.longest, len(mine))
            for k in range(1, size)
        }
        for k in range(1, size):
            dest, source = (rank + k) % size, (rank - k) % size
            steps.append(
                Step(
                    (Message(dest, inp(parts.parts[dest][g])),), (Message(source, landed[source]),)
                )
            )
        total = Combine(
            out(moved(mine, shift)), tuple(landed.get(r, inp(mine)) for r in range(size))
        )
        steps.append(replace(steps.pop(), then=(total,)))
    return steps
