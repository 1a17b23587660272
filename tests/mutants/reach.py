"""Find the tests that reach an edit, the narrow and quick ones first.

One measured run of every test file says so, with ranks as threads and then under mpiexec. Processes
that a test starts are measured too. A measurement is kept for as long as the file and the sources
stay as they are.
"""

from __future__ import annotations

import hashlib
import json
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mutants import nursery
from mutants.catalogue import ROOT
from mutants.chosen import REACH
from mutants.edits import Edit
from mutants.trial import NOTHING_FAILED, RANKS, command, copy_package, environment, run

SECONDS, RANKS_SECONDS = 900.0, 1800.0
APART = (
    *(
        "append_history",
        "ci_scripts",
        "compare*",
        "conformance*",
        "history",
        "layout",
        "mutants*",
        "peers*",
        "promote_pr",
    ),
    *("reporting*", "slurm", "soak", "workflows"),
)
"""Tests of benchmarks, CI, layout and of the mutants themselves: what they say is not about a wrong edit."""
BRIEF = {"SP_PROFILE": "brief"}
"""Under mpiexec as many examples are drawn as in `nox -s tests`."""
NEAR_SECONDS = 12.0
"""Of tests, as they take without an edit: those that are tried first. What they do not kill has all others that reach it."""


Missing = list[tuple[str, Path]]
"""Test files that are not measured yet, and where it is kept what they reach."""
Told = dict[str, dict[str, Any]]
"""What `chosen.Reach` writes: seconds by test, and by file and line the tests that reach it."""


class Red(Exception):
    """A test file is not green without an edit, so that nothing can be said with one."""


@dataclass
class Reached:
    """What tests reach.

    Args:
        seconds: that a test takes.
        lines: by file and line the tests that reach it; "" stands for an import.
        width: of a test: the number of lines that it reaches.
        ranks: the same of the tests under mpiexec.
    """

    seconds: dict[str, float] = field(default_factory=dict)
    lines: dict[str, dict[int, set[str]]] = field(
        default_factory=lambda: defaultdict(lambda: defaultdict(set))
    )
    width: Counter[str] = field(default_factory=Counter)
    ranks: Reached | None = None

    def add(self, told: Told) -> None:
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
            return self._ordered(
                set().union(*(there.get(line, ()) for line in edit.lines)) & self.seconds.keys()
            )
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

    def stages(self, edit: Edit) -> dict[str, tuple[list[str], float]]:
        """Return the tests of each stage that has some, and the seconds that they take without an edit."""
        tests, ranks = self.tests(edit), self.ranks or Reached()
        near = self.near(tests)
        parts = {
            "near": (tests[:near], self),
            "far": (tests[near:], self),
            "ranks": (ranks.tests(edit), ranks),
        }
        return {
            stage: (part, sum(of.seconds[test] for test in part))
            for stage, (part, of) in parts.items()
            if part
        }


def _file(test: str) -> str:
    return test.partition("::")[0]


def digest(root: Path, file: str) -> str:
    """Changes with the sources and with the test file."""
    paths = [
        *sorted((root / "sp_core").rglob("*.py")),
        *sorted((root / "tests").glob("[!t]*.py")),
        root / file,
    ]
    return hashlib.blake2b(b"".join(path.read_bytes() for path in paths), digest_size=6).hexdigest()


def parts(root: Path, kept: Path) -> Iterator[tuple[str, Path]]:
    """Return the test files, and where what they reach is kept."""
    apart = {path for pattern in APART for path in root.glob(f"tests/test_{pattern}.py")}
    for path in sorted({*root.glob("tests/test_*.py")} - apart):
        yield f"tests/{path.name}", kept / f"{path.stem}-{digest(root, f'tests/{path.name}')}.json"


def measured(file: str, target: Path) -> None:
    """Run one test file with ranks as threads, and keep what it reaches.

    Raises:
        Red: it does not end, or does not run.
    """
    with tempfile.TemporaryDirectory(prefix="sp_core-reach-") as directory:
        copy = Path(directory)
        copy_package(copy)
        variables = environment(copy, copy / "witness.json", "threads") | {
            REACH: str(copy / "reach.json")
        }
        code = nursery.run(
            ["-q", *nursery.plugins(), file], copy, copy / "out.txt", variables, SECONDS
        )
        _check(file, copy, code, [copy / "reach.json"])
        _keep(target, json.loads((copy / "reach.json").read_text()))


def measured_on_ranks(missing: Missing) -> None:
    """Run test files under one mpiexec, and keep for each what its tests reach on any rank.

    Raises:
        Red: the launch does not end, or a test is red.
    """
    files = [file for file, _ in missing]
    with tempfile.TemporaryDirectory(prefix="sp_core-reach-") as directory:
        copy = Path(directory)
        copy_package(copy)
        variables = (
            environment(copy, copy / "witness.json", "ranks")
            | BRIEF
            | {REACH: str(copy / "reach.json")}
        )
        told = [copy / f"reach.json{rank}" for rank in range(RANKS)]
        alone = [
            sys.executable,
            "-m",
            "mutants.apart",
            *command("ranks", files, RANKS_SECONDS, nursery.CHOSEN),
        ]
        with (copy / "out.txt").open("w") as output:
            code = run(alone, copy, output.fileno(), variables, RANKS_SECONDS + 60)
        _check(", ".join(files), copy, code, told)
        parts = [json.loads(file.read_text()) for file in told]
    for file, target in missing:
        for rank, part in enumerate(parts):
            _keep(_on_rank(target, rank), _of_file(part, file))


def _of_file(told: Told, file: str) -> Told:
    """Return what the tests of one file reach, and imports."""
    seconds = {test: taken for test, taken in told["seconds"].items() if _file(test) == file}
    lines = {
        name: {
            line: [test for test in tests if _file(test) in ("", file)]
            for line, tests in found.items()
        }
        for name, found in told["lines"].items()
    }
    return {"seconds": seconds, "lines": lines}


def _check(files: str, copy: Path, code: int | None, needed: Sequence[Path]) -> None:
    witness = copy / "witness.json"
    told = json.loads(witness.read_text()) if witness.exists() else {}
    if code not in NOTHING_FAILED or told or not all(file.exists() for file in needed):
        raise Red(
            f"{files}: exit code {code} {told} {(copy / 'out.txt').read_text(errors='replace')[-3000:]}"
        )


def _on_rank(target: Path, rank: int) -> Path:
    return target.with_suffix(f".rank{rank}.json")


def _keep(target: Path, told: Told) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = target.with_suffix(".part")
    scratch.write_text(json.dumps(told))
    scratch.replace(target)


def gathered(
    root: Path = ROOT, kept: Path = ROOT / "reports" / "reach"
) -> tuple[Reached, list[tuple[str, Path]], list[tuple[str, Path]]]:
    """Return what is known by now, and what has still to be measured: with ranks as threads, and under mpiexec."""
    reached = Reached(ranks=Reached())
    found = list(parts(root, kept))
    for _, target in found:
        if target.exists():
            reached.add(json.loads(target.read_text()))
        for rank in range(RANKS):
            if _on_rank(target, rank).exists():
                reached.ranks.add(json.loads(_on_rank(target, rank).read_text()))
    missing = [(file, target) for file, target in found if not target.exists()]
    on_ranks = [
        (file, target) for file, target in found if not _on_rank(target, RANKS - 1).exists()
    ]
    return reached, missing, on_ranks
