"""The trace of a step: spans of all ranks by one clock, communication named and sized."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st

import sp_core as sp
from benchmarks.files import ForeignError
from benchmarks.reporting import foreign
from benchmarks.reporting.trace import rank as clock
from benchmarks.reporting.trace.__main__ import main
from benchmarks.reporting.trace.rank import Log, Profile, merge
from sp_core.testing import spmd

pytestmark = pytest.mark.mpi_skip
RANKS, SEQ, HIDDEN = 2, 96, 32


def span(name: str, start: float, length: float, **more: Any) -> dict[str, Any]:
    return {
        "ph": "X",
        "cat": "cpu_op",
        "name": name,
        "pid": 4711,
        "tid": 4711,
        "ts": start,
        "dur": length,
        **more,
    }


def profile(rank: int, *, base: float, offset: float) -> Profile:
    """A step from 1.0 to 1.5 s by rank 0's clock; a transfer is waited for from 1.2 to 1.3 s.

    Args:
        rank: which.
        base: microseconds that the profiler shows at time 0 of this rank's clock.
        offset: seconds that this clock is ahead.
    """

    def at(seconds: float) -> float:
        return base + (seconds + offset) * 1e6

    calls = [
        {"operation": "ring", "kind": "start", "bytes_sent": 2048, "transfer": None},
        {"operation": "ring", "kind": "wait", "bytes_sent": 2048, "transfer": 0},
        {"operation": "all_reduce", "kind": "run", "bytes_sent": 10, "transfer": None},
    ]
    events = [
        span("clock anchor 0", at(0.5) - 300 * rank, 100),  # made slowly: not to be used
        span("clock anchor 1", at(0.6) - 1, 2),
        span("step", at(1.0), 5e5, cat="user_annotation"),
        span("communication #0", at(1.1), 10),
        span("communication #1", at(1.2), 1e5),
        span("communication #2", at(1.4), 1e4),
        span("aten::mm", at(1.15), 1e4),
        {"ph": "i", "name": "no span", "ts": 0, "pid": 4711, "tid": 1},
    ]
    return Profile(
        rank,
        "cpu of host",
        events,
        calls,
        [(0.4 + offset, 0.6 + offset), (0.6 - 2e-6 + offset, 0.6 + 2e-6 + offset)],
        offset,
    )


def test_ranks_with_different_clocks_are_laid_over_one_another() -> None:
    trace = merge(
        [profile(1, base=5e9, offset=-7.0), profile(0, base=123.0, offset=0.0)], {"scheme": "ring"}
    )
    spans = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    for name, start, length in (
        ("step", 0.0, 5e5),
        ("wait ring, 2.00 KiB sent", 2e5, 1e5),
        ("all_reduce, 10 B sent", 4e5, 1e4),
    ):
        found = [event for event in spans if event["name"] == name]
        assert [event["pid"] for event in found] == [0, 1]
        assert [(event["ts"], event["dur"]) for event in found] == [
            (pytest.approx(start, abs=1), length)
        ] * 2
    assert len(spans) == 2 * 5  # without anchors


def test_a_transfer_is_under_way_from_start_to_the_end_of_its_wait() -> None:
    trace = merge([profile(0, base=0.0, offset=0.0)], {})
    begin, end = (event for event in trace["traceEvents"] if event["ph"] in "be")
    assert (begin["ph"], begin["ts"]) == ("b", pytest.approx(1e5, abs=1))
    assert (end["ph"], end["ts"]) == ("e", pytest.approx(3e5, abs=1))
    assert begin["id"] == end["id"]
    assert begin["name"] == end["name"] == "ring under way, 2.00 KiB sent"


@pytest.mark.parametrize(("ahead", "expected"), [(0.0, 0.0), (1e-5, 0.0), (3.0, 3.0), (-3.0, -3.0)])
def test_an_offset_within_its_uncertainty_is_none(ahead: float, expected: float) -> None:
    trips = [(10.0 + ahead, 10.0 + trip / 2, 10.0 + trip + ahead) for trip in (1e-3, 1e-4, 1e-2)]
    assert clock._best(trips) == pytest.approx(expected)


def test_a_step_of_two_ranks_is_traced(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    sizes = f"--ranks {RANKS} --seq {SEQ} --hidden {HIDDEN} --heads 2 --layout contiguous".split()
    assert main([*sizes, "--out", str(tmp_path / "trace.json")]) == 0, capfd.readouterr()
    trace = json.loads((tmp_path / "trace.json").read_text())
    events = trace["traceEvents"]
    rows = {
        event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"
    }
    assert sorted(rows) == list(range(RANKS))
    assert all(name.startswith(f"rank {rank}, cpu of ") for rank, name in rows.items())
    steps = {event["pid"]: event for event in events if event["name"] == "step"}
    assert max(step["ts"] for step in steps.values()) < min(
        step["ts"] + step["dur"] for step in steps.values()
    )
    ring = [
        event
        for event in events
        if event.get("cat") == "communication" and event["args"]["operation"] == "ring"
    ]
    block = 2 * SEQ // RANKS * HIDDEN * 4  # keys and values of a rank, float32
    for kind in ("start", "wait"):  # a wait repeats the bytes of its start
        calls = [event["args"] for event in ring if event["pid"] == 0]
        assert block in {call["bytes_sent"] for call in calls if call["kind"] == kind}
    assert {event["name"] for event in events} >= {"forward", "backward", "attention, ring"}
    assert all(
        event["ts"] >= 0 and event.get("dur", 0) >= 0 for event in events if event["ph"] != "M"
    )
    table = foreign.read_trace(tmp_path / "trace.json").tables[0]
    assert [line[0] for line in table.rows] == ["0", "1"]


@given(st.lists(st.tuples(st.integers(0, 120), st.integers(0, 120)), max_size=6))
def test_communication_is_counted_once_and_inside_its_step(spans: list[tuple[int, int]]) -> None:
    step = foreign.Event("X", "step", 0, ts=10.0, dur=100.0)
    calls = [foreign.Event("X", "call", 0, ts=start, dur=length) for start, length in spans]
    ticks = {tick for start, length in spans for tick in range(start, start + length)}
    assert foreign.covered(step, calls) == len(ticks & {*range(10, 110)})


@spmd(2)
def test_a_collective_by_an_algorithm_is_named_and_sized(comm: Any) -> None:
    """Its messages are posted by itself, at its start and while it is waited for."""
    with sp.Mesh(comm, sp=2) as mesh:
        log = Log(mesh["sp"])
        sp.all_reduce(torch.ones(10), comm=mesh["sp"], algorithm="ring")
        sp.all_reduce(torch.ones(10), comm=mesh["sp"], algorithm="mpi")
        calls = [
            (call["kind"], call["bytes_sent"])
            for call in log.calls
            if call["operation"] == "all_reduce"
        ]
    assert calls == [("run", 40), ("run", 40)]


def test_a_case_that_makes_no_sense_is_refused_before_anything_starts(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["--hidden", "10", "--heads", "3"]) == 2
    assert "3 heads do not divide hidden 10" in capsys.readouterr().err


@pytest.mark.parametrize(
    "content",
    [
        "[]",
        "{}",
        '{"traceEvents": []}',
        '{"traceEvents": [{"ph": "X", "name": "step", "pid": -1}]}',
        "{",
    ],
)
def test_a_file_that_is_no_trace_is_refused(content: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_text(content)
    with pytest.raises(ForeignError, match=r"trace\.json"):
        foreign.read_trace(path)


def test_the_timeline_adds_up_what_each_rank_sent_and_waited(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_text(json.dumps(merge([profile(0, base=0.0, offset=0.0)], {"scheme": "<b>"})))
    section = foreign.read_trace(path)
    assert section.tables[0].rows == (("0", "500", "110", "22%", "3", "2.01 KiB"),)
    axes: Any = section.pictures[0].figure.axes[0]
    assert axes.get_xlabel().endswith("(ms)")
    assert [round(bar.get_width()) for bar in axes.patches] == [500, 10, 0, 100]
