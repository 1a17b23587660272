"""Describe which data each collective of mpi4py sends to which rank; move it between threads.

`flow` describes a rank's part, from arguments that `bind` has named. `contribution` and `deliver`
move the data between ranks that are threads.
"""

import functools
import itertools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from sp_core.testing.lockstep import Call, Message
from sp_core.testing.specs import Array, Part, Spec, read, require

Values = Mapping[str, Any]
"""Arguments of a call, by parameter."""
Edges = tuple[Sequence[int], Sequence[int]]
"""The ranks that a rank receives from, and the ranks that it sends to."""

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
"""The parameters of each collective on buffers, and the form of each buffer specification.

B: a block for each rank, V: counts for each rank, W: counts and datatypes for each rank; "": one
block, or no buffer.
"""


@dataclass(frozen=True)
class Flow:
    """What one rank sends and receives in a collective.

    Attributes:
        gives: (destination, part of the send buffer) for each message.
        takes: (source, part of the receive buffer) for each message. In a reduction all name the
            same part, which receives the result.
        equal: values that must be equal on all ranks, such as the root.
        text: the arguments as text, for error messages.
        reduction: name of the reduction, such as "SUM"; "" if there is none.
    """

    gives: tuple[tuple[int, Part], ...] = ()
    takes: tuple[tuple[int, Part], ...] = ()
    equal: tuple[Any, ...] = ()
    text: str = ""
    reduction: str = ""

    def call(self, op: str, rank: int) -> Call:
        """Return a description of this rank's call, by which the ranks check that they agree.

        It lists the messages that this rank sends and receives. Data that a rank gives to itself is
        not listed, and neither is the data of a reduction.

        Args:
            op: the name of mpi4py's method, such as "Bcast" or "Ibcast".
            rank: the caller's rank.
        """
        count = not op.lower().startswith(("n", "in"))
        going = [
            (rank, peer, part.nbytes, part.kind)
            for peer, part in self.gives
            if peer != rank and peer >= 0 and not self.reduction
        ]
        coming = [
            (peer, rank, part.nbytes, part.kind)
            for peer, part in self.takes
            if peer != rank and peer >= 0 and not self.reduction
        ]
        return Call(
            op, self.equal, _messages(going, count=count), _messages(coming, count=count), self.text
        )


@functools.cache
def op_of(form: str) -> str:
    """Return the blocking collective on buffers that corresponds to mpi4py's method `form`.

    For example, return "Bcast" for "Bcast", "Ibcast" and "Bcast_init", and "Allgatherv" for
    "Iallgatherv". Return "" for any other method, such as "bcast" or "Send".
    """
    stem = form.removesuffix("_init")
    return next((op for op in (stem, stem[1:].capitalize()) if op in COLLECTIVES), "")


def bind(op: str, args: Sequence[Any], given: Values) -> dict[str, Any]:
    """Return the arguments of a collective on buffers by name, with defaults.

    Args:
        op: a name in COLLECTIVES, such as "Allreduce".
        args, given: the call's positional arguments, and its arguments by name.

    Raises:
        TypeError: an argument is missing, or unknown to this collective.
    """
    names = COLLECTIVES[op]
    values = (
        {name: _DEFAULTS[name] for name in names if name in _DEFAULTS}
        | dict(zip(names, args, strict=False))
        | dict(given)
    )
    wrong = (names.keys() ^ values.keys()) - {"info"}
    if wrong:
        raise TypeError(
            f"{op} takes {', '.join(names) or 'no arguments'}; missing or unknown: "
            f"{', '.join(sorted(wrong))}"
        )
    return values


def in_place(argument: object) -> bool:
    """Return whether an argument is `MPI.IN_PLACE`, or None, which mpi4py takes for it."""
    return argument is None or type(argument).__name__ == "InPlaceType"


def flow(op: str, rank: int, size: int, values: Values, edges: Edges = ((), ())) -> Flow:
    """Return which parts of this rank's buffers a collective sends to and receives from each rank.

    Args:
        op: collective, such as "Allgatherv".
        rank, size: the caller's rank, and the number of ranks.
        values: this rank's arguments by name, defaults filled in, as `bind` returns them.
        edges: (sources, destinations) of this rank, for a collective between neighbours.

    Raises:
        ValueError, TypeError: this rank's own arguments contradict each other, or one that must be
            a buffer is not.
    """
    if not values:
        return Flow()
    if "op" in values:
        return _reduction(op, rank, size, values)
    root, is_scatter = values.get("root"), op.startswith("Scatter")
    sender, receiver = ("buf", "buf") if op == "Bcast" else ("sendbuf", "recvbuf")
    sources, dests = edges if op.startswith("Neighbor") else _ends(op, rank, size, root)
    may_be_in_place = op.startswith(("Allgather", "Alltoall")) or (
        op.startswith(("Gather", "Scatter")) and rank == root
    )
    inside = may_be_in_place and in_place(values[receiver if is_scatter else sender])
    forms = COLLECTIVES[op]
    sends, receives = is_scatter or not inside, not (is_scatter and inside)
    sent = read(values[sender], forms[sender], len(dests)) if dests and sends else None
    received = (
        read(values[receiver], forms[receiver], len(sources), writable=True)
        if sources and receives
        else None
    )
    gives, takes = _paired(dests, sent), _paired(sources, received)
    if inside and sent is None and received is not None and not op.startswith("Gather"):
        gives = tuple(
            (peer, received.parts[rank if op.startswith("Allgather") else peer]) for peer in dests
        )
    if inside:
        gives = tuple(pair for pair in gives if pair[0] != rank)
        takes = tuple(pair for pair in takes if pair[0] != rank)
    elif not op.startswith("Neighbor"):
        _check_self(*[[part for peer, part in ends if peer == rank] for ends in (gives, takes)])
    if sent is not None and received is not None:
        _check_apart(sent, received)
    buffers = (sender, sent), (receiver, received)
    shown = [f"{name}={spec.text}" for name, spec in buffers if spec is not None]
    return Flow(gives, takes, (root,), ", ".join([*shown, *_named(values)]))


