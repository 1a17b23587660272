"""Test the description of collectives: which data it says goes to which rank, and what it moves.

The first law runs each collective on ranks, as threads or under MPI.
"""

import contextlib
import itertools
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

from sp_core.testing import ThreadComm, run_threads, spmd, tier
from sp_core.testing.lockstep import Message
from sp_core.testing.outcome import RankFailure
from sp_core.testing.signatures import (
    _UFUNCS,
    COLLECTIVES,
    Flow,
    bind,
    exchange,
    flow,
    op_name,
    require_reducible,
)
from sp_core.testing.specs import Part

Array = np.ndarray[Any, Any]
REDUCTIONS = {op: names for op, names in COLLECTIVES.items() if "op" in names}
MOVES = {op: names for op, names in COLLECTIVES.items() if "sendbuf" in names and "op" not in names}
MOVES["Bcast"] = {"sendbuf": "", "recvbuf": "", "root": ""}


def edges(p: int, rank: int) -> tuple[list[int], list[int]]:
    """Return the ranks that a rank receives from, and those it sends to, as its neighbours."""
    return [(rank - 1) % p], [(rank + 1) % p]


def sent(op: str, p: int, root: int, n: int, *, symmetric: bool) -> dict[tuple[int, int], Array]:
    """Return the numbers that each rank sends to each rank in a collective, by its definition."""
    pairs = [*itertools.product(range(p), range(p))]
    if "root" in MOVES[op]:
        pairs = [pair for pair in pairs if pair["Gather" in op] == root]
    if op.startswith("Neighbor"):
        pairs = [(i, j) for i, j in pairs if j in edges(p, i)[1]]
    made = {}
    for i, j in pairs:
        to = j if "Scatter" in op or "to" in op else 0
        count = (i + to + i * to * (not symmetric)) % 3 if op.endswith(("v", "w")) else n
        made[i, j] = 100.0 * i + 10 * to + np.arange(count)
    return made


def joined(parts: list[Array], form: str) -> tuple[Array, Any]:
    """Return a buffer with these parts, and its specification. Parts of form V and W have gaps."""
    counts, gap = [len(part) for part in parts], int(form in ("V", "W"))
    buffer = np.concatenate([np.append(part, [-1.0] * gap) for part in parts] or [np.zeros(0)])
    places = [int(sum(counts[:i])) + gap * i for i in range(len(parts))]
    types = [MPI.DOUBLE] * len(parts)
    return buffer, {
        "V": [buffer, (counts, places)],
        "W": [buffer, counts, [8 * place for place in places], types],
    }.get(form, buffer)


Call = tuple[dict[str, Any], Array, Array]
"""A rank's arguments, its receive buffer, and the numbers that this buffer has in the end."""


def moving(
    op: str, p: int, rank: int, root: int, data: dict[tuple[int, int], Array], *, inside: bool
) -> Call:
    """Return a rank's call of a collective that moves `data`; `inside`: in place, if it may be."""
    at_root = op.startswith(("Gather", "Scatter"))
    inside = inside and (op.startswith("All") or (at_root and rank == root))
    out = [part for (source, _), part in data.items() if source == rank]
    came = {source: part for (source, dest), part in data.items() if dest == rank}
    form = MOVES[op]["sendbuf"]
    _, sends = joined(out if form else out[:1], form)
    before = {source: np.full(len(part), -1.0) for source, part in came.items()}
    if inside and "Scatter" not in op:
        before |= dict(enumerate(out)) if "to" in op else {rank: out[0]}
    into, receives = joined([*before.values()], MOVES[op]["recvbuf"])
    after, _ = joined([*came.values()], MOVES[op]["recvbuf"])
    if op == "Bcast":
        buffer = sends if rank == root else into
        return {"buf": buffer, "root": root}, buffer, after
    values = {"sendbuf": sends if out else None, "recvbuf": receives if came else None}
    if inside:
        values["recvbuf" if "Scatter" in op else "sendbuf"] = MPI.IN_PLACE
        after = into.copy() if "Scatter" in op else after
    return values | ({"root": root} if "root" in MOVES[op] else {}), into, after


