"""Show the result of a comparison of two commits."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from benchmarks.compare.rule import Result, Row, summary, table
from benchmarks.reporting.page import Section
from benchmarks.reporting.plots import parts
from benchmarks.reporting.style import COLOURS, GRID, INK, Axes, Picture, case_rows, picture, short

LOOKS = {
    "regressed": ("#d55e00", "s"),
    "improved": ("#009e73", "^"),
    "no regression": ("#0072b2", "o"),
}
OTHER = (GRID, "D")
BARS = 24  # in one plot


def section(result: Result) -> Section:
    """Return the section on a comparison."""
    shown = tuple(pictures(result.rows))
    return Section("Comparison", " ".join(summary(result)), (table(result),), shown)


def pictures(rows: Sequence[Row]) -> Iterator[Picture]:
    """Draw the intervals, those of the most important verdicts first."""
    timed = [row for row in rows if row.change is not None]
    title = "Change of time from base to head, with exact intervals"
    for name, part in parts(title, timed, BARS):
        yield picture(name, draw_intervals, part, size=(7.5, 1.7 + 0.24 * len(part)), columns=3)


def draw_intervals(axes: Axes, rows: Sequence[Row]) -> None:
    """Draw an interval for each case; the bracket is the smallest change that counts."""
    axes.axvline(0, color=INK, linewidth=1)
    for place, row in enumerate(rows):
        found = (row.change.low, row.change.median, row.change.high) if row.change else ()
        low, middle, high = (100 * (value - 1) for value in found)
        colour, marker = LOOKS.get(row.verdict, OTHER)
        label = row.verdict if row.verdict in LOOKS else "other verdict"
        axes.plot([low, high], [place, place], color=colour, linewidth=2)
        axes.plot(middle, place, color=colour, marker=marker, linestyle="none", label=label)
    deltas = [math.nan if row.delta is None else 100 * row.delta for row in rows]
    label = "counts from here"
    axes.plot(deltas, range(len(rows)), "|", color=COLOURS[3], markersize=11, label=label)
    case_rows(axes, [f"{short(row.case)}, P = {row.ranks}" for row in rows], "case (name)")
    axes.set_xlabel("change of time, head against base (%)")
