"""Test how a machine's constants are measured: collectives, their preparation, slow rounds."""

import threading
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch.overrides import TorchFunctionMode

import sp_core as sp
from sp_core import measuring
from sp_core.collectives import execution
from sp_core.collectives.execution import BoundProgram, Ready
from sp_core.mesh import fingerprint
from sp_core.programs import program_of, segment_length, usable
from sp_core.testing import run_threads, spmd
from sp_core.transport import HostTransport
from sp_core.tuning import LINKS, Curve, FileError, Tuning, default_path, load, modelled, save


class Clock(threading.local):
    """A clock for each rank. Only the work that is to be measured advances it."""

    now = 0.0

    def taking(self, seconds: float, work: Callable[..., Any], *given: Any, **more: Any) -> Any:
        """Do some work that takes exactly `seconds`, whatever its parts would take."""
        end = self.now + seconds
        result = work(*given, **more)
        self.now = end
        return result


def take_times_of(truth: Tuning, clock: Clock, substitute: Any) -> list[str]:
    """Let all messages, plans and preparations take the time that `truth` says.

    Return a list to which each later preparation and release appends an entry.
    """
    told: list[str] = []
    post, release = HostTransport.post, BoundProgram.release

    def prepare(group: sp.Communicator, moves: Any, x: torch.Tensor, *given: Any) -> Ready:
        bound: Ready = clock.taking(0.0, execution.bind, group, moves, x, *given)
        assert isinstance(bound, BoundProgram)
        clock.now += truth.bind[0] + truth.bind[1] * len(bound.steps)
        told.append(f"bind {x.nbytes}")
        return bound

    def plan(op: str, x: torch.Tensor, *, comm: Any, algorithm: str, **more: Any) -> Any:
        made = sp.plan(op, x, comm=comm, algorithm=algorithm, **more)
        nbytes = x.nbytes * (comm.size if op == "all_gather" else 1)
        seconds = truth.times[op][algorithm](nbytes)
        return SimpleNamespace(run=partial(clock.taking, seconds, made.run))

    def timed_post(self: HostTransport, sends: Any, recvs: Any, tag: int) -> Any:
        for peer, x in sends:
            same = truth.nodes[self._comm.rank] == truth.nodes[peer]
            clock.now += truth.links["node" if same else "network"](x.nbytes)
        return post(self, sends, recvs, tag)

    def told_release(self: BoundProgram) -> None:
        told.append("release")
        release(self)

    substitute(HostTransport, post=timed_post)
    substitute(BoundProgram, release=told_release)
    parts = {"bind": prepare, "BoundProgram": BoundProgram, "Ready": Ready}
    substitute(
        measuring,
        execution=SimpleNamespace(**parts),
        plan=plan,
        time=SimpleNamespace(perf_counter=lambda: clock.now),
    )
    return told


class Working(TorchFunctionMode):
    """Let sums and copies take the time that `truth` says."""

    def __init__(self, truth: Tuning, clock: Clock) -> None:
        super().__init__()
        self.curves, self.clock = {torch.add: truth.add, torch.Tensor.copy_: truth.copy}, clock

    def __torch_function__(self, work: Any, types: Any, given: Any = (), more: Any = None) -> Any:
        if work in self.curves:
            self.clock.now += self.curves[work](given[0].nbytes)
        return work(*given, **(more or {}))


FEW = (48, 192)
"""Sizes in bytes that two ranks and three ranks can split evenly."""


def curve(*seconds: float) -> Curve:
    return Curve(tuple(zip(FEW, seconds, strict=True)))


