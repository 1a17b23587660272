"""The report as a picture: a panel for each subject, with a square for each library and capability."""

from __future__ import annotations

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
    """Write a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.patches import Patch, Rectangle

    columns = {
        about: [c["name"] for c in document["libraries"] if c["about"] == about]
        for about in SUBJECTS
    }
    rows = {about: list(subject.CAPABILITIES) for about, subject in SUBJECTS.items()}
    widest, heights = max(map(len, columns.values())), [len(names) for names in rows.values()]
    size = (2.2 + 0.75 * widest, 2.5 * len(rows) + 0.36 * sum(heights))
    figure, panels = plt.subplots(
        len(rows), figsize=size, height_ratios=heights, gridspec_kw={"hspace": 0.45}
    )
    for axes, about in zip(panels, rows, strict=True):
        for x, name in enumerate(columns[about]):
            for y, capability in enumerate(rows[about]):
                verdict = document["verdicts"][name][capability]["verdict"]
                axes.add_patch(Rectangle((x, y), 0.94, 0.9, color=COLOURS[verdict]))
                colour = "white" if verdict in ("pass", "wrong", "hung", "crashed") else "black"
                sign = SIGNS.get(verdict, "?")
                axes.text(
                    x + 0.47, y + 0.47, sign, ha="center", va="center", fontsize=7, color=colour
                )
        axes.set_xlim(0, widest)
        axes.set_ylim(len(rows[about]), 0)
        axes.set_xticks(
            [x + 0.5 for x in range(len(columns[about]))],
            columns[about],
            rotation=40,
            ha="left",
            fontsize=8,
        )
        axes.set_yticks([y + 0.45 for y in range(len(rows[about]))], rows[about], fontsize=8)
        axes.xaxis.tick_top()
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
    seen = [
        verdict
        for verdict in COLOURS
        if any(
            v["verdict"] == verdict for one in document["verdicts"].values() for v in one.values()
        )
    ]
    handles = [
        Patch(color=COLOURS[verdict], label=verdict)
        for verdict in seen
        if COLOURS[verdict] != "#ffffff"
    ]
    panels[-1].legend(
        handles=handles,
        loc="upper left",
        bbox_to_anchor=(0, -0.01),
        ncols=len(handles),
        frameon=False,
        fontsize=8,
    )
    figure.savefig(path, dpi=150, bbox_inches="tight")
    plt.close(figure)
