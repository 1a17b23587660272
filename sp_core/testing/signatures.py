"""What goes where in each call of mpi4py, what ranks must agree on, and what a rank's own arguments must satisfy."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sp_core.testing.lockstep import Call, Message
from sp_core.testing.specs import Part, Spec, read

Values = Mapping[str, Any]
Edges = tuple[Sequence[int], Sequence[int]]
"""The ranks that a rank hears from in a neighbourhood, and those that it sends to."""

_DEFAULTS = {"root": 0, "op": None, "recvcounts": None}
_PARAMETERS = """
Barrier
Bcast buf root
Gather sendbuf recvbuf:B root
Gatherv sendbuf recvbuf:V root
Scatter sendbuf:B recvbuf root
Scatterv sendbuf:V recvbuf root
Allgather sendbuf recvbuf:B
Allgatherv sendbuf recvbuf:V
Alltoall sendbuf:B recvbuf:B
Alltoallv sendbuf:V recvbuf:V
Alltoallw sendbuf:W recvbuf:W
Reduce sendbuf recvbuf op root
Allreduce sendbuf recvbuf op
Reduce_scatter_block sendbuf:B recvbuf op
Reduce_scatter sendbuf recvbuf recvcounts op
Scan sendbuf recvbuf op
Exscan sendbuf recvbuf op
Neighbor_allgather sendbuf recvbuf:B
Neighbor_allgatherv sendbuf recvbuf:V
Neighbor_alltoall sendbuf:B recvbuf:B
Neighbor_alltoallv sendbuf:V recvbuf:V
Neighbor_alltoallw sendbuf:W recvbuf:W
"""
COLLECTIVES = {
    op: {name: form for name, _, form in (parameter.partition(":") for parameter in parameters)}
    for op, *parameters in map(str.split, _PARAMETERS.strip().splitlines())
}
"""The parameters of each collective on buffers. B: a block for each rank, V: counts, W: counts and types; else one block."""


@dataclass(frozen=True)
class Flow:
    """One rank's part in a collective.

    Attributes:
        gives: (rank, part) for each that it sends to; in a reduction what it contributes, to itself.
        takes: (rank, part) for each that it hears from; in a reduction the place of the result.
        equal: what has to be the same on all ranks.
        text: the arguments, for people.
        reduction: its name, where it is one.
    """

    gives: tuple[tuple[int, Part], ...] = ()
    takes: tuple[tuple[int, Part], ...] = ()
    equal: tuple[Any, ...] = ()
    text: str = ""
    reduction: str = ""

    def call(self, op: str, rank: int) -> Call:
        """The call to announce. What a rank sends to itself, and a reduction, are no messages."""
        going, coming = (
            [(peer, part.nbytes, part.kind) for peer, part in parts if peer != rank and peer >= 0]
            for parts in (self.gives, self.takes)
        )
        return Call(op, self.equal, *_messages(rank, going, coming, count=not op.lower().startswith(("n", "in"))), self.text)


def bind(op: str, args: Sequence[Any], given: Values) -> dict[str, Any]:
    """The arguments of a collective on buffers, by name.

    Raises:
        TypeError: one is missing, or not one of this operation.
    """
    names = COLLECTIVES[op]
    values = {name: _DEFAULTS[name] for name in names if name in _DEFAULTS} | dict(zip(names, args, strict=False)) | dict(given)
    wrong = (names.keys() ^ values.keys()) - {"info"}
    if wrong:
        raise TypeError(f"{op} takes {', '.join(names) or 'no arguments'}; missing or unknown: {', '.join(sorted(wrong))}")
    return values


def in_place(argument: object) -> bool:
    """Whether it is `MPI.IN_PLACE`, for which None may stand; asked without importing mpi4py."""
    return argument is None or type(argument).__name__ == "InPlaceType"


def flow(op: str, rank: int, size: int, values: Values, edges: Edges = ((), ())) -> Flow:
    """What a rank sends and receives in a collective on buffers, given its arguments by name.

    Raises:
        ValueError, TypeError: this rank's own arguments contradict each other, or are none.
    """
    root = values.get("root")
    if not values:
        return Flow()
    if "op" in values:
        return _reduction(op, rank, size, values)
    sender, receiver = ("buf", "buf") if op == "Bcast" else ("sendbuf", "recvbuf")
    sources, dests = edges if op.startswith("Neighbor") else _ends(op, rank, size, root)
    inside = op.startswith(("Allgather", "Alltoall")) or (op.startswith(("Gather", "Scatter")) and rank == root)
    no_send = inside and not op.startswith("Scatter") and in_place(values[sender])
    no_receive = inside and op.startswith("Scatter") and in_place(values[receiver])
    sent = read(values[sender], COLLECTIVES[op][sender], len(dests)) if dests and not no_send else None
    received = (
        read(values[receiver], COLLECTIVES[op][receiver], len(sources), writable=True) if sources and not no_receive else None
    )
    gives, takes = _paired(dests, sent), _paired(sources, received)
    if no_send and received is not None and not op.startswith("Gather"):
        gives = tuple((peer, received.parts[rank if op.startswith("Allgather") else peer]) for peer in dests)
    if no_send or no_receive:
        gives, takes = (tuple(pair for pair in pairs if pair[0] != rank) for pairs in (gives, takes))
    elif not op.startswith("Neighbor"):
        _check_self(dict(gives).get(rank), dict(takes).get(rank))
    if sent is not None and received is not None:
        _check_apart(sent, received)
    texts = {sender: sent, receiver: received}
    text = ", ".join(f"{name}={value.text}" for name, value in texts.items() if value) + _named(values)
    return Flow(gives, takes, (root,), text)


def _ends(op: str, rank: int, size: int, root: int | None) -> Edges:
    """The ranks that a rank hears from in this operation, and those that it sends to."""
    everyone = tuple(range(size))
    if op.startswith("Gather"):
        return everyone if rank == root else (), (int(root or 0),)
    if op.startswith("Scatter"):
        return (int(root or 0),), everyone if rank == root else ()
    if op == "Bcast":
        return ((), everyone[:rank] + everyone[rank + 1 :]) if rank == root else ((int(root or 0),), ())
    return everyone, everyone


def _paired(ranks: Sequence[int], spec: Spec | None) -> tuple[tuple[int, Part], ...]:
    if spec is None:
        return ()
    return tuple(zip(ranks, spec.parts if len(spec.parts) == len(ranks) else spec.parts * len(ranks), strict=True))


def _reduction(op: str, rank: int, size: int, values: Values) -> Flow:
    """A reduction: all contribute as much, and what comes out fits."""
    root, counts = values.get("root"), values.get("recvcounts")
    inside = in_place(values["sendbuf"]) and root in (None, rank)
    result = root in (None, rank) and not inside
    blocks = size if op == "Reduce_scatter_block" else 1
    sent = read(values["recvbuf" if inside else "sendbuf"], "B", blocks, writable=inside)
    received = read(values["recvbuf"], "", 1, writable=True) if result else None
    if counts is not None:
        counts = tuple(int(count) for count in counts)
        require(len(counts) == size, f"{len(counts)} counts for {size} ranks")
        require(sum(counts) == sent.counts[0], f"the buffer has {sent.counts[0]} elements, its counts add up to {sum(counts)}")
    if received is not None:
        _check_apart(sent, received)
        free = op == "Reduce_scatter" and counts is None  # then mpi4py asks the ranks
        due = received.counts[0] if free else sent.counts[0] if counts is None else counts[rank]
        require(received.parts[0].kind == sent.parts[0].kind, f"sends {sent.text} but receives {received.text}")
        require(received.counts[0] == due, f"receives {received.counts[0]} elements where {due} come out of {sent.text}")
    takes = (sent if received is None else received).parts[:1] if result or inside else ()
    name = op_name(values["op"])
    equal = (blocks * sent.parts[0].nbytes, sent.parts[0].kind, name, root, counts)
    return Flow(_paired((rank,) * blocks, sent), tuple((rank, part) for part in takes), equal, sent.text + _named(values), name)


def _named(values: Values) -> str:
    """The arguments that are no buffers, for people."""
    rest = {name: op_name(value) if name == "op" else value for name, value in values.items() if name in _DEFAULTS}
    return "".join(f", {name}={value}" for name, value in rest.items() if value is not None)


def _check_self(gives: Part | None, takes: Part | None) -> None:
    if gives is not None and takes is not None:
        same = gives.nbytes == takes.nbytes and (not gives.nbytes or gives.kind == takes.kind or "" in (gives.kind, takes.kind))
        require(same, f"sends itself {gives.nbytes} bytes of {gives.kind}, but expects {takes.nbytes} of {takes.kind}")


def _check_apart(sent: Spec, received: Spec) -> None:
    """MPI forbids that the buffers of one call overlap."""
    shared = any(a < d and c < b for a, b in sent.spans for c, d in received.spans)
    require(not shared, "two buffers of this call share memory")


def op_name(op: Any) -> str:
    """The name of a reduction: None is the sum, a string or an operation of MPI is its name; one's own cannot be compared."""
    if isinstance(op, str):
        return op.upper()
    return "SUM" if op is None else str(op.__reduce__()) if getattr(op, "is_predefined", False) else "one's own"


