"""The comparison of commits on made-up machines: every verdict, its reason, and that a stranger comes to the same."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from kit.comparison import CASES, LAYER, RING, ULYSSES, Machine, compared, pair_of_sides, rows_of

from benchmarks import records
from benchmarks.compare import __main__ as command
from benchmarks.compare import recompute
from benchmarks.compare.pairs import coin
from benchmarks.compare.result import CODES, RECORDS, RESULT, cells, load, summary

pytestmark = pytest.mark.mpi_skip  # no communication

Json = dict[str, Any]


def test_made_up_records_are_records(tmp_path: Path) -> None:
    compared(
        tmp_path, Machine(slower={(RING, 1): 1.3}, broken={("head", LAYER, 1, "screen", 2)}), (1,)
    )
    reading = records.read(tmp_path / RECORDS)
    assert (len(reading.records), reading.problems) == (2 * (3 * 10 + 20), [])


def test_identical_sides_have_no_regression(tmp_path: Path) -> None:
    result = compared(tmp_path, Machine())
    assert result.counts == {"no regression": 6}
    assert (result.exit_code, result.gateable_share) == (0, 1.0)
    row = rows_of(result)[RING, 1]
    assert (row.stage, row.pairs, row.delta) == ("screen", 10, 0.10)
    assert row.low <= row.ratio <= row.high
    assert recompute.check(tmp_path) == []


def test_a_slower_case_is_found_where_it_is_and_nowhere_else(tmp_path: Path) -> None:
    machine = Machine(slower={(RING, 2): 1.2})
    result = compared(tmp_path, machine)
    rows = rows_of(result)
    found = rows.pop((RING, 2))
    assert (result.exit_code, found.verdict, found.stage, found.slower) == (
        1,
        "regressed",
        "confirm",
        20,
    )
    assert 1.15 < found.low < found.ratio < found.high < 1.25
    assert found.explanation.startswith("slower only at P=2, in attention (+1.")
    assert found.explanation.endswith("ms), bytes unchanged")
    assert {row.verdict for row in rows.values()} == {"no regression"}
    confirmed = Counter(
        launch[1:3] + launch[4:] for launch in machine.launches if launch[2] == "confirm"
    )
    assert confirmed == {(2, "confirm", (RING,)): 40}
    assert recompute.check(tmp_path) == []


def test_a_faster_case_is_improved_and_no_failure(tmp_path: Path) -> None:
    result = compared(tmp_path, Machine(slower={(RING, 1): 0.7, (RING, 2): 0.7}))
    assert (result.counts, result.exit_code) == ({"improved": 2, "no regression": 4}, 0)
    assert rows_of(result)[RING, 1].explanation.startswith("faster at every P (1, 2), in attention")
    assert recompute.check(tmp_path) == []


def test_more_messages_are_named(tmp_path: Path) -> None:
    more = {
        "comm": {
            "shift": {
                "calls": 2,
                "messages": 4,
                "bytes_sent": 64,
                "bytes_formula": 64,
                "seconds": 0.1,
            }
        }
    }
    result = compared(tmp_path, Machine(slower={(RING, 2): 1.3}, changes={"head": (0, more)}), (2,))
    assert "slower at P=2" in rows_of(result)[RING, 2].explanation
    assert rows_of(result)[RING, 2].explanation.endswith(
        "calls of shift 1 -> 2; messages of shift 2 -> 4"
    )


def test_time_in_a_collective_is_attributed_to_it(tmp_path: Path) -> None:
    waits = {
        "phases": {
            "communication": {"max_s": 0.1, "mean_s": 0.1},
            "total": {"max_s": 0.12, "mean_s": 0.1},
        }
    }
    count = {"calls": 1, "messages": 2, "bytes_sent": 64, "bytes_formula": 64, "seconds": 0.1}
    machine = Machine(
        slower={(RING, 2): 1.3}, changes={"head": (0, {**waits, "comm": {"shift": count}})}
    )
    assert ", in shift (+" in rows_of(compared(tmp_path, machine, (2,)))[RING, 2].explanation


@pytest.mark.parametrize(
    ("machine", "verdict", "reason"),
    [
        (
            Machine(broken={("head", RING, 2, "screen", 4)}),
            "missing",
            "1 of 20 launches; head in pair 4 of the screen stage: timeout",
        ),
        (
            Machine(broken={("base", RING, 2, "screen", 0)}),
            "missing",
            "1 of 20 launches; base in pair 0",
        ),
        (
            Machine(broken={("head", RING, 2, "confirm", 7)}, slower={(RING, 2): 1.3}),
            "missing",
            "1 of 40 launches; head in pair 7",
        ),
        (Machine(lost={("head", RING)}), "missing", "head has lost this case"),
        (Machine(lost={("base", RING)}), "new", "base has no such case"),
        (
            Machine(changes={"head": (0, {"env": {"fingerprint": "f" * 16}})}),
            "mismatch",
            "the fingerprint is not the same",
        ),
        (
            Machine(changes={"base": (6, {"env": {"fingerprint": "f" * 16}})}),
            "mismatch",
            "the fingerprint is not the same",
        ),
        (
            Machine(changes={"head": (3, {"commit": {"sha": "d" * 40}})}),
            "mismatch",
            "the commit of head is not the same",
        ),
        (
            Machine(changes={"head": (5, {"harness_sha": "b" * 64})}),
            "mismatch",
            "the harness is not the same",
        ),
        (
            Machine(changes={"head": (0, {"case": {"shape": {"seq": 32}}})}),
            "mismatch",
            "the case is not the same",
        ),
        (Machine(cores=1), "oversubscribed", "more ranks than cores"),
        (Machine(cores=1, slower={(RING, 2): 2.0}), "oversubscribed", "more ranks than cores"),
        (Machine(noise=0.5), "ungateable", "base against itself varies so much"),
    ],
)
def test_what_cannot_be_judged_says_why(
    machine: Machine, verdict: str, reason: str, tmp_path: Path
) -> None:
    result = compared(tmp_path, machine, (2,))
    row = rows_of(result)[RING, 2]
    assert row.verdict == verdict
    assert reason in row.reason
    assert recompute.check(tmp_path) == []
    if verdict in ("missing", "mismatch") or result.counts.get(verdict) == len(CASES):
        assert result.exit_code == 3


def test_a_launch_that_is_recorded_twice_is_not_judged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch = Machine.launch

    def twice(machine: Machine, *arguments: Any) -> None:
        launch(machine, *arguments)
        if len(machine.launches) == 3:
            launch(machine, *arguments)

    monkeypatch.setattr(Machine, "launch", twice)
    result = compared(tmp_path, Machine(), (2,))
    assert (result.counts, result.exit_code) == ({"missing": 3}, 3)
    assert "in pair 1 of the screen stage is recorded twice" in result.rows[0].reason


def test_a_side_without_any_record_is_not_launched_to_the_end(tmp_path: Path) -> None:
    machine = Machine(dead={("head", 2)})
    result = compared(tmp_path, machine)
    assert (result.counts, result.exit_code) == ({"missing": 3, "no regression": 3}, 3)
    assert sum(launch[1] == 2 for launch in machine.launches) == 2
    assert recompute.check(tmp_path) == []


def test_nothing_measured_is_not_green(tmp_path: Path) -> None:
    machine = Machine(dead={(side, ranks) for side in ("base", "head") for ranks in (1, 2)})
    assert compared(tmp_path, machine).exit_code == 3
    assert recompute.check(tmp_path) == []


def test_doubt_is_red_only_under_strict(tmp_path: Path) -> None:
    machine = Machine(noise=0.02, slower={(LAYER, 1): 1.09})
    result = compared(tmp_path, machine, strict=True)
    row = rows_of(result)[LAYER, 1]
    assert (row.verdict, result.exit_code) == ("inconclusive", 4)
    assert row.reason == f"about {row.pairs_needed} pairs would decide"
    assert recompute.check(tmp_path) == []


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


def test_the_table_shows_everything(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    machine = Machine(
        slower={(RING, 2): 1.3}, lost={("base", LAYER)}, broken={("head", ULYSSES, 1, "screen", 2)}
    )
    options = command.parser().parse_args(["main", "--ranks", "1,2"])
    result = command.compare(pair_of_sides(), options, machine, tmp_path)
    shown = capsys.readouterr().out
    for text in (
        "base base (bbbbbbbbbb) against head head (cccccccccc)",
        "regressed",
        "20 of 20",
        "only at P=2",
        "no such case",
        "it hung",
    ):
        assert text in shown
    assert f"Exit code 1: {CODES[1]}" in "\n".join(summary(result))
    assert cells(rows_of(result)[LAYER, 1])[3:9] == ("-",) * 6
    assert load(tmp_path / RESULT) == result


def test_only_chosen_cases_are_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = command.parser().parse_args(["main", "--ranks", "1", "--cases", "ring", "layers"])
    machine = Machine()
    result = command.compare(pair_of_sides(), options, machine, tmp_path)
    assert {row.case for row in result.rows} == {RING, LAYER}
    assert {launch[4] for launch in machine.launches} == {(LAYER, RING)}
    assert "20 of 20 launches" in capsys.readouterr().out
