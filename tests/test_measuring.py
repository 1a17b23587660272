"""Measure the constants of a machine: every collective, its preparation, rounds that are slow."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

import sp_core as sp
from sp_core import measuring
from sp_core.collectives import execution
from sp_core.collectives.execution import BoundProgram, Ready
from sp_core.schedules import SCHEDULED
from sp_core.testing import run_threads, spmd
from sp_core.tuning import Curve, FileError, Tuning, modelled


@spmd(2)
def test_measuring_gives_constants_for_every_collective(comm: Any) -> None:
    tuning = measuring.measure(comm, seconds=0.0, sizes=(64, 256))
    assert set(tuning.times) == set(measuring.OPS)
    for op, by_name in tuning.times.items():
        assert {"mpi", *SCHEDULED[op]} - {"hierarchical"} == {*by_name} - {
            "window"
        }  # which is there where ranks share memory
    assert comm.allgather(tuning.alpha) == [tuning.alpha] * comm.size


@pytest.mark.parametrize("op", measuring.OPS)
@spmd(2)
def test_what_is_timed_is_a_vector_of_so_many_bytes(comm: Any, op: str) -> None:
    """All ranks together hold that of an all-gather."""
    with sp.Mesh(comm, sp=2) as mesh:
        x = measuring.vector(op, 48, mesh["sp"])
    assert x.nbytes * (2 if op == "all_gather" else 1) == 48


@spmd(2)
def test_nothing_is_measured_that_cannot_be_kept(
    comm: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measuring, "measure", lambda world: pytest.fail("measured in vain"))
    monkeypatch.setenv("SP_TUNING_DIR", "/proc/nope")
    with pytest.raises(FileError, match=r"/proc/nope.*Set SP_TUNING_DIR to a folder that can"):
        measuring.keep(comm)


@spmd(2)
def test_a_disk_that_fills_meanwhile_is_an_error_on_every_rank(
    comm: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = partial(measuring.measure, seconds=0.0, sizes=(64, 256))
    monkeypatch.setattr(measuring, "measure", few)
    monkeypatch.setattr(measuring, "save", Mock(side_effect=OSError("no room")))
    monkeypatch.setenv("SP_TUNING_DIR", str(tmp_path / "new"))
    with pytest.raises(FileError, match=r"\(no room\).*Set SP_TUNING_DIR"):
        measuring.keep(comm)
    assert [*(tmp_path / "new").glob("*")] == []


def test_preparing_a_call_costs_its_start_and_its_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a clock by which each call takes two seconds, and three more for each of its steps."""
    steps: dict[int, list[int]] = {0: [], 1: []}

    def bind(group: sp.Communicator, *arguments: Any) -> Ready:
        bound = execution.bind(group, *arguments)
        assert isinstance(bound, BoundProgram)
        steps[group.rank].append(len(bound.steps))
        return bound

    def body(comm: Any) -> tuple[float, float]:
        with sp.Mesh(comm, transport="host", sp=comm.size) as mesh:
            return measuring._binding(comm, mesh["sp"])

    monkeypatch.setattr(
        measuring, "execution", SimpleNamespace(bind=bind, BoundProgram=BoundProgram, Ready=Ready)
    )
    monkeypatch.setattr(
        measuring, "_median", lambda world, call, seconds: 2.0 + 3.0 * steps[world.rank][-1]
    )
    assert run_threads(2, body) == [pytest.approx((2.0, 3.0))] * 2
    assert all(few < many for few, many in steps.values())


@spmd(1)
def test_there_is_nothing_to_measure_on_one_rank(comm: Any) -> None:
    with pytest.raises(ValueError, match="mpiexec -n 2"):
        measuring.measure(comm)


def test_a_slow_round_is_no_contestants_fault() -> None:
    """Half of the rounds take ten times as long for both."""
    rounds = {"quick": [1.0, 10.0, 1.0, 10.0, 10.0], "slow": [1.1, 11.0, 1.1, 11.0, 11.0]}
    found = measuring.typical(rounds)
    assert found["slow"] / found["quick"] == pytest.approx(1.1)


def test_the_error_of_the_model_is_its_median_and_its_95th_percentile() -> None:
    """Here each of 21 times is one percent more above the model than the one before."""
    link = Curve(((64, 1e-6), (6400, 2e-6)))
    bare = Tuning({}, (0, 0), {"node": link}, link, link)
    times = {
        size: [modelled(bare, "all_reduce", "ring", (0, 0), size) * (1 + percent / 100)]
        for percent, size in enumerate(range(64, 22 * 64, 64))
    }
    found = measuring.fitted(bare, {"all_reduce": {"ring": times}}).error
    assert found == pytest.approx((0.10 / 1.10, 0.19 / 1.19))


@pytest.mark.parametrize(
    ("seconds", "rounds"), [(0.0, measuring.LEAST_ROUNDS), (1e6, measuring.MOST_ROUNDS), (40.0, 5)]
)
def test_there_are_as_many_rounds_as_the_time_allows(
    seconds: float, rounds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two calls of three and of five seconds."""
    monkeypatch.setattr(measuring, "sample", lambda world, call, repeats=1: call())
    world: Any = SimpleNamespace(allgather=lambda mine: [mine])
    calls: dict[str, measuring.Call] = {"three": lambda: 3.0, "five": lambda: 5.0}
    found = measuring.interleaved(world, calls, seconds)
    assert found == {"three": [3.0] * rounds, "five": [5.0] * rounds}


@pytest.mark.parametrize(
    ("nodes", "node", "network"),
    [
        ((0, 0), (0, 1), None),
        ((0, 1), None, (0, 1)),
        ((0, 1, 2, 1), (1, 3), (0, 1)),
        ((0,), None, None),
    ],
)
def test_messages_are_measured_between_the_first_two_ranks_of_a_node_and_of_two_nodes(
    nodes: tuple[int, ...], node: tuple[int, int] | None, network: tuple[int, int] | None
) -> None:
    assert [measuring._pair(nodes, kind) for kind in ("node", "network")] == [node, network]


def test_a_sample_is_the_time_of_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "time", Mock(perf_counter=Mock(side_effect=[10.0, 16.0])))
    calls: list[None] = []
    assert measuring.sample(Mock(), lambda: calls.append(None), repeats=3) == 2.0
    assert len(calls) == 3
