"""What a comparison shows: a table with a line for each case, and what it comes to."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from benchmarks.compare.rule import GATEABLE_SHARE, Verdict

if TYPE_CHECKING:
    from rich.table import Table

DASH = "-"
COLUMNS = ("case", "P", "verdict", "head / base", "interval", "slower", "counts from", "base (ms)", "head (ms)", "remarks")
STYLES = {
    Verdict.REGRESSED: "bold red",
    Verdict.MISSING: "bold red",
    Verdict.MISMATCH: "bold red",
    Verdict.INCONCLUSIVE: "yellow",
    Verdict.UNGATEABLE: "yellow",
    Verdict.IMPROVED: "green",
    Verdict.NEW: "cyan",
    Verdict.OVERSUBSCRIBED: "dim",
}
CODES = {
    0: "nothing got slower",
    1: "something got slower",
    3: "not everything could be compared",
    4: "not everything could be decided",
}


def table(result: Mapping[str, Any]) -> Table:
    """A line for each row of a result."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    shown = Table(box=box.SIMPLE_HEAD, title=title(result), title_justify="left", title_style="bold")
    for column in COLUMNS:
        words = column in ("case", "verdict", "remarks")
        shown.add_column(column, justify="left" if words else "right", overflow="fold", no_wrap=not words)
    for row in result["rows"]:
        shown.add_row(*map(Text, cells(row)), style=STYLES.get(Verdict(row["verdict"]), ""))
    return shown


def title(result: Mapping[str, Any]) -> str:
    """What was compared."""
    names = [f"{side} {result[side]['ref']} ({(result[side]['sha'] or 'changed')[:10]})" for side in ("base", "head")]
    return " against ".join(names) + (": the same commit" if result["same_commit"] else "")


def cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    """The texts of one line."""
    remarks = [text for text in (row["reason"], row["explanation"], *row["flags"]) if text]
    head = (row["case"], str(row["ranks"]), row["verdict"])
    if row["ratio"] is None:
        return (*head, *[DASH] * 6, "; ".join(remarks))
    interval = f"{row['low']:.3f} to {row['high']:.3f}"
    times = (f"{row[side] * 1e3:.3f}" for side in ("base_s", "head_s"))
    slower = f"{row['slower']} of {row['pairs']}"
    return (*head, f"{row['ratio']:.3f}", interval, slower, f"{row['delta']:.1%}", *times, "; ".join(remarks))


def summary(result: Mapping[str, Any]) -> Iterator[str]:
    """What the table comes to, in a few lines."""
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