WEIGHTS = (1.0, 1e16, -1e16, 3.0) if tier() == "threads" else (1.0, 10.0, 100.0, 1000.0)
"""The factors of the numbers of each rank. Threads must add in rank order: these factors round to
another sum in any other order. MPI may choose the order, so under MPI every sum is exact."""


def reducing(op: str, p: int, rank: int, root: int, n: int, *, inside: bool, given: bool) -> Call:
    """Return a rank's call of a reduction; `given`: with counts that differ, if it has counts."""
    counts = [n + given * other % 2 for other in range(p)]
    number = {"Reduce_scatter": sum(counts), "Reduce_scatter_block": n * p}.get(op, n)
    data = [weight * np.arange(1, number + 1) for weight in WEIGHTS[:p]]
    shares = {"Reduce_scatter": counts, "Reduce_scatter_block": [n] * p}.get(op)
    total, here = np.sum(data, axis=0), op != "Reduce" or rank == root
    due: Any = {"Scan": sum(data[: rank + 1]), "Exscan": sum(data[:rank])}.get(op, total)
    if shares:
        due = total[sum(shares[:rank]) :][: shares[rank]]
    own = inside and here
    into = data[rank].copy() if own else np.full(number if np.ndim(due) == 0 else len(due), -1.0)
    values: dict[str, Any] = {
        "sendbuf": (None if given else MPI.IN_PLACE) if own else data[rank],
        "recvbuf": into if here else None,
        "root": root,
        "op": MPI.SUM,
        "recvcounts": counts if given or inside else None,
    }
    is_changed = here and (op, rank) != ("Exscan", 0)
    return {name: values[name] for name in REDUCTIONS[op]}, into, due if is_changed else into[:0]


def offered() -> list[str]:
    """Return the collectives that this tier's communicator has: threads or MPI."""
    return [op for op in COLLECTIVES if tier() == "mpi" or hasattr(ThreadComm, op)]


FORMS = ("{0}", "I{1}", *(["{0}_init"] if tier() == "mpi" else []))
"""The names of a collective that waits, of one that does not, and of a persistent one."""


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("op", offered())
@spmd()
def test_a_collective_does_what_its_definition_says(comm: Any, op: str, form: str) -> None:
    p, rank = comm.size, comm.rank
    on = comm.Create_dist_graph_adjacent(*edges(p, rank)) if op.startswith("Neighbor") else comm
    for root, n, inside in itertools.product(range(p), (0, 2), (False, True)):
        if op in REDUCTIONS:
            call = reducing(op, p, rank, root, n, inside=inside, given=root % 2 == 0)
        elif op in MOVES:
            data = sent(op, p, root, n, symmetric=inside)
            call = moving(op, p, rank, root, data, inside=inside)
        else:
            call = {}, np.zeros(0), np.zeros(0)
        values, into, due = call
        rest = into[len(due) :].tolist()
        complete(getattr(on, form.format(op, op.lower()))(**values))
        assert into[: len(due)].tolist() == [*due]
        assert into[len(due) :].tolist() == rest or tier() == "mpi"  # MPI may write past the share
    if on is not comm:
        on.Free()


def complete(request: Any) -> None:
    """Complete what a collective has returned: nothing, or a request, which may be persistent."""
    if tier() == "mpi" and request is not None:
        assert isinstance(request, MPI.Request)
        persistent = [request] if isinstance(request, MPI.Prequest) else []
        MPI.Prequest.Startall(persistent)
        MPI.Request.Waitall([request])
        for each in persistent:
            each.Free()
    else:
        assert request is None or request.Wait()


@pytest.mark.mpi_skip
@pytest.mark.parametrize("dtype", ["f8", "i4", "u1", "?", "c16"])
@pytest.mark.parametrize("name", list(_UFUNCS))
def test_threads_reduce_as_mpi_does(name: str, dtype: str) -> None:
    op, data = getattr(MPI, name), [np.array(x, dtype) for x in ([0, 3, 5, 0], [6, 2, 0, 0])]

    def body(comm: Any) -> Any:
        into = np.zeros(4, dtype)
        comm.Allreduce(data[comm.rank], into, op)
        return into.tolist()

    due = data[1].copy()
    try:
        op.Reduce_local(data[0], due)
    except MPI.Exception:
        with pytest.raises(RankFailure, match=f"MPI has no {name} of {due.dtype}"):
            run_threads(2, body)
    else:
        assert run_threads(2, body) == [due.tolist()] * 2


