"""Make programs of ceil(log2 P) steps for P ranks: recursive doubling and halving, Bruck, trees.

Each public function returns the `Program` of one rank for an `Operation`. `table` finds them by
name. Pieces are the parts of a vector, one per rank. n is the size of the vector.

Recursive doubling. In step m every rank exchanges all it has with the rank at distance 2^m. The
table shows for four ranks whose data each rank has after each step:

    rank       0       1       2       3
    0 <-> 1, 2 <-> 3
              01      01      23      23
    0 <-> 2, 1 <-> 3
             0123    0123    0123    0123

An all-reduce sends the whole vector in each of its log2 P steps. An all-gather sends the pieces it
has, P-1 pieces in all.

Rabenseifner's all-reduce: halve the vector while summing, then double it while gathering. The
vector in four pieces; which pieces each rank has summed, and over how many ranks:

    rank             0          1          2          3
    0 <-> 2, 1 <-> 3 exchange halves and add
                01 over 2  01 over 2  23 over 2  23 over 2
    0 <-> 1, 2 <-> 3 exchange quarters and add
                 0 over 4   1 over 4   2 over 4   3 over 4
    the same exchanges in reverse order gather: 0 <-> 1, 2 <-> 3, then 0 <-> 2, 1 <-> 3
                 0123       0123       0123       0123

Bytes per rank 2 (P-1)/P n in 2 log2 P steps. If P is no power of two, some ranks take no part. Each
first sends its data to a neighbour, which acts for it, and receives the result at the end (see
`Fold`). This costs these ranks the whole vector twice. The lower ranks' partial sum is always the
left operand, so all ranks get the same bits. A half type is rounded at every addition, log2 P times
(once more if P is no power of two).

Bruck's all-gather sends ever more pieces over ever longer distances, for any number of ranks. Five
ranks; the pieces that each rank has, its own first, after the messages to the rank 1, 2 and 4
before:

    rank           0        1        2        3        4
               0        1        2        3        4
    r <- r+1   01       12       23       34       40
    r <- r+2   0123     1234     2340     3401     4012
    r <- r+4   01234    12340    23401    34012    40123

The last step sends only the missing pieces. The pieces are collected in scratch, in this order, and
copied into rank order at the end. Bytes per rank: P-1 pieces.

Binomial trees serve for a broadcast, and for a reduction with all messages reversed. Six ranks,
numbered from the root; who sends to whom in the steps of a broadcast:

    step 0      0 ------------> 4
    step 1      0 ----> 2       4 (----> 6)
    step 2      0 -> 1  2 -> 3  4 -> 5

A reduction runs the arrows backwards, last step first. Each rank adds the vectors that arrive to
its own. Messages: P-1 in all, each of the whole vector. The addends are in the order of the numbers
above. A half type is rounded at every addition.

Source: Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in
MPICH", IJHPCA 19 (2005), sections 4.1, 4.2, 4.5 and 4.6; Rabenseifner, "Optimization of collective
reduction operations", ICCS 2004, section 3; Bruck, Ho, Kipnis, Upfal and Weathersby, "Efficient
algorithms for all-to-all communications in multiport message-passing systems", IEEE TPDS 8 (1997),
section 4.
"""

from collections.abc import Callable, Sequence

