"""Make tables of plain text, which Markdown, HTML and a terminal of any width show alike."""

import math
import sys
import unicodedata
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from rich import box
from rich.console import Console
from rich.table import Table as Grid
from rich.text import Text

from benchmarks.records import Record
from benchmarks.reporting import derive

MAX_ROWS = 300
WORDS = {
    "case",
    "commit",
    "fingerprint",
    "side",
    "run",
    "device",
    "MPI",
    "software",
    "system",
    "reason",
    "flags",
    "status",
    "verdict",
    "where",
    "contestant",
    "requirement",
    "what",
    "ours",
    "collective",
    "chosen",
    "best",
    "policy",
    "mesh",
    "dtype",
    "remarks",
    "",
}
"""Columns of words, which start at the left; numbers end at the right."""


@dataclass(frozen=True)
class Table:
    """A table.

    Args:
        title: the text above the table.
        columns: the names of the columns.
        rows: the cells of each row, in the order of the columns.
        note: the text below the table.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""

    @property
    def left(self) -> tuple[bool, ...]:
        """Whether each column holds words, which start at the left."""
        return tuple(name in WORDS for name in self.columns)


def make(
    title: str, columns: Iterable[str], cells: Iterable[Iterable[str]], note: str = ""
) -> Table:
    """Make a table of at most MAX_ROWS rows. Columns that are empty in every row are left out."""
    names, lines = tuple(columns), [tuple(line) for line in cells]
    more = f"{len(lines) - MAX_ROWS} more rows are left out." if len(lines) > MAX_ROWS else ""
    kept = [
        i
        for i in range(len(names))
        if not lines or any(line[i] not in (DASH, "") for line in lines)
    ]
    shown = tuple(tuple(line[i] for i in kept) for line in lines[:MAX_ROWS])
    return Table(title, tuple(names[i] for i in kept), shown, " ".join(filter(None, (note, more))))


COLUMNS = (
    "case",
    "time (ms)",
    "speed-up",
    "efficiency",
    "algbw (GB/s)",
    "busbw (GB/s)",
    "comm share",
    "bytes sent",
    "tokens/s",
    "GFLOP/s",
    "peak memory",
    "imbalance",
    "flags",
)


def cells(row: derive.Row) -> tuple[str, ...]:
    """Return the cells of a row, in the order of COLUMNS."""
    scales = row.algbw is None and row.case.layer != "collectives"
    return (
        plain(row.case.id),
        milliseconds(row.seconds),
        f"{row.speedup:.2f}" if scales else DASH,
        percent(row.efficiency) if scales else DASH,
        gigabytes(row.algbw),
        gigabytes(row.busbw),
        percent(row.share),
        size(row.sent),
        count(row.tokens_per_s),
        gigabytes(row.flops_per_s),
        size(row.peak_bytes),
        f"{row.imbalance:.2f}",
        ", ".join(row.flags),
    )


def per_ranks(rows: list[derive.Row]) -> list[Table]:
    """Make a table for each layer and each number of ranks."""
    groups = derive.grouped(rows, lambda row: (row.case.layer, row.ranks))
    return [
        make(f"{plain(layer)}, P = {ranks}", COLUMNS, map(cells, group))
        for (layer, ranks), group in groups
    ]


def failures(records: list[Record]) -> list[Table]:
    """Return a table of the cases without a time, with the reasons; no table if there are none."""
    lines = sorted(
        (plain(r.case.id), str(r.case.ranks), r.status, plain(r.reason or "the time is 0"))
        for r in records
        if not r.seconds
    )
    return [make("Not measured", ("case", "P", "status", "reason"), lines)] if lines else []


def settings(groups: dict[derive.Setting, list[Record]]) -> Table:
    """Return a table with a line for each setting: commit, side and machine."""
    lines = []
    for setting, group in groups.items():
        runs = sorted({r.run_id for r in group})
        run = runs[0] if len(runs) == 1 else f"{len(runs)} runs, the last {runs[-1]}"
        what = (setting.commit, setting.side or DASH, run, len(group))
        machine = next(filter(None, map(_machine, group)), (DASH,) * 5)
        names = (setting.fingerprint, setting.harness[:16])
        lines.append([plain(cell) for cell in (*what, *machine, *names)])
    columns = "commit side run records device count MPI software system fingerprint harness"
    return make("Commits and machines", columns.split(), lines)


def _machine(record: Record) -> tuple[object, ...] | None:
    if not (record.device and record.transport and record.env):
        return None
    device, mpi, env = record.device, record.transport.mpi, record.env
    software = f"Python {env.python}, torch {env.torch}"
    return device.name, device.count, f"{mpi.vendor} {mpi.version}", software, env.platform


LEGEND = (
    "time: median over launches of the median step, from the first rank's start to the last's end. "
    "speed-up and efficiency: against the fewest ranks of the same case. "
    "algbw: bytes of the largest buffer of a rank over the time; "
    "busbw: the same times the share that must cross a link. "
    "comm share: communication and waiting for other ranks, on the rank where it took longest. "
    "bytes sent: by all ranks in one step. imbalance: the slowest rank's time over the mean. "
    "oversubscribed: more threads than cores, so the time says nothing about scaling. "
    "skew-limited: the ranks did not start together."
)


def ratio(value: float) -> str:
    """Write a ratio of times as a change in percent."""
    return f"{'+' if value >= 1 else '-'}{significant(abs(value - 1) * 100, 2)}%"


DASH = "-"
LONGEST = 160  # characters of a foreign text that are shown
BINARY = ("B", "KiB", "MiB", "GiB", "TiB")


def plain(value: object, longest: int = LONGEST) -> str:
    """Return a value on one line of visible characters in reading order, cut to a length."""
    spaced = "".join(
        " " if unicodedata.category(c) in ("Cc", "Zl", "Zp", "Zs") else c for c in str(value)
    )
    shown = " ".join("".join(c for c in spaced if unicodedata.category(c)[0] != "C").split())
    return shown if len(shown) <= longest else shown[: longest - 1] + "…"


def significant(value: float, digits: int = 3) -> str:
    """Write a number with `digits` significant digits, without an exponent."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    rounded = float(f"{value:.{digits - 1}e}")  # 99.96 has as many digits before the point as 100
    return f"{value:,.{max(0, digits - 1 - math.floor(math.log10(abs(rounded))))}f}"


