"""Runs one case in processes of its own, under `mpiexec` or another launcher, and brings back its record, also of a failure."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.case import Case

ROOT = Path(__file__).resolve().parent.parent
SCHEMA_VERSION = 1
POLL_SECONDS = 0.1
GRACE_SECONDS = 15  # the launcher has the same limit and needs time to say where each rank was
NO_MEMORY = ("OutOfMemoryError", "out of memory", "can't allocate memory", "MemoryError", "oom-kill", "signal 9", "Killed")
TIMED_OUT = "the launch has not ended after"  # said by sp_core.testing.launch
TAIL_LINES = 40


@dataclass(frozen=True)
class Launch:
    """How cases are run.

    Args:
        prefix: command in front of the worker, with `{ranks}` in it; sp_core's own launcher if empty.
        timeout: seconds that one case may take.
    """

    prefix: str = ""
    timeout: float = 600.0

    def command(self, case: Case, folder: Path) -> list[str]:
        """The command line of one case."""
        program = [sys.executable, "-m", "mpi4py", "-m", "benchmarks.worker", str(folder)]
        if self.prefix:
            return [*shlex.split(self.prefix.format(ranks=case.ranks)), *program]
        launcher = [sys.executable, "-m", "sp_core.testing.launch", "-n", str(case.ranks), "--timeout", f"{self.timeout:g}"]
        return [*launcher, "--", *program]


Progress = Callable[[dict[str, Any]], None]


def run_case(case: Case, launch: Launch, progress: Progress = lambda told: None) -> tuple[dict[str, Any], str]:
    """Run one case.

    Args:
        case: what to compute.
        launch: how to start the ranks.
        progress: given what rank 0 says it is doing, whenever that changes.

    Returns:
        The record, whose "status" is "ok", "wrong", "oom", "timeout" or "failed", and what the ranks printed.
    """
    with tempfile.TemporaryDirectory(prefix="sp_core-scaling-") as name:
        folder = Path(name)
        (folder / "case.json").write_text(json.dumps(case.as_dict()))
        code = _run(launch, case, folder, progress)
        output = (folder / "output").read_text(errors="replace").replace("\0", "")  # Open MPI ends some lines with one
        record = {"schema_version": SCHEMA_VERSION, "status": "failed", "commit": commit(), "case": case.as_dict()}
        return record | _outcome(folder, code, output, launch.timeout), output


def commit() -> dict[str, Any]:
    """Hash of the commit that is checked out, and whether files differ from it; None where that is not known."""
    sha = _git("rev-parse", "HEAD")
    changed = _git("status", "--porcelain", "--untracked-files=no", "--", ".", ":!benchmarks/results")
    return {"sha": sha, "dirty": None if sha is None or changed is None else bool(changed)}


def tail(output: str) -> str:
    """The last lines of what a case printed."""
    return "\n".join(output.rstrip().splitlines()[-TAIL_LINES:])


def _run(launch: Launch, case: Case, folder: Path, progress: Progress) -> int | None:
    """The exit code, None where time ran out."""
    with (folder / "output").open("w") as output, _process(launch.command(case, folder), output) as process:
        end = time.monotonic() + launch.timeout + GRACE_SECONDS
        told = None
        while (code := process.poll()) is None and time.monotonic() < end:
            time.sleep(POLL_SECONDS)
            now = _told(folder)
            if now is not None and now != told:
                progress(now)
                told = now
        return code


@contextlib.contextmanager
def _process(command: list[str], output: Any) -> Iterator[subprocess.Popen[bytes]]:
    """A process in a group of its own, which ends with the block, however that is left."""
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ask the group to end, so that a launcher can end what it started; then insist."""
    for kind in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
        if process.poll() is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, kind)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=10)


def _told(folder: Path) -> dict[str, Any] | None:
    try:
        told: dict[str, Any] = json.loads((folder / "progress").read_text())
    except (OSError, ValueError):  # not there yet, or half written
        return None
    return told


def _outcome(folder: Path, code: int | None, output: str, timeout: float) -> dict[str, Any]:
    """The worker's record, or the status and reason of a failure."""
    record = folder / "record.json"
    if code == 0 and record.exists():
        found: dict[str, Any] = json.loads(record.read_text())
        return found
    doing = (_told(folder) or {}).get("phase", "starting")
    if code is None or TIMED_OUT in output:
        return {"status": "timeout", "reason": f"not finished after {timeout:g} s, while {doing}"}
    if any(text in output for text in NO_MEMORY) or code in (137, -signal.SIGKILL):
        return {"status": "oom", "reason": f"out of memory, while {doing}"}
    return {"status": "failed", "reason": f"exit code {code} while {doing}: {_complaint(output)}"}


def _complaint(output: str) -> str:
    """The line of the output that most likely says what was wrong."""
    lines = [line.strip() for line in output.splitlines() if any(map(str.isalpha, line))]
    errors = [line for line in lines if re.match(r"[\w.]*(Error|Exception)\b", line)]
    return (errors or lines or ["nothing was printed"])[0]


def _git(*arguments: str) -> str | None:
    try:
        answer = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout.strip()
