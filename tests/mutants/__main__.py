"""`nox -s mutants`: plant every fault of the catalogue, one at a time, and see the suite go red.

Exits with 1 where a mutant survives, hangs, is stale, or does not even let the tests begin.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from mutants.catalogue import ROOT, Mutant, exclusions, mutants
from mutants.report import Result, median_seconds, score, write
from mutants.trial import STAGES, tried, unharmed


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line.

    Returns:
        The exit code.
    """
    options = _parsed(arguments)
    chosen = selected(
        mutants(), options.only, None if options.changed is None else _changed(options.changed)
    )
    if not chosen:
        print("no mutant is chosen", flush=True)
        return 0 if options.changed is not None else 2
    if not options.trust:
        files = list(dict.fromkeys(file for mutant in chosen for file in mutant.tests))
        sane = unharmed(files)
        if sane.verdict != "survived":
            print(f"the tests are not green without a mutant: {sane.law} {sane.words}", flush=True)
            return 2
    with ThreadPoolExecutor(options.jobs) as pool:
        results = list(pool.map(lambda mutant: _told(mutant, options.until), chosen))
    write(options.out, results, exclusions(), os.cpu_count())
    print(
        f"{score(results)} killed, median {median_seconds(results):.1f} s; {options.out}/mutants.md",
        flush=True,
    )
    return int(any(outcome.verdict != "killed" for _, outcome in results))


def selected(
    catalogue: Sequence[Mutant], only: Sequence[str], changed: set[str] | None
) -> list[Mutant]:
    """The mutants of some classes (such as LSE), bugs (LSE-2) or ids (LSE-2/backward), in some files."""
    wanted = [
        m for m in catalogue if not only or {m.id, m.bug, m.bug.partition("-")[0]} & set(only)
    ]
    return [m for m in wanted if changed is None or m.file in changed]


def _parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="nox -s mutants --", description=__doc__)
    parser.add_argument(
        "--only",
        nargs="+",
        default=[],
        metavar="NAME",
        help="classes, bugs or ids: LSE, LSE-2, LSE-2/backward",
    )
    parser.add_argument(
        "--changed", metavar="BASE", help="only mutants of files that differ from this commit"
    )
    parser.add_argument("--jobs", type=int, default=1, help="how many at a time (default: 1)")
    parser.add_argument(
        "--until", choices=STAGES, default=STAGES[-1], help="the last stage (default: %(default)s)"
    )
    parser.add_argument(
        "--trust", action="store_true", help="do not run the tests without a mutant first"
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=ROOT / "reports",
        help="folder of the reports (default: reports)",
    )
    return parser.parse_args(arguments)


def _changed(base: str) -> set[str]:
    told = subprocess.run(
        ["git", "diff", "--name-only", base, "--"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    )
    return set(told.stdout.split())


def _told(mutant: Mutant, until: str) -> Result:
    outcome = tried(mutant, until)
    print(
        f"{mutant.id:12} {outcome.verdict:8} {outcome.stage:7} {outcome.seconds:6.1f} s {outcome.examples or '':4} {outcome.law} "
        f"{outcome.words}",
        flush=True,
    )
    return mutant, outcome


if __name__ == "__main__":
    sys.exit(main())
