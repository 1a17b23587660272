"""Train a small LLaMA on every scheme and mesh, and compare each run with that of one rank.

Exit code: 0 if every mesh has learned what one rank has, 1 if one has not or a launch failed, 2 for
options that cannot be run.
"""

import argparse
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from benchmarks.contests.contest import Contest, Entry, Part, Wrong, at_least
from benchmarks.launching import REPORTS, Record, about, numbers_of_ranks
from benchmarks.reporting.page import COLOURS, styled
from benchmarks.reporting.tables import make
from benchmarks.training.runs import DTYPES, FAULTS, Setting, places

ALONE = "one rank"
FACTOR = 10.0
"""A mesh's loss may be this many times as far from one rank's as that of a perturbed run.

A perturbed run starts from weights that are one unit in the last place away.
"""

SHARE = 0.01
"""The largest allowed difference as a share of the fall of the loss; more would hide errors."""

KINDS = ("loss", "gradients", "norm", "clipped norm")
COLUMNS = ("mesh", "P", "dtype", "last loss", "curve", *KINDS, "apart", "")


def plan(options: argparse.Namespace) -> tuple[Record, list[Entry]]:
    """Return fields of the document, and the launches: one rank in every dtype, then each mesh.

    Raises:
        UsageError: options that cannot be run.
    """
    setting, folder = Setting(steps=options.steps), options.folder.resolve()
    if options.plant and options.out == REPORTS / train.file:
        options.out = folder / "planted.json"
    job = {"setting": setting, "folder": str(folder), "fault": options.plant, "place": None}
    entries = [Entry(ALONE, len(DTYPES), job, needed=True)]
    for ranks in numbers_of_ranks(options.ranks, least=2):
        entries += [Entry(one.name, ranks, {**job, "place": one}) for one in places(ranks)]
    return {"setting": msgspec.structs.asdict(setting), "fault": options.plant}, entries


def allowed(curve: Mapping[str, Any]) -> list[float]:
    """Return for each step how far a mesh's loss may be from one rank's.

    The limit is FACTOR times the largest difference of a perturbed run up to this step. One unit in
    the last place of the loss is the least such difference.
    """
    alone = np.array(curve["losses"])
    least = np.spacing(alone.astype(curve["dtype"])).astype(float)
    seen = np.abs(np.array(curve["perturbed"]) - alone).max(0)
    return [float(FACTOR * x) for x in np.maximum.accumulate(np.maximum(seen, least))]


def divergence(losses: Sequence[float], curve: Mapping[str, Any]) -> float:
    """Return the worst difference from one rank's loss over the allowed one; it must be <= 1."""
    if len(losses) != len(curve["losses"]):
        return math.inf
    ratios = np.abs(np.array(losses) - np.array(curve["losses"])) / allowed(curve)
    return float(np.nan_to_num(ratios, nan=math.inf, posinf=math.inf).max())


def yardstick(curve: Mapping[str, Any]) -> list[str]:
    """Return a text for each fault of the runs on one rank."""
    longest, learned = allowed(curve)[-1], curve["losses"][0] - min(curve["losses"])
    far = f"{curve['worst']:.3g} times the bound around the float64 reference"
    amplified = (
        f"training amplifies one unit in the last place so much that {longest:.2g} would be "
        f"allowed, where {learned:.2g} was learned; take fewer steps, or a lower learning rate"
    )
    return [far] * (not curve["worst"] <= 1) + [amplified] * (not longest <= SHARE * learned)


def complaints(record: Mapping[str, Any], curve: Mapping[str, Any]) -> list[str]:
    """Return a text for each fault of the run on a mesh."""
    found = [
        f"{kind}: {ratio:.3g} times the bound, worst in {where}"
        for kind, (ratio, where) in record["worst"].items()
        if not ratio <= 1
    ]
    ratio, apart = divergence(record["losses"], curve), record["apart"]
    unit = f"{FACTOR:g} times a change of one unit in the last place"
    more = {
        "not everything was compared": not set(KINDS) <= set(record["worst"]),
        f"losses: {ratio:.3g} times as far from one rank's as {unit}": ratio > 1,
        f"ranks that hold the same weight differ by {apart:.3g} in the end": not apart <= 0,
    }
    return [*found, *(text for text, is_so in more.items() if is_so)]


def runs_of(document: Record) -> tuple[dict[str, Any], list[Record]]:
    """Return the curves of one rank by dtype, and the runs of all meshes."""
    first, *launches = document["launches"]
    return first["curves"], [run for launch in launches for run in launch["runs"]]