@pytest.mark.parametrize(
    ("nodes", "transport", "seconds"), [((0, 0), "window", 9e3), ((0, 0, 1), "host", 2.4e4)]
)
def test_the_constants_of_a_machine_that_follows_the_model_are_found(
    nodes: tuple[int, ...], transport: str, seconds: float, substitute: Any
) -> None:
    """The measurement takes between 93% and 100% of the seconds that were asked for."""
    links = {"node": curve(1.0, 2.0), "network": curve(4.0, 32.0)}
    links = {kind: links[kind] for kind in LINKS[: len(set(nodes))]}
    truth = Tuning({}, nodes, links, curve(0.5, 0.75), curve(0.25, 1.5), start=8.0, bind=(2.0, 3.0))
    for op in measuring.OPS:
        for name in usable(nodes, op, window=transport == "window"):
            slower = 9.0 if name == "mpi" else 1.0  # MPI follows no model
            times = [slower * modelled(truth, op, name, nodes, size) for size in FEW]
            truth.times.setdefault(op, {})[name] = curve(*times)
    clock = Clock()
    told = take_times_of(truth, clock, substitute)
    mesh = partial(sp.Mesh, nodes=nodes)
    substitute(
        measuring, Mesh=lambda *world, **given: mesh(*world, **given | {"transport": transport})
    )

    def body(comm: Any) -> tuple[Tuning, float]:
        with Working(truth, clock):
            return measuring.measure(comm, seconds=seconds, sizes=FEW), clock.now

    for found, now in run_threads(len(nodes), body):
        plain = (found.nodes, found.links, found.add, found.copy, found.bind, found.fingerprint)
        assert plain == (nodes, links, truth.add, truth.copy, truth.bind, fingerprint())
        assert (found.start, *found.error) == pytest.approx((8.0, 0.0, 0.0))
        assert points(found) == [(*one, pytest.approx(s)) for *one, s in points(truth)]
        assert 0.93 < now / seconds < 1.0
        assert datetime.fromisoformat(found.measured_at).tzinfo == UTC
    assert {*told} == {"release", f"bind {4 << 10}", f"bind {8 << 20}"}
    assert told.count("release") == len(told) / 2 - len(nodes)


def points(tuning: Tuning) -> list[Any]:
    """Return the times of all collectives as rows of name, algorithm, bytes and seconds."""
    return [
        (op, name, *point)
        for op, by_name in tuning.times.items()
        for name, one in by_name.items()
        for point in one.points
    ]


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
    comm: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, substitute: Any
) -> None:
    few = partial(measuring.measure, seconds=0.0, sizes=(64, 256))
    substitute(measuring, measure=few, save=Mock(side_effect=OSError("no room")))
    monkeypatch.setenv("SP_TUNING", str(tmp_path / "damaged.json"))  # it is not read
    monkeypatch.setenv("SP_TUNING_DIR", str(tmp_path / "new"))
    with pytest.raises(FileError, match=r"\(no room\).*Set SP_TUNING_DIR"):
        measuring.keep(comm)
    assert [*(tmp_path / "new").glob("*")] == []


def test_the_first_rank_keeps_what_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, substitute: Any
) -> None:
    link = Curve(((64, 1e-6),))
    made = Tuning(fingerprint(), (0, 0), {"node": link}, link, link, start=3.0)
    saved = Mock(side_effect=save)
    substitute(measuring, measure=lambda world: made, save=saved)
    monkeypatch.setenv("SP_TUNING_DIR", str(tmp_path))
    run_threads(2, measuring.keep)
    saved.assert_called_once()
    assert load(default_path(fingerprint())).start == 3.0


