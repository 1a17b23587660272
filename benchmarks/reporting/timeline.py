"""A Chrome trace of one step as a picture: a bar for each rank, its communication coloured by operation."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.reporting import foreign
from benchmarks.reporting.page import Section
from benchmarks.reporting.style import (
    COLOURS,
    GRID,
    Axes,
    Picture,
    blank,
    legend,
    plain_ticks,
    short,
)
from benchmarks.reporting.tables import count, make, milliseconds, percent, plain, size

SCHEMA = "timeline.schema.json"
RANKS = 32  # in the picture
OPERATIONS = 5  # with a colour of their own
COLUMNS = ("rank", "step (ms)", "communication (ms)", "share", "calls", "bytes sent")
Event = dict[str, Any]


def read(path: Path) -> Section:
    """The section on a trace.

    Args:
        path: trace.json of `nox -s trace`.

    Raises:
        ForeignError: the file is not one, or shows no step of any rank.
    """
    trace = foreign.load(path, SCHEMA)
    spans = [e for e in trace["traceEvents"] if e["ph"] == "X" and "ts" in e and "dur" in e]
    steps = {e["pid"]: e for e in spans if e["name"] == "step"}
    if not steps:
        raise foreign.ForeignError(f"{path}: no span named step. Make the trace by nox -s trace.")
    calls = [e for e in spans if e.get("cat") == "communication" and e["pid"] in steps]
    about = trace.get("otherData", {})
    told = ", ".join(
        plain(about[name], 40)
        for name in ("scheme", "direction", "layout", "dtype", "device")
        if name in about
    )
    table = make(
        "Communication of one step",
        COLUMNS,
        (_cells(step, calls) for _, step in sorted(steps.items())),
    )
    figure, axes = blank(9.0, 1.7 + 0.42 * min(len(steps), RANKS))
    draw(axes, [step for _, step in sorted(steps.items())][:RANKS], calls)
    legend(axes, 4)
    return Section(
        "Timeline",
        f"One step: {told}.",
        (table,),
        (Picture("Timeline", "One step on every rank", figure, broad=True),),
    )


def _cells(step: Event, calls: Sequence[Event]) -> tuple[str, ...]:
    mine = [call for call in calls if call["pid"] == step["pid"]]
    spent, sent = sum(call["dur"] for call in mine), sum(_sent(call) for call in mine)
    share = percent(spent / step["dur"] if step["dur"] else None)
    return (
        str(step["pid"]),
        milliseconds(step["dur"] / 1e6),
        milliseconds(spent / 1e6),
        share,
        count(len(mine)),
        size(sent),
    )


def _sent(call: Event) -> int:
    """Bytes of a call; a wait repeats those of its start, and agreement is no payload."""
    told = call.get("args", {})
    value = told.get("bytes_sent")
    return value if isinstance(value, int) and told.get("kind") not in ("wait", "agree") else 0


def draw(axes: Axes, steps: Sequence[Event], calls: Sequence[Event]) -> None:
    """A grey bar for the step of each rank, and over it what was communication."""
    start = min(step["ts"] for step in steps)
    rows = {step["pid"]: place for place, step in enumerate(steps)}
    for place, step in enumerate(steps):
        label = "computation" if place == 0 else None
        axes.barh(
            place,
            step["dur"] / 1e3,
            left=(step["ts"] - start) / 1e3,
            height=0.62,
            color=GRID,
            alpha=0.35,
            label=label,
        )
    shown = [call for call in calls if call["pid"] in rows]
    names = sorted({_operation(call) for call in shown}, key=lambda name: (name == "control", name))
    for number, name in enumerate(names):
        mine = [call for call in shown if _operation(call) == name]
        places = [rows[call["pid"]] for call in mine]
        lefts = [(call["ts"] - start) / 1e3 for call in mine]
        widths = [call["dur"] / 1e3 for call in mine]
        axes.barh(
            places,
            widths,
            left=lefts,
            height=0.62,
            color=COLOURS[min(number, OPERATIONS)],
            label=short(name),
        )
    plain_ticks(axes.yaxis, range(len(steps)), [f"rank {step['pid']}" for step in steps])
    axes.set_ylim(len(steps) - 0.5, -0.5)
    axes.set_ylabel("rank (number)")
    axes.set_xlabel("time since the first rank began (ms)")


def _operation(call: Event) -> str:
    return str(call.get("args", {}).get("operation", "other"))
