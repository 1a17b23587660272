"""Draw pictures in one style, and write sections of tables and pictures as Markdown and HTML.

Plots have one size, colours that colour-blind people tell apart, and the page's ink. The HTML page
is self-contained.
"""

import io
import re
from base64 import b64encode
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined, select_autoescape
from markupsafe import Markup, escape

from benchmarks.reporting.tables import Table, plain

if TYPE_CHECKING:
    from matplotlib.axes import Axes as Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure, FigureBase
else:
    Axes = object  # matplotlib is slow to import

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#b07aa1", "#9c7400", "#4aa3df")
"""After Okabe and Ito, jfly.uni-koeln.de/color; yellow and pink are darker, to be seen on white."""

MARKERS = "osD^vP"
INK, GRID = "#1b1f24", "#8a8f98"
SIZE = (4.6, 3.7)  # inches; a phone shows one plot beside nothing else
PRETENDED: dict[str, Any] = {"linestyle": ":", "linewidth": 1}
"""The style of a line that was not measured, such as an ideal."""

LABEL = 44  # characters of a name in a plot
HALF = 26  # characters of the longest name in a legend with several columns
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


def styled() -> AbstractContextManager[None]:
    """Return a context in which matplotlib draws and saves in the style of this module."""
    import matplotlib

    return matplotlib.rc_context(SETTINGS)


@dataclass(frozen=True)
class Picture:
    """A plot with one message.

    Args:
        title: the text above the plot, which is also its label for screen readers.
        draw: draws the plot into the given axes.
        size: width and height in inches.
        columns: columns of the legend, if its names are short.
    """

    title: str
    draw: Callable[[Axes], None]
    size: tuple[float, float] = SIZE
    columns: int = 2

    @property
    def broad(self) -> bool:
        """Whether the plot needs the whole width of the page."""
        return self.size[0] > SIZE[0]

    @cached_property
    def figure(self) -> "Figure":
        """A figure with this plot alone."""
        from matplotlib.figure import Figure

        figure = Figure(figsize=self.size, layout="constrained")
        self.onto(figure)
        return figure

    def onto(self, figure: "FigureBase") -> None:
        """Draw the plot into a figure, with a legend below the axes."""
        with styled():
            axes = figure.add_subplot()
            self.draw(axes)
            handles, labels = axes.get_legend_handles_labels()
            if named := dict(zip(labels, handles, strict=True)):
                fitting = 1 if max(map(len, named)) > HALF else self.columns
                figure.legend(named.values(), named, loc="outside lower center", ncols=fitting)


def picture(title: str, draw: Callable[..., None], *what: Any, **looks: Any) -> Picture:
    """Return a picture that is drawn by `draw(axes, *what)`; `looks` are its size and columns."""
    return Picture(plain(title), lambda axes: draw(axes, *what), **looks)


