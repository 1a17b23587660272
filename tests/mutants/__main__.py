"""`nox -s mutants`: plant every fault of the catalogue, one at a time, and see the tests fail.

The exit code is 1 if a mutant survives, hangs, is stale, or keeps the tests from starting. It is 2
if no mutant is chosen, a test fails without a mutant, or the machine cannot run tests apart.
A signal ends the command when the running trials have ended.
"""

import argparse
import compileall
import os
import statistics
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

from mutants.catalogue import Exclusion, Mutant, exclusions, mutants
from mutants.trial import Outcome, Stage, tried
from studies.commands import ROOT, refused
from studies.records import table, write

from benchmarks import launching
from benchmarks.launching import Options, UsageError, about

SECONDS = 240.0
"""Time limit of the tests that a mutant names, in seconds."""
SANE_SECONDS = 1200.0
"""Time limit of one test file without a planted fault, in seconds. All of its tests run."""
OPTIONS: Options = {
    "--only": about(nargs="+", default=[], help="classes, bugs or ids: LSE, LSE-2, LSE-2/x"),
    "--jobs": about(type=int, default=1, help="how many at a time (default: 1)"),
    "--out": about(type=Path, default=ROOT / "reports", help="folder of the reports"),
}
Result = tuple[Mutant, Outcome]


@launching.program("nox -s mutants --", __doc__, OPTIONS)
def main(options: argparse.Namespace) -> int:
    """Run the command line; return the exit code."""
    chosen = selected(mutants(), options.only)
    if problem := refused() if chosen else "no mutant is chosen":
        raise UsageError(problem)
    compileall.compile_dir(ROOT / "sp_core", quiet=1)  # otherwise every copy would compile again
    with ThreadPoolExecutor(options.jobs) as pool:
        if red := [words for words in pool.map(_unchanged, named(chosen)) if words]:
            print(*red, sep="\n", flush=True)
            return 2
        results: list[Result] = []
        try:
            results.extend(pool.map(_told, chosen))
        finally:
            if results:
                report(options.out, results)
    return int(any(outcome.verdict != "killed" for _, outcome in results))


def selected(catalogue: Sequence[Mutant], only: Sequence[str]) -> list[Mutant]:
    """Return the mutants whose class (LSE), bug (LSE-2) or id (LSE-2/x) is in `only`, or all."""
    return [m for m in catalogue if not only or {m.id, m.bug, m.bug.partition("-")[0]} & {*only}]


def named(chosen: Sequence[Mutant]) -> list[str]:
    """Return the test files that mutants name, and the single tests in files that none names."""
    tests = {test for mutant in chosen for test in mutant.tests}
    covered = {test for test in tests if "::" in test and test.partition("::")[0] in tests}
    return sorted(tests - covered)


def stage_of(*tests: str, seconds: float = SECONDS) -> Stage:
    """Return a stage that runs these tests, with ranks as threads."""
    return Stage("chosen", [f"tests/{name}" for name in tests], seconds)


def _unchanged(tests: str) -> str:
    """Return the failure of these tests without a planted fault, or "" if they pass."""
    sane = tried("README.md", str, [stage_of(tests, seconds=SANE_SECONDS)])
    if sane.verdict == "survived":
        return ""
    return f"{tests} is not green without a mutant: {sane.law} {sane.words}"


def _told(mutant: Mutant) -> Result:
    outcome = tried(mutant.file, mutant.planted, [stage_of(*mutant.tests)])
    print(f"{mutant.id:12}", outcome.verdict, outcome.law, outcome.words, flush=True)
    return mutant, outcome


def score(results: Sequence[Result]) -> str:
    """Return the number of killed mutants and the number of all as text, such as "3 of 4"."""
    return f"{sum(outcome.verdict == 'killed' for _, outcome in results)} of {len(results)}"


def report(out: Path, results: Sequence[Result]) -> None:
    """Write the report into a folder, and print the score."""
    plain = [
        {"id": m.id, "family": m.family, "file": m.file, **asdict(outcome)}
        for m, outcome in results
    ]
    write(out, "mutants", markdown(results, exclusions()), plain)
    print(f"{score(results)} killed; {out}/mutants.md", flush=True)


def markdown(results: Sequence[Result], excluded: Sequence[Exclusion]) -> list[str]:
    """Return the lines of the report."""
    times = [outcome.seconds for _, outcome in results if outcome.verdict == "killed"]
    families: dict[str, list[Result]] = {}
    for mutant, outcome in results:
        families.setdefault(mutant.family, []).append((mutant, outcome))
    lines = [
        "# Planted faults and the tests that kill them",
        "",
        f"`nox -s mutants`: {score(results)} killed, median time to a kill "
        f"{statistics.median(times or [0.0]):.1f} s on {os.cpu_count()} cores. "
        "Each must be killed by the tests that it names.",
        "",
        *table(("class", "killed"), [(name, score(part)) for name, part in families.items()]),
    ]
    head = ("fault", "source", "verdict", "law", "examples", "seconds")
    for family, part in families.items():
        lines += ["", f"## {family}", "", *table(head, [_row(*result) for result in part])]
    rows = [(one.id, one.reason) for one in excluded]
    return [*lines, "", "## Not planted", "", *table(("fault", "reason"), rows)]


def _row(mutant: Mutant, outcome: Outcome) -> tuple[object, ...]:
    law = outcome.law.removeprefix("tests/") or outcome.words
    title, seconds = f"{mutant.id} {mutant.title}", f"{outcome.seconds:.0f}"
    return title, mutant.source, outcome.verdict, law, outcome.examples or "", seconds


if __name__ == "__main__":
    launching.main(main)
