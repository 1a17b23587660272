"""Which tests reach an edit, the narrow and quick ones first.

One measured run of every test file says so. It is kept for as long as the file and the sources stay as they are.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from mutants import nursery
from mutants.catalogue import ROOT
from mutants.chosen import REACH
from mutants.edits import Edit
from mutants.trial import FILE, copy_package, environment, test_files

SECONDS = 500.0
NEAR_SECONDS = 12.0
"""Of tests, as they take without an edit: those that are tried first. What they do not kill has all others that reach it."""


class Red(Exception):
    """A test file is not green without an edit, so that nothing can be said with one."""


@dataclass
class Reached:
    """What tests reach.

    Args:
        seconds: that a test takes.
        lines: by file and line the tests that reach it; "" stands for an import.
        width: of a test: the number of lines that it reaches.
    """

    seconds: dict[str, float] = field(default_factory=dict)
    lines: dict[str, dict[int, set[str]]] = field(default_factory=lambda: defaultdict(lambda: defaultdict(set)))
    width: Counter[str] = field(default_factory=Counter)

    def add(self, told: dict[str, dict[str, object]]) -> None:
        """Take in what one test file reaches."""
        self.seconds.update(told["seconds"])
        for file, lines in told["lines"].items():
            for line, tests in lines.items():
                self.lines[file][int(line)].update(tests)
                self.width.update(tests)

    def tests(self, edit: Edit) -> list[str]:
        """All tests that reach an edit, in the order to try them; of what is imported, all in files that reach its module."""
        there = self.lines.get(edit.file, {})
        if edit.inside:
            return self._ordered(set().union(*(there.get(line, ()) for line in edit.lines)) & self.seconds.keys())
        files = {_file(test) for test in set().union(*there.values()) & self.seconds.keys()}
        return self._ordered(test for test in self.seconds if _file(test) in files)

    def _ordered(self, tests: Iterable[str]) -> list[str]:
        """Narrow and quick before wide and slow, with the first instances of a test before its later ones."""
        price = {test: (self.seconds[test] + 0.01) * self.width[test] for test in tests}
        turns: Counter[str] = Counter()
        dear: dict[str, float] = {}
        for test in sorted(price, key=lambda test: (price[test], test)):
            function = test.partition("[")[0]
            turns[function] += 1
            dear[test] = price[test] * turns[function]
        return sorted(dear, key=lambda test: (dear[test], test))

    def near(self, tests: Sequence[str]) -> int:
        """How many of these tests go first; at least one."""
        taken = 0.0
        for place, test in enumerate(tests):
            taken += self.seconds[test]
            if taken > NEAR_SECONDS:
                return max(place, 1)
        return len(tests)


def _file(test: str) -> str:
    return test.partition("::")[0]


def digest(root: Path, file: str) -> str:
    """Changes with the sources and with the test file."""
    paths = [*sorted((root / "sp_core").rglob("*.py")), *sorted((root / "tests").glob("[!t]*.py")), root / file]
    return hashlib.blake2b(b"".join(path.read_bytes() for path in paths), digest_size=6).hexdigest()


def parts(root: Path, kept: Path) -> Iterator[tuple[str, Path]]:
    """The library's test files, and where what they reach is kept."""
    for file in test_files(root, "threads", ()):
        yield file, kept / f"{Path(file).stem}-{digest(root, file)}.json"


def measured(file: str, target: Path) -> None:
    """Run one test file, and keep what it reaches.

    Raises:
        Red: it does not end, or does not run.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="sp_core-reach-") as directory:
        copy = Path(directory)
        copy_package(copy)
        variables = environment(copy, copy / "witness.json", "threads") | {REACH: str(copy / "reach.json")}
        code = nursery.run(["-q", *nursery.plugins(), file], copy, copy / "out.txt", variables, SECONDS)
        told = json.loads(Path(variables[FILE]).read_text()) if Path(variables[FILE]).exists() else {}
        if code not in (0, 5) or told or not (copy / "reach.json").exists():
            raise Red(f"{file}: exit code {code} {told} {(copy / 'out.txt').read_text()[-2000:]}")
        scratch = target.with_suffix(".part")
        scratch.write_bytes((copy / "reach.json").read_bytes())
        scratch.replace(target)


def gathered(root: Path = ROOT, kept: Path = ROOT / "reports" / "reach") -> tuple[Reached, list[tuple[str, Path]]]:
    """What is known by now, and what has still to be measured."""
    reached, missing = Reached(), []
    for file, target in parts(root, kept):
        if target.exists():
            reached.add(json.loads(target.read_text()))
        else:
            missing.append((file, target))
    return reached, missing
