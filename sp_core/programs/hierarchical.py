"""Make the program of an all-reduce over several nodes.

The ranks sum inside each node, then between nodes, and copy the result inside each node.

The vector, of size n, is cut into lanes: as many parts as the largest node has ranks, L. Two nodes
of two ranks, the vector in two lanes `a` and `b`; which lane each rank has summed, and over how
many ranks:

    node                  0                    1
    rank              0        1           2        3
    0 <-> 1, 2 <-> 3 exchange lanes and add
                   a over 2  b over 2    a over 2  b over 2
    0 <-> 2, 1 <-> 3: a ring of the nodes for each lane (see `ring`)
                   a over 4  b over 4    a over 4  b over 4
    0 <-> 1, 2 <-> 3 exchange lanes
                      ab       ab          ab       ab

In a node with fewer than L ranks a rank carries (sums and sends) several lanes. So nodes may have
any number of ranks, in any order. With N nodes each node sends 2 (N-1)/N n bytes to the next one,
the least possible. A ring over all ranks in an unlucky order sends up to L times as much. Inside
its node a rank sends 2 (L-1)/L n bytes. The sum of a piece is made on one rank at a time and then
copied, so all ranks get the same bits. A half type is rounded at every addition.

Source: Träff and Hunold, "Decomposing MPI collectives for exploiting multi-lane communication",
IEEE Cluster 2020: the full-lane all-reduce.
"""

from sp_core.programs.program import (
    Combine,
    Message,
    Operation,
    Program,
    Region,
    Step,
    inp,
    out,
    program,
    spans,
    tmp,
)
from sp_core.segments import split_sizes


class _Place:
    """Hold which ranks are on which node, and which lanes (parts of the vector) they carry.

    A rank carries a lane if it sums that lane over the ranks of its node, and then over the nodes.
    The rank with index i among the n ranks of a node carries lanes i, i + n, i + 2n, ...

    Args:
        t: the operation.

    Attributes:
        rank: the rank whose sends, receives and additions are listed.
        groups: for each node, the ranks on it, in ascending order.
        own: index of this rank's node in `groups`.
        mates: the ranks on the node of this rank, ascending, with this rank among them.
        lanes: for each lane, its range of the vector.
    """

    def __init__(self, t: Operation) -> None:
        nodes = t.nodes or (0,) * t.size
        self.rank = t.rank
        self.groups = tuple(
            tuple(r for r in range(t.size) if nodes[r] == node) for node in dict.fromkeys(nodes)
        )
        self.own = next(n for n, group in enumerate(self.groups) if t.rank in group)
        self.mates = self.groups[self.own]
        self.lanes = spans(split_sizes(t.elements, max(map(len, self.groups))))

    def carrier(self, lane: int, node: int) -> int:
        """Return the rank that sums lane number `lane` on a node near this rank's node.

        In the ring of nodes, that node comes `node` nodes after this rank's node; or before it if
        `node` is negative.
        """
        group = self.groups[(self.own + node) % len(self.groups)]
        return group[lane % len(group)]

    def carried_by(self, rank: int) -> range:
        """Return the indices of the lanes that `rank`, on this node, sums and sends on."""
        return range(self.mates.index(rank), len(self.lanes), len(self.mates))


