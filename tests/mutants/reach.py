"""Find the tests that reach an edit, the narrow and quick ones first.

One measured run of every test file says so, with ranks as threads and then under mpiexec. Processes
that a test starts are measured too. A measurement is kept for as long as the file and the sources
stay as they are.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mutants.edits import Edit
from mutants.plugin import REACH, file_of
from mutants.trial import NOTHING_FAILED, ON_RANKS, Stage, copy_package, run_stage
from studies.commands import RANKS, ROOT

KEPT = ROOT / "reports" / "reach"
SECONDS = {"threads": 900.0, ON_RANKS: 1800.0}
APART = (
    *("append_history", "ci_scripts", "compare*", "conformance*", "history", "layout", "mutants*"),
    *("peers*", "promote_pr", "reporting*", "slurm", "soak", "workflows"),
)
"""Tests of benchmarks, CI, layout and the mutants: they say nothing of a wrong edit."""
BRIEF = {"SP_PROFILE": "brief"}
"""Under mpiexec as many examples are drawn as in `nox -s tests`."""
NEAR, FAR = "near", "far"
STAGES = (NEAR, FAR, ON_RANKS)
"""The first tests that reach an edit, all others, and those under mpiexec."""
NEAR_SECONDS = 12.0
"""Of tests, as they take without an edit: those that are tried first."""
PATIENCE, LEAST_SECONDS = 4.0, 90.0
"""How much longer than without an edit tests may take: the machine may have other work."""
Told = dict[str, dict[str, Any]]
"""What `plugin.Reach` writes: seconds by test, and by file and line the tests that reach it."""


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
        """Return the tests that reach an edit, in the order to try them.

        An edit that runs when its module is imported has all tests in files that reach the module.
        """
        there = self.lines.get(edit.file, {})
        if edit.inside:
            reaching = set().union(*(there.get(line, ()) for line in edit.lines))
            return self._ordered(reaching & self.seconds.keys())
        files = {file_of(test) for test in set().union(*there.values()) & self.seconds.keys()}
        return self._ordered(test for test in self.seconds if file_of(test) in files)

    def _ordered(self, tests: Iterable[str]) -> list[str]:
        """Sort narrow and quick tests first, and the first instances of a test before others."""
        price = {test: (self.seconds[test] + 0.01) * self.width[test] for test in tests}
        turns: Counter[str] = Counter()
        dear: dict[str, float] = {}
        for test in sorted(price, key=lambda test: (price[test], test)):
            function = test.partition("[")[0]
            turns[function] += 1
            dear[test] = price[test] * turns[function]
        return sorted(dear, key=lambda test: (dear[test], test))

    def near(self, tests: Sequence[str]) -> int:
        """Return how many of these tests go first; at least one."""
        taken = 0.0
        for place, test in enumerate(tests):
            taken += self.seconds[test]
            if taken > NEAR_SECONDS:
                return max(place, 1)
        return len(tests)

    def stages(self, edit: Edit) -> list[Stage]:
        """Return the stages that have tests which reach an edit."""
        tests, ranks = self.tests(edit), self.ranks or Reached()
        near = self.near(tests)
        parts = ((tests[:near], self), (tests[near:], self), (ranks.tests(edit), ranks))
        return [
            Stage(
                name,
                list(dict.fromkeys(map(file_of, part))),
                LEAST_SECONDS + PATIENCE * sum(of.seconds[test] for test in part),
                part,
                BRIEF if name == ON_RANKS else {},
            )
            for name, (part, of) in zip(STAGES, parts, strict=True)
            if part
        ]


def digest(file: Path) -> str:
    """Return a digest of the sources and of a test file."""
    paths = [*sorted((ROOT / "sp_core").rglob("*.py")), *sorted((ROOT / "tests").glob("[!t]*.py"))]
    text = b"".join(path.read_bytes() for path in [*paths, file])
    return hashlib.blake2b(text, digest_size=6).hexdigest()


def kept() -> dict[str, Path]:
    """Return by test file where it is kept what its tests reach."""
    tests = ROOT / "tests"
    apart = {path for pattern in APART for path in tests.glob(f"test_{pattern}.py")}
    return {
        f"tests/{path.name}": KEPT / f"{path.stem}-{digest(path)}.json"
        for path in sorted({*tests.glob("test_*.py")} - apart)
    }


def on_rank(target: Path, rank: str) -> Path:
    """Return where it is kept what tests reach on a rank; with "" as threads."""
    return target.with_suffix(f".rank{rank}.json") if rank else target


def measure(files: Sequence[str], stage: str = "threads") -> None:
    """Run test files in one session, and keep what they reach, under mpiexec on each rank.

    Raises:
        Red: the session does not end, or a test is red.
    """
    ranks = [*map(str, range(RANKS))] if stage == ON_RANKS else [""]
    with tempfile.TemporaryDirectory(prefix="sp_core-reach-") as directory:
        copy = Path(directory)
        copy_package(copy)
        variables = {REACH: str(copy / "reach.json")} | (BRIEF if stage == ON_RANKS else {})
        ending = run_stage(copy, Stage(stage, files, SECONDS[stage], (), variables))
        sources = [copy / f"reach.json{rank}" for rank in ranks]
        if ending.code not in NOTHING_FAILED or ending.told or not all(x.exists() for x in sources):
            raise Red(f"{files}: exit code {ending.code} {ending.told} {ending.printed[-3000:]}")
        told = [json.loads(source.read_text()) for source in sources]
    KEPT.mkdir(parents=True, exist_ok=True)
    for file, target in kept().items():
        for rank, part in zip(ranks, told, strict=True):
            if file in files:
                on_rank(target, rank).write_text(json.dumps(of_file(part, file)))


def of_file(told: Told, file: str) -> Told:
    """Return what the tests of one file reach, and imports."""
    lines = {
        name: {
            line: [test for test in tests if file_of(test) in ("", file)]
            for line, tests in found.items()
        }
        for name, found in told["lines"].items()
    }
    seconds = {test: taken for test, taken in told["seconds"].items() if file_of(test) == file}
    return {"seconds": seconds, "lines": lines}


def gathered() -> tuple[Reached, list[str], list[str]]:
    """Return what is known, and the files to measure with ranks as threads and under mpiexec."""
    reached, ranks = Reached(), Reached()
    reached.ranks = ranks
    missing: tuple[list[str], list[str]] = ([], [])
    for file, target in kept().items():
        for rank in ("", *map(str, range(RANKS))):
            if on_rank(target, rank).exists():
                told = json.loads(on_rank(target, rank).read_text())
                (ranks if rank else reached).add(told)
            elif file not in missing[bool(rank)]:
                missing[bool(rank)].append(file)
    return reached, *missing
