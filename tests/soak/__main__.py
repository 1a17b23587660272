"""`nox -s soak`: run the suite in its short profile again and again, each time with another seed.

Some runs have busy cores beside them. Each run is appended to soak.jsonl at once; the same command
goes on after the last line. Exits with 1 where one failed.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from soak.laws import FILES
from soak.runs import STAGES, Run, carried_out
from studies.commands import RANKS, ROOT
from studies.records import add_line, read_lines, table, write

from benchmarks.launching import commit

LINES = "soak.jsonl"
OPTIONS: dict[str, dict[str, Any]] = {
    "--runs": {"type": int, "default": 50, "help": "without a load of its own"},
    "--loaded": {"type": int, "default": 10, "help": "with a busy process on each core"},
    "--jobs": {"type": int, "default": 1, "help": "runs at a time"},
    "--seed": {"type": int, "help": "of the runs' seeds (default: that of the file, or any)"},
    "--stages": {"nargs": "+", "choices": STAGES, "default": STAGES, "help": "default: all"},
    "--tests": {"nargs": "+", "default": FILES, "metavar": "FILE", "help": "default: the laws"},
    "--out": {"type": Path, "default": ROOT / "reports" / "soak", "help": "folder"},
}
KINDS = {
    "idle": "with nothing of their own beside them",
    "loaded": "with a busy process on each core",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    parser = argparse.ArgumentParser(prog="nox -s soak --", description=__doc__)
    for name, option in OPTIONS.items():
        parser.add_argument(name, **option)
    options = parser.parse_args(arguments)
    # What was started is ended when this process is told to end.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    options.out.mkdir(parents=True, exist_ok=True)
    journal = options.out / LINES
    lines = read_lines(journal)
    seed = seed_of(journal, lines, options.seed)
    wanted = runs(seed, "idle", options.runs) + runs(seed, "loaded", options.loaded)
    known = {(line["kind"], line["number"]): line for line in lines}
    left = [run for run in wanted if run.key not in known]
    print(f"seed {seed}: {len(left)} runs to go, {len(wanted) - len(left)} done", flush=True)

    def one(run: Run) -> dict[str, Any]:
        return carried_out(run, options.tests, options.stages, options.out)

    # With one job in this thread, which an interruption reaches.
    each = map if options.jobs == 1 else ThreadPoolExecutor(options.jobs).map
    for run, ended in zip(left, each(one, left), strict=True):
        known[run.key] = {"soak": seed, **ended, "commit": commit()}
        add_line(journal, known[run.key])
        print(told(ended), flush=True)
    chosen = [known[run.key] for run in wanted]
    plain = {"seed": seed, "cores": os.cpu_count(), "tests": list(options.tests), "runs": chosen}
    write(options.out, "soak", markdown(plain), plain)
    return int(any(run["verdict"] != "passed" for run in chosen))


def seed_of(journal: Path, lines: Sequence[dict[str, Any]], given: int | None) -> int:
    """Return the seed that the runs' seeds are drawn from.

    Raises:
        SystemExit: the file is of another soak.
    """
    found = {line["soak"] for line in lines}
    if given is None:
        given = next(iter(found), random.SystemRandom().randrange(2**31))
    if found - {given}:
        raise SystemExit(
            f"{journal} is a soak with seed {found}, {given} was given. "
            "Give that seed or another --out."
        )
    return given


def runs(seed: int, kind: str, count: int) -> list[Run]:
    """Return the runs of one kind. The seed of each depends on the soak's and its number only."""
    return [
        Run(kind, number, random.Random(f"{seed} {kind} {number}").randrange(2**31))
        for number in range(count)
    ]


def told(run: dict[str, Any]) -> str:
    """Return a run in a line, and two for each failure."""
    failures = [
        f"  {f['stage']}: {f['test']}: {f['words']}\n  {f['command']}" for f in run["failures"]
    ]
    return "\n".join([" ".join(map(str, _row(run))), *failures])


def markdown(plain: dict[str, Any]) -> list[str]:
    """Return the lines of the report."""
    done = plain["runs"]
    commits = {json.dumps(run["commit"]): run["commit"] for run in done}.values()
    names = [f"{(c['sha'] or 'unknown')[:10]}{' with changes' * bool(c['dirty'])}" for c in commits]
    lines = ["# The suite again and again", ""]
    for kind, where in KINDS.items():
        part = [run for run in done if run["kind"] == kind]
        took = [sum(run["seconds"].values()) for run in part] or [0.0]
        passed = sum(run["verdict"] == "passed" for run in part)
        lines.append(
            f"- {passed} of {len(part)} runs passed {where}; "
            f"median {statistics.median(took):.0f} s, longest {max(took):.0f} s"
        )
    head = ("run", "seed", "verdict", "seconds", "tests", "load when it began")
    lines += [
        "",
        f"Each run has a seed of its own, drawn from {plain['seed']}, and two stages: ranks as "
        f"threads, then `mpiexec -n {RANKS}`. {plain['cores']} cores; commit {', '.join(names)}; "
        f"test files: {len(plain['tests'])}.",
        "",
        *table(head, [_row(run) for run in done]),
    ]
    failed = [run for run in done if run["failures"]]
    lines += ["", "## What failed", ""] * bool(failed)
    for run in failed:
        name = f"- {run['kind']} {run['number']}, seed {run['seed']}"
        lines += [
            f"{name}, {f['test']}: {f['words']}\n\n      {f['command']}" for f in run["failures"]
        ]
    return lines


def _row(run: dict[str, Any]) -> tuple[object, ...]:
    seconds, tests = (
        " + ".join(f"{value:g}" for value in run[name].values()) for name in ("seconds", "tests")
    )
    name, load = f"{run['kind']} {run['number']}", f"{run['load']:g}"
    return name, run["seed"], run["verdict"], seconds, tests, load


if __name__ == "__main__":
    sys.exit(main())
