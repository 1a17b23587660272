"""The curves of all meshes on top of each other, and how far apart they are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.reporting.style import COLOURS, SETTINGS
from benchmarks.training.judging import FACTOR, allowed

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def draw(curves: Mapping[str, Any], records: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draw losses on the left, and for each dtype their distances from one rank's on the right.

    Args:
        curves: of one rank, by dtype.
        records: of meshes; failed ones are left out.
        path: of the PNG to write.
    """
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter

    done = [record for record in records if "reason" not in record]
    with matplotlib.rc_context(SETTINGS):
        figure = Figure(figsize=(11, 4.2), layout="constrained")
        left, right = figure.subplots(1, 2)
        for record in done:
            left.plot(record["losses"], color=COLOURS[record["ranks"] % len(COLOURS)], linewidth=0.8, alpha=0.6)
        for number, (dtype, curve) in enumerate(curves.items()):
            left.plot(curve["losses"], color="black", linestyle=(0, (1, 3)), linewidth=1.2, label=f"one rank, {dtype}")
            _distances(right, curve, [record for record in done if record["dtype"] == dtype], COLOURS[number])
        for ranks in sorted({record["ranks"] for record in done}):
            count = sum(record["ranks"] == ranks for record in done)
            left.plot([], [], color=COLOURS[ranks % len(COLOURS)], label=f"P = {ranks}, {count} runs")
        left.set(xlabel="step", ylabel="loss (nats per byte)", title="Every mesh learns the same")
        right.set(xlabel="step", ylabel="difference from one rank's loss", title="to within what one unit in the last place causes")
        right.set_yscale("log")
        right.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0e}"))
        left.legend()
        right.legend(loc="center", ncols=2)  # between the curves of the dtypes
        figure.savefig(path, dpi=150)


def _distances(axes: Axes, curve: Mapping[str, Any], records: Sequence[Mapping[str, Any]], colour: str) -> None:
    """Differences of all meshes in one dtype, and the greatest that is allowed; those of 0 are not on a logarithmic axis."""
    alone = curve["losses"]
    for number, record in enumerate(records):
        apart = [abs(mine - loss) or float("nan") for mine, loss in zip(record["losses"], alone, strict=True)]
        axes.plot(apart, color=colour, linewidth=0.6, alpha=0.5, label=f"{curve['dtype']}, meshes" if number == 0 else None)
    for number, run in enumerate(curve["perturbed"]):
        apart = [abs(mine - loss) or float("nan") for mine, loss in zip(run, alone, strict=True)]
        axes.plot(apart, color="black", linewidth=0.6, alpha=0.7, label="one rank, weights 1 ulp away" if number == 0 else None)
    axes.plot(
        allowed(curve), color=colour, linestyle="--", linewidth=1.4, label=f"{curve['dtype']}, allowed: {FACTOR:g} times that"
    )
