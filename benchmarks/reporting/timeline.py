"""Show a Chrome trace of a step."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from benchmarks.records import ForeignError, read_bytes
from benchmarks.reporting.derive import grouped
from benchmarks.reporting.page import Section
from benchmarks.reporting.style import COLOURS, GRID, Axes, case_rows, picture, short
from benchmarks.reporting.tables import count, make, milliseconds, percent, plain, size

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
    ts: Microseconds = 0.0
    dur: Microseconds = 0.0
    args: dict[str, Any] = {}

    @property
    def end(self) -> float:
        """Microseconds, by the trace's clock."""
        return self.ts + self.dur

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
    try:
        trace = msgspec.json.decode(read_bytes(path), type=Trace)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ForeignError(f"{path}: {error}") from error
    spans = [event for event in trace.trace_events if event.ph == "X"]
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
    spent, reached = 0.0, step.ts
    for call in sorted(calls, key=lambda call: call.ts):
        first, last = max(call.ts, reached), min(call.end, step.end)
        spent, reached = spent + max(last - first, 0.0), max(reached, last)
    return spent


def draw_steps(axes: Axes, steps: Sequence[Event], calls: Sequence[Event]) -> None:
    """Draw a grey bar for the step of each rank, and over it what was communication."""
    rows = {step.pid: place for place, step in enumerate(steps)}
    start = min(step.ts for step in steps)

    def bars(events: Sequence[Event], **looks: Any) -> None:
        lefts = [(event.ts - start) / 1e3 for event in events]
        widths = [event.dur / 1e3 for event in events]
        axes.barh([rows[event.pid] for event in events], widths, 0.62, lefts, **looks)

    bars(steps, color=GRID, alpha=0.35, label="computation")
    shown = [call for call in calls if call.pid in rows]
    by_name = grouped(shown, lambda call: (call.operation == "control", call.operation))
    for number, ((_, name), mine) in enumerate(by_name):
        bars(mine, color=COLOURS[min(number, len(COLOURS) - 1)], label=short(name))
    case_rows(axes, [f"rank {step.pid}" for step in steps], "rank (number)")
    axes.set_xlabel("time since the first rank began (ms)")
