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
NO_MEMORY = ("OutOfMemoryError", "out of memory", "can't allocate memory", "MemoryError", "oom-kill")
KILLED = ("signal 9", "Killed")  # by the kernel, which does not say why; or by somebody
TIMED_OUT = "the launch has not ended after"  # said by sp_core.testing.launch
TAIL_LINES = 40

KEEP_MEMORY = "glibc.malloc.mmap_threshold=1073741824:glibc.malloc.trim_threshold=17179869184"
"""GLIBC_TUNABLES with which the C library keeps what a process frees, instead of having the kernel clear the same pages again."""


@dataclass(frozen=True)
class Launch:
    """How cases are run.

    Args:
        prefix: command in front of the worker, with `{ranks}` in it; sp_core's own launcher if empty.
        timeout: seconds that one case may take.
        python: the interpreter of the ranks.
        variables: NAME=VALUE for the environment of the ranks.
    """

    prefix: str = ""
    timeout: float = 600.0
    python: str = sys.executable
    variables: tuple[str, ...] = ()

    def command(self, ranks: int, worker: str, *arguments: str) -> list[str]:
        """The command line that runs a module on several ranks."""
        set_first = ["env", *self.variables] if self.variables else []
        program = [*set_first, self.python, "-m", "mpi4py", "-m", worker, *arguments]
        if self.prefix:
            return [*shlex.split(self.prefix.format(ranks=ranks)), *program]
        launcher = [self.python, "-m", "sp_core.testing.launch", "-n", str(ranks), "--timeout", f"{self.timeout:g}"]
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
        code, output = watch(launch.command(case.ranks, "benchmarks.worker", str(folder)), folder, launch.timeout, progress)
        record = {"schema_version": SCHEMA_VERSION, "status": "failed", "commit": commit(), "case": case.as_dict()}
        return record | _outcome(folder, code, output, launch.timeout), output


def numbers_of_ranks(text: str, wrong: type[ValueError], least: int = 1) -> list[int]:
    """Different numbers of ranks, from a list such as "1,2,4".

    Raises:
        ValueError: of the kind `wrong`, which says what to pass.
    """
    try:
        found = [int(part) for part in text.split(",")]
    except ValueError:
        raise wrong(f"--ranks {text!r} is not a list of numbers; pass one such as 1,2,4.") from None
    if min(found) < least or len(set(found)) != len(found):
        raise wrong(f"--ranks {text}: every number must be {least} or more, and appear once.")
    return found


def commit(root: Path = ROOT) -> dict[str, Any]:
    """Hash of the commit that is checked out, and whether files differ from it; None where that is not known."""
    sha = git(root, "rev-parse", "HEAD")
    changed = git(root, "status", "--porcelain", "--untracked-files=no", "--", ".", ":!benchmarks/results")
    return {"sha": sha, "dirty": None if sha is None or changed is None else bool(changed)}


def tail(output: str) -> str:
    """The last lines of what a case printed."""
    return "\n".join(output.rstrip().splitlines()[-TAIL_LINES:])


def watch(command: list[str], folder: Path, timeout: float, progress: Progress) -> tuple[int | None, str]:
    """Run a command that leaves `progress` in a folder; its exit code, None where time ran out, and what it printed."""
    code = _run(command, folder, timeout, progress)
    return code, (folder / "output").read_text(errors="replace").replace("\0", "")  # Open MPI ends some lines with one


def _run(command: list[str], folder: Path, timeout: float, progress: Progress) -> int | None:
    with (folder / "output").open("w") as output, _process(command, output) as process:
        end = time.monotonic() + timeout + GRACE_SECONDS
        known = None
        while (code := process.poll()) is None and time.monotonic() < end:
            time.sleep(POLL_SECONDS)
            now = told(folder)
            if now is not None and now != known:
                progress(now)
                known = now
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


def told(folder: Path) -> dict[str, Any] | None:
    """What rank 0 last said that it is doing."""
    try:
        news: dict[str, Any] = json.loads((folder / "progress").read_text())
    except (OSError, ValueError):  # not there yet, or half written
        return None
    return news


def _outcome(folder: Path, code: int | None, output: str, timeout: float) -> dict[str, Any]:
    """The worker's record, or the status and reason of a failure."""
    record = folder / "record.json"
    if code == 0 and record.exists():
        found: dict[str, Any] = json.loads(record.read_text())
        return found
    return failure(code, output, timeout, (told(folder) or {}).get("phase", "starting"))


def failure(code: int | None, output: str, timeout: float, doing: str) -> dict[str, Any]:
    """Status and reason of a launch that went wrong.

    Args:
        code: exit code, None where time ran out.
        output: what the ranks and the launcher printed.
        timeout: seconds that the launch had.
        doing: what the ranks did last.
    """
    if code is None or TIMED_OUT in output:
        return {"status": "timeout", "reason": f"not finished after {timeout:g} s, while {doing}"}
    if any(text in output for text in NO_MEMORY):
        return {"status": "oom", "reason": f"out of memory, while {doing}"}
    if any(text in output for text in KILLED) or code in (137, -signal.SIGKILL):
        return {"status": "oom", "reason": f"killed, most likely because memory ran out, while {doing}"}
    return {"status": "failed", "reason": f"exit code {code} while {doing}: {_complaint(output)}"}


def _complaint(output: str) -> str:
    """The line of the output that most likely says what was wrong."""
    lines = [line.strip() for line in output.splitlines() if any(map(str.isalpha, line))]
    errors = [line for line in lines if re.match(r"[\w.]*(Error|Exception)\b", line)]
    return (errors or lines or ["nothing was printed"])[0]


def git(root: Path, *arguments: str) -> str | None:
    """What git says in a checkout; None where it fails."""
    try:
        answer = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout.strip()
