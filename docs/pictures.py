"""Draw the pictures of the concepts from the library itself, when the documentation is built."""

import shutil
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

import sp_core as sp

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "docs" / "pictures"
RESULTS = (
    "benchmarks/results/bench-cpu.png",
    "benchmarks/results/train.png",
    "tests/conformance/REPORT.png",
)
P, S = 4, 32
COLORS = ("#4477aa", "#ee6677", "#228833", "#ccbb44")
LAYOUTS = {
    "contiguous": sp.Sharding.contiguous(S, P),
    "zigzag": sp.Sharding.zigzag(S, P),
    "striped": sp.Sharding.striped(S, P),
    "from positions": sp.Sharding.from_positions(
        [[position for position in range(S) if position // 3 % P == rank] for rank in range(P)]
    ),
}
TRANSPORTS = {
    "staged": ("GPU 0", "copy", "host memory", "MPI", "host memory", "copy", "GPU 1"),
    "ipc": ("GPU 0", "read by GPU 1", "GPU 1"),
    "window": ("memory of rank 0", "write", "shared memory", "read", "memory of rank 1"),
}


def draw_layouts() -> None:
    """Draw who holds which token."""
    figure, rows = plt.subplots(len(LAYOUTS), figsize=(8, 3.2), layout="constrained")
    for axes, (name, sharding) in zip(rows, LAYOUTS.items(), strict=True):
        for rank in range(P):
            for position in sharding.positions(rank).tolist():
                axes.barh(0, 0.95, left=position, color=COLORS[rank])
                axes.text(position + 0.47, 0, str(rank), ha="center", va="center")
        _bare(axes, f"{name}, by position; numbers are ranks")
    _save(figure, "layouts")


def draw_balance() -> None:
    """Draw the causal work of each rank."""
    figure, axes = plt.subplots(figsize=(8, 2.6), layout="constrained")
    for place, (name, sharding) in enumerate(LAYOUTS.items()):
        work = [sum(int(i) + 1 for i in sharding.positions(rank)) for rank in range(P)]
        for rank, own in enumerate(work):
            axes.bar(place + rank / 5, own * P / sum(work), 0.18, color=COLORS[rank])
        axes.text(place + 0.3, -0.12, name, ha="center", va="top")
    axes.axhline(1, color="gray", linewidth=0.8)
    axes.set(xticks=[], ylabel="work / mean work")
    _save(figure, "balance")


def draw_ring() -> None:
    """Draw whose keys each rank holds in each step."""
    figure, axes = plt.subplots(figsize=(8, 2.6), layout="constrained")
    for step in range(P):
        for rank in range(P):
            owner = (rank - step) % P
            axes.barh(-rank, 0.9, left=step, color=COLORS[owner])
            axes.text(step + 0.45, -rank, f"K, V of rank {owner}", ha="center", va="center")
    axes.set_yticks([-rank for rank in range(P)], [f"rank {rank}" for rank in range(P)])
    axes.set_xticks([step + 0.45 for step in range(P)], [f"step {step}" for step in range(P)])
    axes.tick_params(length=0)
    _save(figure, "ring")


def draw_transports() -> None:
    """Draw the places that a block passes."""
    figure, rows = plt.subplots(len(TRANSPORTS), figsize=(8, 3), layout="constrained")
    for axes, (name, stations) in zip(rows, TRANSPORTS.items(), strict=True):
        for place, station in enumerate(stations):
            box = {"boxstyle": "round", "facecolor": "#dde6f0"} if place % 2 == 0 else None
            text = station if box else f"{station}\n\u2192"
            where = (place + 0.5) / len(stations)
            axes.text(where, 0.5, text, ha="center", va="center", bbox=box)
        _bare(axes, name)
    _save(figure, "transports")


def _bare(axes: Axes, title: str) -> None:
    axes.set_title(title, loc="left", fontsize=10)
    axes.set_axis_off()


def _save(figure: Any, name: str) -> None:
    FOLDER.mkdir(exist_ok=True)
    figure.savefig(FOLDER / f"{name}.svg", metadata={"Date": None})
    plt.close(figure)


def on_pre_build(**_: Any) -> None:
    """Draw all pictures, and copy those of committed results, before mkdocs reads the folder."""
    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "sp_core"  # the same file in every build
    for draw in (draw_layouts, draw_balance, draw_ring, draw_transports):
        draw()
    for path in RESULTS:
        shutil.copy(ROOT / path, FOLDER)


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Show the copies of pictures that lie outside the folder of the documentation."""
    for path in RESULTS:
        markdown = markdown.replace(f"](../{path})", f"](pictures/{Path(path).name})")
    return markdown