def test_an_operation_has_one_name_and_those_of_the_program_share_one() -> None:
    own, product = MPI.Op.Create(lambda *_: None), {"sendbuf": np.ones(2), "op": MPI.MINLOC}
    names = [*map(op_name, (None, MPI.SUM, MPI.MAX, MPI.MINLOC, own, max))]
    assert names == ["SUM", "SUM", "MAX", "MINLOC", *["an operation of the program"] * 2]
    strange = flow("Allreduce", 0, 1, product | {"recvbuf": np.ones(2)})
    with pytest.raises(ValueError, match=f"reduce with {', '.join(_UFUNCS)}, not MINLOC$"):
        require_reducible(strange)
    own.Free()


SIX, TWO, NO = np.arange(6.0), np.zeros(2), np.zeros(0)
BOTH = {"sendbuf": SIX, "op": None}
SHARES = {"sendbuf": np.arange(4.0), "recvbuf": TWO, "op": None}
GAPS = MPI.DOUBLE.Create_vector(1, 1, 2).Create_resized(0, 16).Commit()


@pytest.mark.parametrize(
    ("op", "values", "said"),
    [
        ("Reduce_scatter", SHARES | {"recvcounts": [4]}, "1 counts for 2 ranks"),
        ("Reduce_scatter", SHARES | {"recvcounts": [2, 2]}, ""),
        ("Reduce_scatter", SHARES | {"recvcounts": None}, ""),
        (
            "Reduce_scatter",
            SHARES | {"recvcounts": [2, 1]},
            "the buffer has 4 elements, its counts add up to 3",
        ),
        (
            "Reduce_scatter",
            SHARES | {"recvcounts": [1, 3]},
            "receives 2 elements, but this rank's share of 4 x float64 has 3",
        ),
        ("Reduce_scatter_block", SHARES, ""),
        ("Reduce_scatter_block", SHARES | {"recvbuf": SIX}, "share of 2 x float64 has 2"),
        ("Allreduce", SHARES, "receives 2 elements, but this rank's share of 4 x float64 has 4"),
        ("Allreduce", BOTH | {"recvbuf": np.arange(6)}, "sends 6 x float64 but receives 6 x int64"),
        ("Allreduce", BOTH | {"recvbuf": SIX}, "share memory"),
        ("Reduce", {"sendbuf": SIX, "recvbuf": None, "op": None, "root": 0}, ""),
        ("Allgather", {"sendbuf": SIX[:2], "recvbuf": SIX[2:]}, ""),
        ("Allgather", {"sendbuf": SIX[:2], "recvbuf": SIX[1:5]}, "share memory"),
        ("Allgather", {"sendbuf": SIX[3:5], "recvbuf": SIX[:4]}, "share memory"),
        ("Alltoall", {"sendbuf": SIX[2:], "recvbuf": SIX[:4]}, "share memory"),
        (
            "Allgather",
            {"sendbuf": TWO, "recvbuf": np.arange(4)},
            "16 bytes of float64, but expects 16 of int64",
        ),
        ("Allgather", {"sendbuf": TWO.view("u1"), "recvbuf": np.arange(4)}, ""),
        ("Allgather", {"sendbuf": TWO, "recvbuf": np.arange(4).view("u1")}, ""),
        ("Allgather", {"sendbuf": NO, "recvbuf": np.arange(0)}, ""),
        (
            "Allgather",
            {"sendbuf": TWO, "recvbuf": SIX},
            "sends itself 16 bytes of float64, but expects 24",
        ),
        ("Allgather", {"sendbuf": [SIX, 1, GAPS], "recvbuf": SIX[:2]}, ""),
        ("Neighbor_allgather", {"sendbuf": TWO, "recvbuf": np.arange(6)}, ""),
        ("Bcast", {"buf": SIX, "root": 1}, ""),
        ("Bcast", {"buf": None, "root": 1}, "needs a datatype, got None alone"),
        ("Gather", {"sendbuf": None, "recvbuf": SIX, "root": 0}, "needs a datatype"),
        ("Scatter", {"sendbuf": SIX, "recvbuf": None, "root": 0}, "needs a datatype"),
    ],
)
def test_arguments_that_contradict_each_other_are_refused(op: str, values: Any, said: str) -> None:
    """They are those of rank 1 of two ranks, whose neighbours are both rank 1."""
    with pytest.raises((TypeError, ValueError), match=said) if said else contextlib.nullcontext():
        flow(op, 1, 2, values, ((1, 1), (1, 1)))


