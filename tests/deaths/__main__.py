"""Lose ranks of launches, and judge how the launches end (`nox -s deaths`).

First a rank of a launch is lost, in every way at every place. Then systems have faults that must be
caught, attributed and shrunk. Last, a rank of a plain program fails, under MPI and torchrun.

Each run adds its rows to deaths.json. The exit code is 1 if a launch took too long, its report
lacks something, or a process or a file is left.
"""

import argparse
import random
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

from deaths.programs import rows, tried_program
from deaths.report import add
from deaths.trial import drawn, tried, tried_fault
from deaths.ways import PLACES, WAYS
from kit.faults import CRASHES, FAULTS
from studies.commands import ROOT, mpi_library

from benchmarks import launching
from benchmarks.launching import Options, about

KNOWN = (*(fault.fault for fault in FAULTS), *CRASHES)
OPTIONS: Options = {
    "--ways": about(nargs="*", choices=tuple(WAYS), default=tuple(WAYS), help="default: all"),
    "--places": about(nargs="*", choices=PLACES, default=PLACES, help="default: all"),
    "--faults": about(nargs="*", choices=KNOWN, default=KNOWN, help="default: all"),
    "--programs": about(
        action=argparse.BooleanOptionalAction,
        default=True,
        help="lose a rank of programs that are no test sessions (default: yes)",
    ),
    "--seed": about(type=int, help="draws the rank and the example of each death (default: any)"),
    "--out": about(
        type=Path,
        default=ROOT / "reports" / "deaths",
        help="folder (default: reports/deaths)",
    ),
}


@launching.program("nox -s deaths --", __doc__, OPTIONS)
def main(options: argparse.Namespace) -> int:
    """Run the command line; return the exit code."""
    seed = random.SystemRandom().randrange(2**31) if options.seed is None else options.seed
    library = mpi_library()
    return int(sum(add(options.out, library, *row) for row in _rows(options, seed)) > 0)


def _rows(options: argparse.Namespace, seed: int) -> Iterator[tuple[str, dict[str, Any], str]]:
    """Try everything that is asked for; yield a kind, a row of the report, and the printed text."""
    for way, place in product(options.ways, options.places):
        row, text = tried(drawn(way, place, random.Random(f"{seed} {way} {place}")))
        yield "deaths", {**row, "seed": seed}, text
    for fault in options.faults:
        yield "faults", *tried_fault(fault)
    for where, start in rows() if options.programs else ():
        yield "programs", *tried_program(where, start)


if __name__ == "__main__":
    launching.main(main)
