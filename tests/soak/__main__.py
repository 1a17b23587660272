"""`nox -s soak`: run the suite in its short profile many times, each time with a different seed.

During some runs other processes keep all cores busy. The report is written again after each run.
The exit code is 1 if a run failed, and 2 if there is nothing to run.
"""

import argparse
import os
import random
import statistics
from pathlib import Path
from typing import Any

from soak.laws import FILES
from soak.runs import STAGES, Run, carried_out, of_stage
from studies.commands import RANKS, ROOT
from studies.records import named, table, write

from benchmarks import launching
from benchmarks.checkout import commit
from benchmarks.launching import Options, UsageError, about

OPTIONS: Options = {
    "--runs": about(type=int, default=50, help="without a load of its own"),
    "--loaded": about(type=int, default=10, help="with a busy process on each core"),
    "--seed": about(type=int, help="of the runs' seeds (default: any)"),
    "--stages": about(nargs="+", choices=STAGES, default=STAGES, help="default: all"),
    "--tests": about(nargs="+", default=FILES, metavar="FILE", help="default: the laws"),
    "--out": about(type=Path, default=ROOT / "reports" / "soak", help="folder"),
}
KINDS = {
    "idle": "with nothing of their own beside them",
    "loaded": "with a busy process on each core",
}


@launching.program("nox -s soak --", __doc__, OPTIONS)
def main(options: argparse.Namespace) -> int:
    """Run the command line; return the exit code."""
    stages = [stage for stage in options.stages if of_stage(stage, options.tests)]
    if not stages:
        raise UsageError("these test files run as threads only: pass `--stages threads`")
    seed = random.SystemRandom().randrange(2**31) if options.seed is None else options.seed
    asked = [
        Run(kind, number, random.Random(f"{seed} {kind} {number}").randrange(2**31))
        for kind, count in (("idle", options.runs), ("loaded", options.loaded))
        for number in range(count)
    ]
    print(f"seed {seed}: {len(asked)} runs", flush=True)
    done: list[dict[str, Any]] = []
    plain = {"seed": seed, "cores": os.cpu_count(), "tests": list(options.tests), "runs": done}
    for run in asked:
        ended = carried_out(run, options.tests, stages, options.out)
        print(told(ended), flush=True)
        done.append({**ended, "commit": commit()})
        write(options.out, "soak", markdown(plain), plain)
    return int(any(run["verdict"] != "passed" for run in done))


def told(run: dict[str, Any]) -> str:
    """Return a text of a run: one line for it, and two lines for each failure."""
    failures = [
        f"  {f['stage']}: {f['test']}: {f['words']}\n  {f['command']}" for f in run["failures"]
    ]
    return "\n".join([" ".join(map(str, _row(run))), *failures])


def markdown(plain: dict[str, Any]) -> list[str]:
    """Return the lines of the report."""
    done = plain["runs"]
    commits = ", ".join(dict.fromkeys(named(run["commit"]) for run in done))
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
        f"threads, then `mpiexec -n {RANKS}`. {plain['cores']} cores; commit {commits}; "
        f"test files: {len(plain['tests'])}.",
        "",
        *table(head, [_row(run) for run in done]),
    ]
    failed = [
        f"- {run['kind']} {run['number']}, seed {run['seed']}, {f['test']}: {f['words']}\n\n"
        f"      {f['command']}"
        for run in done
        for f in run["failures"]
    ]
    return [*lines, "", "## What failed", "", *failed] if failed else lines


def _row(run: dict[str, Any]) -> tuple[object, ...]:
    seconds, tests = (
        " + ".join(f"{value:g}" for value in run[name].values()) for name in ("seconds", "tests")
    )
    name, load = f"{run['kind']} {run['number']}", f"{run['load']:g}"
    return name, run["seed"], run["verdict"], seconds, tests, load


if __name__ == "__main__":
    launching.main(main)
