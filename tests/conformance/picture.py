"""Draw the report: a panel for each subject, with a square for each library and capability."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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

DARK = ("pass", "wrong", "hung", "crashed")


def draw(document: Mapping[str, Any], path: Path) -> None:
    """Write a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.patches import Patch

    columns = {about: [] for about in SUBJECTS}
    for column in document["libraries"]:
        columns[column["about"]].append(column["name"])
    widest = max(map(len, columns.values()))
    heights = [len(subject.CAPABILITIES) for subject in SUBJECTS.values()]
    size = (2.2 + 0.75 * widest, 2.5 * len(heights) + 0.36 * sum(heights))
    options = {"height_ratios": heights, "gridspec_kw": {"hspace": 0.45}}
    figure, panels = plt.subplots(len(heights), figsize=size, **options)
    for axes, (about, subject) in zip(panels, SUBJECTS.items(), strict=True):
        axes.set_xlim(0, widest)
        verdicts = {name: document["verdicts"][name] for name in columns[about]}
        _panel(axes, verdicts, list(subject.CAPABILITIES))
    seen = {v["verdict"] for one in document["verdicts"].values() for v in one.values()}
    shown = [verdict for verdict in COLOURS if verdict in seen and verdict in SIGNS]
    handles = [Patch(color=COLOURS[verdict], label=verdict) for verdict in shown]
    place = {"loc": "upper left", "bbox_to_anchor": (0, -0.01), "ncols": len(handles)}
    panels[-1].legend(handles=handles, **place, frameon=False, fontsize=8)
    figure.savefig(path, dpi=150, bbox_inches="tight")
    plt.close(figure)


def _panel(axes: Any, verdicts: Mapping[str, Any], capabilities: Sequence[str]) -> None:
    """Draw the squares of a subject."""
    from matplotlib.patches import Rectangle

    for x, column in enumerate(verdicts.values()):
        for y, capability in enumerate(capabilities):
            verdict = column[capability]["verdict"]
            axes.add_patch(Rectangle((x, y), 0.94, 0.9, color=COLOURS[verdict]))
            words = {"ha": "center", "va": "center", "fontsize": 7}
            words["color"] = "white" if verdict in DARK else "black"
            axes.text(x + 0.47, y + 0.47, SIGNS.get(verdict, "?"), **words)
    places = [x + 0.5 for x in range(len(verdicts))]
    axes.set_ylim(len(capabilities), 0)
    axes.set_xticks(places, list(verdicts), rotation=40, ha="left", fontsize=8)
    axes.set_yticks([y + 0.45 for y in range(len(capabilities))], capabilities, fontsize=8)
    axes.xaxis.tick_top()
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
