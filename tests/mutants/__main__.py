"""`nox -s mutants`: plant every fault of the catalogue, one at a time, and see the suite go red.

Exits with 1 where a mutant survives, hangs, is stale, or does not even let the tests begin.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mutants.catalogue import Exclusion, Mutant, exclusions, mutants
from mutants.trial import ON_RANKS, Outcome, Stage, compile_all, tried
from studies.commands import ROOT
from studies.records import table, write

ELSEWHERE = (
    *("append_history", "bench", "ci_scripts", "compare*", "conformance", "counters", "doctor"),
    *("history", "kit_*", "layout", "llama_command", "mutants*", "peers*"),
    *("promote_pr", "readme", "records", "reporting*", "scaling*", "slurm", "trace", "workflows"),
)
"""Tests of benchmarks, commands, CI and the kit: they say nothing about a fault of the library."""
SECONDS = {"chosen": 240.0, "threads": 900.0, ON_RANKS: 840.0}
"""Limits of the stages: files that a mutant names, all with ranks as threads, all under mpiexec."""
STAGES = tuple(SECONDS)
OPTIONS: dict[str, dict[str, Any]] = {
    "--only": {"nargs": "+", "default": [], "help": "classes, bugs or ids: LSE, LSE-2, LSE-2/x"},
    "--changed": {"metavar": "BASE", "help": "only mutants of files that differ from this commit"},
    "--jobs": {"type": int, "default": 1, "help": "how many at a time (default: 1)"},
    "--until": {"choices": STAGES, "default": ON_RANKS, "help": "the last stage"},
    "--trust": {"action": "store_true", "help": "do not run the tests without a mutant first"},
    "--out": {"type": Path, "default": ROOT / "reports", "help": "folder of the reports"},
}
Result = tuple[Mutant, Outcome]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    parser = argparse.ArgumentParser(prog="nox -s mutants --", description=__doc__)
    for name, option in OPTIONS.items():
        parser.add_argument(name, **option)
    options = parser.parse_args(arguments)
    changed = None if options.changed is None else _changed(options.changed)
    chosen = selected(mutants(), options.only, changed)
    if not chosen:
        print("no mutant is chosen", flush=True)
        return 0 if options.changed is not None else 2
    compile_all()
    for file in () if options.trust else {file for mutant in chosen for file in mutant.tests}:
        sane = tried("README.md", str, [*stages((file,), STAGES[0])])
        if sane.verdict != "survived":
            print(f"{file} is not green without a mutant: {sane.law} {sane.words}", flush=True)
            return 2
    with ThreadPoolExecutor(options.jobs) as pool:
        results = list(pool.map(lambda mutant: (mutant, _told(mutant, options.until)), chosen))
    plain = [
        {"id": m.id, "family": m.family, "file": m.file, **asdict(outcome)}
        for m, outcome in results
    ]
    write(options.out, "mutants", markdown(results, exclusions()), plain)
    print(f"{score(results)} killed; {options.out}/mutants.md", flush=True)
    return int(any(outcome.verdict != "killed" for _, outcome in results))


def selected(
    catalogue: Sequence[Mutant], only: Sequence[str], changed: set[str] | None
) -> list[Mutant]:
    """Return the mutants of some classes (LSE), bugs (LSE-2) or ids (LSE-2/x), in some files."""
    wanted = [
        m for m in catalogue if not only or {m.id, m.bug, m.bug.partition("-")[0]} & set(only)
    ]
    return [m for m in wanted if changed is None or m.file in changed]


def _changed(base: str) -> set[str]:
    command = ["git", "diff", "--name-only", base, "--"]
    return set(subprocess.check_output(command, cwd=ROOT, text=True).split())


def stages(chosen: Sequence[str], until: str) -> Iterator[Stage]:
    """Return the stages: the files of a mutant; all others of the library; all under mpiexec."""
    tests = ROOT / "tests"
    elsewhere = {path for pattern in ELSEWHERE for path in tests.glob(f"test_{pattern}.py")}
    every = [path.name for path in sorted({*tests.glob("test_*.py")} - elsewhere)]
    others = [name for name in every if name not in chosen]
    names = {"chosen": chosen, "threads": others, ON_RANKS: [*chosen, *others]}
    for stage in STAGES[: STAGES.index(until) + 1]:
        yield Stage(stage, [f"tests/{name}" for name in names[stage]], SECONDS[stage])


def _told(mutant: Mutant, until: str) -> Outcome:
    outcome = tried(mutant.file, mutant.planted, stages(mutant.tests, until))
    said = (outcome.verdict, outcome.stage, f"{outcome.seconds} s", outcome.law, outcome.words)
    print(f"{mutant.id:12}", *said, flush=True)
    return outcome


def score(results: Sequence[Result]) -> str:
    """Return how many are killed, of how many."""
    return f"{sum(outcome.verdict == 'killed' for _, outcome in results)} of {len(results)}"


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
        f"{statistics.median(times or [0.0]):.1f} s on {os.cpu_count()} cores. Stages: the files "
        "that a fault names, all tests with ranks as threads, all tests under `mpiexec -n 4`.",
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
    late = f" ({outcome.stage})" if outcome.stage not in ("", "chosen") else ""
    seconds, verdict = f"{outcome.seconds:.0f}", f"{outcome.verdict}{late}"
    title = f"{mutant.id} {mutant.title}"
    return title, mutant.source, verdict, law, outcome.examples or "", seconds


if __name__ == "__main__":
    sys.exit(main())
