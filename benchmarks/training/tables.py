"""What the session prints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.training.judging import divergence
from benchmarks.training.setting import Setting

KINDS = ("loss", "gradients", "norm", "clipped norm")
WIDTH = 110  # of a table that goes into a file


def show(
    setting: Setting,
    curves: Mapping[str, Any],
    records: Sequence[Mapping[str, Any]],
    found: Sequence[Sequence[str]],
    seconds: float,
) -> None:
    """Print a line for each mesh, what is wrong with those that are, and the summary."""
    from rich.box import SIMPLE
    from rich.console import Console
    from rich.table import Table

    console = Console()
    console = console if console.is_terminal else Console(width=WIDTH)
    table = Table(box=SIMPLE, caption="error over bound from one rank's weights; at most 1", pad_edge=False)
    for name in ("P", "mesh", "dtype", "last loss", "curve", *KINDS, "apart"):
        table.add_column(name, justify="left" if name in ("mesh", "dtype") else "right")
    for record in records:
        table.add_row(*row(record, curves[record["dtype"]]))
    console.print(table)
    for record, texts in zip(records, found, strict=True):
        for text in texts:
            console.print(
                f"WRONG P = {record['ranks']}, {record['place']}, {record['dtype']}: {text}", markup=False, highlight=False
            )
    for dtype, curve in curves.items():
        spread = max(abs(run[-1] - curve["losses"][-1]) for run in curve["perturbed"])
        first, last = curve["losses"][0], curve["losses"][-1]
        print(f"one rank, {dtype}: loss {first:.3f} to {last:.3f}; from weights one ulp away the last loss differs by {spread:.1e}")
    right = sum(not texts for texts in found)
    print(
        f"{right} of {len(records)} runs over several ranks have learned what one rank has; {setting.steps} steps, {seconds:.0f} s"
    )


def row(record: Mapping[str, Any], curve: Mapping[str, Any]) -> list[str]:
    """The cells of a mesh."""
    start = [str(record["ranks"]), record["place"], record["dtype"]]
    if "reason" in record:
        return [*start, "failed"]
    ratios = [f"{record['worst'][kind][0]:.3f}" for kind in KINDS]
    return [*start, f"{record['losses'][-1]:.4f}", f"{divergence(record['losses'], curve):.3f}", *ratios, f"{record['apart']:.0e}"]
