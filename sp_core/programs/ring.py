"""Make programs of P - 1 steps for P ranks, any number: rings, and pairwise exchange.

Each public function returns the `Program` of one rank for an `Operation`. `table` finds them by
name. Pieces are the parts of a vector, one per rank. n is the size of the vector.

In a ring every rank sends to the next one and receives from the one before.

Reduce-scatter. Piece p starts at rank p + 1 and collects one addend at each rank, so that its sum
is complete at rank p. P = 3, `p` is a piece of one rank and `p+` a partial sum, shown at the rank
that sends it:

    step        rank 0 --> rank 1 --> rank 2 --> rank 0
      0             2          0          1
      1             1+         2+         0+             afterwards rank r adds its own piece r

All-gather. Piece p starts at rank p, and each rank sends it on:

      0             0          1          2
      1             2          0          1

An all-reduce is a reduce-scatter, then an all-gather. Bytes per rank: (P-1)/P n for each half, the
least possible. Steps: P-1 for each half. The addends of piece p are in the order p+1, p+2, ..., p
of their ranks. So rounding depends on the place in the vector, but all ranks get the same bits. A
half type is rounded at every addition.

If pieces are cut into segments, two segments travel round the ring at the same time in the
reduce-scatter. One segment is sent while the other is added. Scratch is two segments in an
all-reduce, and four in a reduce-scatter of more than two ranks:

    step       0   1   2   3   4   5   ...
    segment    0   1   0   1   0   1

Each step posts its messages while those of the step before are under way.

The all-gather adds nothing, so each piece is sent round in two halves. The all-gather begins when
the last segment is summed. A sum that is sent at once would have to come out of another core's
cache. Such a cache is slower than memory if the cores share no cache.

Pairwise exchange: in step k every rank sends to the rank k further on and receives from the rank k
before. Four ranks; `a>b` is the piece of rank a that is meant for rank b:

    step        rank 0     rank 1     rank 2     rank 3
      1          0>1        1>2        2>3        3>0
      2          0>2        1>3        2>0        3>1
      3          0>3        1>0        2>1        3>2

Pairwise reduce-scatter. Rank b keeps all addends of its piece in scratch, and adds them in rank
order once it has them all. The result is bitwise that of a loop over the ranks, for any size and
number of ranks. A half type is summed in float32 and rounded once. With segments the scratch is 2
(P-1) of them. In the all-reduce a ring then gathers the sums. Bytes per rank: those of the other
ranks' pieces, the least possible.

Source: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations",
JPDC 69 (2009), section 4; segments: as `segmented ring` in Open MPI's coll/tuned; pairwise: Thakur,
Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH", IJHPCA 19
(2005), sections 4.3 and 4.4.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from sp_core.programs.program import (
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

STEPS_IN_FLIGHT = 4
"""How many steps of an all-to-all are under way at once: no message depends on another."""


class Cut:
    """Hold the pieces of a vector, each cut into the same number of segments.

    The number is 1, or even: one segment of a pair is under way while the other is added.

    Args:
        counts: elements of each piece.
        segment: most elements of a segment; None: each piece is one segment.

    Attributes:
        parts: for each piece, the ranges of its segments in the vector.
        depth: how many steps may be under way at the same time: 2, or 1 for pieces of one segment.
        longest: elements of the longest segment.
    """

    def __init__(self, counts: Sequence[int], segment: int | None = None) -> None:
        most = max(counts)
        number = 1 if segment is None or most <= segment else 2 * -(-most // (2 * segment))
        self.parts = tuple(
            tuple(moved(part, piece.start) for part in split_ranges(len(piece), number))
            for piece in spans(counts)
        )
        self.depth, self.longest = min(number, 2), -(-most // number)

    def sums(self, rank: int) -> Iterator[tuple[int, range, range]]:
        """Yield (k, range sent, range received) for each step of a rank in a ring reduce-scatter.

        A range holds the indices of a segment's elements in the vector. k is how many ranks have
        sent the segment before this rank. First the segments 0 to `depth` - 1 of all pieces travel
        round the whole ring, then the next `depth` segments, and so on.
        """
        size = len(self.parts)
        for first in range(0, len(self.parts[0]), self.depth):
            for k in range(size - 1):
                for g in range(first, first + self.depth):
                    going, coming = (self.parts[(rank - k - back) % size][g] for back in (1, 2))
                    yield k, going, coming


def _onward(t: Operation, sent: Region, received: Region, *then: Combine) -> Step:
    """Return a step: send to the next rank, receive from the rank before, then combine."""
    return exchange((t.rank + 1) % t.size, sent, (t.rank - 1) % t.size, received, *then)


def all_reduce(t: Operation) -> Program:
    """Return the program of a ring all-reduce: a reduce-scatter into OUT, then an all-gather."""
    parts = Cut(split_sizes(t.elements, t.size), t.segment)
    steps: list[Step] = []
    for k, going, coming in parts.sums(t.rank):
        landed = tmp(len(steps) % parts.depth * parts.longest, len(coming))
        summed = Combine(out(coming), (landed, inp(coming)))
        steps.append(_onward(t, out(going) if k else inp(going), landed, summed))
    return program([*steps, *_gathered(t, parts)], parts.depth * parts.longest, parts.depth)


def _gathered(t: Operation, parts: Cut) -> Iterator[Step]:
    """Yield the steps of a ring all-gather in OUT, where this rank's own piece lies already.

    Each piece is sent in `parts.depth` messages: as many as steps may be under way at once.
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
    """Return the program of a ring reduce-scatter.

    Partial sums are in scratch: one segment is received while another is sent. The last sum goes to
    OUT.
    """
    parts = Cut(t.send, t.segment)
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
    """Return the program of a ring all-gather.

    Every message is received at its final place in OUT.
    """
    own = copy(inp(range(t.recv[t.rank])), out(spans(t.recv)[t.rank]))
    return program([Step(then=(own,)), *_gathered(t, Cut(t.recv))])