@pytest.mark.parametrize("size", [2, 3, 31, 32, 33, 128, 1024])
def test_the_preparation_of_a_step_is_found_for_any_number_of_ranks(
    size: int, substitute: Any
) -> None:
    """A call takes as long as on its slowest rank, which is not always this one."""
    clock, group = Clock(), Mock(rank=0, size=size, device="cpu", nodes=(0,) * size)

    def steps(name: str, moves: Any, rank: int) -> int:
        segment = segment_length(moves.elements, size, moves.itemsize)
        return len(program_of(moves._replace(rank=rank, segment=segment), name).steps)

    def bind(_: Any, moves: Any, send: Any, recv: Any, name: str, scratch: Any) -> Any:
        most[:] = [max(steps(name, moves, rank) for rank in {0, 1, size // 2, size - 1})]
        clock.now += 2.0 + 3.0 * most[0]
        return Mock(spec=BoundProgram, steps=range(steps(name, moves, 0)))

    most: list[int] = []
    world: Any = Mock(allgather=lambda mine: [mine, *(most if isinstance(mine, int) else [])])
    parts = {"bind": bind, "BoundProgram": BoundProgram, "Ready": Ready}
    timer = SimpleNamespace(perf_counter=lambda: clock.now)
    substitute(measuring, execution=SimpleNamespace(**parts), time=timer)
    assert measuring._binding(world, group) == (2.0, 3.0)


@pytest.mark.parametrize(("size", "skipped"), [(16, 0), (17, 1), (1024, 3)])
def test_no_vector_is_measured_that_has_too_few_elements_to_split(
    size: int, skipped: int, substitute: Any
) -> None:
    """The smallest vector has 16 elements. Constants may have other sizes for each collective."""
    group: Any = SimpleNamespace(size=size, nodes=(0,) * size, window=None)
    substitute(
        measuring, plan=Mock(), interleaved=lambda _, runs, *given: {name: [1.0] for name in runs}
    )
    samples = measuring.collectives(Mock(), group, 0.0)
    for op, by_name in samples.items():
        first = skipped if op in ("all_gather", "all_to_all") else 0
        assert {tuple(by_size) for by_size in by_name.values()} == {measuring.SIZES[first:]}
    link = Curve(((64, 1e-6),))
    bare = Tuning({}, (0, 0), {"node": link}, link, link)
    times = measuring.fitted(bare, samples).times
    assert times["all_gather"]["mpi"].points[0] == (measuring.SIZES[skipped], 1.0)


def test_sizes_are_powers_of_four_from_64_bytes_to_64_mib() -> None:
    assert tuple(1 << bits for bits in range(6, 28, 2)) == measuring.SIZES


@spmd(1)
def test_there_is_nothing_to_measure_on_one_rank(comm: Any) -> None:
    with pytest.raises(ValueError, match="mpiexec -n 2"):
        measuring.measure(comm)


def test_a_slow_round_is_no_contestants_fault() -> None:
    """Slow rounds take ten times as long for both contestants, so their ratio stays the same."""
    rounds = {"quick": [1.0, 10.0, 1.0, 10.0, 10.0], "slow": [1.1, 11.0, 1.1, 11.0, 11.0]}
    found = measuring.typical(rounds)
    assert found["slow"] / found["quick"] == pytest.approx(1.1)


def test_the_error_of_the_model_is_its_median_and_its_95th_percentile() -> None:
    """The 20 times of this test are 0 to 19 percent above the model."""
    link = Curve(((64, 1e-6), (6400, 2e-6)))
    bare = Tuning({}, (0, 0), {"node": link}, link, link)
    times = {
        size: [modelled(bare, "all_reduce", "ring", (0, 0), size) * (1 + percent / 100)]
        for percent, size in enumerate(range(64, 21 * 64, 64))
    }
    found = measuring.fitted(bare, {"all_reduce": {"ring": times}}).error
    assert found == pytest.approx(((0.09 / 1.09 + 0.10 / 1.10) / 2, 0.18 / 1.18))


@pytest.mark.parametrize(
    ("times", "seconds", "rounds", "repeats"),
    [
        ((3.0, 5.0), 0.0, 3, (1, 1)),
        ((3.0, 5.0), 80.0, 5, (1, 1)),
        ((3.0, 5.0), 1e6, 15, (1, 1)),
        ((3e-5, 1e-7), 8e-4, 4, (3, 50)),
    ],
)
def test_calls_take_turns_as_often_as_the_time_allows(
    times: tuple[float, float],
    seconds: float,
    rounds: int,
    repeats: tuple[int, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The second rank takes twice as long. On both, a first call takes a minute more."""
    clock, calls = Clock(), list[str]()
    monkeypatch.setattr(measuring, "time", SimpleNamespace(perf_counter=lambda: clock.now))
    two = dict(zip("ab", times, strict=True))

    def call(name: str) -> None:
        clock.now += two[name] + 60.0 * (name not in calls)
        calls.append(name)

    def both(mine: Any) -> list[Any]:
        slow = (
            {name: [2 * s for s in took] for name, took in mine.items()} if calls[8:] else 2 * mine
        )
        return [mine, slow]

    world: Any = SimpleNamespace(allgather=both, Barrier=lambda: calls.append("-"))
    found = measuring.interleaved(world, {name: partial(call, name) for name in two}, seconds)
    assert found == {name: pytest.approx([2 * took] * rounds) for name, took in two.items()}
    a, b = (f"-{name * number}" for name, number in zip("ab", repeats, strict=True))
    assert "".join(calls) == "-a-a-b-b" + "".join(islice(cycle((a, b, b, a)), 2 * rounds))


def test_a_call_takes_some_time_on_a_clock_that_shows_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(measuring, "time", SimpleNamespace(perf_counter=lambda: 5.0))
    world: Any = SimpleNamespace(allgather=lambda mine: [mine], Barrier=lambda: None)
    assert min(measuring.interleaved(world, {"quick": str}, 0.0)["quick"]) > 0


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
