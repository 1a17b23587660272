"""Which of all edits are tried: a seeded sample, spread over files and operators. And which change nothing that can be seen."""

from __future__ import annotations

import hashlib
import tomllib
from collections import Counter
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

    What is drawn hangs on digests and not on places in a list: a change of the library changes the sample near its lines, no more.

    Source: sequential Poisson sampling of the strata that get one more; Ohlsson, Journal of Official Statistics 14 (1998), 149-162.
    """
    strata = Counter((edit.file, edit.operator) for edit in found)
    wanted = {stratum: count * min(number / max(len(found), 1), 1.0) for stratum, count in strata.items()}
    shares = {stratum: int(share) for stratum, share in wanted.items()}
    more = sorted((s for s in strata if wanted[s] > shares[s]), key=lambda s: _luck(seed, *s) / (wanted[s] - shares[s]))
    for stratum in more[: min(number, len(found)) - sum(shares.values())]:
        shares[stratum] += 1
    chosen: list[Edit] = []
    for edit in sorted(found, key=lambda edit: (edit.file, edit.operator, _luck(seed, edit.id))):
        stratum = (edit.file, edit.operator)
        if shares[stratum]:
            shares[stratum] -= 1
            chosen.append(edit)
    return chosen


def _luck(seed: int, *names: str) -> float:
    """A number in [0, 1) that depends on nothing but these."""
    digest = hashlib.blake2b(repr((seed, *names)).encode(), digest_size=8).digest()
    return int.from_bytes(digest) / 2.0**64


def equivalents(path: Path = EQUIVALENT) -> list[Equivalent]:
    """The edits that change nothing, with their reasons."""
    entries = tomllib.loads(path.read_text()).get("equivalent", []) if path.exists() else []
    return [Equivalent(**{name: text.strip() for name, text in entry.items()}) for entry in entries]


def stale(known: Sequence[Equivalent], found: Sequence[Edit]) -> list[Equivalent]:
    """Those that speak of an edit that there is not: the lines have changed since."""
    return [one for one in known if not any(one.is_that(edit) for edit in found)]
