"""Rings: every rank sends to the next one and receives from the one before, so any number of ranks does equally well.

Reduce-scatter. Piece p starts at rank p + 1 and collects one addend at each rank, so that its sum
is complete at rank p. P = 3, `p` is a piece of one rank and `p+` a partial sum, shown where it is
sent from:

    step        rank 0 --> rank 1 --> rank 2 --> rank 0
      0             2          0          1
      1             1+         2+         0+             afterwards rank r adds its own piece r

All-gather. Piece p starts at rank p and is passed on:

      0             0          1          2
      1             2          0          1

All-reduce is one after the other. Bytes per rank: (P-1)/P n for each half, which is the least
possible; steps: P-1 for each. The addends of piece p are in the order p+1, p+2, ..., p of their
ranks: rounding depends on the place in the vector, but all ranks get the same bits. A half type is
rounded at every addition.

With segments, two of them go round together in the reduce-scatter, so that one travels while the
other is added, and scratch is two segments:

    step       0   1   2   3   4   5   ...
    segment    0   1   0   1   0   1        each step posts its messages while those of the step
    before are under way

Nothing is added in the all-gather, so each piece goes round in two halves. It begins when the last
segment is summed: a sum that is sent at once would have to come out of the other core's cache,
which is slower than memory where the cores share none.

Source: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations",
JPDC 69 (2009), section 4;
segments: as `segmented ring` in Open MPI's coll/tuned.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

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
from sp_core.segments import moved, split_ranges, split_sizes


@dataclass(frozen=True)
class Cut:
    """Pieces cut into equally many segments, so that one travels while another is added, and scratch stays small.

    Args:
        parts: by piece, the ranges of its segments.
        depth: how many steps may be under way: 2 where there are segments to alternate between,
            else 1.
    """

    parts: tuple[tuple[range, ...], ...]
    depth: int

    @property
    def longest(self) -> int:
        """Elements of the longest segment."""
        return max(len(part) for piece in self.parts for part in piece)

    @property
    def rounds(self) -> tuple[tuple[range, ...], ...]:
        """For each piece, the ranges sent in one all-gather round. There are as many as may be under way."""
        count = len(self.parts[0]) // self.depth
        starts = range(0, len(self.parts[0]), count)
        return tuple(
            tuple(range(piece[g].start, piece[g + count - 1].stop) for g in starts)
            for piece in self.parts
        )

    def sums(self, rank: int) -> Iterator[tuple[int, range, range]]:
        """Yield the messages of a reduce-scatter: how often the piece was sent before, what a rank sends and what it receives.

        As many segments go round together as may be under way, one such group after the other.
        """
        size = len(self.parts)
        for first in range(0, len(self.parts[0]), self.depth):
            for k in range(size - 1):
                for g in range(first, first + self.depth):
                    yield (
                        k,
                        self.parts[(rank - k - 1) % size][g],
                        self.parts[(rank - k - 2) % size][g],
                    )


def cut(counts: Sequence[int], segment: int | None = None) -> Cut:
    """Cut pieces of `counts` elements into segments of at most `segment`; into one where it is None or long enough.

    The number of segments is the same for every piece, and even where it is not one, so that they
    go in pairs.
    """
    longest = max(counts)
    number = 1 if segment is None or longest <= segment else 2 * -(-longest // (2 * segment))
    parts = tuple(
        tuple(moved(part, piece.start) for part in split_ranges(len(piece), number))
        for piece in spans(counts)
    )
    return Cut(parts, 1 if number == 1 else 2)


def all_reduce(rank: int, size: int, count: int, segment: int | None = None) -> Program:
    """Reduce-scatter into OUT, for one group of segments after the other, then all-gather."""
    parts = cut(split_sizes(count, size), segment)
    steps: list[Step] = []
    for k, going, coming in parts.sums(rank):
        landed = tmp(len(steps) % parts.depth * parts.longest, len(coming))
        sent = Message((rank + 1) % size, out(going) if k else inp(going))
        summed = Combine(out(coming), (landed, inp(coming)))
        steps.append(Step((sent,), (Message((rank - 1) % size, landed),), (summed,)))
    return program([*steps, *gathered(rank, parts)], parts.depth * parts.longest, parts.depth)


def gathered(rank: int, parts: Cut) -> Iterator[Step]:
    """All-gather the pieces in OUT, of which each rank has its own."""
    size = len(parts.rounds)
    for k in range(size - 1):
        for going, coming in zip(
            parts.rounds[(rank - k) % size], parts.rounds[(rank - k - 1) % size], strict=True
        ):
            yield Step(
                (Message((rank + 1) % size, out(going)),),
                (Message((rank - 1) % size, out(coming)),),
            )


def reduce_scatter(rank: int, counts: Sequence[int], segment: int | None = None) -> Program:
    """Keep partial sums in scratch, where one segment is received while another is sent."""
    size, parts = len(counts), cut(counts, segment)
    slots = parts.depth * (1 if size == 2 else 2)
    first = parts.parts[rank][0].start
    steps: list[Step] = []
    for k, going, coming in parts.sums(rank):
        landed = tmp(len(steps) % slots * parts.longest, len(coming))
        sent = (
            tmp((len(steps) - parts.depth) % slots * parts.longest, len(going)) if k else inp(going)
        )
        target = landed if k < size - 2 else out(moved(coming, -first))
        summed = Combine(target, (landed, inp(coming)))
        steps.append(
            Step(
                (Message((rank + 1) % size, sent),),
                (Message((rank - 1) % size, landed),),
                (summed,),
            )
        )
    return program(steps, slots * parts.longest, parts.depth)


def all_gather(rank: int, counts: Sequence[int]) -> Program:
    """Receive every message in its place of OUT."""
    size, pieces = len(counts), spans(counts)
    own = inp(range(counts[rank]))
    steps = [Step(then=(copy(own, out(pieces[rank])),))]
    for k in range(size - 1):
        going, coming = (rank - k) % size, (rank - k - 1) % size
        sent = out(pieces[going]) if k else own
        steps.append(
            Step(
                (Message((rank + 1) % size, sent),),
                (Message((rank - 1) % size, out(pieces[coming])),),
            )
        )
    return program(steps)