def pairwise_reduce_scatter(t: Operation) -> Program:
    """Return the program of a pairwise reduce-scatter.

    For one segment (part of a piece) after the other, the ranks exchange all addends and add them
    in rank order.
    """
    parts = Cut(t.send, t.segment)
    sums = _pairwise_sums(t, parts, -parts.parts[t.rank][0].start)
    return program(sums, parts.depth * (t.size - 1) * parts.longest, parts.depth)


def pairwise_all_reduce(t: Operation) -> Program:
    """Return the program of an all-reduce: a pairwise reduce-scatter, then a ring all-gather."""
    parts = Cut(split_sizes(t.elements, t.size), t.segment)
    steps = [*_pairwise_sums(t, parts, 0), *_gathered(t, parts)]
    return program(steps, parts.depth * (t.size - 1) * parts.longest, parts.depth)


def pairwise_all_to_all(t: Operation) -> Program:
    """Return the program of an all-to-all, in which each piece goes to its rank in one message."""
    going, coming = (
        [make(piece) for piece in spans(counts)] for make, counts in ((inp, t.send), (out, t.recv))
    )
    steps = [Step(then=(copy(going[t.rank], coming[t.rank]),))]
    for k in range(1, t.size):
        dest, source = (t.rank + k) % t.size, (t.rank - k) % t.size
        steps.append(exchange(dest, going[dest], source, coming[source]))
    return program(steps, depth=STEPS_IN_FLIGHT)


def _pairwise_sums(t: Operation, parts: Cut, shift: int) -> list[Step]:
    """Return steps that receive all addends of this rank's piece and write their sum to OUT.

    Args:
        t: the operation.
        parts: the pieces in IN and their segments.
        shift: added to a position in IN to get the position of the sum in OUT.
    """
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