def milliseconds(seconds: float) -> str:
    """Write seconds as milliseconds, without the unit."""
    return significant(seconds * 1e3)


def gigabytes(rate: float | None) -> str:
    """Write bytes per second as GB/s (1e9), without the unit."""
    return DASH if rate is None else significant(rate / 1e9)


def percent(share: float | None) -> str:
    """Write a share as a percentage."""
    return DASH if share is None else f"{share:.1%}" if abs(share) < 0.1 else f"{share:.0%}"


def size(count: float | None) -> str:
    """Write bytes with a binary unit."""
    if count is None:
        return DASH
    step = max(0, min(len(BINARY) - 1, math.floor(math.log2(count) / 10))) if count >= 1 else 0
    return f"{significant(count / 1024**step) if step else f'{count:.0f}'} {BINARY[step]}"


def count(value: float | None) -> str:
    """Write a whole number with separators."""
    return DASH if value is None else f"{value:,.0f}"


WIDTH = 170  # characters of a line of output that goes into a file
LINES_EVERY = 10  # steps between two lines of plain progress
GAP = 3  # characters between columns
WRAPPED = 60  # a longer cell counts as this many characters; it is wrapped


def console() -> Console:
    """Return a console as wide as the terminal; WIDTH characters if the output is a file."""
    return Console(width=None if sys.stdout.isatty() else WIDTH)


def following(name: str) -> Callable[..., None]:
    """Return a function that prints a line for some of its calls with phase, done and total."""
    said = -LINES_EVERY

    def told(phase: str, done: int, total: int, **_: object) -> None:
        nonlocal said
        if abs(done - said) >= LINES_EVERY or 0 < done == total:
            said = done
            say(f"{name}: {f'{done} of {total}, ' * bool(total)}{phase}")

    return told


def say(text: str, style: str = "") -> None:
    """Print a text as it is, without markup and without line breaks of the terminal's width."""
    console().print(text, style=style, highlight=False, markup=False, soft_wrap=True)


def show(table: Table) -> None:
    """Print a table. Columns that do not fit follow below, each time with the first column."""
    on, title = console(), table.title
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
            grid.add_row(*(Text(row[place]) for place in part))
        on.print(grid)
        title = ""
    if table.note:
        say(table.note, "dim")


def _parts(table: Table, width: int) -> Iterator[list[int]]:
    """Yield the column indices of each part; the first column is in all parts."""
    widths = [
        max(map(len, (name, *(row[i][:WRAPPED] for row in table.rows)))) + GAP
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
