"""The comparison of commits on made-up machines: every verdict, its reason, a second opinion."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any, cast

import pytest
from kit.comparison import CASES, LAYER, RING, ULYSSES, Machine, compared, pair_of_sides, rows_of

from benchmarks import launching, records
from benchmarks.compare import __main__ as command
from benchmarks.compare.pairs import coin
from benchmarks.compare.rule import CODES, RECORDS, Result, cells, summary

pytestmark = pytest.mark.mpi_skip  # no communication

SLOWER = {(RING, 2): 1.3}
TIMEOUT = "head in pair {} of the {} stage: timeout"
MORE = {"bytes_sent": 64, "seconds": 0.1}
WAITS = {
    "communication": {"max_s": 0.1, "mean_s": 0.1},
    "total": {"max_s": 0.12, "mean_s": 0.1},
}


def head(since: int = 0, **change: Any) -> Machine:
    """A machine on which head has other records from a pair on."""
    return Machine(changes={"head": (since, change)})


def slower_head(**change: Any) -> Machine:
    return Machine(slower=SLOWER, changes={"head": (0, change)})


def counts(result: Result) -> dict[str, int]:
    """How often each verdict was given."""
    return dict(Counter(map(str, (row.verdict for row in result.rows))))


def broken(stage: str, pair: int, side: str = "head", **more: Any) -> Machine:
    return Machine(broken={(side, RING, 2, stage, pair)}, **more)


@pytest.mark.parametrize(
    ("machine", "verdict", "told", "code"),
    [
        (Machine(), "no regression", "", 0),
        (Machine(slower={(RING, 2): 0.7}), "improved", "faster in attention", 0),
        (Machine(slower=SLOWER), "regressed", "slower in attention (+1.", 1),
        (slower_head(phases=WAITS, comm={"shift": MORE}), "regressed", "slower in shift (+", 1),
        (broken("screen", 4), "missing", "1 of 20 launches; " + TIMEOUT.format(4, "screen"), 3),
        (broken("screen", 0, "base"), "missing", "1 of 20 launches; base in pair 0", 3),
        (
            broken("confirm", 7, slower=SLOWER),
            "missing",
            "1 of 40 launches; " + TIMEOUT.format(7, "confirm"),
            3,
        ),
        (Machine(lost={("head", RING)}), "missing", "head has lost this case", 3),
        (Machine(lost={("base", RING)}), "new", "base has no such case", 0),
        (head(env={"fingerprint": "f" * 16}), "mismatch", "the fingerprint is not the same", 3),
        (
            Machine(changes={"base": (6, {"env": {"fingerprint": "f" * 16}})}),
            "mismatch",
            "the fingerprint is not the same",
            3,
        ),
        (head(3, commit={"sha": "d" * 40}), "mismatch", "the commit of head is not the same", 3),
        (head(5, harness_sha="b" * 64), "mismatch", "the harness is not the same", 3),
        (head(case={"shape": {"seq": 32}}), "mismatch", "the case is not the same", 3),
        (Machine(cores=1), "oversubscribed", "more ranks than cores", 3),
        (Machine(cores=1, slower={(RING, 2): 2.0}), "oversubscribed", "more ranks than cores", 3),
        (Machine(noise=0.5), "ungateable", "base against itself varies so much", 3),
    ],
)
def test_every_verdict_has_its_reason(
    machine: Machine, verdict: str, told: str, code: int, tmp_path: Path
) -> None:
    result = compared(tmp_path, machine, (2,))
    row = rows_of(result)[RING, 2]
    assert (row.verdict, result.exit_code) == (verdict, code)
    assert told in "; ".join(row.remarks)
    reading = records.read(tmp_path / RECORDS)
    assert (len(reading.records) >= 40, reading.problems) == (True, [])  # made up, but valid


def test_a_slower_case_is_found_where_it_is_and_nowhere_else(tmp_path: Path) -> None:
    machine = Machine(slower={(RING, 2): 1.2, (ULYSSES, 1): 0.7, (ULYSSES, 2): 0.7})
    result = compared(tmp_path, machine)
    rows = rows_of(result)
    found: Any = rows[RING, 2]
    assert (found.verdict, found.change.count, found.slower) == ("regressed", 20, 20)
    unchanged: Any = rows[RING, 1]
    assert (unchanged.change.count, unchanged.delta) == (10, 0.10)
    assert 1.15 < found.change.low < found.change.median < found.change.high < 1.25
    assert found.remarks[0].startswith("slower in attention (+1.")
    assert rows[ULYSSES, 1].remarks[0].startswith("faster in attention")
    assert counts(result) == {"regressed": 1, "improved": 2, "no regression": 3}
    assert result.gateable_share == 1.0
    places = [launch[1:3] + launch[4:] for launch in machine.launches if launch[2] == "confirm"]
    assert Counter(places) == {(1, "confirm", (ULYSSES,)): 40, (2, "confirm", (RING, ULYSSES)): 40}


@pytest.mark.parametrize("dead", [{("head", 2)}, {("base", 2), ("head", 2)}])
def test_a_side_without_any_record_is_not_launched_to_the_end(
    dead: set[tuple[str, int]], tmp_path: Path
) -> None:
    machine = Machine(dead=dead)
    result = compared(tmp_path, machine)
    assert (counts(result), result.exit_code) == ({"missing": 3, "no regression": 3}, 3)
    assert sum(launch[1] == 2 for launch in machine.launches) == 2


def test_doubt_is_red_only_under_strict(tmp_path: Path) -> None:
    machine = Machine(noise=0.02, slower={(LAYER, 1): 1.09})
    result = compared(tmp_path, machine, strict=True)
    row = rows_of(result)[LAYER, 1]
    assert (row.verdict, result.exit_code) == ("inconclusive", 4)
    assert re.fullmatch(r"about \d+ pairs would decide", row.remarks[0])


def test_the_order_of_each_pair_is_its_coin(tmp_path: Path) -> None:
    machine = Machine()
    compared(tmp_path, machine, seed=5)
    first = {launch[1:4]: launch[0] for launch in reversed(machine.launches)}
    assert first == {
        place: ("base", "head")[coin(5, place[1], place[0], place[2])] for place in first
    }
    assert len(first) == 20
    throws = [coin(seed, "screen", 2, index) for seed in range(400) for index in range(10)]
    assert abs(sum(throws) - 2000) < 4 * 32  # four standard deviations of as many fair coins


@pytest.mark.parametrize("cases", [[], ["--cases", "ring", "layers"]])
def test_the_table_shows_everything_that_was_chosen(
    cases: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken_launch = {("head", ULYSSES, 1, "screen", 2)}
    machine = Machine(slower=SLOWER, lost={("base", LAYER)}, broken=broken_launch)
    options = launching.parse("compare", "", command.OPTIONS, ["main", "--ranks", "1,2", *cases])
    result = command.compare(pair_of_sides(), options, cast("Any", machine), tmp_path)
    shown = capsys.readouterr().out
    assert "compare: 40 of 40, screen pair 10, P=2" in shown
    for text in (
        "base base (bbbbbbbbbb) against head head (cccccccccc)",
        "regressed",
        "20 of 20",
        "slower in attention",
        "no such case",
    ):
        assert text in shown
    assert ("it hung" in shown) == (not cases)
    assert f"Exit code 1: {CODES[1]}" in "\n".join(summary(result))
    assert {row.case for row in result.rows} == ({RING, LAYER} if cases else set(CASES))
    assert {launch[4] for launch in machine.launches if launch[2] == "screen"} == {
        (RING,) if cases else (RING, ULYSSES)
    }
    assert cells(rows_of(result)[LAYER, 1])[3:9] == ("-",) * 6
    assert "regressed" in (tmp_path / "report.md").read_text()
