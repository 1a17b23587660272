"""Test that the table of counters is exact, and that one more message, call or tensor is found."""

import time
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from kit.meshed import meshed

import sp_core as sp
from benchmarks import counters
from benchmarks.cases import bench_schemes
from benchmarks.cases.case import measure, meshes, problem
from benchmarks.cases.setting import LAYERS
from benchmarks.sample import Counts
from sp_core.counters import Counters
from sp_core.testing import run_threads, spmd

SHIFT = partial(sp.shift_start, offset=1, dim=0)
SOME = 5  # of so many entries one is counted here; `nox -s counters` counts all


def some(ranks: int) -> list[Any]:
    """Return some of the table's cases: each scheme, the last of the layers, and the LLaMA's."""
    cases = counters.chosen(ranks)
    return cases[::SOME] + cases[-4:]


@spmd()
def test_what_is_counted_is_what_the_table_says(comm: Any) -> None:
    """The numbers are the same with ranks as threads and under mpiexec."""
    found = counters.count(some(comm.size), comm)
    table = counters.load()
    assert counters.differences(found, {name: table[name] for name in found}) == []


@pytest.mark.mpi_skip
@spmd(2, 4)
def test_bytes_are_those_of_messages_where_ranks_share_no_memory(
    comm: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mesh over several nodes has no window, and sends messages instead."""
    monkeypatch.setattr("sp_core.communicator.make_window", lambda *_: (None, "several nodes"))
    cases, cpu = bench_schemes.cases(comm.size, shape=counters.ATTENTION), torch.device("cpu")
    for one in cases:
        if (one.transport, one.direction) == ("window", "both"):
            with meshes(one, comm, cpu) as mesh:
                work = bench_schemes.build(one, mesh, lambda: None)
                assert problem(measure(work, comm, cpu, Counts(1, 1, 1), memory=False)) is None


def late(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls `function` 20 ms later."""

    def call(*given: Any, **named: Any) -> Any:
        time.sleep(0.02)
        return function(*given, **named)

    return call


@pytest.mark.parametrize("form", ["call", "start", "plan"])
@spmd(1, 2)
@meshed()
def test_the_seconds_of_a_collective_have_what_it_does_at_its_start(
    mesh: sp.Mesh, form: str
) -> None:
    plan = sp.plan("all_reduce", torch.ones(3), comm=mesh["sp"], algorithm="ring")
    begun = time.perf_counter()
    vars(plan._bound)["begin"] = late(plan._bound.begin)
    mesh["sp"].counters.reset()
    if form == "plan":
        plan.run()
    else:
        mesh["sp"].wait(plan._bound.start(once=form == "call"), "all_reduce")
    seconds = mesh["sp"].counters["all_reduce"].seconds
    assert 0.02 <= seconds <= time.perf_counter() - begun


@pytest.mark.parametrize("start", [sp.all_reduce_start, SHIFT], ids=["all_reduce", "shift"])
@spmd(2)
@meshed()
def test_what_a_transport_does_at_a_start_is_counted(mesh: sp.Mesh, start: Any) -> None:
    transport, begun = mesh["sp"].transport, time.perf_counter()
    for name in ("start", "exchange"):
        vars(transport)[name] = late(getattr(transport, name))
    start(torch.ones(3), comm=mesh["sp"], algorithm="mpi").wait()
    (count,) = (each for name, each in mesh["sp"].counters.items() if name != "control")
    assert 0.02 <= count.seconds <= time.perf_counter() - begun


@pytest.mark.parametrize("algorithm", ["ring", "window", "mpi"], ids="by {}".format)
@spmd(2)
@meshed(transport="window")
def test_no_call_counts_more_seconds_than_the_clock(mesh: sp.Mesh, algorithm: Any) -> None:
    counts, how = mesh["sp"].counters, {"comm": mesh["sp"], "algorithm": algorithm}
    x = torch.ones(9)
    for call in (sp.plan("all_reduce", x, **how).run, partial(sp.all_reduce, x, **how)):
        counts.reset()
        begun = time.perf_counter()
        call()
        spent = time.perf_counter() - begun
        assert {*counts} == {"all_reduce", "control"}
        assert all(0 < count.seconds <= spent for count in counts.values())


@spmd(1)
@meshed()
def test_a_snapshot_stays_as_it_is(mesh: sp.Mesh) -> None:
    told = []
    for _ in range(2):
        sp.all_reduce(torch.ones(9), comm=mesh["sp"])
        told.append(mesh["sp"].counters.snapshot())
    assert [every["all_reduce"]["calls"] for every in told] == [1, 2]


def test_a_total_has_the_most_scratch_of_a_call_and_agreements_if_asked() -> None:
    counts = Counters()
    for op, nbytes in (("all_reduce", 3), ("all_gather", 5), ("all_reduce", 4)):
        counts[op].add(scratch=nbytes)
    assert [counts["all_reduce"].scratch, counts.total().scratch] == [4, 5]
    counts["control"].add()
    assert [counts.total(control=control).calls for control in (False, True)] == [3, 4]


@pytest.mark.mpi_skip
def test_no_constants_of_earlier_measurements_are_used(
    monkeypatch: pytest.MonkeyPatch,
    substitute: Callable[..., None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("SP_TUNING", "/proc/nope")
    substitute(counters, SIZES=(2,), chosen=Mock(return_value=some(2)[:1]), load=dict)
    assert counters.main([]) == 1
    assert "1 entries, 1 differences" in capsys.readouterr().out


def test_the_table_has_every_case_and_no_other() -> None:
    names = [f"{case.id} P={ranks}" for ranks in counters.SIZES for case in counters.chosen(ranks)]
    what_to_do = "run nox -s counters -- --write, and commit benchmarks/counters.json"
    assert sorted(counters.load()) == sorted(names), what_to_do
    assert counters.TABLE.read_text() == counters.text(counters.load()), what_to_do
    suites = {case.layer for case in counters.chosen(2)}
    assert suites == {*LAYERS}, "let `chosen` in benchmarks/counters.py take cases of each suite"


@pytest.mark.mpi_skip
@pytest.mark.parametrize(
    ("fault", "fields"),
    [
        ("message", {"bytes_sent", "calls", "messages"}),
        ("call", {"calls"}),
        ("tensor", {"peak_bytes"}),
    ],
)
def test_one_too_many_is_red(fault: str, fields: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    case = next(one for one in counters.chosen(2) if one.id.startswith("schemes/ring"))
    attention_of = bench_schemes.attention_of

    def faulty(case: Any, mesh: Any) -> Any:
        def attend(*tensors: Any, **arguments: Any) -> Any:
            comm, more = mesh["sp"], torch.zeros(1000 if fault == "tensor" else 0)
            if fault == "message":
                sp.shift(torch.zeros(1), comm=comm, sizes=(1, 1))
            if fault == "call":
                comm.wait(comm.exchange([], []), "exchange")
            return attention_of(case, mesh)(*tensors, **arguments) + more.sum()

        return attend

    monkeypatch.setattr(bench_schemes, "attention_of", faulty)
    found = run_threads(2, lambda comm: counters.count([case], comm))[0]
    told = counters.differences(found, {name: counters.load()[name] for name in found})
    assert {line.split(": ")[1] for line in told} == fields


def test_differences_name_what_is_new_gone_or_changed() -> None:
    table = {"a": {"messages": 1}, "b": {"messages": 1}}
    found = {"b": {"messages": 2, "bytes_sent": 4}, "c": {"messages": 1}}
    assert counters.differences(found, table) == [
        "a: no longer measured",
        "c: not in the table",
        "b: bytes_sent: None -> 4",
        "b: messages: 1 -> 2",
    ]
