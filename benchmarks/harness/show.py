"""What the runner shows: which case is measured, what went wrong, and a table for each number of ranks."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from benchmarks.harness.derived import alone, derive
from benchmarks.records import Record
from sp_core.machine import busy_share, cores

BUSY_SHARE = 0.2
DASH = "-"
COLUMNS = ("case", "ms", "ratio to P=1", "efficiency", "algbw GB/s", "busbw GB/s", "comm share", "bytes sent", "")
WIDTH = 160  # where the output is no terminal
LINES_EVERY = 20  # cases between two lines of plain progress
COLUMN_STYLES = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())


class Display:
    """Speaks to the person who started the run.

    Args:
        plan: cases by number of ranks.
    """

    def __init__(self, plan: dict[int, list[Any]]) -> None:
        self.console = Console(width=None if sys.stdout.isatty() else WIDTH)
        total = sum(map(len, plan.values()))
        self._say(f"{total} measurements: P = {', '.join(map(str, plan))}; this machine offers {cores()} cores.")
        if (busy := busy_share()) > BUSY_SHARE:
            self._say(f"note: other work keeps {busy:.0%} of this machine busy; timings will suffer.", "yellow")

    @contextmanager
    def launch(self, ranks: int, total: int) -> Iterator[Callable[[dict[str, Any]], None]]:
        """Show the progress of one launch: a bar on a terminal, else a line now and then."""
        with Progress(*COLUMN_STYLES, console=self.console, transient=True, disable=not self.console.is_terminal) as bar:
            task = bar.add_task(f"P = {ranks}: starting", total=total)
            said = [-LINES_EVERY]

            def told(news: dict[str, Any]) -> None:
                bar.update(task, description=f"P = {ranks}: {news['case']}", completed=news["done"])
                if not self.console.is_terminal and news["done"] >= said[0] + LINES_EVERY:
                    said[0] = news["done"]
                    self._say(f"P = {ranks}: {news['done']} of {total}, {news['case']}")

            yield told
        self._say(f"P = {ranks}: done")

    def problem(self, ranks: int, output: str) -> None:
        """What a launch that went wrong has printed."""
        if output:
            self._say(f"P = {ranks} went wrong; the last lines of its output:\n{output}", "red")

    def tables(self, found: Sequence[Record]) -> None:
        """One table for each P, and a line for each case that failed."""
        single = alone(found)
        for ranks in sorted({record["case"]["ranks"] for record in found}):
            mine = [record for record in found if record["case"]["ranks"] == ranks]
            self.console.print(table(mine, single))
            for record in mine:
                if record["timing"] is None or record["reason"] is not None:
                    reason = str(record["reason"]).splitlines()[0]
                    self._say(f"P = {ranks}, {record['case']['id']}: {record['status'].upper()}: {reason}", "red")

    def _say(self, text: str, style: str = "") -> None:
        self.console.print(text, style=style, highlight=False, markup=False, soft_wrap=True)


def table(found: Sequence[Record], single: dict[str, float]) -> Table:
    """The records of one P that have a timing.

    Args:
        found: records.
        single: median seconds on one rank, by case id.
    """
    made = Table(title=f"P = {found[0]['case']['ranks']}")
    for number, name in enumerate(COLUMNS):
        made.add_column(name, justify="right" if 0 < number < len(COLUMNS) - 1 else "left", no_wrap=number == 0)
    for record in found:
        if record["timing"] is not None:
            made.add_row(*cells(record, single.get(record["case"]["id"])))
    return made


def cells(record: Record, single: float | None) -> tuple[str, ...]:
    """The text of each column."""
    found = derive(record, single)
    return (
        record["case"]["id"],
        f"{found.seconds * 1e3:.3f}",
        _or_dash(found.speedup, "{:.2f}"),
        _or_dash(found.efficiency, "{:.0%}"),
        *(_or_dash(None if rate is None else rate / 1e9, "{:.2f}") for rate in (found.algbw, found.busbw)),
        f"{found.share:.0%}",
        f"{found.bytes_sent:,}",
        ", ".join(found.flags),
    )


def _or_dash(value: float | None, form: str) -> str:
    return DASH if value is None else form.format(value)
