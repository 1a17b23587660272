"""Draw a seeded sample of all edits, spread over folders, files and operators.

Read which edits change nothing, and why.
"""

from __future__ import annotations

import hashlib
import tomllib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from mutants.catalogue import HERE
from mutants.edits import Edit, edits
from studies.commands import ROOT

KIT = ("launch", "testing")
"""The folders of `sp_core` that hold the testing kit and its launcher; it has its own sample."""

SAME = ("file", "place", "before", "after")
"""What an entry and its edit have in common."""

LEAST = 20
"""Edits that a room gets however small it is: with fewer, one survivor would be more than 5 %."""


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

    def holds(self, edit: Edit) -> bool:
        """Return whether it speaks of this edit."""
        return all(getattr(edit, name) == getattr(self, name) for name in SAME)


def room_of(file: str) -> str:
    """Return the folder of a file below `sp_core`, such as "mask", or "sp_core" itself."""
    return "/".join(file.split("/")[1:-1]) or "sp_core"


def candidates(*, kit: bool = False) -> list[Edit]:
    """Return all edits of the library, or of its testing kit, by file and line."""
    paths = [path.relative_to(ROOT) for path in sorted((ROOT / "sp_core").rglob("*.py"))]
    files = [path for path in paths if (path.parts[1] in KIT) == kit]
    return [edit for path in files for edit in edits(path.as_posix(), (ROOT / path).read_text())]


def shares(counts: dict[str, int], number: int) -> dict[str, int]:
    """Split a number over rooms: each gets `LEAST` if it can, the rest in proportion to edits."""
    least = min(LEAST, number // max(len(counts), 1))
    given = {room: min(least, count) for room, count in counts.items()}
    while sum(given.values()) < min(number, sum(counts.values())):
        open_rooms = [room for room in sorted(counts) if given[room] < counts[room]]
        given[min(open_rooms, key=lambda room: given[room] / counts[room])] += 1
    return given


def drawn(found: Sequence[Edit], number: int, seed: int) -> list[Edit]:
    """Draw from every room its share of the number."""
    rooms: dict[str, list[Edit]] = {}
    for edit in found:
        rooms.setdefault(room_of(edit.file), []).append(edit)
    given = shares({room: len(edits) for room, edits in rooms.items()}, number)
    return [edit for room in sorted(rooms) for edit in _spread(rooms[room], given[room], seed)]


def _spread(found: Sequence[Edit], number: int, seed: int) -> list[Edit]:
    """Draw every edit with the same probability; files and operators get their share.

    The draw depends on digests and not on places in a list: a change of the library changes the
    sample near its lines, no more.

    Source: sequential Poisson sampling of the strata that get one more; Ohlsson, Journal of
    Official Statistics 14 (1998), 149-162.
    """
    strata = Counter((edit.file, edit.operator) for edit in found)
    wanted = {
        stratum: count * min(number / max(len(found), 1), 1.0) for stratum, count in strata.items()
    }
    given = {stratum: int(share) for stratum, share in wanted.items()}
    more = sorted(
        (s for s in strata if wanted[s] > given[s]),
        key=lambda s: _luck(seed, *s) / (wanted[s] - given[s]),
    )
    for stratum in more[: min(number, len(found)) - sum(given.values())]:
        given[stratum] += 1
    chosen: list[Edit] = []
    for edit in sorted(found, key=lambda edit: (edit.file, edit.operator, _luck(seed, edit.id))):
        stratum = (edit.file, edit.operator)
        if given[stratum]:
            given[stratum] -= 1
            chosen.append(edit)
    return chosen


def _luck(seed: int, *names: str) -> float:
    """A number in [0, 1) that depends on nothing but these."""
    digest = hashlib.blake2b(repr((seed, *names)).encode(), digest_size=8).digest()
    return int.from_bytes(digest) / 2.0**64


def equivalents() -> list[Equivalent]:
    """Return the edits that change nothing, with their reasons."""
    told = tomllib.loads((HERE / "equivalent.toml").read_text())["equivalent"]
    return [Equivalent(**{name: text.strip() for name, text in one.items()}) for one in told]


def stale(known: Sequence[Equivalent], found: Sequence[Edit]) -> list[Equivalent]:
    """Return the entries for which there is no such edit: the lines have changed since."""
    return [one for one in known if not any(one.holds(edit) for edit in found)]
