"""Show what other programs have left: a comparison of two commits, and a Chrome trace of a step."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta, Struct

from benchmarks.compare.pairs import importance
from benchmarks.compare.rule import Row, load, summary, table
from benchmarks.files import ForeignError, read_json
from benchmarks.reporting.derive import grouped
from benchmarks.reporting.page import Section
from benchmarks.reporting.plots import parts
from benchmarks.reporting.style import COLOURS, GRID, INK, Axes, Picture, case_rows, picture, short
from benchmarks.reporting.tables import count, make, milliseconds, percent, plain, size

LOOKS = {
    "regressed": ("#d55e00", "s"),
    "improved": ("#009e73", "^"),
    "no regression": ("#0072b2", "o"),
}
OTHER = (GRID, "D")
BARS = 24  # in one plot


def read_comparison(path: Path) -> Section:
    """Return the section on a comparison.

    Args:
        path: result.json of a comparison.

    Raises:
        ForeignError: the file is not one.
    """
    result = load(path)
    result.rows.sort(key=importance)
    return Section(
        "Comparison", " ".join(summary(result)), (table(result),), tuple(pictures(result.rows))
    )


def pictures(rows: Sequence[Row]) -> Iterator[Picture]:
    """Draw the intervals, those of the most important verdicts first."""
    timed = [row for row in rows if row.change is not None]
    for part in parts(timed, BARS):
        title = "Change of time from base to head, with exact intervals"
        yield picture(title, draw_intervals, part, size=(7.5, 1.7 + 0.24 * len(part)), columns=3)


def draw_intervals(axes: Axes, rows: Sequence[Row]) -> None:
    """Draw an interval for each case; the bracket is the smallest change that counts."""
    axes.axvline(0, color=INK, linewidth=1)
    for place, row in enumerate(rows):
        low, middle, high = (100 * (value - 1) for value in row.change or ())
        colour, marker = LOOKS.get(row.verdict, OTHER)
        label = row.verdict if row.verdict in LOOKS else "other verdict"
        axes.plot([low, high], [place, place], color=colour, linewidth=2)
        axes.plot(middle, place, color=colour, marker=marker, linestyle="none", label=label)
    deltas = [math.nan if row.delta is None else 100 * row.delta for row in rows]
    label = "counts from here"
    axes.plot(deltas, range(len(rows)), "|", color=COLOURS[3], markersize=11, label=label)
    case_rows(axes, [f"{short(row.case)}, P = {row.ranks}" for row in rows], "case (name)")
    axes.set_xlabel("change of time, head against base (%)")


RANKS = 32  # in the picture
COLUMNS = ("rank", "step (ms)", "communication (ms)", "share", "calls", "bytes sent")
TOLD = ("scheme", "direction", "layout", "dtype", "device")
Microseconds = Annotated[float, Meta(ge=0, le=1e12)]


class Event(Struct):
    """The part of an event of a Chrome trace that is read."""

    ph: str
    name: str
    pid: Annotated[int, Meta(ge=0, le=65535)]
    cat: str = ""
    ts: Microseconds | None = None
    dur: Microseconds = 0.0
    args: dict[str, Any] = {}

    @property
    def start(self) -> float:
        """Microseconds, by the trace's clock."""
        return self.ts or 0.0

    @property
    def end(self) -> float:
        """Microseconds, by the trace's clock."""
        return self.start + self.dur

    @property
    def operation(self) -> str:
        """The operation of a communicator."""
        return str(self.args.get("operation", "other"))

    @property
    def sent(self) -> int:
        """Bytes of a call; a wait repeats those of its start, and agreement is no payload."""
        payload = self.args.get("kind") not in ("wait", "agree")
        value = self.args.get("bytes_sent") if payload else 0
        return value if isinstance(value, int) else 0


class Trace(Struct, rename="camel"):
    """The part of a Chrome trace that is read."""

    trace_events: Annotated[list[Event], Meta(max_length=1_000_000)]
    other_data: dict[str, Any] = {}


def read_trace(path: Path) -> Section:
    """Return the section on a trace.

    Args:
        path: trace.json of `nox -s trace`.

    Raises:
        ForeignError: the file is not one, or shows no step of any rank.
    """
    trace = read_json(path, Trace)
    spans = [event for event in trace.trace_events if event.ph == "X" and event.ts is not None]
    steps = sorted((e for e in spans if e.name == "step"), key=lambda step: step.pid)
    if not steps:
        raise ForeignError(f"{path}: no span named step. Make the trace by nox -s trace.")
    calls = [event for event in spans if event.cat == "communication"]
    told = ", ".join(plain(trace.other_data[n], 40) for n in TOLD if n in trace.other_data)
    table = make("Communication of one step", COLUMNS, (_cells(step, calls) for step in steps))
    shown = steps[:RANKS]
    broad = (9.0, 1.7 + 0.42 * len(shown))
    drawn = picture("One step on every rank", draw_steps, shown, calls, size=broad, columns=4)
    return Section("Timeline", f"One step: {told}.", (table,), (drawn,))


def _cells(step: Event, calls: Sequence[Event]) -> tuple[str, ...]:
    mine = [call for call in calls if call.pid == step.pid]
    spent = covered(step, mine)
    return (
        str(step.pid),
        milliseconds(step.dur / 1e6),
        milliseconds(spent / 1e6),
        percent(spent / step.dur if step.dur else None),
        count(len(mine)),
        size(sum(call.sent for call in mine)),
    )


def covered(step: Event, calls: Sequence[Event]) -> float:
    """Return the microseconds of a step in which any of the calls was under way."""
    spent, reached = 0.0, step.start
    for call in sorted(calls, key=lambda call: call.start):
        first, last = max(call.start, reached), min(call.end, step.end)
        spent, reached = spent + max(last - first, 0.0), max(reached, last)
    return spent


def draw_steps(axes: Axes, steps: Sequence[Event], calls: Sequence[Event]) -> None:
    """Draw a grey bar for the step of each rank, and over it what was communication."""
    rows = {step.pid: place for place, step in enumerate(steps)}
    start = min(step.start for step in steps)

    def bars(events: Sequence[Event], **looks: Any) -> None:
        lefts = [(event.start - start) / 1e3 for event in events]
        widths = [event.dur / 1e3 for event in events]
        axes.barh([rows[event.pid] for event in events], widths, 0.62, lefts, **looks)

    bars(steps, color=GRID, alpha=0.35, label="computation")
    shown = [call for call in calls if call.pid in rows]
    by_name = grouped(shown, lambda call: (call.operation == "control", call.operation))
    for number, ((_, name), mine) in enumerate(by_name):
        bars(mine, color=COLOURS[min(number, len(COLOURS) - 1)], label=short(name))
    case_rows(axes, [f"rank {step.pid}" for step in steps], "rank (number)")
    axes.set_xlabel("time since the first rank began (ms)")