@pytest.mark.parametrize("op", COLLECTIVES)
def test_arguments_are_named_as_by_mpi4py(op: str) -> None:
    """Some may be left out, and any may be given by name."""
    names, defaults = list(COLLECTIVES[op]), {"root": 0, "op": None, "recvcounts": None}
    values = dict(zip(names, "abcde", strict=False))
    for k in range(len(names) + 1):
        by_name = {name: values[name] for name in names[k:]}
        assert bind(op, [*values.values()][:k], by_name) == values
        assert bind(op, [*values.values()][:k], by_name | {"info": 3}) == values | {"info": 3}
        missing = [name for name in names[k:] if name not in defaults]
        if missing:
            with pytest.raises(
                TypeError, match=f"{op} takes .*unknown: {', '.join(sorted(missing))}$"
            ):
                bind(op, "abcde"[:k], {})
        else:
            assert bind(op, "abcde"[:k], {}) == {
                name: values[name] if i < k else defaults[name] for i, name in enumerate(names)
            }
    with pytest.raises(TypeError, match=f"takes {', '.join(names) or 'no arguments'}; .*: unheard"):
        bind(op, [], values | {"unheard": 1})


@pytest.mark.parametrize("op", ["Alltoall", "Ialltoall", "Neighbor_alltoall", "Ineighbor_alltoall"])
def test_messages_between_two_ranks_are_numbered_but_not_those_of_neighbours(op: str) -> None:
    """Neither are the messages of a rank to itself listed, nor those to nobody."""
    parts = [(peer, Part(8 * n, "int64")) for n, peer in enumerate((1, 2, 1, 0, MPI.PROC_NULL, -1))]
    call = Flow(tuple(parts), tuple(parts)).call(op, 0)
    turns = [0, 0, 0 if "eighbor" in op else 1]
    expected = [(1, turns[0], 0, ""), (2, turns[1], 8, "int64"), (1, turns[2], 16, "int64")]
    assert [(x.dest, *x[2:]) for x in call.sends] == expected
    assert [(x.source, *x[2:]) for x in call.receives] == expected
    assert {x.source for x in call.sends} == {x.dest for x in call.receives} == {0}


def test_a_rank_sends_to_its_destinations_and_receives_from_its_sources() -> None:
    op, values = "Neighbor_allgather", {"sendbuf": SIX[:2], "recvbuf": SIX[2:4]}
    call = flow(op, 1, 3, values, ([0], [2])).call(op, 1)
    assert call.sends == [Message(1, 2, 0, 16, "float64")]
    assert call.receives == [Message(0, 1, 0, 16, "float64")]


@pytest.mark.parametrize("later", [False, True])
def test_announced_messages_are_those_of_ranks_that_exist(later: bool) -> None:
    sends, recvs = [(0, 4), (2, 8), (0, 0)], [(1, 3), (1, 5)]
    call = exchange(1, 3, sends, recvs, later)
    assert (call.op, call.equal) == ("announce_exchange", (later,))
    assert call.sends == [Message(1, 0, 0, 4), Message(1, 2, 0, 8), Message(1, 0, 1, 0)]
    assert call.receives == [Message(1, 1, 0, 3), Message(1, 1, 1, 5)]
    assert call.text == f"{sends=}, {recvs=}"
    for peer, ends in itertools.product((-1, 3), ("sends", "recvs")):
        given: Any = {"sends": [], "recvs": [], ends: [(0, 4), (peer, 8)]}
        with pytest.raises(ValueError, match=f"^rank {peer} is not one of the 3 ranks of this c"):
            exchange(1, 3, **given)