def _ends(op: str, rank: int, size: int, root: int | None) -> Edges:
    """Return the ranks that a rank receives from in this operation, and those it sends to."""
    everyone, at_root = tuple(range(size)), (int(root or 0),)
    if op.startswith("Gather"):
        return everyone if rank == root else (), at_root
    if op.startswith("Scatter"):
        return at_root, everyone if rank == root else ()
    if op == "Bcast":
        return ((), everyone[:rank] + everyone[rank + 1 :]) if rank == root else (at_root, ())
    return everyone, everyone


def _paired(ranks: Sequence[int], spec: Spec | None) -> tuple[tuple[int, Part], ...]:
    """Return (rank, part) for each rank. If `spec` has one part, all ranks get that."""
    if spec is None:
        return ()
    return tuple(
        zip(
            ranks,
            spec.parts if len(spec.parts) == len(ranks) else spec.parts * len(ranks),
            strict=True,
        )
    )


def _reduction(op: str, rank: int, size: int, values: Values) -> Flow:
    """Return a rank's part in a reduction. Every rank contributes equally many elements."""
    root, counts = values.get("root"), values.get("recvcounts")
    inside = in_place(values["sendbuf"]) and root in (None, rank)
    result = root in (None, rank) and not inside
    blocks = size if op == "Reduce_scatter_block" else 1
    sent = read(values["recvbuf" if inside else "sendbuf"], "B", blocks, writable=inside)
    received = read(values["recvbuf"], "", 1, writable=True) if result else None
    if counts is not None:
        counts = tuple(int(count) for count in counts)
        require(len(counts) == size, f"{len(counts)} counts for {size} ranks")
        require(
            sum(counts) == sent.counts[0],
            f"the buffer has {sent.counts[0]} elements, its counts add up to {sum(counts)}",
        )
    if received is not None:
        _check_apart(sent, received)
        free = op == "Reduce_scatter" and counts is None  # then mpi4py gathers the counts
        due = received.counts[0] if free else sent.counts[0] if counts is None else counts[rank]
        require(
            received.parts[0].kind == sent.parts[0].kind,
            f"sends {sent.text} but receives {received.text}",
        )
        require(
            received.counts[0] == due,
            f"receives {received.counts[0]} elements, but this rank's share of {sent.text} has "
            f"{due}",
        )
    place = (sent if received is None else received).parts[0]
    dests = range({"Scan": rank, "Exscan": rank + 1}.get(op, 0), size) if root is None else (root,)
    sources = range({"Scan": rank + 1, "Exscan": rank}.get(op, size) if root in (None, rank) else 0)
    name = op_name(values["op"])
    _require_numbers(place, name)
    equal = (sum(part.nbytes for part in sent.parts), sent.parts[0].kind, name, root, counts)
    return Flow(
        tuple((dest, part) for dest in dests for part in sent.parts),
        tuple((source, place) for source in sources),
        equal,
        ", ".join([sent.text, *_named(values)]),
        name,
    )


def _require_numbers(part: Part, name: str) -> None:
    """Raise ValueError if the reduction `name` of MPI would combine the bytes of short floats."""
    are_bytes = part.view is not None and part.view.dtype.kind == "S"
    text = f"MPI has no {name} of bfloat16 or shorter floats, only of their bytes; reduce float32"
    require(not are_bytes or name not in _UFUNCS, text)


def _named(values: Values) -> list[str]:
    """Return the arguments that are no buffers as texts, such as "root=0"."""
    rest = {
        name: op_name(value) if name == "op" else value
        for name, value in values.items()
        if name in _DEFAULTS
    }
    return [f"{name}={value}" for name, value in rest.items() if value is not None]


def _check_self(gives: Sequence[Part], takes: Sequence[Part]) -> None:
    """Raise ValueError if a rank sends itself other sizes or kinds of data than it expects."""
    for given, taken in itertools.product(gives, takes):
        require(
            given.nbytes == taken.nbytes
            and (not given.nbytes or given.kind == taken.kind or "" in (given.kind, taken.kind)),
            f"sends itself {given.nbytes} bytes of {given.kind}, but expects {taken.nbytes} of "
            f"{taken.kind}",
        )


