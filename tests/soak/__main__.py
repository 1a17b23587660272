"""`nox -s soak`: the suite in its short profile again and again, each time with another seed; then with busy cores beside it.

What each run found is appended to soak.jsonl at once; the same command goes on after the last line.
Exits with 1 where one failed.
"""

from __future__ import annotations

import argparse
import random
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from mutants.catalogue import ROOT
from soak.laws import FILES
from soak.record import Soak, told
from soak.runs import STAGES, Ended, Run, carried_out

RUNS, LOADED = 50, 10


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line.

    Returns:
        The exit code.
    """
    options = _parsed(arguments)
    signal.signal(
        signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM)
    )  # so that what was started is ended
    soak = Soak(options.out, options.seed)
    wanted = [*runs(soak.seed, "idle", options.runs), *runs(soak.seed, "loaded", options.loaded)]
    left = [run for run in wanted if run.key not in soak.ended]
    print(f"seed {soak.seed}: {len(left)} runs to go, {len(wanted) - len(left)} done", flush=True)

    def one(run: Run) -> Ended:
        return carried_out(run, options.tests, options.stages, options.out)

    for ended in _in_order(one, left, options.jobs):
        soak.add(ended)
        print(told(ended), flush=True)
    soak.write([run.key for run in wanted], options.tests)
    return int(any(not soak.ended[run.key].passed for run in wanted))


def runs(seed: int, kind: str, count: int) -> list[Run]:
    """The runs of one kind; each has a seed that depends on nothing but the soak's and its own number."""
    return [
        Run(kind, number, random.Random(f"{seed} {kind} {number}").randrange(2**31))
        for number in range(count)
    ]


def _in_order(one: Callable[[Run], Ended], left: Sequence[Run], jobs: int) -> Iterator[Ended]:
    if jobs == 1:  # in this thread, which an interruption reaches
        yield from map(one, left)
        return
    with ThreadPoolExecutor(jobs) as pool:
        yield from pool.map(one, left)


def _parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="nox -s soak --", description=__doc__)
    parser.add_argument(
        "--runs", type=int, default=RUNS, help="without a load of its own (default: %(default)s)"
    )
    parser.add_argument(
        "--loaded",
        type=int,
        default=LOADED,
        help="with a busy process on each core (default: %(default)s)",
    )
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time (default: %(default)s)")
    parser.add_argument(
        "--seed",
        type=int,
        help="that the runs' seeds are drawn from (default: that of the file, or any)",
    )
    parser.add_argument("--stages", nargs="+", choices=STAGES, default=STAGES, help="default: all")
    parser.add_argument(
        "--tests", nargs="+", default=FILES, metavar="FILE", help="default: the laws"
    )
    parser.add_argument(
        "--out", type=Path, default=ROOT / "reports" / "soak", help="folder (default: reports/soak)"
    )
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
