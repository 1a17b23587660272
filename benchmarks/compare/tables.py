"""The table of a comparison with a line for each case, and its summary."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from benchmarks.compare.rule import GATEABLE_SHARE
from benchmarks.reporting.tables import Table, make
from benchmarks.reporting.text import DASH

COLUMNS = ("case", "P", "verdict", "head / base", "interval", "slower", "counts from", "base (ms)", "head (ms)", "remarks")
CODES = {
    0: "nothing got slower",
    1: "something got slower",
    3: "not everything could be compared",
    4: "not everything could be decided",
}


def table(result: Mapping[str, Any]) -> Table:
    """Return a line for each row of a result."""
    names = [f"{side} {result[side]['ref']} ({(result[side]['sha'] or 'changed')[:10]})" for side in ("base", "head")]
    title = " against ".join(names) + (": the same commit" if result["same_commit"] else "")
    return make(title, COLUMNS, map(cells, result["rows"]))


def cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the texts of one line."""
    remarks = [text for text in (row["reason"], row["explanation"], *row["flags"]) if text]
    head = (row["case"], str(row["ranks"]), row["verdict"])
    if row["ratio"] is None:
        return (*head, *[DASH] * 6, "; ".join(remarks))
    interval = f"{row['low']:.3f} to {row['high']:.3f}"
    times = (f"{row[side] * 1e3:.3f}" for side in ("base_s", "head_s"))
    slower = f"{row['slower']} of {row['pairs']}"
    return (*head, f"{row['ratio']:.3f}", interval, slower, f"{row['delta']:.1%}", *times, "; ".join(remarks))


def summary(result: Mapping[str, Any]) -> Iterator[str]:
    """Sum up a result in a few lines."""
    counts = ", ".join(f"{count} {verdict}" for verdict, count in result["counts"].items()) or "no case"
    yield f"{counts}. Exit code {result['exit_code']}: {CODES[result['exit_code']]}."
    if 0 < result["gateable_share"] < GATEABLE_SHARE:
        yield (
            f"Only {result['gateable_share']:.0%} of the cases are quiet enough to be judged, {GATEABLE_SHARE:.0%} should be: "
            "is something else running on this machine?"
        )
    if result["same_commit"]:
        yield "Base and head are the same commit, so this measures the comparison itself."
    yield from result["problems"]
