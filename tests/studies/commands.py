"""Run a command with a limit, and end all that it has started."""

from __future__ import annotations

import contextlib
import subprocess
import sys
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
