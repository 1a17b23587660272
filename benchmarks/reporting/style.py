"""Give all plots one size, colours that colour-blind people tell apart, and the page's ink."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from benchmarks.reporting.tables import plain

if TYPE_CHECKING:
    from matplotlib.axes import Axes as Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure as Figure, FigureBase
else:
    Axes = Axis = Figure = FigureBase = object  # matplotlib is slow to import

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#b07aa1", "#9c7400", "#4aa3df")
"""After Okabe and Ito, jfly.uni-koeln.de/color; yellow and pink are darker, to be seen on white."""

MARKERS = "osD^vP"
INK, GRID = "#1b1f24", "#8a8f98"
SIZE = (4.6, 3.7)  # inches; a phone shows one plot beside nothing else
PRETENDED: dict[str, Any] = {"linestyle": ":", "linewidth": 1}
"""A line that nobody measured."""

LABEL = 44  # characters of a name in a plot
HALF = 26  # of one that leaves room for another beside it
SETTINGS: Any = {
    "axes.axisbelow": True,
    "axes.edgecolor": INK,
    "axes.grid": True,
    "axes.labelcolor": INK,
    "axes.labelsize": 9,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlecolor": INK,
    "axes.titlesize": 10,
    "font.family": ["DejaVu Sans"],  # comes with matplotlib
    "grid.alpha": 0.3,
    "grid.color": GRID,
    "hatch.color": "#ffffff",
    "legend.fontsize": 8,
    "legend.frameon": False,
    "legend.labelcolor": INK,
    "svg.fonttype": "path",
    "svg.hashsalt": "sp_core",
    "text.color": INK,
    "text.parse_math": False,  # a dollar in a record is no formula
    "xtick.color": INK,
    "xtick.labelsize": 8,
    "ytick.color": INK,
    "ytick.labelsize": 8,
}


@contextmanager
def styled() -> Iterator[None]:
    """Draw and save in the style of this module."""
    import matplotlib

    with matplotlib.rc_context(SETTINGS):
        yield


@dataclass(frozen=True)
class Picture:
    """A plot with one message.

    Args:
        title: above it, also for those who do not see it.
        draw: draws into axes.
        size: in inches.
        columns: of the legend, if its words are short.
    """

    title: str
    draw: Callable[[Axes], None]
    size: tuple[float, float] = SIZE
    columns: int = 2

    @property
    def broad(self) -> bool:
        """Whether it needs the whole width of the page."""
        return self.size[0] > SIZE[0]

    @cached_property
    def figure(self) -> Figure:
        """The plot by itself."""
        from matplotlib.figure import Figure as Figure

        figure = Figure(figsize=self.size, layout="constrained")
        self.onto(figure)
        return figure

    def onto(self, figure: FigureBase) -> None:
        """Draw one pair of axes with a legend below, where it covers nothing."""
        with styled():
            axes = figure.add_subplot()
            self.draw(axes)
            handles, labels = axes.get_legend_handles_labels()
            if named := dict(zip(labels, handles, strict=True)):
                fitting = 1 if max(map(len, named)) > HALF else self.columns
                figure.legend(named.values(), named, loc="outside lower center", ncols=fitting)


def picture(title: str, draw: Callable[..., None], *what: Any, **looks: Any) -> Picture:
    """Return a picture into whose axes `draw` draws `what`."""
    return Picture(plain(title), lambda axes: draw(axes, *what), **looks)


def svg(figure: Figure) -> str:
    """Return a figure as SVG for the inside of a page, whose ink is that of the text around it."""
    file = io.StringIO()
    with styled():
        figure.savefig(
            file, format="svg", transparent=True, metadata={"Date": None, "Creator": None}
        )
    text = file.getvalue()
    drawn = text[text.index("<svg") :].replace(INK, "currentColor")
    return re.sub("<!--.*?-->", "", drawn, flags=re.DOTALL)  # comments repeat every text


def short(name: object) -> str:
    """Cut the middle of a name for a legend or beside an axis: names begin alike."""
    whole = plain(name).encode("latin-1", "replace").decode("latin-1")  # every font has these
    ends = whole[: LABEL // 3], whole[-(LABEL - LABEL // 3 - 1) :]
    return whole if len(whole) <= LABEL else "…".join(ends)


def line(
    axes: Axes,
    number: int,
    points: Sequence[tuple[float, float]],
    doubtful: Sequence[bool],
    label: str,
) -> None:
    """Draw one series; what must be read with care has a hollow marker."""
    colour, marker = COLOURS[number % len(COLOURS)], MARKERS[number % len(MARKERS)]
    axes.plot(*zip(*points, strict=True), color=colour, linewidth=1.4, label=short(label))
    for point, mark in zip(points, doubtful, strict=True):
        face = "none" if mark else colour
        axes.plot(*point, color=colour, marker=marker, markersize=6, mfc=face, linestyle="none")


def hollow(axes: Axes, flags: Sequence[str]) -> None:
    """Say in the legend what a hollow marker means."""
    if flags:
        label = f"hollow: {' or '.join(sorted(set(flags)))}"
        axes.plot([], color=GRID, marker="o", mfc="none", linestyle="none", label=label)


def ranks_axis(axes: Axes, ranks: Sequence[int]) -> None:
    """Make the x axis the number of ranks, each power of two as far from the next."""
    axes.set_xscale("log", base=2)
    axes.set_xlabel("ranks P (number)")
    plain_ticks(axes.xaxis, sorted(set(ranks)))


def case_rows(axes: Axes, labels: Sequence[str], name: str) -> None:
    """Make the y axis a list from top to bottom."""
    plain_ticks(axes.yaxis, range(len(labels)), labels)
    axes.set(ylabel=name, ylim=(len(labels) - 0.5, -0.5))


def log_axis(axis: Axis) -> None:
    """Make the y axis logarithmic, with few, plain numbers."""
    from matplotlib.ticker import LogLocator, NullLocator

    axis.axes.set_yscale("log")
    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter("{x:,g}")


def plain_ticks(axis: Axis, places: Sequence[float], labels: Sequence[str] | None = None) -> None:
    """Set ticks at these places and nowhere else."""
    from matplotlib.ticker import NullLocator

    axis.set_minor_locator(NullLocator())
    axis.set_ticks(list(places), list(labels or (f"{place:g}" for place in places)))
