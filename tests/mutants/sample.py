"""Which of all edits are tried: a seeded sample, spread over files and operators. And which change nothing that can be seen."""

from __future__ import annotations

import random
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mutants.catalogue import HERE, ROOT
from mutants.edits import Edit, edits

ROOMS = ("sharding.py", "mask", "attention", "schemes", "collectives", "autograd", "schedules")
"""Files and folders of `sp_core` that are edited: what owns, moves and computes."""

EQUIVALENT = HERE / "equivalent.toml"


@dataclass(frozen=True)
class Equivalent:
    """An edit after which everything is as before, or only slower.

    Args:
        file: that it changes.
        place: the function.
        before: the lines without it.
        after: and with it.
        reason: why nothing can notice.
    """

    file: str
    place: str
    before: str
    after: str
    reason: str

    def is_that(self, edit: Edit) -> bool:
        """Whether it speaks of this edit."""
        return (self.file, self.place, self.before, self.after) == (edit.file, edit.place, edit.before, edit.after)


def room_of(file: str) -> str:
    """The room of a file: "sharding", "mask"."""
    return file.split("/")[1].removesuffix(".py")


def candidates(root: Path = ROOT) -> list[Edit]:
    """All edits of the rooms, by file and line."""
    paths = [path for room in ROOMS for path in sorted([root / "sp_core" / room, *(root / "sp_core" / room).rglob("*.py")])]
    files = [path for path in paths if path.is_file()]
    return [edit for path in files for edit in edits(path.relative_to(root).as_posix(), path.read_text())]


def drawn(found: Sequence[Edit], number: int, seed: int) -> list[Edit]:
    """Every edit is as likely as any other, and every file and operator gets its share, up to one more or less.

    Source: systematic sampling of a sorted list with a random start; Cochran, Sampling Techniques (1977), chapter 8.
    """
    generator = random.Random(seed)
    mixed = sorted(found, key=lambda edit: (edit.file, edit.operator, generator.random()))
    if number >= len(mixed):
        return mixed
    step = len(mixed) / number
    begin = generator.random() * step
    return [mixed[min(int(begin + turn * step), len(mixed) - 1)] for turn in range(number)]


def equivalents(path: Path = EQUIVALENT) -> list[Equivalent]:
    """The edits that change nothing, with their reasons."""
    entries = tomllib.loads(path.read_text()).get("equivalent", []) if path.exists() else []
    return [Equivalent(**{name: text.strip() for name, text in entry.items()}) for entry in entries]


def stale(known: Sequence[Equivalent], found: Sequence[Edit]) -> list[Equivalent]:
    """Those that speak of an edit that there is not: the lines have changed since."""
    return [one for one in known if not any(one.is_that(edit) for edit in found)]
