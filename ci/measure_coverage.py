"""Measure which lines of the package the tests reach, as threads and under mpiexec together.

Prints the table and writes reports/coverage.xml, even if tests fail; then the exit code is 1. The
lines that a killed rank reached are not counted.
"""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RANKS = 4
SECONDS = 1200
TOOL = ("-m", "coverage")
MEASURED = (*TOOL, "run", "-m", "pytest", "-q", "-m", "not starts_mpi")
SPREAD = ("-n", str(os.cpu_count() or 1), "--dist", "loadfile")
LIMITS = ("-n", str(RANKS), "--timeout", str(SECONDS))
LAUNCH = ("-m", "sp_core.testing.launch", *LIMITS, "--", "python")
ON_RANKS = ("--only-mpi", "--sp-expect-ranks", str(RANKS))


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure the coverage of the tests on all ranks together.

    Returns:
        The exit code.
    """
    given = list(sys.argv[1:] if arguments is None else arguments) or ["tests"]
    if {"-h", "--help"} & {*given}:
        print(f"{__doc__}\nArguments go to pytest: `nox -s coverage -- tests/test_mask.py`.")
        return 0
    xml = ROOT / "reports" / "coverage.xml"
    xml.parent.mkdir(exist_ok=True)
    steps = [
        (*TOOL, "erase"),
        (*MEASURED, *SPREAD, *given),
        (*LAUNCH, *MEASURED, *ON_RANKS, *given),
        (*TOOL, "combine"),
        (*TOOL, "report", "--skip-covered"),
        (*TOOL, "xml", "-o", str(xml)),
    ]
    codes = [
        subprocess.run([sys.executable, *step], cwd=ROOT, check=False).returncode for step in steps
    ]
    return int(any(codes))


if __name__ == "__main__":
    sys.exit(main())
