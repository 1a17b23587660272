"""The judgement on a mesh, and how all of them are shown: a table, and curves on top of each other."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.reporting.style import COLOURS, styled
from benchmarks.reporting.tables import Table, make

FACTOR = 10.0
"""How many times as far as a run from weights one unit in the last place away a mesh may be."""

SHARE = 0.01
"""What is allowed may be at most this share of what was learned: a longer yardstick could not tell right from wrong."""


def allowed(curve: Mapping[str, Any]) -> list[float]:
    """How far from one rank's loss a mesh's may be at each step: ten times the largest divergence so far of a perturbed run.

    Less than one unit in the last place of a loss no loss can differ by, so that is the least
    divergence.
    """
    alone = curve["losses"]
    least = [float(np.spacing(np.dtype(curve["dtype"]).type(loss))) for loss in alone]
    seen = [
        max(abs(run[step] - loss) for run in curve["perturbed"]) for step, loss in enumerate(alone)
    ]
    return [FACTOR * limit for limit in accumulate(map(max, seen, least), max)]


def divergence(losses: Sequence[float], curve: Mapping[str, Any]) -> float:
    """The worst difference from one rank's loss over what is allowed; above 1 means that another thing was learned."""
    if len(losses) != len(curve["losses"]):
        return math.inf
    limits = allowed(curve)
    ratios = [
        abs(mine - alone) / limit
        for mine, alone, limit in zip(losses, curve["losses"], limits, strict=True)
    ]
    return max((math.inf if math.isnan(ratio) else ratio for ratio in ratios), default=math.inf)


def yardstick(curve: Mapping[str, Any]) -> list[str]:
    """What is wrong with the runs of one rank."""
    longest, learned = allowed(curve)[-1], curve["losses"][0] - min(curve["losses"])
    found = []
    if not curve["worst"] <= 1:
        found.append(f"{curve['worst']:.3g} times the bound around the float64 reference")
    if not longest <= SHARE * learned:
        found.append(
            f"training amplifies one unit in the last place so much that {longest:.2g} would be allowed, where {learned:.2g} was "
            "learned; take fewer steps, or a lower learning rate"
        )
    return found


def complaints(record: Mapping[str, Any], curve: Mapping[str, Any]) -> list[str]:
    """What is wrong with a mesh."""
    if "reason" in record:
        return [record["reason"]]
    found = [
        f"{kind}: {ratio:.3g} times the bound, worst in {where}"
        for kind, (ratio, where) in record["worst"].items()
        if ratio > 1
    ]
    if not {"loss", "gradients", "norm", "clipped norm"} <= set(record["worst"]):
        found.append("not everything was compared")
    ratio = divergence(record["losses"], curve)
    if ratio > 1:
        found.append(
            f"losses: {ratio:.3g} times as far from one rank's as {FACTOR:g} times a change of one unit in the last place"
        )
    if record["apart"] > 0:
        found.append(f"ranks that hold the same weight differ by {record['apart']:.3g} in the end")
    return found


KINDS = ("loss", "gradients", "norm", "clipped norm")
COLUMNS = ("mesh", "P", "dtype", "last loss", "curve", *KINDS, "apart", "")


def table(
    curves: Mapping[str, Any], records: Sequence[Mapping[str, Any]], found: Sequence[Sequence[str]]
) -> Table:
    """Return a line for each mesh."""
    rows = [
        row(record, curves[record["dtype"]], texts)
        for record, texts in zip(records, found, strict=True)
    ]
    return make("meshes", COLUMNS, rows, "error over bound from one rank's weights; at most 1")


def row(
    record: Mapping[str, Any], curve: Mapping[str, Any], complaints: Sequence[str]
) -> tuple[str, ...]:
    """Return the cells of a mesh."""
    start = (record["place"], str(record["ranks"]), record["dtype"])
    if "reason" in record:
        return (*start, *["-"] * (len(COLUMNS) - 4), "failed")
    ratios = [f"{record['worst'][kind][0]:.3f}" for kind in KINDS]
    last, apart = f"{record['losses'][-1]:.4f}", f"{record['apart']:.0e}"
    return (
        *start,
        last,
        f"{divergence(record['losses'], curve):.3f}",
        *ratios,
        apart,
        "wrong" if complaints else "",
    )


def draw(curves: Mapping[str, Any], records: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draw losses on the left, and for each dtype their distances from one rank's on the right.

    Args:
        curves: of one rank, by dtype.
        records: of meshes; failed ones are left out.
        path: of the PNG to write.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter

    done = [record for record in records if "reason" not in record]
    with styled():
        figure = Figure(figsize=(11, 4.2), layout="constrained")
        left, right = figure.subplots(1, 2)
        for record in done:
            left.plot(
                record["losses"],
                color=COLOURS[record["ranks"] % len(COLOURS)],
                linewidth=0.8,
                alpha=0.6,
            )
        for number, (dtype, curve) in enumerate(curves.items()):
            left.plot(
                curve["losses"],
                color="black",
                linestyle=(0, (1, 3)),
                linewidth=1.2,
                label=f"one rank, {dtype}",
            )
            _distances(
                right,
                curve,
                [record for record in done if record["dtype"] == dtype],
                COLOURS[number],
            )
        for ranks in sorted({record["ranks"] for record in done}):
            count = sum(record["ranks"] == ranks for record in done)
            left.plot(
                [], [], color=COLOURS[ranks % len(COLOURS)], label=f"P = {ranks}, {count} runs"
            )
        left.set(xlabel="step", ylabel="loss (nats per byte)", title="Every mesh learns the same")
        right.set(
            xlabel="step",
            ylabel="difference from one rank's loss",
            title="to within what one unit in the last place causes",
        )
        right.set_yscale("log")
        right.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0e}"))
        left.legend()
        right.legend(loc="center", ncols=2)  # between the curves of the dtypes
        figure.savefig(path, dpi=150)


def _distances(
    axes: Any, curve: Mapping[str, Any], records: Sequence[Mapping[str, Any]], colour: str
) -> None:
    """Differences of all meshes in one dtype, and the greatest that is allowed; those of 0 are not on a logarithmic axis."""
    alone = curve["losses"]
    for number, record in enumerate(records):
        apart = [
            abs(mine - loss) or float("nan")
            for mine, loss in zip(record["losses"], alone, strict=True)
        ]
        axes.plot(
            apart,
            color=colour,
            linewidth=0.6,
            alpha=0.5,
            label=f"{curve['dtype']}, meshes" if number == 0 else None,
        )
    for number, run in enumerate(curve["perturbed"]):
        apart = [abs(mine - loss) or float("nan") for mine, loss in zip(run, alone, strict=True)]
        axes.plot(
            apart,
            color="black",
            linewidth=0.6,
            alpha=0.7,
            label="one rank, weights 1 ulp away" if number == 0 else None,
        )
    axes.plot(
        allowed(curve),
        color=colour,
        linestyle="--",
        linewidth=1.4,
        label=f"{curve['dtype']}, allowed: {FACTOR:g} times that",
    )