def all_reduce(t: Operation) -> Program:
    """Return the program of an all-reduce in three parts.

    The vector is cut into lanes, of which each rank of a node sums its own over the node. A ring of
    the nodes all-reduces each lane. Then the ranks of each node send each other the results.
    """
    place = _Place(t)
    widths = [len(place.lanes[lane]) for lane in place.carried_by(t.rank)]
    if len(place.mates) == 1:
        widths = [-(-width // len(place.groups)) for width in widths]
    slots = dict(zip(place.carried_by(t.rank), (span.start for span in spans(widths)), strict=True))
    return program(
        [*_sums(place, slots), *_rings(place, slots), _copies(place, slots)], sum(widths)
    )


def _sums(place: _Place, slots: dict[int, int]) -> list[Step]:
    """Return steps that sum the lanes of this rank over the ranks of its node, into OUT.

    A lane is the part of the vector that one rank of each node sums. In each step the rank sends
    another rank's lanes from IN, receives addends of its own lanes into scratch, and adds them.

    Args:
        place: the nodes and lanes.
        slots: for each lane of this rank, the element of scratch at which its addends begin.
    """
    steps, have = [], inp
    for k in range(1, len(place.mates)):
        dest, source = (
            place.mates[(place.mates.index(place.rank) + way * k) % len(place.mates)]
            for way in (1, -1)
        )
        sends = tuple(Message(dest, inp(place.lanes[lane])) for lane in place.carried_by(dest))
        landed = {lane: tmp(slots[lane], len(place.lanes[lane])) for lane in slots}
        sums = tuple(
            Combine(out(place.lanes[lane]), (landed[lane], have(place.lanes[lane])))
            for lane in slots
        )
        steps.append(
            Step(sends, tuple(Message(source, region) for region in landed.values()), sums)
        )
        have = out
    return steps


def _rings(place: _Place, slots: dict[int, int]) -> list[Step]:
    """Return the steps of ring all-reduces over the nodes, one for each lane of this rank.

    A lane is the part of the vector that one rank of each node sums. The rings run together: a step
    has a message for each lane.

    Args:
        place: the nodes and lanes.
        slots: for each lane of this rank, the element of scratch at which its addends begin.
    """
    number, own = len(place.groups), place.own
    have = out if len(place.mates) > 1 else inp
    parts = {
        lane: spans(split_sizes(len(place.lanes[lane]), number), place.lanes[lane].start)
        for lane in slots
    }
    steps = []
    for k in range(number - 1):
        going, coming = (
            {lane: parts[lane][(own - k - behind) % number] for lane in parts} for behind in (1, 2)
        )
        landed = {lane: tmp(slots[lane], len(coming[lane])) for lane in parts}
        sums = tuple(
            Combine(out(coming[lane]), (landed[lane], have(coming[lane]))) for lane in parts
        )
        sent = out if k else have
        steps.append(_passed_on(place, {lane: sent(going[lane]) for lane in parts}, landed, sums))
    for k in range(number - 1):
        sends, receives = (
            {lane: out(parts[lane][(own - k - behind) % number]) for lane in parts}
            for behind in (0, 1)
        )
        steps.append(_passed_on(place, sends, receives))
    return steps


def _passed_on(
    place: _Place,
    going: dict[int, Region],
    coming: dict[int, Region],
    then: tuple[Combine, ...] = (),
) -> Step:
    """Return a step that sends a region of each lane to the rank of that lane on the next node.

    A lane is a part of the vector, which one rank of each node carries. A region is a range of a
    buffer. In the same step the rank receives a region of each lane from the previous node.

    Args:
        place: the nodes and lanes of all ranks.
        going, coming: by lane, the region to send, or to receive into.
        then: sums to compute after the messages have arrived.
    """
    return Step(
        tuple(Message(place.carrier(lane, 1), region) for lane, region in going.items()),
        tuple(Message(place.carrier(lane, -1), region) for lane, region in coming.items()),
        then,
    )


def _copies(place: _Place, slots: dict[int, int]) -> Step:
    """Return the step in which the ranks of a node send each other their lanes of the result.

    A lane is the part of the vector that one rank of each node has summed.

    Args:
        place: the nodes and lanes.
        slots: a mapping whose keys are the indices of this rank's lanes.
    """
    others = [mate for mate in place.mates if mate != place.rank]
    sends = tuple(Message(mate, out(place.lanes[lane])) for mate in others for lane in slots)
    receives = tuple(
        Message(mate, out(place.lanes[lane])) for mate in others for lane in place.carried_by(mate)
    )
    return Step(sends, receives)
