"""Write sections of tables and pictures as Markdown and as one self-contained HTML page."""

from __future__ import annotations

import io
from base64 import b64encode
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.reporting.style import SIZE, Picture, styled, svg
from benchmarks.reporting.tables import Table, plain

if TYPE_CHECKING:
    from jinja2 import Template


MAX_PROBLEMS = 50
PLOTS, ROWS = 4, 12  # that are seen without a click, so that a page fits a phone


@dataclass(frozen=True)
class Section:
    """A part of a report.

    Args:
        title: its heading.
        text: sentences of ours.
        tables, pictures: what it shows.
    """

    title: str
    text: str = ""
    tables: tuple[Table, ...] = ()
    pictures: tuple[Picture, ...] = ()


@dataclass(frozen=True)
class Page:
    """A report.

    Args:
        title: the heading.
        problems: what could not be read, each naming its file.
        sections: in the order in which they are shown.
    """

    title: str
    problems: tuple[str, ...]
    sections: tuple[Section, ...]

    @property
    def complaints(self) -> list[str]:
        """The problems as they are shown: plain, and not more than one wants to read."""
        more = len(self.problems) - MAX_PROBLEMS
        shown = [plain(problem, 400) for problem in self.problems[:MAX_PROBLEMS]]
        return [*shown, f"and {more} more"] if more > 0 else shown


def markdown(page: Page, picture: str | None) -> str:
    """Return the page as Markdown of GitHub; `picture` is a file beside it, if there is one."""
    return _template("page.md").render(page=page, picture=picture)


def code(text: str) -> str:
    """Return a text as Markdown code, in which nothing is a link, HTML or the end of a cell.

    There is no escape for a backtick in code, nor a safe one for a bar in a table, so these two
    become look-alikes.
    """
    clean = plain(text, 400).replace("`", "'").replace("|", "¦")
    return f"`{clean}`" if clean else ""


def html(page: Page) -> str:
    """Return the page as HTML: style, plots and one script inside, and nothing is fetched.

    The page's policy names the script by its digest, so that no other can run.
    """
    script = Path(__file__).with_name("page.js").read_text(encoding="utf-8")
    digest = "sha256-" + b64encode(sha256(script.encode()).digest()).decode()
    names = {"shown": PLOTS, "rows": ROWS, "script": script, "digest": digest}
    return _template("page.html").render(page=page, **names)


@cache
def _template(name: str) -> Template:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined, select_autoescape

    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=select_autoescape(),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"svg": _svg, "breakable": _breakable, "code": code}
    return environment.get_template(name)


def _svg(picture: Picture) -> str:
    """Draw a picture, named for those who cannot see it. matplotlib escapes the words inside."""
    from markupsafe import Markup

    named = f'<svg role="img" aria-label="{escape(picture.title)}" '
    return Markup(svg(picture.figure).replace("<svg ", named, 1))  # noqa: S704  # ours


def _breakable(cell: str) -> str:
    """Let the text of a cell go on in the next line after a slash, if the column is narrow."""
    from markupsafe import Markup

    return Markup("/<wbr>").join(cell.split("/"))


def write(page: Page, folder: Path, name: str) -> list[Path]:
    """Write NAME.md, NAME.html and, where the page has pictures, NAME.png into a folder.

    Returns:
        The files.
    """
    folder.mkdir(parents=True, exist_ok=True)
    paths = {kind: folder / f"{name}.{kind}" for kind in ("md", "html", "png")}
    drawn = [section.pictures for section in page.sections if section.pictures]
    most = max(1, SHOWN // max(1, len(drawn)))
    pictures = [picture for some in drawn for picture in some[:most]]
    paths["md"].write_text(
        markdown(page, paths["png"].name if pictures else None), encoding="utf-8"
    )
    paths["html"].write_text(html(page), encoding="utf-8")
    paths["png"].unlink(missing_ok=True)  # that of an older report
    if pictures:
        paths["png"].write_bytes(overview(pictures))
    return [path for path in paths.values() if path.exists()]


SHOWN = 6  # plots of the overview
TITLE = 60  # characters


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
