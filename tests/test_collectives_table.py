"""Test the table of collectives: which targets are reached, and how much time "auto" loses."""

import subprocess
from dataclasses import replace
from typing import Any

import pytest
import torch

import sp_core as sp
from benchmarks.contests.collectives import contestants as timed, table as program
from benchmarks.contests.collectives.contestants import CONTESTANTS, error_of
from benchmarks.contests.collectives.table import KIB, MIB, OURS, ROWS, Row, heat_of, heats, judged
from benchmarks.statistics import FEWEST, MISS
from sp_core.programs.table import SCHEDULED
from sp_core.testing import run_threads
from sp_core.tuning import Curve, Tuning

FLAT = Curve(((1, 1e-9), (1 << 40, 1e-9)))
BARE = Tuning({"host": "here"}, (0, 0), {"node": FLAT}, FLAT, FLAT)
BOTH = ("segmented_ring", "window")
RATIO = Row("ratio", "all_reduce", (64 * MIB,), BOTH, target=2.5, scratch=4 * MIB)


def launch(other: float, ours: float, *, scratch: int = 0, kind: str = "default") -> dict[str, Any]:
    """Make a launch of eight rounds, in which our times differ a little."""
    samples = {
        "library": [other] * 8,
        "segmented_ring": [ours * (1 + 0.001 * place) for place in range(8)],
    }
    heat = {"samples": samples, "scratch": dict.fromkeys(samples, scratch)}
    names = [heat_of(row, nbytes) for row in (RATIO, *ROWS[:2]) for nbytes in row.nbytes]
    return {"status": "ok", "kind": kind, "heats": dict.fromkeys(names, heat)}


def test_every_algorithm_that_two_ranks_have_is_a_contestant() -> None:
    offered = {name for names in SCHEDULED.values() for name in names} - {"hierarchical"}
    assert {*OURS} == offered, "write its name into OURS of contests/collectives/table.py"


@pytest.mark.parametrize(
    ("row", "found", "mark"),
    [
        (RATIO, launch(3.0, 1.0), "reached"),
        (RATIO, launch(2.0, 1.0), "not reached"),
        (RATIO, launch(3.0, 1.0, scratch=5 * MIB), "not reached"),
        (RATIO, launch(2.509, 1.0), "reached, open"),
        (RATIO, [launch(3.0, 1.0), launch(2.0, 1.0)], "not reached, open"),
        (RATIO, launch(3.0, 1.0, kind="tuned"), "not measured"),
        (replace(RATIO, target=None), launch(2.0, 1.0), "-"),
        (replace(RATIO, ours=("window",)), launch(3.0, 1.0), "not measured"),
        (replace(RATIO, other="gloo"), launch(3.0, 1.0), "not measured"),
        (replace(RATIO, microseconds=2.0), launch(1e-3, 1e-3), "not reached, open"),
        (replace(RATIO, microseconds=20.0), launch(1e-3, 1e-3), "reached"),
        (replace(RATIO, microseconds=2.0), launch(1e-3, 2e-3), "not reached"),
    ],
)
def test_what_counts_as_reached(row: Row, found: Any, mark: str) -> None:
    """The rounds of a few launches are counted together."""
    launches = found if isinstance(found, list) else [found]
    required, *_ = judged(row, 64 * MIB, launches)
    assert required.mark == mark
    assert required.found is None or required.found.count == 8 * len(launches)


def test_rounds_of_one_launch_are_not_independent() -> None:
    """With six launches each counts once, so one fast launch does not narrow the interval."""
    assert 2**-FEWEST <= MISS < 2 ** (1 - FEWEST)
    launches = [launch(2.0 + place / 10, 1.0) for place in range(FEWEST)]
    required, *_ = judged(RATIO, 64 * MIB, launches)
    found = required.found
    assert found is not None
    assert (found.count, found.low, found.high) == pytest.approx((FEWEST, 2.0, 2.5), rel=0.01)
    assert judged(RATIO, 64 * MIB, launches[1:])[0].found != found


def test_every_contestant_that_a_row_names_is_there() -> None:
    assert {name for row in ROWS for name in (row.other, *row.ours)} <= set(CONTESTANTS)
    assert all(row.target is None or row.microseconds is None for row in ROWS)
    planned = {
        (row.kind, heat_of(row, nbytes)): (row.op, nbytes, (row.other, *row.ours))
        for row in ROWS
        for nbytes in row.nbytes
    }
    found = {(kind, name): heat for kind in program.KINDS for name, heat in heats(kind).items()}
    assert (found, {kind for kind, _ in found}) == (planned, set(program.KINDS) - {"regret"})


def raced(op: str, nbytes: int, names: list[str]) -> dict[str, Any]:
    """Run one heat of a collective on two ranks as threads; return its samples."""

    def body(world: Any) -> dict[str, Any]:
        with sp.Mesh(world, transport="window", all=world.size) as mesh:
            return timed.heat(world, mesh, op, nbytes, names)

    return run_threads(2, body)[0]


