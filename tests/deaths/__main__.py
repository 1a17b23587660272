"""`nox -s deaths`.

A rank of a launch is lost in every way at every point; then faults that must be caught, attributed
and shrunk; then a rank of a plain program fails, under MPI and torchrun.

Each run adds its rows to deaths.json. Exits with 1 where a launch took too long, its report lacks
something, or something is left.
"""

from __future__ import annotations

import argparse
import random
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from deaths.programs import rows, tried_program
from deaths.report import Report
from deaths.trial import drawn, library, tried, tried_fault
from deaths.ways import PLACES, WAYS
from kit.faults import CRASHES, FAULTS
from studies.commands import ROOT


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line.

    Returns:
        The exit code.
    """
    options = _parsed(arguments)
    signal.signal(
        signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM)
    )  # so that what was started is ended
    seed = random.SystemRandom().randrange(2**31) if options.seed is None else options.seed
    report = Report(options.out, library())
    for way in options.ways:
        for place in options.places:
            row, printed = tried(drawn(way, place, random.Random(f"{seed} {way} {place}")))
            report.add("deaths", {**row, "seed": seed}, printed)
    for fault in options.faults:
        report.add("faults", *tried_fault(fault))
    for where, start in rows() if options.programs else ():
        report.add("programs", *tried_program(where, start))
    return int(report.faults > 0)


def _parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="nox -s deaths --", description=__doc__)
    known = [fault.fault for fault in FAULTS] + list(CRASHES)
    parser.add_argument(
        "--ways", nargs="*", choices=list(WAYS), default=list(WAYS), help="default: all"
    )
    parser.add_argument("--places", nargs="*", choices=PLACES, default=PLACES, help="default: all")
    parser.add_argument("--faults", nargs="*", choices=known, default=known, help="default: all")
    parser.add_argument(
        "--programs",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="lose a rank of programs that are no test sessions (default: yes)",
    )
    parser.add_argument(
        "--seed", type=int, help="draws the rank and the example of each death (default: any)"
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=ROOT / "reports" / "deaths",
        help="folder (default: reports/deaths)",
    )
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
