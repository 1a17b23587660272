"""Find the tests that reach an edit, those first that are quick and reach few lines.

Every test file that may notice an edit runs twice under coverage, with ranks as threads and under
mpiexec. Both runs draw few examples (`SP_PROFILE=brief`), or they would take more than half an hour
on two cores. Processes that a test starts are measured too. A measurement stays valid until the
file or the sources change.
"""

import hashlib
import json
from bisect import bisect
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from itertools import accumulate, product
from pathlib import Path
from typing import Any

from mutants.edits import Edit
from mutants.plugin import REACH, TEST
from mutants.trial import NEAR_RANKS, NOTHING_FAILED, ON_RANKS, Stage, run_stage
from studies.commands import ROOT, copied

KEPT = ROOT / "reports" / "reach"
SECONDS = 2400.0
APART = (
    *("append_history", "ci_scripts", "compare*", "conformance*", "gpu_command", "history"),
    *("layout", "mutants*", "netlab", "peers*", "promote_pr", "reporting*", "slurm", "soak"),
    "workflows",
)
"""Names of test files that are not run: tests of benchmarks, CI, layout and the mutants."""
OF_KIT = (
    *(
        "kit_*",
        "deaths",
        "example_project",
        "failing",
        "findings",
        "memory",
        "mesh",
        "order",
        "reference",
    ),
    *("llama_command", "readme", "records", "scheme_laws", "torchrun"),
)
"""Names of test files that try an edit of the kit. All others reach it too, and would take long."""
BRIEF = {"SP_PROFILE": "brief"}
"""Few examples: as many as `nox -s tests` draws under mpiexec."""
UNHURRIED = {"SP_WATCHDOG_S": "120", "SP_WATCHDOG_PHASE_S": "300"}
"""Longer time limits, in seconds. Coverage slows examples, and none hangs without an edit."""
MEASURED = """[run]
parallel = true
data_file = {copy}/measured
include = {copy}/sp_core/*
concurrency = thread
context = ${{{test}-}}
patch = _exit
"""
"""Settings of coverage. Lines reached by a process that a test starts count for that test."""
NEAR, FAR = "near", "far"
STAGES = (NEAR, NEAR_RANKS, FAR, ON_RANKS)
"""The stages: the first tests that reach an edit, as threads and under mpiexec; then all others."""
NEAR_SECONDS = 12.0
"""A stage of first tests holds as many as take this many seconds in total without an edit."""
PATIENCE, LEAST_SECONDS = 4.0, 90.0
"""A stage may take LEAST_SECONDS plus PATIENCE times its seconds without an edit."""
Told = dict[str, dict[str, Any]]
"""A stored measurement: "seconds" by test; "lines": by file and line, the tests that reach it."""


class Red(Exception):
    """A test file fails without an edit, so it cannot be used to try edits."""


@dataclass
class Reached:
    """The lines that tests reach.

    Args:
        seconds: how long each test takes.
        lines: by file and line, the tests that reach it; "" stands for code outside of tests, such
            as an import.
        width: the number of lines that each test reaches.
        ranks: the same information for the tests under mpiexec.
    """

    seconds: dict[str, float] = field(default_factory=dict)
    lines: dict[str, dict[int, set[str]]] = field(
        default_factory=lambda: defaultdict(lambda: defaultdict(set))
    )
    width: Counter[str] = field(default_factory=Counter)
    ranks: "Reached | None" = None

    def add(self, told: Told) -> None:
        """Add the measurement of one test file."""
        self.seconds.update(told["seconds"])
        for file, lines in told["lines"].items():
            for line, tests in lines.items():
                self.lines[file][int(line)].update(tests)
                self.width.update(tests)

    def tests(self, edit: Edit) -> list[str]:
        """Return the tests that reach an edit, in the order to try them.

        For an edit that runs only outside of tests, such as at an import or at the begin of a
        session, return all tests in the files that reach the module.
        """
        there = self.lines.get(edit.file, {})
        reaching = set().union(*(there.get(line, ()) for line in edit.lines))
        if edit.inside and reaching != {""}:
            return self._ordered(reaching & self.seconds.keys())
        files = {file_of(test) for test in set().union(*there.values()) & self.seconds.keys()}
        return self._ordered(test for test in self.seconds if file_of(test) in files)

    def _ordered(self, tests: Iterable[str]) -> list[str]:
        """Sort by seconds times lines reached, times n for the n-th parameter set of a test."""
        price = {test: (self.seconds[test] + 0.01) * self.width[test] for test in tests}
        turns: Counter[str] = Counter()
        dear: dict[str, float] = {}
        for test in sorted(price, key=lambda test: (price[test], test)):
            function = test.partition("[")[0]
            turns[function] += 1
            dear[test] = price[test] * turns[function]
        return sorted(dear, key=lambda test: (dear[test], test))

    def near(self, tests: Sequence[str]) -> int:
        """Return how many of these tests are tried first; at least one."""
        return max(1, bisect([*accumulate(self.seconds[test] for test in tests)], NEAR_SECONDS))

    def stages(self, edit: Edit) -> list[Stage]:
        """Return the stages, each with its tests that reach the edit; none is empty."""
        found = [(of.tests(edit), of) for of in (self, self.ranks or Reached())]
        parts = [(tests[: of.near(tests)], of) for tests, of in found]
        parts += [(tests[of.near(tests) :], of) for tests, of in found]
        return [
            Stage(
                name,
                list(dict.fromkeys(map(file_of, part))),
                LEAST_SECONDS + PATIENCE * sum(of.seconds[test] for test in part),
                part,
                {} if of is self else BRIEF,
            )
            for name, (part, of) in zip(STAGES, parts, strict=True)
            if part
        ]


