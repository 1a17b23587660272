"""Read the catalogue of faults: documented bugs of other projects and of ours.

Each is the replacement of a piece of text.

`faults/*.toml` hold what is planted, `excluded.toml` what has no place here and why, `known.txt`
the numbers of all of them.
"""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from pathlib import Path

from mutants.trial import Stale

HERE = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Mutant:
    """One planted fault.

    Args:
        id: of the documented bug; with a slash and a word where it is planted in several ways.
        title: what the bug is.
        source: where it is documented.
        symptom: what was seen there.
        file: that is changed.
        old: text that occurs in it exactly once, however the formatter breaks its lines.
        new: what takes its place.
        tests: files, or ids of tests, that run first; those of the file's own room before others.
        family: the class of bugs.
    """

    id: str
    title: str
    source: str
    symptom: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    family: str

    @property
    def bug(self) -> str:
        """The number of the documented bug."""
        return self.id.partition("/")[0]

    def planted(self, text: str) -> str:
        """The text of the file with the fault in it.

        Raises:
            Stale: there is no one place for it.
        """
        planted, found = re.subn(_laid_out_anyhow(self.old), lambda _: self.new, text)
        if found != 1:
            raise Stale(
                f"{self.id}: the text occurs {found} times in {self.file}, needed once: "
                f"{self.old!r}"
            )
        return planted


@dataclass(frozen=True)
class Exclusion:
    """A documented bug that cannot be planted.

    Args:
        id: of the bug.
        reason: why not.
        absent: regular expressions that the package does not contain (letters of either case), for
            as long as the reason holds.
    """

    id: str
    reason: str
    absent: list[str]


def _laid_out_anyhow(text: str) -> str:
    """Return a regular expression for code with any line breaks inside it and trailing commas."""
    code = text.strip()
    words = re.findall(r"\w+|\s+|.", code)
    inside = "".join(r"\s+" if word.isspace() else re.escape(word) for word in words)
    opened = re.sub(r"\\[(\[{]", r"\g<0>\\s*", inside)
    closed = re.sub(r"\\[)\]}]", r"(?:,?\\s+)?\g<0>", opened)
    before, after = map(re.escape, text.split(code))
    return before + closed + after


def mutants(folder: Path = HERE / "faults") -> list[Mutant]:
    """All planted faults, by family."""
    texts = [path.read_text() for path in sorted(folder.glob("*.toml"))]
    families = [family for text in texts for family in tomllib.loads(text)["family"]]
    return [
        Mutant(**{**told, "tests": tuple(told["tests"])}, family=family["name"])
        for family in families
        for told in family["mutant"]
    ]


def exclusions(path: Path = HERE / "excluded.toml") -> list[Exclusion]:
    """All bugs that are not planted."""
    return [Exclusion(**entry) for entry in tomllib.loads(path.read_text())["excluded"]]


def known(path: Path = HERE / "known.txt") -> list[str]:
    """The numbers of all documented bugs that the catalogue answers for."""
    return path.read_text().split()