from sp_core.programs.program import (
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


class Fold:
    """Choose the ranks that take part in exchanges: a power of two of any number of ranks.

    `extra` ranks take no part. Among the first 2 * extra ranks, each odd one also acts for the even
    one before it. The ranks that take part get places 0, 1, ... in rank order. For 7 ranks there
    are 4 places, and ranks 0, 2 and 4 have another rank act for them:

        rank    0 -> 1    2 -> 3    4 -> 5    6
        place        0         1         2    3

    Args:
        size: the number of ranks.

    Attributes:
        levels: the number of exchanges: log2 of the number of ranks that take part.
        extra: how many ranks take no part in the exchanges: other ranks act for them.
    """

    def __init__(self, size: int) -> None:
        self.levels = size.bit_length() - 1
        self.extra = size - (1 << self.levels)

    def place(self, rank: int) -> int | None:
        """Return the place (0, 1, ...) of a rank in the exchanges; None if it takes no part."""
        if rank >= 2 * self.extra:
            return rank - self.extra
        return rank // 2 if rank % 2 else None

    def rank(self, place: int) -> int:
        """Return the rank that has this place in the exchanges: the inverse of `place`."""
        return 2 * place + 1 if place < self.extra else place + self.extra

    def carries(self, rank: int) -> bool:
        """Return whether `rank` also acts for rank - 1, which takes no part in the exchanges."""
        return rank < 2 * self.extra and rank % 2 == 1

    def pieces(self, pieces: Sequence[range], first: int, count: int) -> range:
        """Return the range of the pieces of all ranks for which the ranks at some places act.

        A place is the number of a rank among those that take part in the exchanges.

        Args:
            pieces: for each rank, the range of its piece.
            first, count: the first place, and the number of places.
        """
        begin, end = (
            2 * place if place < self.extra else place + self.extra
            for place in (first, first + count)
        )
        return joined(pieces[begin], pieces[end - 1])

    def served(self, rank: int, result: Region) -> list[Step]:
        """Return the step in which `rank` sends the result to rank - 1, if `rank` acts for it.

        Args:
            rank: the rank whose program is made.
            result: the region that holds the result.

        Returns:
            A list of that step, or an empty list.
        """
        return [Step((Message(rank - 1, result),))] if self.carries(rank) else []


def _folded(rank: int, own: Region, result: Region) -> Program:
    """Return the program of a rank that takes no part, because rank + 1 acts for it.

    The rank sends its input to rank + 1, and receives the result from there at the end.

    Args:
        rank: the rank whose program is made.
        own: region of the rank's input.
        result: region of the result.
    """
    return program([Step((Message(rank + 1, own),)), Step((), (Message(rank + 1, result),))])


def all_reduce(t: Operation) -> Program:
    """Return the program of an all-reduce by recursive doubling.

    Each step exchanges the whole vector.
    """
    return _all_reduce(t, [range(t.elements)] * t.size, halving=False)


def rabenseifner(t: Operation) -> Program:
    """Return the program of Rabenseifner's all-reduce.

    Each step exchanges and adds half as much as the step before; then the same steps in reverse
    order gather the sums.
    """
    return _all_reduce(t, spans(split_sizes(t.elements, 1 << Fold(t.size).levels)), halving=True)


def _all_reduce(t: Operation, pieces: Sequence[range], *, halving: bool) -> Program:
    """Return the program of an all-reduce in which pairs of ranks exchange and add pieces.

    Args:
        t: the operation.
        pieces: ranges of the vector, one per place of the `Fold`; without `halving` each is the
            whole vector.
        halving: whether each step adds half as many pieces as the one before; then the sums are
            gathered by the same exchanges in reverse order.
    """
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
        peer, width = fold.rank(place ^ (1 << m)), 1 << m
        keep, give = (
            joined(pieces[first], pieces[first + width - 1])
            for first in ((place >> m) << m, (place >> m ^ 1) << m)
        )
        landed = tmp(0, len(keep))
        parts = (landed, have(keep)) if peer < t.rank else (have(keep), landed)
        steps.append(exchange(peer, have(give), peer, landed, Combine(out(keep), parts)))
        back.append(exchange(peer, out(keep), peer, out(give)))
        have = out
    scratch = max(len(message.region) for step in steps for message in step.receives)
    steps += reversed(back) if halving else ()
    return program([*steps, *fold.served(t.rank, out(whole))], scratch)


def all_gather(t: Operation) -> Program:
    """Return the program of an all-gather by recursive doubling.

    In step m each rank exchanges all its pieces, those of 2^m consecutive ranks, with the rank
    whose number differs in bit m. If the number of ranks is not a power of two, `Fold` says which
    ranks act for others.
    """
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
    """Return the program of Bruck's all-gather.

    Pieces are collected in scratch, where place i holds the piece of rank + i (modulo the size).
    The last step copies them to OUT.
    """
    rank, size, counts = t.rank, t.size, t.recv
    places = spans([*counts[rank:], *counts[:rank]])
    steps = [Step(then=(copy(inp(range(counts[rank])), tmp(0, counts[rank])),))]
    for have in (1 << step for step in range((size - 1).bit_length())):
        more = min(have, size - have)
        going, coming = (joined(places[first], places[first + more - 1]) for first in (0, have))
        sent, received = (tmp(places.start, len(places)) for places in (going, coming))
        steps.append(exchange((rank - have) % size, sent, (rank + have) % size, received))
    total, before = sum(counts), sum(counts[:rank])
    rotated = (
        copy(tmp(0, total - before), out(range(before, total))),
        copy(tmp(total - before, before), out(range(before))),
    )
    return program([*steps, Step(then=rotated)], total)


def broadcast(t: Operation) -> Program:
    """Return the program of a broadcast along a binomial tree.

    A rank receives the vector from its parent and sends it to its children, largest subtree first.
    """
    whole = range(t.elements)
    parents, children = _family(t)
    have = out(whole) if parents else inp(whole)
    received = [Step((), (Message(parent, have),)) for parent in parents]
    return program([*received, *(Step((Message(child, have),)) for child in reversed(children))])


def reduce(t: Operation) -> Program:
    """Return the program of a reduction along a binomial tree.

    A rank adds the vectors of its children to its own, smallest subtree first, and sends the sum to
    its parent. The root keeps the sum.
    """
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
    """Return ([parent], children) of this rank in the binomial tree; the root has no parent.

    Children are ranks, the smallest subtree first. Ranks are numbered from the root. The number of
    a child is that of its parent with one more bit set, below the parent's lowest one.
    """
    number = (t.rank - t.root) % t.size
    lowest = number & -number if number else 1 << t.size.bit_length()
    found = [number + (1 << bit) for bit in range(lowest.bit_length() - 1)]
    children = [(child + t.root) % t.size for child in found if child < t.size]
    return [((number & (number - 1)) + t.root) % t.size] if number else [], children
