"""Test the model of collectives' times, and the choice of algorithms."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from oracle.collective_cases import DTYPES, Case, cases
from oracle.schedule_cases import nodes_of
from oracle.tunings import ALPHA, BETA, GAMMA, PLAIN, SLOW, drawn, straight, timed

import sp_core as sp
from sp_core import programs
from sp_core.programs import ALGORITHMS, SCHEDULED, operation, program_of, usable
from sp_core.testing import given, spmd
from sp_core.tuning import (
    Curve,
    Tuning,
    decide,
    model,
    modelled,
    predict,
)


def test_a_curve_goes_through_its_points_and_grows_between_them() -> None:
    curve = Curve(((64, 1e-6), (1024, 2e-6), (4096, 8e-6)))
    assert [curve(size) for size in (1, 64, 1024, 4096, 8192)] == pytest.approx(
        [1e-6, 1e-6, 2e-6, 8e-6, 16e-6]
    )
    between = [curve(size) for size in range(64, 4096, 64)]
    assert between == sorted(between)
    assert curve(2048) == pytest.approx(4e-6)
    assert Curve(((64, 2e-6), (4096, 7e-6)))(4096) == 7e-6
    for points in (
        (),
        ((0, 1.0), (2, 1.0)),
        ((2, 1.0), (1, 1.0)),
        ((1, 0.0),),
        ((1, float("inf")),),
        ((1, float("nan")),),
    ):
        with pytest.raises(ValueError, match="curve"):
            Curve(points)


@pytest.mark.parametrize("size", [2, 4, 8])
def test_the_model_is_that_of_the_papers(size: int) -> None:
    """Compare with Thakur et al., section 4: n bytes in equal pieces, a power of two of ranks."""
    n, logs = 1 << 20, size.bit_length() - 1
    share = (size - 1) / size * n
    expected = {
        ("all_reduce", "ring"): 2 * (size - 1) * ALPHA + 2 * share * BETA + share * GAMMA,
        ("all_reduce", "recursive_doubling"): logs * (ALPHA + n * BETA + n * GAMMA),
        ("all_reduce", "rabenseifner"): 2 * logs * ALPHA + 2 * share * BETA + share * GAMMA,
        ("reduce_scatter", "ring"): (size - 1) * ALPHA + share * (BETA + GAMMA),
        ("all_gather", "recursive_doubling"): logs * ALPHA + share * BETA + n / size * BETA,
        ("broadcast", "binomial"): logs * (ALPHA + n * BETA),
        ("reduce", "binomial"): logs * (ALPHA + n * BETA + n * GAMMA),
    }
    known = replace(PLAIN, links={kind: straight(ALPHA, BETA) for kind in ("node", "network")})
    for nodes in ((0,) * size, tuple(range(size))):
        for (op, algorithm), seconds in expected.items():
            assert modelled(known, op, algorithm, nodes, n) == pytest.approx(seconds, rel=0.05), (
                op,
                algorithm,
            )


def test_the_speed_told_is_that_inside_a_node_or_else_between_nodes() -> None:
    near, far = Curve(((8, 1.0), (64, 16.0))), Curve(((4, 3.0), (16, 8.0)))
    links = {"network": far, "node": near}
    both, one = replace(PLAIN, links=links), replace(PLAIN, links={"network": far})
    assert [(known.alpha, known.beta) for known in (both, one)] == [(1.0, 0.25), (3.0, 0.5)]


def test_a_pipelined_sum_hides_behind_messages_to_other_nodes_only() -> None:
    """Inside a node the core that adds also copies the messages, so both times add up."""
    messages, sums = straight(1e-9, 1e-9), straight(1e-9, 2e-9)
    known = replace(PLAIN, links={"node": messages, "network": messages}, add=sums)
    n, nodes = 1 << 26, ((0, 0), (0, 1), (0, 0, 1, 1))
    near, far, four = (modelled(known, "all_reduce", "segmented_ring", at, n) for at in nodes)
    # each of two ranks sends half of n bytes twice, adds half once
    assert near == pytest.approx(n * 1e-9 + n / 2 * 2e-9, rel=0.02)
    assert far == pytest.approx(n * 1e-9, rel=0.02)
    assert four == pytest.approx(6 * n / 4 * 1e-9, rel=0.02)  # each has a neighbour elsewhere


def test_what_was_measured_corrects_the_model() -> None:
    known = replace(
        PLAIN, times={"all_reduce": {"ring": straight(3e-6, 3e-10), "mpi": straight(1e-6, 9e-10)}}
    )
    for nbytes in (64, 4096, 1 << 22):
        assert predict(known, "all_reduce", "ring", (0, 0), nbytes) == pytest.approx(
            3e-6 + 3e-10 * nbytes, rel=0.02
        )
    more = [predict(known, "all_reduce", "mpi", (0,) * size, 1 << 22) for size in (2, 4, 8)]
    assert more == sorted(more)
    bound = replace(known, bind=(1.0, 2.0))
    for op, name, size in (("all_reduce", "ring", 2), ("broadcast", "binomial", 4)):  # two steps
        call, planned = (
            predict(bound, op, name, (0,) * size, 64, planned=planned) for planned in (False, True)
        )
        assert call == pytest.approx(planned + 1 + 2 * 2)


def test_less_than_one_number_takes_as_long_as_one() -> None:
    """In a ring of four ranks, one number takes a rank at most four steps, two numbers five."""
    one, two, less = (
        modelled(PLAIN, "all_reduce", "ring", (0,) * 4, nbytes) for nbytes in (4, 8, 1)
    )
    assert less == one > PLAIN.start
    assert (round(one / ALPHA), round(two / ALPHA)) == (4, 5)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("count", [1, 1024])
def test_a_prediction_without_times_is_that_of_the_slowest_rank(
    size: int, apart: bool, count: int
) -> None:
    """The vector has 1024 elements per rank, or one in all. Some ranks may be on another node."""
    nodes = (*(0,) * (size - size // 2), *(int(apart),) * (size // 2))
    count, pieces = (1, (1, *(0,) * (size - 1))) if count == 1 else (count * size, (count,) * size)
    segment = programs.segment_length(count, size, 4)
    for op in ("all_gather", "reduce_scatter", "all_reduce", "all_to_all"):
        mpi = min(modelled(SLOW, op, name, nodes, 4 * count) for name in SCHEDULED[op])
        assert modelled(SLOW, op, "mpi", nodes, 4 * count) == mpi
        for name in {*SCHEDULED[op]} - {"hierarchical"}:
            tasks = [
                operation(op, rank, size, pieces, segment=segment, nodes=nodes)
                for rank in range(size)
            ]
            slowest = max(
                model._seconds(SLOW, program_of(task, name), task.rank, nodes) for task in tasks
            )
            found = predict(SLOW, op, name, nodes, 4 * count)
            assert found == modelled(SLOW, op, name, nodes, 4 * count)
            assert found == pytest.approx(slowest), (op, name)


@pytest.mark.parametrize(("size", "ranks"), [(8, range(8)), (9, (0, 1, 8)), (12, (0, 1, 11))])
def test_of_more_than_eight_ranks_three_are_looked_at(size: int, ranks: Sequence[int]) -> None:
    for op, names in SCHEDULED.items():
        for name in names:
            assert [*model._programs(op, name, (0,) * size, 1 << 12)] == [*ranks], (op, name)


def test_a_hierarchy_wins_where_the_network_is_slow() -> None:
    nodes, names = (0, 1) * 4, ("ring", "hierarchical", "recursive_doubling")
    seconds = {name: modelled(SLOW, "all_reduce", name, nodes, 1 << 24) for name in names}
    assert min(seconds, key=lambda name: seconds[name]) == "hierarchical"
    assert modelled(PLAIN, "all_reduce", "ring", nodes, 64) == float("inf")


def test_the_quickest_is_taken_and_the_library_where_nothing_is_known() -> None:
    known = replace(
        PLAIN, times={"all_reduce": {"mpi": straight(1e-6, 9e-10), "ring": straight(1e-5, 3e-10)}}
    )
    among = ("mpi", "ring")

    def taken(nbytes: int, nodes: tuple[int, ...] = (0, 0), tuning: Tuning = known) -> str:
        return decide(tuning, "all_reduce", nodes, nbytes, among=among, planned=True)

    assert [taken(nbytes) for nbytes in (0, 64, 4096, 1 << 20)] == ["mpi", "mpi", "mpi", "ring"]
    assert taken(1 << 20, (0,)) == taken(1 << 20, (0, 1)) == taken(1 << 20, tuning=PLAIN) == "mpi"
    assert taken(1 << 20, (0, 1), replace(known, links=SLOW.links)) == "ring"
    equal = timed({"all_reduce": {"ring": 1.0, "mpi": 1.0}})
    assert decide(equal, "all_reduce", (0, 0), 8, among=("ring", "mpi"), planned=True) == "mpi"
    alone = timed({"all_reduce": {"ring": 1.0}})
    assert (taken(8, tuning=alone), taken(8, (0, 1), alone)) == ("ring", "mpi")
    model._decided.cache_clear()
    assert {taken(nbytes) for nbytes in range(1 << 10, 1 << 11)} == {"mpi"}
    assert model._decided.cache_info().currsize == 1 + 4  # four sizes for each doubling
    costly = replace(known, bind=(1.0, 0.0))
    assert decide(costly, "all_reduce", (0, 0), 1 << 20, among=among, planned=False) == "mpi"


@given(
    max_examples=40,
    case=cases(DTYPES, list(SCHEDULED), "auto"),
    seed=st.integers(0, 99),
    layout=st.integers(0, 9),
)
def test_whatever_auto_takes_is_right(comm: Any, case: Case, seed: int, layout: int) -> None:
    """Rank 0 and the others have different random constants. Calls and plans give right results."""
    tuning = replace(drawn(seed), links=SLOW.links)
    with sp.Mesh(
        comm,
        nodes=nodes_of(comm.size, layout),
        tuning=drawn(comm.rank) if comm.rank else tuning,
        sp=comm.size,
    ) as mesh:
        inputs = case.inputs(comm.size)
        wanted = case.expected(inputs, comm.rank, comm.size)
        assert torch.equal(case.call(inputs[comm.rank], mesh["sp"]), wanted)
        if case.op != "shift":
            made = sp.plan(case.op, inputs[comm.rank], comm=mesh["sp"], **case.arguments(comm.size))
            assert len(set(comm.allgather(made.algorithm))) == 1
            assert torch.equal(made.run(), wanted)


def small_ones_by(name: str) -> Tuning:
    """Return constants with which `name` is quickest for 1 or 2 bytes, and the library for more."""
    rising = Curve(((1, 0.1), (2, 0.1), (4, 10.0)))
    return replace(
        PLAIN, times={"all_reduce": {"mpi": Curve(((1, 1.0), (1 << 40, 1.0))), name: rising}}
    )


@spmd(3)
def test_in_place_and_with_nan_by_what_auto_takes(comm: Any) -> None:
    """Both make buffers before the algorithm runs. The buffers must be for that algorithm."""
    everyone = ("mpi", *SCHEDULED["all_reduce"])
    always = [
        timed({"all_reduce": dict.fromkeys(everyone, 1.0) | {name: 0.1}}) for name in everyone
    ]
    for tuning in (*always, *map(small_ones_by, SCHEDULED["all_reduce"])):
        with sp.Mesh(comm, tuning=tuning, sp=comm.size) as mesh:
            x = torch.full((40,), float(comm.rank))
            assert torch.equal(
                sp.all_reduce_(x, comm=mesh["sp"]), torch.full((40,), sum(range(comm.size)) * 1.0)
            )
            planned = torch.full((40,), 2.0)
            made = sp.plan("all_reduce_", planned, comm=mesh["sp"])
            assert made.run()[0] == 2 * comm.size
            assert made._prepared.recv is not None
            assert (made._prepared.recv.data_ptr() == planned.data_ptr()) == (
                made.algorithm != "mpi"
            )
            holes = torch.tensor([float("nan") if comm.rank else 1.0, comm.rank * 1.0])
            greatest = sp.all_reduce(holes, comm=mesh["sp"], op="max")
            assert greatest[0].isnan()
            assert greatest[1] == comm.size - 1


def test_a_hierarchy_is_offered_only_where_there_are_nodes() -> None:
    for nodes, there in (((0, 0), False), ((0, 1), False), ((0, 0, 1), True)):
        assert ("hierarchical" in usable(nodes, "all_reduce", window=False)) == there
    assert usable((0, 0), "all_gather", window=True) == tuple(
        name for name in ALGORITHMS["all_gather"] if name != "auto"
    )
