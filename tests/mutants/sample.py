"""Draw a seeded sample of all edits, spread over the folders of `sp_core`.

Read from `equivalent.toml` which edits no test can notice, and why. A folder is called a room.
"""

import hashlib
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass

from mutants.catalogue import HERE
from mutants.edits import Edit, edits
from studies.commands import ROOT

KIT = ("launch", "testing")
"""The folders of `sp_core` with the testing kit and its launcher. They have their own sample."""

SAME = ("file", "place", "before", "after")
"""The fields that are equal in an entry of `equivalent.toml` and its edit."""

LEAST = 20
"""The least number of edits drawn from a room: with fewer, one survivor would be more than 5 %."""


@dataclass(frozen=True)
class Equivalent:
    """An edit that changes no result. It may cost time.

    Args:
        file: the file that it changes.
        place: the function that it changes.
        before: the lines without the edit.
        after: the lines with the edit.
        reason: why no test can notice it.
    """

    file: str
    place: str
    before: str
    after: str
    reason: str

    def holds(self, edit: Edit) -> bool:
        """Return whether this entry describes the given edit."""
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
    """Split a number over rooms: each gets up to `LEAST`, the rest in proportion to its edits."""
    least = min(LEAST, number // max(len(counts), 1))
    given = {room: min(least, count) for room, count in counts.items()}
    while sum(given.values()) < min(number, sum(counts.values())):
        open_rooms = [room for room in sorted(counts) if given[room] < counts[room]]
        given[min(open_rooms, key=lambda room: given[room] / counts[room])] += 1
    return given


def drawn(found: Sequence[Edit], number: int, seed: int) -> list[Edit]:
    """Draw each room's share of the number. All edits of a room have the same probability.

    The draw depends on digests of the edits, not on their order. A change of the library therefore
    changes the sample only near the changed lines.
    """
    rooms: dict[str, list[Edit]] = {}
    for edit in sorted(
        found, key=lambda edit: hashlib.blake2b(f"{seed} {edit.id}".encode()).digest()
    ):
        rooms.setdefault(room_of(edit.file), []).append(edit)
    given = shares({room: len(edits) for room, edits in rooms.items()}, number)
    return [edit for room in sorted(rooms) for edit in rooms[room][: given[room]]]


def equivalents() -> list[Equivalent]:
    """Return the edits that no test can notice, with the reasons."""
    told = tomllib.loads((HERE / "equivalent.toml").read_text())["equivalent"]
    return [Equivalent(**{name: text.strip() for name, text in one.items()}) for one in told]


def stale(known: Sequence[Equivalent], found: Sequence[Edit]) -> list[Equivalent]:
    """Return the entries that match no edit any more, because their lines have changed."""
    return [one for one in known if not any(one.holds(edit) for edit in found)]
