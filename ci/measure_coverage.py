"""Measure which lines of the package the tests reach, as threads and under mpiexec together.

Prints the table and writes reports/coverage.xml, also where tests are red; then the exit code is 1.
A killed rank tells nothing.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RANKS = 4
SECONDS = 1200
MEASURED = ("-m", "coverage", "run", "-m", "pytest", "-q", "-m", "not starts_mpi")
SPREAD = ("-n", str(os.cpu_count() or 1), "--dist", "loadfile")
LAUNCH = (
    "-m",
    "sp_core.testing.launch",
    "-n",
    str(RANKS),
    "--timeout",
    str(SECONDS),
    "--",
    "python",
)
ON_RANKS = ("--only-mpi", "--sp-expect-ranks", str(RANKS))


def stages(arguments: Sequence[str]) -> list[tuple[str, ...]]:
    """Return Python's arguments for each run that is measured."""
    return [(*MEASURED, *SPREAD, *arguments), (*LAUNCH, *MEASURED, *ON_RANKS, *arguments)]


def reports(folder: Path) -> list[tuple[str, ...]]:
    """Return Python's arguments for each report."""
    tool = ("-m", "coverage")
    return [
        (*tool, "combine"),
        (*tool, "report", "--skip-covered"),
        (*tool, "xml", "-o", str(folder / "coverage.xml")),
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure the coverage of the tests on all ranks together.

    Returns:
        The exit code.
    """
    given = list(sys.argv[1:] if arguments is None else arguments) or ["tests"]
    (ROOT / "reports").mkdir(exist_ok=True)
    steps = [("-m", "coverage", "erase"), *stages(given), *reports(ROOT / "reports")]
    codes = [
        subprocess.run([sys.executable, *step], cwd=ROOT, check=False).returncode for step in steps
    ]
    return int(any(codes))


if __name__ == "__main__":
    sys.exit(main())
