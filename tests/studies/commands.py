"""Run a command with a limit, and end all that it has started."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.launching import ROOT as ROOT, process

RANKS = 4
"""As in `nox -s tests`: some tests need four."""


def on_ranks(seconds: float, *arguments: str, ranks: int = RANKS) -> list[str]:
    """Return the command that starts pytest under mpiexec, in a launch that ends itself."""
    launch = ["-m", "sp_core.testing.launch", "-n", str(ranks), "--timeout", f"{seconds:g}", "--"]
    suite = ["python", "-m", "pytest", "--only-mpi", "--sp-expect-ranks", str(ranks)]
    return [sys.executable, *launch, *suite, *arguments]


def outside(**more: str) -> dict[str, str]:
    """Return the environment of a session that is not part of this one, with more variables."""
    kept = {name: x for name, x in os.environ.items() if not name.startswith(("SP_", "PYTEST_"))}
    paths = [str(ROOT / "tests"), str(ROOT), *filter(None, [kept.get("PYTHONPATH")])]
    return kept | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"} | more


def run(
    arguments: Sequence[str],
    folder: Path,
    output: int,
    variables: Mapping[str, str],
    seconds: float,
) -> int | None:
    """Run a command to its end, or to the end of its time.

    Returns:
        The exit code; None if the time was up.
    """
    ended = contextlib.suppress(subprocess.TimeoutExpired)
    with ended, process(arguments, output, folder, variables) as started:
        return started.wait(seconds)
    return None


def printed(
    arguments: Sequence[str], folder: Path, variables: Mapping[str, str], seconds: float
) -> tuple[int | None, str]:
    """Run a command to its end, or to the end of its time.

    Returns:
        The exit code, None if the time was up; and its output and errors as one text.
    """
    with tempfile.TemporaryFile("w+", errors="replace") as file:
        code = run(arguments, folder, file.fileno(), variables, seconds)
        file.seek(0)
        return code, file.read()


def mpi_library() -> str:
    """Return the MPI library, asked in a process of its own: this one must not start it."""
    asked = "name, numbers = MPI.get_vendor(); print(name, '.'.join(map(str, numbers)))"
    program = f"import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI; {asked}"
    answer = subprocess.run(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, check=False
    )
    return answer.stdout.strip() or "no MPI"
