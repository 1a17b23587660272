"""What is shown: for each length a table of times and ratios, then the required lines, each with pass or short."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING

from benchmarks.peers import ratios
from benchmarks.peers.ratios import Record
from benchmarks.peers.setting import Setting

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

DASH = "-"
STYLES = {"pass": "green", "short": "red"}
LEGEND = (
    "One launch gives one number per contestant, the median of its samples; a ratio is the median over the launches, in brackets\n"
    "its exact interval (order statistics; 95 %, or the widest with fewer than 6 launches). open: the interval crosses the bound.\n"
    "Times: forward and backward, last rank's end minus first rank's start."
)


def show(console: Console, launches: Sequence[Record], setting: Setting) -> None:
    """Everything about the launches that were completed."""
    done = [launch for launch in launches if launch["status"] == "ok"]
    if not done:
        console.print("no launch was completed; nothing to show.", style="red")
        return
    for seq in setting.seqs:
        console.print(results(done, seq))
    if not setting.check_only:
        console.print(required(done, setting))
        console.print(LEGEND, style="dim", highlight=False, soft_wrap=True)


def results(launches: Sequence[Record], seq: int) -> Table:
    """All contestants at one length, quickest first, those without a time last."""
    winner = ratios.best(launches, seq)
    table = _table(f"sequence {seq}, {len(launches)} launches", "contestant", "ms", f"time / {winner or 'ours'}", "max error", "")
    names = sorted(launches[0]["seqs"][str(seq)], key=lambda name: _typical(launches, seq, name) or float("inf"))
    for name in names:
        milliseconds, against = _typical(launches, seq, name), ratios.ratio(launches, seq, name, winner)
        status, style = state(launches, seq, name)
        time = DASH if milliseconds is None else f"{milliseconds * 1e3:.2f}"
        table.add_row(name, time, str(against or DASH), _error(launches, seq, name), status, style=style)
    return table


def required(launches: Sequence[Record], setting: Setting) -> Table:
    """The lines that must hold."""
    table = _table("required", "ratio", "sequence", "must be", "median, interval", "")
    extras = [seq for seq in setting.seqs if setting.extras(seq)]
    for line in ratios.lines(launches, setting.seqs, extras):
        style = STYLES.get(line.mark.split(",")[0], "yellow")
        table.add_row(line.text, str(line.seq), f"{line.relation} {line.bound:g}", str(line.ratio or DASH), line.mark, style=style)
    return table


def state(launches: Sequence[Record], seq: int, name: str) -> tuple[str, str]:
    """How a contestant's checks came out, and the style to show it in."""
    found = [launch["seqs"][str(seq)][name] for launch in launches]
    bad = [check for check in found if check["status"] != "ok"]
    if not bad:
        return "ok", ""
    often = "" if len(bad) == len(found) else f" in {len(bad)} of {len(found)} launches"
    reason = f": {bad[0]['reason']}" if "reason" in bad[0] else ""
    return f"{bad[0]['status']}{often}{reason}", "yellow" if bad[0]["status"] == "not installed" else "red"


def _typical(launches: Sequence[Record], seq: int, name: str) -> float | None:
    times = [x for x in ratios.medians(launches, seq, name) if x is not None]
    return statistics.median(times) if times else None


def _error(launches: Sequence[Record], seq: int, name: str) -> str:
    """The largest error of any launch, over the largest element."""
    found = [x for launch in launches for x in launch["seqs"][str(seq)][name].get("errors", {}).values()]
    if not found:
        return DASH
    return "not finite" if None in found else f"{max(found):.1e}"


def _table(title: str, *columns: str) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left", title_style="bold")
    for column in columns:
        table.add_column(column, justify="left" if column in ("contestant", "ratio", "") else "right", overflow="fold")
    return table