def require(condition: bool, problem: str) -> None:
    """Raise a ValueError where a rank contradicts itself."""
    if not condition:
        raise ValueError(problem)


def exchange(
    op: str, rank: int, size: int, sends: Iterable[tuple[int, int]], recvs: Iterable[tuple[int, int]], later: bool
) -> Call:
    """The announcement of messages, as (rank, bytes)."""
    sends, recvs = list(sends), list(recvs)
    for peer, _ in (*sends, *recvs):
        require(0 <= peer < size, f"rank {peer} is not one of the {size} ranks of this communicator")
    messages = _messages(rank, [(*pair, "") for pair in sends], [(*pair, "") for pair in recvs])
    return Call(op, (later,), *messages, f"sends={sends}, recvs={recvs}")


def _messages(
    rank: int, going: Iterable[tuple[int, int, str]], coming: Iterable[tuple[int, int, str]], *, count: bool = True
) -> tuple[list[Message], list[Message]]:
    """The messages that a rank sends to others and receives from them, as (rank, bytes, kind), counted by rank."""
    made: tuple[list[Message], list[Message]] = ([], [])
    for pairs, messages, sends in ((going, made[0], True), (coming, made[1], False)):
        turns: Counter[int] = Counter()
        for peer, nbytes, kind in pairs:
            source, dest = (rank, peer) if sends else (peer, rank)
            messages.append(Message(source, dest, turns[peer], int(nbytes), kind if nbytes else ""))
            turns[peer] += count
    return made