def _check_apart(sent: Spec, received: Spec) -> None:
    """Refuse buffers of one call that overlap in memory, as MPI does."""
    parts = itertools.product(sent.parts, received.parts)
    # only the addresses are compared: memory on a device cannot be read
    shared = any(np.may_share_memory(a.view, b.view) for a, b in parts)
    require(not shared, "two buffers of this call share memory")


def op_name(op: Any) -> str:
    """Return the name of a reduction's operation: "SUM" for None.

    Operations that the program defines cannot be compared, so all of them have one name.
    """
    return (
        "SUM"
        if op is None
        else str(op.__reduce__())
        if getattr(op, "is_predefined", False)
        else "an operation of the program"
    )


def exchange(
    rank: int, size: int, sends: Sequence[Any], recvs: Sequence[Any], later: bool = False
) -> Call:
    """Return the call by which a rank announces messages, so that the ranks can check them.

    Messages sent are (destination, bytes), messages received (source, bytes). `later` says whether
    other calls may come before them. Raise ValueError for a rank that does not exist.
    """
    for peer, _ in (*sends, *recvs):
        require(
            0 <= peer < size, f"rank {peer} is not one of the {size} ranks of this communicator"
        )
    sent = _messages([(rank, peer, nbytes, "") for peer, nbytes in sends])
    received = _messages([(peer, rank, nbytes, "") for peer, nbytes in recvs])
    text = f"sends={sends}, recvs={recvs}"
    return Call("announce_exchange", (later,), sent, received, text)


def _messages(parts: Iterable[tuple[int, int, int, str]], *, count: bool = True) -> list[Message]:
    """Return messages, given source, destination, number of bytes and kind of data of each.

    Messages from one rank to another are numbered 0, 1, 2, ... (`turn`); with `count` False, as in
    collectives of neighbours, all are number 0. A message of 0 bytes has the kind "".
    """
    turns, made = Counter[tuple[int, int]](), []
    for source, dest, nbytes, kind in parts:
        made.append(Message(source, dest, turns[source, dest], int(nbytes), kind if nbytes else ""))
        turns[source, dest] += count
    return made


_UFUNCS: dict[str, tuple[np.ufunc, str]] = {
    "SUM": (np.add, "iufc"),
    "PROD": (np.multiply, "iufc"),
    "MAX": (np.fmax, "iuf"),  # fmax and fmin drop a NaN, as an MPI library may
    "MIN": (np.fmin, "iuf"),
    "LAND": (np.logical_and, "iub"),
    "LOR": (np.logical_or, "iub"),
    "LXOR": (np.logical_xor, "iub"),
    "BAND": (np.bitwise_and, "iu"),
    "BOR": (np.bitwise_or, "iu"),
    "BXOR": (np.bitwise_xor, "iu"),
}
"""For each reduction its function, and the kinds of NumPy's types for which MPI has it."""


def require_reducible(flow: Flow) -> None:
    """Raise ValueError if threads cannot compute the flow's reduction, or MPI not for its type."""
    parts = [part for _, part in (*flow.gives[:1], *flow.takes[:1])] if flow.reduction else []
    for part in parts:
        require(
            flow.reduction in _UFUNCS,
            f"ranks that are threads reduce with {', '.join(_UFUNCS)}, not {flow.reduction}",
        )
        dtype, (_, kinds) = view(part).dtype, _UFUNCS[flow.reduction]
        require(dtype.kind in kinds, f"MPI has no {flow.reduction} of {dtype}")


def contribution(flow: Flow, dest: int) -> Array:
    """Return a copy of the elements that a rank sends to rank `dest`."""
    return np.concatenate([view(part) for peer, part in flow.gives if peer == dest])


def deliver(op: str, rank: int, flow: Flow, came: Mapping[int, Array]) -> None:
    """Write the data `came` of each source into the buffers of a rank's `flow`.

    `came` is in rank order. A reduction combines it in this order, the same in every run.
    """
    if not flow.reduction:
        for source, part in flow.takes:
            view(part)[:] = came[source].view(view(part).dtype)
    elif flow.takes:
        (reduce, _), place = _UFUNCS[flow.reduction], view(flow.takes[0][1])
        result = functools.reduce(lambda x, y: reduce(x, y).astype(x.dtype), came.values())
        if op.startswith("Reduce_scatter"):
            counts = flow.equal[-1] or [len(place)] * len(came)
            require(sum(counts) == len(result), f"{len(result)} elements are not {counts}")
            result = result[sum(counts[:rank]) : sum(counts[: rank + 1])]
        place[: len(result)] = result


def view(part: Part) -> Array:
    """Return the elements of a part as an array. Raise ValueError if they have gaps."""
    require(
        part.view is not None,
        "ranks that are threads need a contiguous array of numbers; this one has gaps",
    )
    return np.asarray(part.view)
