"""Algorithms of P - 1 steps, for any number of ranks: rings, and pairwise exchange.

In a ring every rank sends to the next one and receives from the one before.

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
    segment    0   1   0   1   0   1

Each step posts its messages while those of the step before are under way.

Nothing is added in the all-gather, so each piece goes round in two halves. It begins when the last
segment is summed: a sum that is sent at once would have to come out of the other core's cache,
which is slower than memory where the cores share none.

Pairwise exchange: in step k every rank sends to the rank k further on and receives from the rank k
before. Four ranks; `a>b` is the piece of rank a that is meant for rank b:

    step        rank 0     rank 1     rank 2     rank 3
      1          0>1        1>2        2>3        3>0
      2          0>2        1>3        2>0        3>1
      3          0>3        1>0        2>1        3>2

Reduce-scatter. Rank b keeps all addends of its piece in scratch, and adds them in the order of
their ranks once it has them all: the result is bitwise that of a loop over the ranks, for any size
and number of ranks; a half type is summed in float32 and rounded once. With segments the scratch is
2 (P-1) of them. All-reduce: a ring passes the sums round. Bytes per rank: those of the other ranks'
pieces, the least possible.

Source: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations",
JPDC 69 (2009), section 4; segments: as `segmented ring` in Open MPI's coll/tuned; pairwise: Thakur,
Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH", IJHPCA 19
(2005), sections 4.3 and 4.4.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from sp_core.schedules.program import (
    Combine,
    Operation,
    Program,
    Region,
    Step,
    copy,
    exchange,
    inp,
    out,
    program,
    spans,
    tmp,
)
from sp_core.segments import moved, split_ranges, split_sizes

WINDOW = 4
"""Messages under way at once where none depends on another."""


@dataclass(frozen=True)
class Cut:
    """Pieces cut into equally many segments, so that one travels while another is added.

    Args:
        parts: by piece, the ranges of its segments.
        depth: how many steps may be under way: 2 where there are segments to alternate between,
            else 1.
    """

    parts: tuple[tuple[range, ...], ...]
    depth: int

    @cached_property
    def longest(self) -> int:
        """Elements of the longest segment."""
        return max(len(part) for piece in self.parts for part in piece)

    def sums(self, rank: int) -> Iterator[tuple[int, range, range]]:
        """Yield the messages of a reduce-scatter.

        For each, how often the piece was sent before, and the ranges that a rank sends and
        receives. As many segments go round together as may be under way, one such group after the
        other.
        """
        size = len(self.parts)
        for first in range(0, len(self.parts[0]), self.depth):
            for k in range(size - 1):
                for g in range(first, first + self.depth):
                    going, coming = (self.parts[(rank - k - back) % size][g] for back in (1, 2))
                    yield k, going, coming


def cut(counts: Sequence[int], segment: int | None = None) -> Cut:
    """Cut pieces of `counts` elements into segments of at most `segment` elements; None: one.

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


def _onward(t: Operation, sent: Region, received: Region, *then: Combine) -> Step:
    """Send to the next rank, and receive from the one before."""
    return exchange((t.rank + 1) % t.size, sent, (t.rank - 1) % t.size, received, *then)


def all_reduce(t: Operation) -> Program:
    """Reduce-scatter into OUT, for one group of segments after the other, then all-gather."""
    parts = cut(split_sizes(t.elements, t.size), t.segment)
    steps: list[Step] = []
    for k, going, coming in parts.sums(t.rank):
        landed = tmp(len(steps) % parts.depth * parts.longest, len(coming))
        summed = Combine(out(coming), (landed, inp(coming)))
        steps.append(_onward(t, out(going) if k else inp(going), landed, summed))
    return program([*steps, *_gathered(t, parts)], parts.depth * parts.longest, parts.depth)


def _gathered(t: Operation, parts: Cut) -> Iterator[Step]:
    """All-gather the pieces in OUT, of which each rank has its own.

    A piece is sent in as many messages as may be under way.
    """
    count = len(parts.parts[0]) // parts.depth
    for k in range(t.size - 1):
        going, coming = (parts.parts[(t.rank - k - back) % t.size] for back in (0, 1))
        for g in range(0, len(going), count):
            sent, received = (
                out(range(piece[g].start, piece[g + count - 1].stop)) for piece in (going, coming)
            )
            yield _onward(t, sent, received)


def reduce_scatter(t: Operation) -> Program:
    """Keep partial sums in scratch, where one segment is received while another is sent."""
    parts = cut(t.send, t.segment)
    slots, first = parts.depth * (1 if t.size == 2 else 2), parts.parts[t.rank][0].start
    steps: list[Step] = []
    for k, going, coming in parts.sums(t.rank):
        sent, landed = (
            tmp(number % slots * parts.longest, len(piece))
            for number, piece in ((len(steps) - parts.depth, going), (len(steps), coming))
        )
        target = landed if k < t.size - 2 else out(moved(coming, -first))
        summed = Combine(target, (landed, inp(coming)))
        steps.append(_onward(t, sent if k else inp(going), landed, summed))
    return program(steps, slots * parts.longest, parts.depth)


def all_gather(t: Operation) -> Program:
    """Receive every message in its place of OUT."""
    own = copy(inp(range(t.recv[t.rank])), out(spans(t.recv)[t.rank]))
    return program([Step(then=(own,)), *_gathered(t, cut(t.recv))])


def pairwise_reduce_scatter(t: Operation) -> Program:
    """Exchange and add all addends of a segment, then those of the next one."""
    parts = cut(t.send, t.segment)
    steps = _pairwise_sums(t, parts, -parts.parts[t.rank][0].start)
    return program(steps, parts.depth * (t.size - 1) * parts.longest, parts.depth)


def pairwise_all_reduce(t: Operation) -> Program:
    """Add all segments, then pass the sums round a ring."""
    parts = cut(split_sizes(t.elements, t.size), t.segment)
    steps = [*_pairwise_sums(t, parts, 0), *_gathered(t, parts)]
    return program(steps, parts.depth * (t.size - 1) * parts.longest, parts.depth)


def pairwise_all_to_all(t: Operation) -> Program:
    """Send every piece to its rank in one message."""
    going, coming = (
        [make(piece) for piece in spans(counts)] for make, counts in ((inp, t.send), (out, t.recv))
    )
    steps = [Step(then=(copy(going[t.rank], coming[t.rank]),))]
    for k in range(1, t.size):
        dest, source = (t.rank + k) % t.size, (t.rank - k) % t.size
        steps.append(exchange(dest, going[dest], source, coming[source]))
    return program(steps, depth=WINDOW)


def _pairwise_sums(t: Operation, parts: Cut, shift: int) -> list[Step]:
    """Add each segment of this rank's piece, into OUT at its place in IN moved by `shift`."""
    rank, size, steps = t.rank, t.size, list[Step]()
    for g, mine in enumerate(parts.parts[rank]):
        first, landed = g % parts.depth * (size - 1), {}
        for k in range(1, size):
            dest, source = (rank + k) % size, (rank - k) % size
            landed[source] = tmp((first + k - 1) * parts.longest, len(mine))
            steps.append(exchange(dest, inp(parts.parts[dest][g]), source, landed[source]))
        addends = tuple(landed.get(r, inp(mine)) for r in range(size))
        steps.append(replace(steps.pop(), then=(Combine(out(moved(mine, shift)), addends),)))
    return steps
