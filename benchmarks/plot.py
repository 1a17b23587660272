"""Time and speed-up against the number of ranks, with the ideal line."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.report import Record, Row, rows, title

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = ("#1f5fa8", "#c05a1c", "#4d8b31")
CAVEATS = ("oversubscribed", "shared GPU")


def plot(groups: list[list[Record]], path: Path) -> None:
    """Draw the records of each dtype into one picture.

    Args:
        groups: records by dtype; failed ones are left out.
        path: of the PNG to write.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4.2), layout="constrained")
    drawn = [(rows(records), records) for records in groups if rows(records)]
    for (group, records), colour in zip(drawn, COLOURS, strict=False):
        _draw(left, group, [row.milliseconds for row in group], group[0].milliseconds, records[0]["case"]["dtype"], colour)
        _draw(right, group, [row.speedup for row in group], 1.0, records[0]["case"]["dtype"], colour, rising=True)
    ticks = sorted({row.ranks for group, _ in drawn for row in group})
    _label(left, "time of one step (ms, median)", ticks)
    _label(right, f"speed-up against P = {ticks[0]}", ticks)
    figure.suptitle(_heading(groups), fontsize=10)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def _draw(axes: Axes, group: list[Row], values: list[float], first: float, name: str, colour: str, *, rising: bool = False) -> None:
    ranks = [row.ranks for row in group]
    growth = [r / ranks[0] for r in ranks]
    ideal = [first * g if rising else first / g for g in growth]
    axes.plot(ranks, ideal, linestyle="--", color=colour, alpha=0.45, label=f"{name}, ideal")
    axes.plot(ranks, values, marker="o", color=colour, label=name)
    marked = [(row.ranks, value) for row, value in zip(group, values, strict=True) if set(CAVEATS) & set(row.flags)]
    if marked:
        kinds = " or ".join(kind for kind in CAVEATS if any(kind in row.flags for row in group))
        axes.plot(*zip(*marked, strict=True), linestyle="none", marker="o", markersize=11, mfc="none", mec="crimson", label=kinds)


def _label(axes: Axes, what: str, ticks: list[int]) -> None:
    axes.set_xlabel("ranks P")
    axes.set_ylabel(what)
    axes.set_xticks(ticks)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.25)
    axes.legend(fontsize=8)


def _heading(groups: list[list[Record]]) -> str:
    record = next(r for records in groups for r in records if r["status"] == "ok")
    text = title([record]).partition(" on ")[2]
    mpi = record["transport"]["mpi"]
    machine = f"{record['device']['name']}, {mpi['vendor']} {mpi['version']}"
    return f"Strong scaling of one transformer block, AllGather-KV, forward\n{text}\n{machine}"
