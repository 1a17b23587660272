"""Run a command with a limit, and end all that it has started."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RANKS = 4
"""As in `nox -s tests`: some tests need four."""
GRACE_SECONDS = 20.0


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
    process = subprocess.Popen(
        arguments,
        cwd=folder,
        env=variables,
        stdout=output,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        return None
    finally:
        _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a command and what it has started; the launcher needs a moment to end its ranks."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
            process.wait(GRACE_SECONDS)
        except ProcessLookupError:
            return
        except subprocess.TimeoutExpired:
            continue