def show(document: Record) -> Iterator[Part]:
    """Yield a table of the meshes, and a complaint for each fault."""
    curves, runs = runs_of(document)
    rows, right = [], 0
    for run in runs:
        curve = curves[run["dtype"]]
        wrong = complaints(run, curve)
        right += not wrong
        place = f"P = {run['ranks']}, {run['place']}, {run['dtype']}"
        yield from (Wrong(f"{place}: {text}") for text in wrong)
        ratios = [f"{run['worst'][kind][0]:.3f}" for kind in KINDS if kind in run["worst"]]
        numbers = (f"{run['losses'][-1]:.4f}", f"{divergence(run['losses'], curve):.3f}", *ratios)
        start = (run["place"], str(run["ranks"]), run["dtype"])
        rows.append((*start, *numbers, f"{run['apart']:.0e}", "wrong" if wrong else ""))
    yield make("meshes", COLUMNS, rows, "error over bound from one rank's weights; at most 1")
    for dtype, curve in curves.items():
        yield from (Wrong(f"{ALONE}, {dtype}: {text}") for text in yardstick(curve))
        spread = max(abs(one[-1] - curve["losses"][-1]) for one in curve["perturbed"])
        yield (
            f"{ALONE}, {dtype}: loss {curve['losses'][0]:.3f} to {curve['losses'][-1]:.3f}; "
            f"from weights one ulp away the last loss differs by {spread:.1e}"
        )
    yield (
        f"{right} of {len(runs)} runs over several ranks have learned what one rank has; "
        f"{document['setting']['steps']} steps"
    )


def draw(document: Record, path: Path) -> None:
    """Draw losses on the left, and for each dtype their distances from one rank's on the right.

    Args:
        document: has the runs of one rank and of all meshes.
        path: the PNG file to write.
    """
    from matplotlib.figure import Figure

    curves, runs = runs_of(document)
    with styled():
        figure = Figure(figsize=(11, 4.2), layout="constrained")
        left, right = figure.subplots(1, 2)
        for ranks in sorted({run["ranks"] for run in runs}):
            mine = [run["losses"] for run in runs if run["ranks"] == ranks]
            colour = COLOURS[ranks % len(COLOURS)]
            lines = left.plot(np.transpose(mine), color=colour, linewidth=0.8, alpha=0.6)
            lines[0].set_label(f"P = {ranks}, {len(mine)} runs")
        for number, (dtype, curve) in enumerate(curves.items()):
            left.plot(
                curve["losses"],
                label=f"{ALONE}, {dtype}",
                color="black",
                linestyle=(0, (1, 3)),
                linewidth=1.2,
            )
            _distances(right, curve, [run for run in runs if run["dtype"] == dtype], number)
        left.set(xlabel="step", ylabel="loss (nats per byte)", title="Every mesh learns the same")
        right.set(
            xlabel="step",
            ylabel="difference from one rank's loss",
            title="to within what one unit in the last place causes",
            yscale="log",
        )
        right.yaxis.set_major_formatter("{x:.0e}")
        left.legend()
        right.legend(loc="center", ncols=2)  # between the curves of the dtypes
        figure.savefig(path, dpi=150)


def _distances(axes: Any, curve: Mapping[str, Any], runs: Sequence[Record], number: int) -> None:
    """Draw differences of all meshes in one dtype, and the greatest that is allowed.

    A logarithmic axis cannot show differences of 0.
    """
    dtype, colour = curve["dtype"], COLOURS[number]
    for losses, label, color in (
        ([run["losses"] for run in runs], f"{dtype}, meshes", colour),
        (curve["perturbed"], "one rank, weights 1 ulp away", "black"),
    ):
        if not losses:  # only one rank was run
            continue
        apart = np.abs(np.array(losses) - np.array(curve["losses"]))
        shown = np.where(apart > 0, apart, np.nan).T
        axes.plot(shown, color=color, linewidth=0.6, alpha=0.6)[0].set_label(label)
    label = f"{dtype}, allowed: {FACTOR:g} times that"
    axes.plot(allowed(curve), color=colour, linestyle="--", linewidth=1.4, label=label)


OPTIONS = {
    "--ranks": about(
        default="2,3,4",
        metavar="P,P,...",
        help="beside one, which always runs (default: %(default)s)",
    ),
    "--steps": about(
        type=at_least(1), default=Setting().steps, metavar="N", help="default: %(default)s"
    ),
    "--plant": about(
        choices=tuple(FAULTS),
        help="train with this fault on all meshes: then the exit code must be 1 (default of --out: "
        "planted.json in --folder)",
    ),
    "--folder": about(
        type=Path,
        default=REPORTS / "train",
        help="for weights and gradients (default: reports/train)",
    ),
}
train = Contest(
    *("train", __doc__, OPTIONS, plan, f"{__package__}.runs:measure", show),
    file="train.json",
    timeout=1800.0,
    draw=draw,
)
