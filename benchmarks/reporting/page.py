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

from benchmarks.reporting.style import Picture, styled, svg
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
    from PIL import Image  # comes with matplotlib

    tiles = []
    for picture in pictures:
        file = io.BytesIO()
        picture.figure.suptitle(plain(picture.title, TITLE), fontsize=10)
        with styled():
            picture.figure.savefig(file, format="png", dpi=130, facecolor="white")
        tiles.append(Image.open(file).convert("RGB"))
    widths = [tile.width for tile in tiles]
    width = max(*widths, 2 * min(widths) * (len(tiles) > 1))
    canvas = Image.new("RGB", (width, sum(tile.height for tile in tiles)), "white")
    left = top = height = 0
    for tile in tiles:
        if left and left + tile.width > width:
            left, top, height = 0, top + height, 0
        canvas.paste(tile, (left, top))
        left, height = left + tile.width, max(height, tile.height)
    file = io.BytesIO()
    canvas.crop((0, 0, width, top + height)).save(file, format="png")
    return file.getvalue()
