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
from kit.comparison import RING, Machine, compared

from benchmarks.compare import selftest
from benchmarks.compare.result import Key, Result, Row, Told
from benchmarks.compare.rule import Verdict
from benchmarks.compare.sides import Side
from benchmarks.launching import UsageError

pytestmark = pytest.mark.mpi_skip  # no communication


@pytest.fixture
def stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[Key, selftest.Stored]:
    """The launches of three comparisons of a commit with itself."""
    monkeypatch.setattr(selftest, "PLANTED_CASE", RING)
    results = []
    for number in range(3):
        folder = tmp_path / f"same-{number}"
        folder.mkdir()
        results.append(compared(folder, Machine(number, noise=0.02), seed=number))
    return selftest.load(results, tmp_path)


def test_resampling_finds_no_regression_and_a_delay(
    stored: dict[Key, selftest.Stored], capsys: pytest.CaptureFixture[str]
) -> None:
    assert selftest.resampled(stored, 50) == []
    shown = capsys.readouterr().out
    assert "0 of 50 resampled comparisons of 6 cases say regressed" in shown
    assert f"{RING}, P=2, 20% more: found 100 of 100" in shown


def test_resampling_throws_every_coin_again() -> None:
    """A second worktree that always looks slower is no change, and must not look like one."""
    runs = [[(1.0, 1.3)] * 10 for _ in range(3)]
    draw = random.Random(1)
    alarms = [selftest.Stored(0.10, runs).again(draw) for _ in range(200)]
    assert Verdict.REGRESSED not in alarms
    assert len(set(map(tuple, selftest.thrown(runs[0], draw)))) == 2


def test_resampling_can_fail(
    stored: dict[Key, selftest.Stored], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(selftest, "EXTRA", 0.05)
    assert [text.split(",")[0] for text in selftest.resampled(stored, 5)] == [RING] * 2
    alarm = argparse.Namespace(verdict=Verdict.REGRESSED)
    monkeypatch.setattr(selftest, "judge", lambda *_: alarm)
    (told,) = selftest.resampled(stored, 5)
    assert told.startswith("5 of 5 resampled comparisons")


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