@pytest.mark.parametrize("op", sorted({row.op for row in ROWS}))
def test_every_contestant_is_right_whatever_was_run_before(
    op: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The size is such that a sum in place has several chunks.

    Contestants of other libraries are left out, because they need processes.
    """
    monkeypatch.setattr(timed, "SHARE", 0.0)
    names = [name for name in CONTESTANTS if name not in ("library", "gloo")]
    found = raced(op, 4 * MIB, names)
    assert {"plan of the library", "window", "window, staged"} <= set(found["samples"])
    assert all(len(samples) >= timed.LEAST_ROUNDS for samples in found["samples"].values())


@pytest.mark.parametrize("value", [0.0, float("nan")])
def test_a_wrong_contestant_has_no_time(value: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 has the right result, rank 1 the wrong one."""

    def wrong(field: Any) -> timed.Runner:
        results = timed.expected(field), torch.full((256,), value)
        return timed.Runner(lambda: None, lambda: results[field.world.rank])

    monkeypatch.setitem(CONTESTANTS, "gloo", wrong)
    with pytest.raises(Exception, match=r"gloo: all_reduce of 1024 bytes is off by"):
        raced("all_reduce", KIB, ["plan of the library", "gloo"])


def test_an_error_is_told_in_roundings() -> None:
    wanted = torch.tensor([1.0, -3.0], dtype=torch.float64)
    assert error_of(torch.tensor([1.0, -3.0]), wanted) == 0
    assert error_of(torch.tensor([1.0, -3.0 * (1 + 2**-8)]), wanted) == pytest.approx(1)
    assert error_of(torch.zeros(5), wanted[:0]) == 0


ODD, EVEN = {"mpi": 2.0, "ring": 1.0}, {"mpi": 1.0, "ring": 1.5}


def samples(odd: dict[str, float], even: dict[str, float]) -> Any:
    """Make samples: seconds by algorithm in the rounds that are fitted, and in those that judge."""
    return {
        "all_reduce": {
            name: {64: [odd[name], even[name]] * 3, 4 * KIB: [odd[name], even[name]] * 3}
            for name in odd
        }
    }


def test_a_choice_is_judged_on_rounds_that_it_has_not_seen() -> None:
    found = timed.judged(BARE, samples(ODD, EVEN))
    told = [(case["chosen"], case["best"], case["seconds"] / case["least"]) for case in found]
    assert told == [("ring", "mpi", 1.5)] * 2
    assert not timed.summary(found)["reached"]
    same = timed.summary(timed.judged(BARE, samples(ODD, ODD)))
    assert (same["reached"], same["median"], same["p95"]) == (True, 0, 0)
    assert same["prediction_error"]["p95"] == pytest.approx(0)


def test_a_loss_of_two_microseconds_does_not_count() -> None:
    best = {"seconds": 1e-6, "least": 1e-6, "predicted": 1.0, "plain": 1.0}
    for seconds, lost, beyond in ((2.5e-6, 1.5, 0.0), (4e-6, 3.0, 3.0)):
        found = timed.summary([{**best, "seconds": seconds}, *[best] * 9])
        shares = (found["p95"], found["p95_beyond_microseconds"])
        assert (*shares, found["reached"]) == pytest.approx((lost, beyond, not beyond))


def test_what_is_shown() -> None:
    cases = timed.judged(BARE, samples(ODD, EVEN))
    facts = {
        "transport": {"mpi": {"vendor": "MPICH", "version": "5.0.2"}},
        "env": {"torch": "2", "cores": 2},
        "device": {"name": "a processor"},
    }
    regrets = {"status": "ok", "cases": cases, "summary": timed.summary(cases)}
    launches = [{**launch(3.0, 1.0), **facts}, regrets]
    document = {"ranks": 2, "commit": {"sha": "abc"}, "launches": launches}
    shown = str(list(program.show(document)))
    for text in ("MPICH 5.0.2", "reached", "median regret 50.0%", "all_reduce"):
        assert text in shown
    assert "float32; intervals hold within the 1 launches of a row" in shown
    document["launches"] = launches[:1] * FEWEST
    assert "float32; intervals over 6 launches" in str(list(program.show(document)))


@pytest.mark.parametrize(
    ("kind", "own"),
    [("default", []), ("tuned", ["GLIBC_TUNABLES"]), ("huge", ["THP_MEM_ALLOC_ENABLE"])],
)
@pytest.mark.parametrize("count", [1, 2])
def test_a_launch_has_its_own_environment(
    kind: str, own: list[str], count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If every rank has a core, a library that yields while it waits is no fair opponent."""
    monkeypatch.setattr(program, "cores", lambda: count)
    names = ("OMPI_MCA_mpi_yield_when_idle", "THP_MEM_ALLOC_ENABLE", "GLIBC_TUNABLES")
    inherited = [f"{name}=inherited" for name in names]
    command = ["env", "-i", *inherited, "env", *program.variables(kind)]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = {line.partition("=")[0] for line in shown.splitlines()}
    assert found == {*own, *names[: 2 - count]}
