"""A comparison of two commits: the verdict on each case with its interval, the most important first."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.reporting import foreign
from benchmarks.reporting.page import Section
from benchmarks.reporting.style import (
    COLOURS,
    GRID,
    INK,
    Axes,
    Picture,
    blank,
    legend,
    plain_ticks,
    short,
)
from benchmarks.reporting.tables import DASH, make, plain, ratio

SCHEMA = "comparison.schema.json"
ORDER = (
    "regressed",
    "missing",
    "mismatch",
    "inconclusive",
    "ungateable",
    "improved",
    "new",
    "oversubscribed",
    "no regression",
)
"""The most important verdict first."""

LOOKS = {
    "regressed": ("#d55e00", "s"),
    "improved": ("#009e73", "^"),
    "no regression": ("#0072b2", "o"),
}
OTHER = (GRID, "D")
BARS = 24  # in one plot
OUTCOMES = {
    0: "nothing regressed",
    1: "something regressed",
    3: "not everything could be measured or compared",
    4: "not everything could be decided",
}
COLUMNS = (
    "case",
    "P",
    "verdict",
    "change",
    "interval",
    "counts from",
    "slower pairs",
    "reason",
    "flags",
)
NOTE = (
    "change: median of head / base over pairs of launches, and its exact interval. counts from: the smallest change judged. "
    "regressed: confirmed by fresh pairs. ungateable: base against itself varies too much. inconclusive is not red."
)


def read(path: Path) -> Section:
    """The section on a comparison.

    Args:
        path: result.json of a comparison.

    Raises:
        ForeignError: the file is not one.
    """
    result = foreign.load(path, SCHEMA)
    rows = sorted(result["rows"], key=importance)
    base, head = (
        f"{plain(result[s]['ref'], 40)} ({plain(result[s]['sha'])[:10]})" for s in ("base", "head")
    )
    counts = Counter(row["verdict"] for row in rows)
    summary = (
        ", ".join(f"{counts[verdict]} {verdict}" for verdict in ORDER if counts[verdict])
        or "no case"
    )
    text = f"Base {base}, head {head}. Outcome: {OUTCOMES[result['exit_code']]}. {summary}. "
    text += f"{result['gateable_share']:.0%} of the cases were quiet enough to be judged."
    table = make("Verdicts", COLUMNS, map(_cells, rows), NOTE)
    return Section("Comparison", text, (table,), tuple(pictures(rows)))


def importance(row: dict[str, Any]) -> tuple[int, float, str, int]:
    """What sorts rows: the verdict, then how large the change is."""
    size = abs(math.log(row["ratio"])) if row["ratio"] else 0.0
    return ORDER.index(row["verdict"]), -size, row["case"], row["ranks"]


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    known = _interval(row) is not None
    return (
        plain(row["case"]),
        str(row["ranks"]),
        row["verdict"],
        ratio(row["ratio"]) if known else DASH,
        f"{ratio(row['low'])} to {ratio(row['high'])}" if known else DASH,
        f"{row['delta']:.0%}" if row["delta"] is not None else DASH,
        f"{row['slower']} of {row['pairs']}" if row["pairs"] else DASH,
        plain("; ".join(filter(None, (row["explanation"], row["reason"])))),
        plain(", ".join(row["flags"])),
    )


def _interval(row: dict[str, Any]) -> tuple[float, float, float] | None:
    """Low, middle and high of head / base, where they were measured."""
    found = (row["low"], row["ratio"], row["high"])
    return None if None in found else found


def pictures(rows: Sequence[dict[str, Any]]) -> Iterator[Picture]:
    """The intervals, those of the most important verdicts first."""
    timed = [row for row in rows if _interval(row) is not None]
    for part in (timed[i : i + BARS] for i in range(0, len(timed), BARS)):
        figure, axes = blank(7.5, 1.7 + 0.24 * len(part))
        draw(axes, part)
        legend(axes, 3)
        yield Picture(
            "Comparison",
            "Change of time from base to head, with exact intervals",
            figure,
            broad=True,
        )


def draw(axes: Axes, rows: Sequence[dict[str, Any]]) -> None:
    """An interval for each case; the bracket on the right is the smallest change that counts."""
    axes.axvline(0, color=INK, linewidth=1)
    named: set[str] = set()
    for place, row in enumerate(rows):
        low, middle, high = (100 * (value - 1) for value in _interval(row) or ())
        colour, marker = LOOKS.get(row["verdict"], OTHER)
        label = row["verdict"] if row["verdict"] in LOOKS else "other verdict"
        axes.plot([low, high], [place, place], color=colour, linewidth=2)
        axes.plot(
            middle,
            place,
            color=colour,
            marker=marker,
            linestyle="none",
            label=None if label in named else label,
        )
        named.add(label)
        if row["delta"] is not None:
            axes.plot(
                100 * row["delta"],
                place,
                color=COLOURS[3],
                marker="|",
                markersize=11,
                linestyle="none",
            )
    axes.plot(
        [],
        [],
        color=COLOURS[3],
        marker="|",
        markersize=11,
        linestyle="none",
        label="counts from here",
    )
    plain_ticks(
        axes.yaxis, range(len(rows)), [f"{short(row['case'])}, P = {row['ranks']}" for row in rows]
    )
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_ylabel("case (name)")
    axes.set_xlabel("change of time, head against base (%)")
