"""Read the catalogue of planted faults: documented bugs of other projects and of this one.

Each fault replaces a piece of source text. `faults/*.toml` hold the faults, `excluded.toml` the
bugs that cannot be planted and the reasons, and `known.txt` the numbers of all bugs.
"""

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
        id: the documented bug's number, such as "LSE-2". It is "LSE-2/x" if there are several ways.
        title: one line that says what the bug is.
        source: the project and the issue that document it.
        symptom: what users of that project saw.
        file: the file that is changed, below the root of the repository.
        old: text that occurs in the file exactly once, however the formatter breaks its lines.
        new: the text that replaces `old`.
        tests: the test files or test ids, below `tests`, that must kill the mutant, in the order in
            which they run.
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
        """Return the number of the documented bug."""
        return self.id.partition("/")[0]

    def planted(self, text: str) -> str:
        """Return the text of the file with the fault in it.

        Raises:
            Stale: `old` does not occur exactly once.
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
        id: the bug's number.
        reason: why it cannot be planted.
        absent: regular expressions that match nothing in the package, in either case of letters, as
            long as the reason holds.
    """

    id: str
    reason: str
    absent: list[str]


def _laid_out_anyhow(text: str) -> str:
    """Return a regular expression for this code with any line breaks and trailing commas."""
    code = text.strip()
    words = re.findall(r"\w+|\s+|.", code)
    inside = "".join(r"\s+" if word.isspace() else re.escape(word) for word in words)
    opened = re.sub(r"\\[(\[{]", r"\g<0>\\s*", inside)
    closed = re.sub(r"\\[)\]}]", r"(?:,?\\s+)?\g<0>", opened)
    before, after = map(re.escape, text.split(code))
    return before + closed + after


def mutants() -> list[Mutant]:
    """Return all planted faults, one family after the other."""
    texts = [path.read_text() for path in sorted((HERE / "faults").glob("*.toml"))]
    families = [family for text in texts for family in tomllib.loads(text)["family"]]
    return [
        Mutant(**{**told, "tests": tuple(told["tests"])}, family=family["name"])
        for family in families
        for told in family["mutant"]
    ]


def exclusions() -> list[Exclusion]:
    """Return all bugs that are not planted."""
    found = tomllib.loads((HERE / "excluded.toml").read_text())["excluded"]
    return [Exclusion(**entry) for entry in found]


def known() -> list[str]:
    """Return the numbers of all documented bugs, planted or excluded."""
    return (HERE / "known.txt").read_text().split()
