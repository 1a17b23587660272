"""The comparison tests itself: its self-test and its resampling find what they must, or fail."""

from __future__ import annotations

import argparse
import itertools
import random
import runpy
import time
from pathlib import Path

import pytest
import torch
from kit.comparison import RING, Machine, compared, pair_of_sides

from benchmarks.compare import resample, selftest
from benchmarks.compare.result import Result, Row, Told
from benchmarks.compare.rule import Verdict
from benchmarks.compare.sides import Side
from benchmarks.launching import UsageError

pytestmark = pytest.mark.mpi_skip  # no communication


@pytest.fixture
def stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Three comparisons of a commit with itself."""
    monkeypatch.setattr("kit.comparison.pair_of_sides", same_sides)
    folders = [tmp_path / str(number) for number in range(3)]
    for number, folder in enumerate(folders):
        folder.mkdir()
        compared(folder, Machine(number, noise=0.02), seed=number)
    return folders


def same_sides() -> tuple[Side, Side]:
    base, head = pair_of_sides()
    return base, Side("head", head.root, head.python, Told("head", base.told.sha))


def test_resampling_finds_no_regression_and_a_delay(
    stored: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert resample.main([*map(str, stored), "--comparisons", "50", "--case", RING]) == 0
    shown = capsys.readouterr().out
    assert "50 comparisons of identical commits, 6 cases each: 0 say regressed" in shown
    assert f"{RING}, P=2, 20% more: found 100 of 100" in shown


def test_resampling_throws_every_coin_again() -> None:
    """A second worktree that always looks slower is no change, and must not look like one."""
    runs = [[(1.0, 1.3)] * 10 for _ in range(3)]
    draw = random.Random(1)
    alarms = [resample.Stored(0.10, runs).again(draw) for _ in range(200)]
    assert resample.Verdict.REGRESSED not in alarms
    assert len(set(map(tuple, resample.thrown(runs[0], draw)))) == 2


def test_resampling_can_fail(
    stored: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = [*map(str, stored), "--comparisons", "5"]
    assert resample.main([*chosen, "--case", RING, "--extra", "0.05"]) == 1
    monkeypatch.setattr(
        resample,
        "judge",
        lambda screen, confirm, delta: argparse.Namespace(verdict=resample.Verdict.REGRESSED),
    )
    assert resample.main(chosen) == 1
    (tmp_path / "different").mkdir()
    monkeypatch.setattr("kit.comparison.pair_of_sides", pair_of_sides)
    compared(tmp_path / "different", Machine(), (1,))
    assert resample.main([str(tmp_path / "different")]) == 2
    assert resample.main([str(tmp_path)]) == 2


def row(case: str, ranks: int, verdict: str) -> Row:
    return Row(case, ranks, Verdict(verdict), delta=0.12)


def result(rows: list[Row], gateable_share: float = 1.0) -> Result:
    told = Told("HEAD", "a" * 40)
    return Result(base=told, head=told, rows=rows, gateable_share=gateable_share, exit_code=0)


PLANTED = selftest.PLANTED_CASE


@pytest.mark.parametrize(
    ("rows", "wrong"),
    [
        (
            [
                row(PLANTED, 1, "regressed"),
                row(PLANTED, 2, "regressed"),
                row("other", 2, "inconclusive"),
            ],
            0,
        ),
        (
            [
                row(PLANTED, 1, "ungateable"),
                row(PLANTED, 2, "regressed"),
                row(PLANTED, 4, "oversubscribed"),
            ],
            0,
        ),
        ([row(PLANTED, 1, "regressed"), row(PLANTED, 2, "inconclusive")], 1),
        ([row(PLANTED, 1, "regressed"), row("other", 2, "regressed")], 1),
        ([row(PLANTED, 1, "ungateable")], 1),
        ([], 1),
    ],
)
def test_the_selftest_knows_what_must_be_found(rows: list[Row], wrong: int) -> None:
    assert len(selftest.planted_found(result(rows))) == wrong


@pytest.mark.parametrize("verdict", ["regressed", "improved", "missing", "mismatch", "new"])
def test_the_selftest_knows_what_must_not_be_found(verdict: str) -> None:
    rows = [row("a", 1, "no regression"), row("b", 1, verdict)]
    assert len(list(selftest.nothing_found(result(rows, 1.0)))) == 1
    assert len(list(selftest.nothing_found(result(rows[:1], 0.5)))) == 1
    assert list(selftest.nothing_found(result(rows[:1], 0.8))) == []


def test_the_planted_work_takes_its_share(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the last rank, forward only; the clock goes on by one a reading, by ten in the call."""
    path = tmp_path / selftest.PLANTED_IN
    path.parent.mkdir(parents=True)
    call = "def ring_attention(*, comm):\n    return [time.perf_counter() for _ in range(10)]\n"
    path.write_text(f"import time\nimport torch\n\n\n{call}")
    side = selftest.plant(Side("head", tmp_path, "python", Told("HEAD", "a" * 40)), 3.0)
    assert (side.told.sha, "200% more work" in side.told.ref) == (None, True)
    clock = itertools.count()
    monkeypatch.setattr(time, "perf_counter", lambda: float(next(clock)))
    attention = runpy.run_path(str(path))["ring_attention"]

    def took(rank: int) -> int:
        before = next(clock)
        attention(comm=argparse.Namespace(rank=rank, size=2))
        return next(clock) - before

    with torch.no_grad():
        others, last = took(0), took(1)
    assert (others, took(1)) == (13, 13)
    assert last == 11 * 3 + 2
    path.write_text("")
    with pytest.raises(UsageError, match="plant the work elsewhere"):
        selftest.plant(side, 1.5)


def test_as_much_is_planted_as_the_case_needs() -> None:
    assert selftest.planted_delta([result([row(PLANTED, 2, "no regression")])]) == 0.12
    assert selftest.planted_delta([]) == 0.10
