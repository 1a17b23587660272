"""Draw the report: a table for each subject, with a cell for each library and capability."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from conformance.libraries import SUBJECTS

COLOURS = {
    "pass": "#3a9d5d",
    "refused": "#e9c46a",
    "not offered": "#e8e8e8",
    "wrong": "#d1495b",
    "hung": "#7b2d8b",
    "crashed": "#7b2d8b",
    "slow": "#f4a261",
    "not installed": "#ffffff",
    "not tried": "#ffffff",
}
SIGNS = {
    "pass": "\N{CHECK MARK}",
    "refused": "no",
    "not offered": "",
    "wrong": "wrong",
    "hung": "hung",
    "crashed": "crash",
    "slow": "slow",
}


def draw(document: Mapping[str, Any], path: Path) -> None:
    """Write a PNG: a table for each subject, a row for each library, cells coloured by verdict."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    columns: dict[str, list[str]] = {}  # a report of some libraries may lack a subject
    for column in document["libraries"]:
        columns.setdefault(column["about"], []).append(column["name"])
    heights = [2 + len(names) for names in columns.values()]
    figure = Figure(figsize=(14, 0.3 * sum(heights)), layout="constrained")
    panels = figure.subplots(len(heights), height_ratios=heights, squeeze=False)
    seen = set()
    for axes, (about, names) in zip(panels[:, 0], columns.items(), strict=True):
        capabilities = list(SUBJECTS[about].CAPABILITIES)
        found = [document["verdicts"][name] for name in names]
        cells = [[column[name]["verdict"] for name in capabilities] for column in found]
        seen |= {verdict for row in cells for verdict in row}
        axes.axis("off")
        axes.table(
            [[SIGNS.get(verdict, "?") for verdict in row] for row in cells],
            cellColours=[[COLOURS[verdict] for verdict in row] for row in cells],
            cellLoc="center",
            rowLabels=names,
            colLabels=capabilities,
            bbox=(0, 0, 1, 1),
        )
    shown = [verdict for verdict in SIGNS if verdict in seen]
    handles = [Patch(color=COLOURS[verdict], label=verdict) for verdict in shown]
    figure.legend(handles=handles, loc="outside lower left", ncols=len(handles), frameon=False)
    figure.savefig(path, dpi=150)
