"""Rings: every rank sends to the next one and receives from the one before, so any number of ranks does equally well.

Reduce-scatter. Piece p starts at rank p + 1 and collects one addend at each rank, so that its sum is complete at rank p. P = 3,
`p` is a piece of one rank and `p+` a partial sum, shown where it is sent from:

    step        rank 0 --> rank 1 --> rank 2 --> rank 0
      0             2          0          1
      1             1+         2+         0+             afterwards rank r adds its own piece r

All-gather. Piece p starts at rank p and is passed on:

      0             0          1          2
      1             2          0          1

All-reduce is one after the other. Bytes per rank: (P-1)/P n for each half, which is the least possible; steps: P-1 for each.
The addends of piece p are in the order p+1, p+2, ..., p of their ranks: rounding depends on the place in the vector, but all ranks
get the same bits. A half type is rounded at every addition.

With segments, two of them go round together in the reduce-scatter, so that one travels while the other is added, and scratch is two
segments:

    step       0   1   2   3   4   5   ...
    segment    0   1   0   1   0   1        each step posts its messages while those of the step before are under way

Nothing is added in the all-gather, so each piece goes round in two halves. It begins when the last segment is summed: a sum that is
sent at once would have to come out of the other core's cache, which is slower than memory where the cores share none.

Source: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", JPDC 69 (2009), section 4;
segments: as `segmented ring` in Open MPI's coll/tuned.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from sp_core.schedules.cutting import Cut, cut
from sp_core.schedules.definition import Combine, Message, Program, Step, copy, inp, out, program, spans, tmp
from sp_core.segments import split_sizes


def all_reduce(rank: int, size: int, count: int, segment: int | None = None) -> Program:
    """Reduce-scatter into OUT, for one group of segments after the other, then all-gather."""
    if size == 1:
        return program([Step(then=(copy(inp(range(count)), out(range(count))),))])
    parts = cut(split_sizes(count, size), segment)
    right, left = (rank + 1) % size, (rank - 1) % size
    steps: list[Step] = []
    for group in parts.groups:
        for k in range(size - 1):
            for g in group:
                going, coming = parts.parts[(rank - k - 1) % size][g], parts.parts[(rank - k - 2) % size][g]
                landed = tmp(len(steps) % parts.depth * parts.longest, len(coming))
                sent = out(going) if k else inp(going)
                summed = Combine(out(coming), (landed, inp(coming)))
                steps.append(Step((Message(right, sent),), (Message(left, landed),), (summed,)))
    return program([*steps, *gathered(rank, parts)], parts.depth * parts.longest, parts.depth)


def gathered(rank: int, parts: Cut) -> Iterator[Step]:
    """The all-gather of pieces in OUT, of which each rank has its own."""
    size = len(parts.rounds)
    for k in range(size - 1):
        for going, coming in zip(parts.rounds[(rank - k) % size], parts.rounds[(rank - k - 1) % size], strict=True):
            yield Step((Message((rank + 1) % size, out(going)),), (Message((rank - 1) % size, out(coming)),))


def reduce_scatter(rank: int, counts: Sequence[int], segment: int | None = None) -> Program:
    """Partial sums stay in scratch: one segment is received while another is sent."""
    size = len(counts)
    if size == 1:
        return program([Step(then=(copy(inp(range(counts[0])), out(range(counts[0]))),))])
    parts = cut(counts, segment)
    right, left = (rank + 1) % size, (rank - 1) % size
    slots = parts.depth * (1 if size == 2 else 2)
    first = parts.parts[rank][0].start
    steps: list[Step] = []
    for group in parts.groups:
        for k in range(size - 1):
            for g in group:
                going, coming = parts.parts[(rank - k - 1) % size][g], parts.parts[(rank - k - 2) % size][g]
                landed = tmp(len(steps) % slots * parts.longest, len(coming))
                sent = tmp((len(steps) - len(group)) % slots * parts.longest, len(going)) if k else inp(going)
                target = landed if k < size - 2 else out(range(coming.start - first, coming.stop - first))
                summed = Combine(target, (landed, inp(coming)))
                steps.append(Step((Message(right, sent),), (Message(left, landed),), (summed,)))
    return program(steps, slots * parts.longest, parts.depth)


def all_gather(rank: int, counts: Sequence[int]) -> Program:
    """Every message is received where it belongs."""
    size, pieces = len(counts), spans(counts)
    own = inp(range(counts[rank]))
    steps = [Step(then=(copy(own, out(pieces[rank])),))]
    for k in range(size - 1):
        going, coming = (rank - k) % size, (rank - k - 1) % size
        sent = out(pieces[going]) if k else own
        steps.append(Step((Message((rank + 1) % size, sent),), (Message((rank - 1) % size, out(pieces[coming])),)))
    return program(steps)
