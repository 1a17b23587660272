"""Show a comparison of two commits: the verdict on each case with its interval."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.compare.pairs import importance
from benchmarks.compare.result import Row, load, summary, table
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


def read(path: Path) -> Section:
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
        broad = (7.5, 1.7 + 0.24 * len(part))
        yield picture("Comparison", title, draw, part, size=broad, columns=3)


def draw(axes: Axes, rows: Sequence[Row]) -> None:
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
