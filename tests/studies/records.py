"""Keep what a study has found in a file of lines, and write its report as Markdown and JSON."""

import json
import os
import xml.etree.ElementTree as ET
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a file. A last line that was cut short is removed from it."""
    text = path.read_text() if path.exists() else ""
    whole = text[: text.rfind("\n") + 1]
    if whole != text:
        path.write_text(whole)
    return [json.loads(line) for line in whole.splitlines()]


def add_line(path: Path, line: dict[str, Any]) -> None:
    """Append a line to a file, and write it through to the disk."""
    with path.open("a") as file:
        file.write(json.dumps(line) + "\n")
        file.flush()
        os.fsync(file.fileno())


def junit(path: Path) -> list[tuple[str, str | None]]:
    """Return the id of each test in a JUnit file, and its error text, or None if it has none."""
    found: list[tuple[str, str | None]] = []
    for case in ET.parse(path).getroot().iter("testcase") if path.exists() else ():
        file = case.get("file", "")
        inner = case.get("classname", "").removeprefix(file.removesuffix(".py").replace("/", "."))
        parts = (file, *inner.strip(".").split("."), case.get("name", ""))
        bad = [one for kind in ("failure", "error") for one in case.findall(kind)]
        said = " ".join(" ".join(one.text or one.get("message") or "" for one in bad).split())
        found.append(("::".join(filter(None, parts)), said if bad else None))
    return found


def named(commit: Mapping[str, Any]) -> str:
    """Return the short name of a commit, from what `benchmarks.checkout.commit` returns."""
    return f"{(commit['sha'] or 'unknown')[:10]}{' with changes' * bool(commit['dirty'])}"


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    """Return the lines of a Markdown table."""
    ruler = ["---"] * len(head)
    lines = [
        "| " + " | ".join(str(cell).replace("|", "\\|") for cell in row) + " |"
        for row in (head, ruler, *rows)
    ]
    return [lines[0].replace("|  |", "| |"), *lines[1:]]


def write(folder: Path, name: str, lines: Iterable[str], plain: object) -> None:
    """Write `name`.md and `name`.json into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.md").write_text("\n".join(lines) + "\n")
    (folder / f"{name}.json").write_text(json.dumps(plain, indent=1) + "\n")
