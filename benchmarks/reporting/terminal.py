"""Tables in a terminal of any width."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from benchmarks.reporting.tables import Table

if TYPE_CHECKING:
    from rich.console import Console as Console
    from rich.progress import Progress
else:
    Console = Progress = object  # rich is slow to import

WIDTH = 170  # of output that goes into a file
GAP = 3  # characters between columns
LONGEST = 60  # characters of a cell before it goes on in the next line
GOOD, BAD, DOUBTFUL = "green", "red", "yellow"
STYLES = {
    "reached": GOOD,
    "improved": GOOD,
    "not reached": BAD,
    "regressed": BAD,
    "missing": BAD,
    "mismatch": BAD,
    "wrong": BAD,
    "failed": BAD,
    "oom": BAD,
    "timeout": BAD,
    "inconclusive": DOUBTFUL,
    "ungateable": DOUBTFUL,
    "not installed": DOUBTFUL,
    "not measured": DOUBTFUL,
    "oversubscribed": "dim",
}
"""Of a row, by the first words of one of its cells."""


def console() -> Console:
    """Return a console as wide as the terminal, or as all tables if the output is a file."""
    from rich.console import Console as Console

    return Console(width=None if sys.stdout.isatty() else WIDTH)


def bar(on: Console) -> Progress:
    """Return a progress bar that is shown on a terminal only."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    return Progress(*columns, console=on, transient=True, disable=not on.is_terminal)


def say(on: Console, text: str, style: str = "") -> None:
    """Print a text as it is, without markup and without line breaks of the terminal's width."""
    on.print(text, style=style, highlight=False, markup=False, soft_wrap=True)


def show(on: Console, table: Table) -> None:
    """Print a table; columns that do not fit follow below, under the first one again."""
    from rich import box
    from rich.table import Table as Grid
    from rich.text import Text

    title = table.title
    for part in _parts(table, on.width):
        grid = Grid(box=box.SIMPLE_HEAD, title=Text(title, "bold"), title_justify="left")
        for place in part:
            words = table.left[place]
            grid.add_column(
                table.columns[place],
                justify="left" if words else "right",
                overflow="fold",
                no_wrap=not words,
            )
        for row in table.rows:
            grid.add_row(*(Text(row[place]) for place in part), style=_style(row))
        on.print(grid)
        title = ""
    if table.note:
        say(on, table.note, "dim")


def _style(row: tuple[str, ...]) -> str:
    found: list[Any] = [
        STYLES[start] for cell in row if (start := cell.split(",")[0].split(":")[0]) in STYLES
    ]
    return found[0] if found else ""


def _parts(table: Table, width: int) -> Iterator[list[int]]:
    """The columns of each part, with the first column in all of them."""
    widths = [
        max(map(len, (name, *(row[i][:LONGEST] for row in table.rows)))) + GAP
        for i, name in enumerate(table.columns)
    ]
    part, used = [0], widths[0]
    for place in range(1, len(widths)):
        if used + widths[place] > width and len(part) > 1:
            yield part
            part, used = [0], widths[0]
        part.append(place)
        used += widths[place]
    yield part
