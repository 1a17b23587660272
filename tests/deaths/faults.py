"""One launch of a system with a fault, and whether the kit found the smallest example of it."""

from __future__ import annotations

import re
import sys
import tempfile
import time
from typing import Any

from deaths.trial import environment
from kit.faults import CRASH_MINIMUM, CRASHES, FAULTS
from kit.plugin import wanted
from mutants.catalogue import ROOT
from mutants.trial import run

RANKS = 4
CASE = "tests/deaths/case_fault.py"
SECONDS = 500.0
OPTIONS = ("-q", "--color=no", "-p", "no:cacheprovider")


def tried(fault: str) -> tuple[dict[str, Any], str]:
    """Run the property with a fault switched on.

    Returns:
        A row of the report, and what was printed.
    """
    begin = time.monotonic()
    with tempfile.TemporaryFile("w+") as output:
        variables = {**environment("{}"), "SUT_FAULT": fault}
        code = run([sys.executable, *command(fault)], ROOT, output.fileno(), variables, SECONDS)
        output.seek(0)
        printed = output.read()
    expected = {one.fault: [f"RankFailure[{one.name}", one.told] for one in FAULTS}.get(
        fault, ["RankFailure[RankCrashed"]
    )
    minimum = {one.fault: f"{one.minimum}, seed=0" for one in FAULTS}.get(fault, CRASH_MINIMUM)
    found = re.findall(r"@example\((.*)\)", printed)
    wrong = [f"not said: {text}" for text in expected if text not in printed]
    wrong += [] if found[:1] == [minimum] else [f"smallest example: {minimum} was expected"]
    wrong += [] if code == 1 else [f"exit code {code}"]
    starts = re.search(r"(\d+) launches", printed)
    row = {
        "fault": fault,
        "minimum": found[0] if found else "",
        "launches": int(starts[1]) if starts else 1,
    }
    return {**row, "seconds": round(time.monotonic() - begin, 1), "faults": wrong}, printed


def command(fault: str) -> list[str]:
    """What is run: a fault that a rank dies of needs an engine outside the launch."""
    if fault in CRASHES:
        return [
            "-m",
            "sp_core.testing.shrink_crash",
            "-n",
            str(RANKS),
            "--losses",
            "12",
            CASE,
            "--",
            *OPTIONS,
            *wanted(),
        ]
    launch = [
        "-m",
        "sp_core.testing.launch",
        "-n",
        str(RANKS),
        "--timeout",
        f"{SECONDS - 60:g}",
        "--",
    ]
    return [*launch, "python", "-m", "pytest", "--with-mpi", *OPTIONS, *wanted(), CASE]