def digest(file: Path) -> str:
    """Return a digest of the sources and of a test file."""
    paths = [*sorted((ROOT / "sp_core").rglob("*.py")), *sorted((ROOT / "tests").glob("[!t]*.py"))]
    text = b"".join(path.read_bytes() for path in [*paths, file])
    return hashlib.blake2b(text, digest_size=6).hexdigest()


def files(*, kit: bool) -> list[str]:
    """Return the test files that may notice an edit of the library, or of the kit."""
    found = _named(*OF_KIT) if kit else sorted({*_named("*")} - {*_named(*APART)})
    if find_spec("transformers") and not kit:
        found += sorted((ROOT / "tests" / "hf").glob("test_*.py"))
    return [path.relative_to(ROOT).as_posix() for path in found]


def _named(*patterns: str) -> list[Path]:
    return sorted(path for each in patterns for path in (ROOT / "tests").glob(f"test_{each}.py"))


def file_of(test: str) -> str:
    """Return the file of a test id."""
    return test.partition("::")[0]


def kept(file: str, stage: str) -> Path:
    """Return the path where `measure` stores the lines that a test file reaches in a stage.

    A stage is "threads" or "ranks".
    """
    return KEPT / f"{Path(file).stem}-{stage}-{digest(ROOT / file)}.json"


def measure(file: str, stage: str) -> None:
    """Run a test file under coverage, and store which lines its tests reach.

    Raises:
        Red: the session does not end, or a test fails.
    """
    with copied() as copy:
        settings = copy / "coverage.ini"
        settings.write_text(MEASURED.format(copy=copy, test=TEST))
        variables = {REACH: f"{copy}/seconds", "COVERAGE_PROCESS_START": str(settings)}
        ending = run_stage(copy, Stage(stage, [file], SECONDS, (), variables | UNHURRIED | BRIEF))
        if ending.code not in NOTHING_FAILED or ending.told:
            raise Red(f"{file}: exit code {ending.code} {ending.told} {ending.printed[-3000:]}")
        seconds: dict[str, float] = {}
        for rank in copy.glob("seconds*.json"):
            seconds |= json.loads(rank.read_text())
        KEPT.mkdir(parents=True, exist_ok=True)
        told = {"seconds": seconds, "lines": _lines(copy)}
        kept(file, stage).write_text(json.dumps(told, default=sorted))


def _lines(copy: Path) -> dict[str, dict[int, list[str]]]:
    """Return, by file and line, the tests that reach it; combine the data of all processes."""
    from coverage import Coverage

    coverage = Coverage(str(copy / "measured"), config_file=False, messages=False)
    coverage.combine([str(copy)])  # warns of a process that was killed while it wrote
    data = coverage.get_data()
    return {
        str(Path(name).relative_to(copy)): data.contexts_by_lineno(name)
        for name in data.measured_files()
    }


def gathered(*, kit: bool) -> tuple[Reached, list[tuple[str, str]]]:
    """Return all stored measurements, and the pairs of test file and stage still to measure.

    `kit`: whether the edits are those of the kit.
    """
    reached = Reached(ranks=Reached())
    missing = []
    parts = (("threads", reached), (ON_RANKS, reached.ranks))
    for (stage, part), file in product(parts, files(kit=kit)):
        if part is not None and kept(file, stage).exists():
            part.add(json.loads(kept(file, stage).read_text()))
        else:
            missing.append((file, stage))
    return reached, missing
