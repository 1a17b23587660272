"""What is shown: every row with its target and whether it was reached, then what "auto" loses and how far predictions are off."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from benchmarks.collectives_table.regret import MEDIAN, MICROSECONDS, WORST
from benchmarks.collectives_table.rows import KIB, MIB, Line, lines

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

STYLES = {"reached": "green", "not reached": "red"}
SHOWN = 12  # cases of regret, the worst ones


def show(console: Console, document: dict[str, Any]) -> None:
    """All tables of a record."""
    launches = [launch for launch in document["launches"] if launch["status"] == "ok"]
    mpi = mpi_of(document)
    console.print(fingerprint(document), highlight=False)
    timed = [launch for launch in launches if "heats" in launch]
    if timed:
        console.print(rows_table(lines(timed, mpi), f"{mpi}, {document['ranks']} ranks, float32"))
    for launch in launches:
        if "summary" in launch:
            console.print(regret_table(launch))


def mpi_of(document: dict[str, Any]) -> str:
    """The MPI of a record."""
    return next((launch["transport"]["mpi"]["vendor"] for launch in document["launches"] if "transport" in launch), "no MPI")


def fingerprint(document: dict[str, Any]) -> str:
    """Where and from what it comes, in a line."""
    launch = next((launch for launch in document["launches"] if "transport" in launch), None)
    if launch is None:
        return "no launch was completed"
    mpi, env = launch["transport"]["mpi"], launch["env"]
    parts = (f"{mpi['vendor']} {mpi['version']}", f"torch {env['torch']}", launch["device"]["name"], f"{env['cores']} cores")
    return ", ".join((*parts, str(document["commit"]["sha"])))


def rows_table(found: Iterable[Line], title: str) -> Table:
    """A line for every row and size."""
    table = _table(title, "what", "vector", "ours", "must be", "median, interval", "scratch", "")
    for line in found:
        row = line.row
        must = "-" if row.target is None else f">= {row.target:g}"
        must = must if row.microseconds is None else f"<= {row.microseconds:g} us more"
        scratch = "-" if line.value is None else size(line.scratch)
        style = STYLES.get(line.mark.split(",")[0], "yellow")
        table.add_row(row.what, size(line.nbytes), line.ours, must, str(line.value or "-"), scratch, line.mark, style=style)
    return table


def regret_table(launch: dict[str, Any]) -> Table:
    """The figures asked for in the title, and the worst cases."""
    told = launch["summary"]
    reached = "reached" if told["reached"] else "not reached"
    title = (
        f"auto over {told['cases']} cases: median regret {told['median']:.1%} (<= {MEDIAN:.0%}), 95th percentile {told['p95']:.1%}"
        f", {told['p95_beyond_microseconds']:.1%} where more than {MICROSECONDS:g} us (<= {WORST:.0%}): {reached}\n"
        f"prediction off by {told['prediction_error']['median']:.0%} (median), {told['prediction_error']['p95']:.0%} (95th); "
        f"the model without corrections by {told['model_error']['median']:.0%}, {told['model_error']['p95']:.0%}"
    )
    table = _table(title, "collective", "vector", "chosen", "best", "us", "of the best", "predicted us", "model us")
    for case in sorted(launch["cases"], key=lambda case: case["least"] / case["seconds"])[:SHOWN]:
        times = [f"{case[kind] * 1e6:,.1f}" for kind in ("seconds", "least", "predicted", "plain")]
        table.add_row(case["op"], size(case["nbytes"]), case["chosen"], case["best"], *times)
    return table


def size(nbytes: int) -> str:
    """Bytes for people."""
    for unit, name in ((MIB, "MiB"), (KIB, "KiB")):
        if nbytes >= unit:
            return f"{nbytes / unit:.3g} {name}"
    return f"{nbytes} B"


def _table(title: str, *columns: str) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left", title_style="bold")
    for column in columns:
        table.add_column(column, justify="left" if column in ("what", "collective", "chosen", "best", "ours", "") else "right")
    return table
