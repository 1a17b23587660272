"""Test the trace of a step: spans of all ranks by one clock, communication with its bytes."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st

import sp_core as sp
from benchmarks.records import ForeignError
from benchmarks.reporting import report
from benchmarks.reporting.tables import size
from benchmarks.reporting.trace import Event, Log, main, merge, shifted, spans
from benchmarks.sample import difference
from sp_core.testing import spmd

RANKS, SEQ, HIDDEN = 2, 96, 32


CALLS = (
    ("start ring", 1.1, 10, 2048),
    ("wait ring", 1.2, 1e5, 2048),
    ("run all_reduce", 1.4, 1e4, 10),
    ("agree control", 1.45, 0, 64),
)


def span(name: str, start: float, length: float, **more: Any) -> Event:
    shown = {"ph": "X", "cat": "cpu_op", "name": name, "tid": 1, "ts": start, "dur": length}
    return {**shown, **more}


def call(name: str, start: float, length: float, sent: int) -> Event:
    kind, operation = name.split()
    told = {"operation": operation, "kind": kind, "bytes_sent": sent}
    return span(name, start, length, cat="communication", args=told)


def profile(rank: int, ahead: float) -> list[Event]:
    """Return a step at 1.0 to 1.5 s of rank 0's clock, by a clock that is `ahead` seconds ahead."""
    step = span("step", (1.0 + ahead) * 1e6, 5e5)
    calls = [call(name, (start + ahead) * 1e6, *more) for name, start, *more in CALLS]
    return shifted(rank, "cpu of host", [step, *calls], ahead)


def test_ranks_with_different_clocks_are_laid_over_one_another() -> None:
    trace = merge([profile(1, ahead=-7.0), profile(0, ahead=0.0)], {"scheme": "ring"})
    found = [one for one in trace["traceEvents"] if one["ph"] == "X"]
    for name, start in (("step", 0.0), ("start ring", 1e5), ("wait ring", 2e5)):
        places = [(one["pid"], one["ts"]) for one in found if one["name"] == name]
        assert places == [(rank, pytest.approx(start, abs=1)) for rank in (0, 1)]


def test_spans_of_the_profiler_have_the_time_of_the_clock() -> None:
    itself = span("overhead", 0, 1, cat="overhead")
    events = [span("aten::mm", 5.0, 1, pid=4711), itself, {"ph": "i", "name": "no span", "ts": 0}]
    trace = {"traceEvents": events, "baseTimeNanoseconds": 2_000_000}
    assert list(spans(trace)) == [span("aten::mm", 2005.0, 1)]


@pytest.mark.parametrize(("ahead", "expected"), [(0.0, 0.0), (1e-5, 0.0), (3.0, 3.0), (-3.0, -3.0)])
def test_an_offset_within_its_uncertainty_is_none(ahead: float, expected: float) -> None:
    trips = [(10.0 + ahead, 10.0 + trip / 2, 10.0 + trip + ahead) for trip in (1e-3, 1e-4, 1e-2)]
    assert difference(trips) == pytest.approx(expected)


@pytest.mark.mpi_skip
def test_a_step_of_two_ranks_is_traced(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "trace.json"
    sizes = f"--ranks {RANKS} --seq {SEQ} --hidden {HIDDEN} --heads 2 --layout contiguous".split()
    assert main([*sizes, "--out", str(out)]) == 0, capfd.readouterr()
    events = json.loads(out.read_text())["traceEvents"]
    rows = {one["pid"]: one["args"]["name"] for one in events if one["name"] == "process_name"}
    assert all(rows[rank].startswith(f"rank {rank}, cpu of ") for rank in range(RANKS))
    steps = [one for one in events if one["name"] == "step"]
    ends = [step["ts"] + step["dur"] for step in steps]
    assert max(step["ts"] for step in steps) < min(ends)
    assert min(one["ts"] for one in events if one["ph"] != "M") == 0
    block = f"{size(2 * SEQ // RANKS * HIDDEN * 4)} sent"  # keys and values of a rank, float32
    mine = {one["name"]: one for one in reversed(events) if one["pid"] == 0}
    assert mine.keys() >= {"forward", "backward", "attention, ring"}
    # a wait repeats the bytes of its start
    inside, started, waited = (
        mine[name] for name in ("forward", f"start ring, {block}", f"wait ring, {block}")
    )
    assert inside["tid"] == started["tid"]
    assert inside["ts"] < started["ts"] < inside["ts"] + inside["dur"]
    begun, ended = [one["ts"] for one in events if one["name"] == f"ring under way, {block}"][:2]
    assert (begun, ended) == (started["ts"], pytest.approx(waited["ts"] + waited["dur"], abs=0.01))
    table = report.read_trace(out).tables[0]
    assert [line[0] for line in table.rows] == ["0", "1"]


@given(st.lists(st.tuples(st.integers(0, 120), st.integers(0, 120)), max_size=6))
def test_communication_is_counted_once_and_inside_its_step(spans: list[tuple[int, int]]) -> None:
    step = report.Event("X", "step", 0, ts=10.0, dur=100.0)
    calls = [report.Event("X", "call", 0, ts=start, dur=length) for start, length in spans]
    ticks = {tick for start, length in spans for tick in range(start, start + length)}
    assert report.covered(step, calls) == len(ticks & {*range(10, 110)})


@spmd(2)
def test_a_collective_by_an_algorithm_is_named_and_sized(comm: Any) -> None:
    """The algorithm posts messages at its start and during the wait. One event has all bytes."""
    with sp.Mesh(comm, sp=2) as mesh:
        log = Log(mesh["sp"])
        sp.all_reduce(torch.ones(10), comm=mesh["sp"], algorithm="ring")
        sp.all_reduce(torch.ones(10), comm=mesh["sp"], algorithm="mpi")
    told = [event["args"] for event in log.events if event["ph"] == "X"]
    calls = [(one["kind"], one["bytes_sent"]) for one in told if one["operation"] == "all_reduce"]
    assert calls == [("run", 40), ("run", 40)]


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
        report.read_trace(path)


def test_the_timeline_adds_up_what_each_rank_sent_and_waited(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_text(json.dumps(merge([profile(0, ahead=0.0)], {"scheme": "<b>"})))
    section = report.read_trace(path)
    assert section.tables[0].rows == (("0", "500", "110", "22%", "4", "2.01 KiB"),)
    axes: Any = section.pictures[0].figure.axes[0]
    assert axes.get_xlabel().endswith("(ms)")
    assert [round(bar.get_width()) for bar in axes.patches] == [500, 10, 0, 100, 0]