def short(name: object) -> str:
    """Return a name, without its middle if it is too long for a legend: names begin alike."""
    whole = plain(name).encode("latin-1", "replace").decode("latin-1")  # every font has them
    ends = whole[: LABEL // 3], whole[-(LABEL - LABEL // 3 - 1) :]
    return whole if len(whole) <= LABEL else "…".join(ends)


def line(
    axes: Axes,
    number: int,
    points: Sequence[tuple[float, float]],
    doubtful: Sequence[bool],
    label: str,
) -> None:
    """Draw the series with index `number`; a doubtful point has a hollow marker."""
    colour, marker = COLOURS[number % len(COLOURS)], MARKERS[number % len(MARKERS)]
    axes.plot(*zip(*points, strict=True), color=colour, linewidth=1.4, label=short(label))
    for point, mark in zip(points, doubtful, strict=True):
        face = "none" if mark else colour
        axes.plot(*point, color=colour, marker=marker, markersize=6, mfc=face, linestyle="none")


def hollow(axes: Axes, flags: Sequence[str]) -> None:
    """Add to the legend what a hollow marker means, if there are flags."""
    if flags:
        label = f"hollow: {' or '.join(sorted(set(flags)))}"
        axes.plot([], color=GRID, marker="o", mfc="none", linestyle="none", label=label)


def case_rows(axes: Axes, labels: Sequence[str], name: str) -> None:
    """Label the rows of the y axis, from top to bottom; `name` is the label of the axis."""
    plain_ticks(axes.yaxis, range(len(labels)), labels)
    axes.set(ylabel=name, ylim=(len(labels) - 0.5, -0.5))


def log_axis(axis: "Axis") -> None:
    """Make the y axis logarithmic, with few, plain numbers."""
    axis.axes.set_yscale("log", subs=[])
    locator: Any = axis.get_major_locator()
    locator.set_params(subs=(1, 2, 5))
    axis.set_major_formatter("{x:,g}")


def plain_ticks(axis: "Axis", places: Sequence[float], labels: Sequence[str] | None = None) -> None:
    """Set ticks at these values only; without labels the ticks show the values."""
    axis.set_ticks([], minor=True)
    axis.set_ticks(list(places), list(labels or (f"{place:g}" for place in places)))


MAX_PROBLEMS = 50
PLOTS, ROWS = 4, 12  # shown before a click, so that a page fits a phone


@dataclass(frozen=True)
class Section:
    """A part of a report.

    Args:
        title: the section's heading.
        text: the sentences below the heading.
        tables, pictures: what the section shows besides its text.
    """

    title: str
    text: str = ""
    tables: tuple[Table, ...] = ()
    pictures: tuple[Picture, ...] = ()


@dataclass(frozen=True)
class Page:
    """A report.

    Args:
        title: the report's heading.
        problems: a text for each problem on reading, which names the file.
        sections: in the order in which they are shown.
    """

    title: str
    problems: tuple[str, ...]
    sections: tuple[Section, ...]

    @property
    def complaints(self) -> list[str]:
        """The problems as they are shown: plain text, and at most `MAX_PROBLEMS` of them."""
        more = len(self.problems) - MAX_PROBLEMS
        shown = [plain(problem, 400) for problem in self.problems[:MAX_PROBLEMS]]
        return [*shown, f"and {more} more"] if more > 0 else shown


def code(text: str) -> str:
    """Return a text as Markdown code, in which nothing is a link, HTML or the end of a cell.

    There is no escape for a backtick in code, nor a safe one for a bar in a table, so these two
    become look-alikes.
    """
    clean = plain(text, 400).replace("`", "'").replace("|", "¦")
    return f"`{clean}`" if clean else ""


def svg(picture: Picture) -> Markup:
    """Return a picture as SVG for the inside of a page, in the colour of the text around it.

    Its title is the label for screen readers. matplotlib escapes the texts in the picture.
    """
    file = io.StringIO()
    with styled():
        picture.figure.savefig(
            file, format="svg", transparent=True, metadata={"Date": None, "Creator": None}
        )
    text = file.getvalue()
    drawn = text[text.index("<svg") :].replace(INK, "currentColor")
    drawn = re.sub("<!--.*?-->", "", drawn, flags=re.DOTALL)  # they repeat every text
    named = f'<svg role="img" aria-label="{escape(picture.title)}" '
    return Markup(drawn.replace("<svg ", named, 1))  # noqa: S704  # ours


def breakable(cell: str) -> str:
    """Allow a line break after each slash in the text of a cell, for narrow columns."""
    return Markup("/<wbr>").join(cell.split("/"))


TEMPLATES = Environment(
    loader=FileSystemLoader(Path(__file__).parent),
    autoescape=select_autoescape(),
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
TEMPLATES.filters |= {"svg": svg, "breakable": breakable, "code": code}


def markdown(page: Page, picture: str | None) -> str:
    """Return the page as GitHub Markdown; `picture` is a file beside it, if there is one."""
    return TEMPLATES.get_template("page.md").render(page=page, picture=picture)


def html(page: Page) -> str:
    """Return the page as HTML: style, plots and one script inside, and nothing is fetched.

    The page's policy names the script by its digest, so that no other script can run.
    """
    script = Path(__file__).with_name("page.js").read_text(encoding="utf-8")
    digest = "sha256-" + b64encode(sha256(script.encode()).digest()).decode()
    names = {"shown": PLOTS, "rows": ROWS, "script": script, "digest": digest}
    return TEMPLATES.get_template("page.html").render(page=page, **names)


def write(page: Page, folder: Path, name: str) -> list[Path]:
    """Write NAME.md, NAME.html and, where the page has pictures, NAME.png into a folder.

    Returns:
        The files.
    """
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{name}.{kind}" for kind in ("md", "html", "png")]
    drawn = [section.pictures for section in page.sections if section.pictures]
    most = max(1, SHOWN // max(1, len(drawn)))
    pictures = [picture for some in drawn for picture in some[:most]]
    if pictures:
        paths[2].write_bytes(overview(pictures))
    else:
        paths.pop().unlink(missing_ok=True)  # remove the picture of an older report
    paths[0].write_text(markdown(page, f"{name}.png" if pictures else None), encoding="utf-8")
    paths[1].write_text(html(page), encoding="utf-8")
    return paths


SHOWN = 6  # plots of the overview
TITLE = 60  # characters of a plot's title there


def overview(pictures: Sequence[Picture]) -> bytes:
    """Return plots as PNG, two in a row, a broad one alone."""
    from matplotlib.figure import Figure

    rows, file = list[list[Picture]](), io.BytesIO()
    for picture in pictures:
        if rows and len(rows[-1]) == 1 and not (rows[-1][0].broad or picture.broad):
            rows[-1].append(picture)
        else:
            rows.append([picture])
    heights = [max(picture.size[1] for picture in row) for row in rows]
    figure = Figure(figsize=(2 * SIZE[0], sum(heights)), layout="constrained")
    parts = figure.subfigures(len(rows), 1, squeeze=False, height_ratios=heights)[:, 0]
    for part, row in zip(parts, rows, strict=True):
        columns = 1 if row[0].broad else 2
        for place, picture in zip(part.subfigures(1, columns, squeeze=False)[0], row, strict=False):
            picture.onto(place)
            place.suptitle(plain(picture.title, TITLE), fontsize=10)
    with styled():
        figure.savefig(file, format="png", dpi=130, facecolor="white")
    return file.getvalue()
