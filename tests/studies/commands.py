"""Run a child program: in a copy of the repository, apart from other processes, in limited time."""

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path

from benchmarks.launching import ROOT as ROOT, process

RANKS = 4
"""The number of ranks, as in `nox -s tests`: some tests need four."""
UNCOPIED = (".git", ".[!g]*", "reports", "site", "*.tmp")
APART = (
    *("unshare", "--map-root-user", "--mount", "--mount-proc", "--pid", "--fork", "--kill-child"),
    *("sh", "-c", 'mount -t tmpfs tmpfs /dev/shm && "$@"; exit $?', "sh"),
)
"""The beginning of a command that gets its own process namespace and its own shared memory.

All processes that the command starts end with it, and it can signal no process outside. Otherwise a
wrong edit of the code that ends leftover processes could end those of the whole machine.
"""


def refused() -> str:
    """Return why this machine starts no command with `APART`, and what to do; "" if it does."""
    try:
        code, text = printed([*APART, "true"], ROOT, os.environ, 60)
    except OSError as error:
        code, text = None, str(error)
    if code == 0:
        return ""
    reason = text.strip() or f"{APART[0]}: exit code {code}, no output"
    allowed = "`sudo sysctl -w kernel.apparmor_restrict_unprivileged_userns=0`"
    return f"{reason}\nTo try mutants, be root, or allow user namespaces: {allowed}"


@contextlib.contextmanager
def copied() -> Iterator[Path]:
    """Yield the folder of a copy of the repository, with its compiled Python files."""
    with tempfile.TemporaryDirectory(prefix="sp_core-", ignore_cleanup_errors=True) as name:
        shutil.copytree(ROOT, name, ignore=shutil.ignore_patterns(*UNCOPIED), dirs_exist_ok=True)
        yield Path(name)


def on_ranks(seconds: float, *arguments: str, ranks: int = RANKS) -> list[str]:
    """Return the command that starts pytest under mpiexec, in a launch that ends itself."""
    launch = ["-m", "sp_core.testing.launch", "-n", str(ranks), "--timeout", f"{seconds:g}", "--"]
    suite = ["python", "-m", "pytest", "--only-mpi", "--sp-expect-ranks", str(ranks)]
    return [sys.executable, *launch, *suite, *arguments]


def outside(**more: str) -> dict[str, str]:
    """Return the environment of a session that is independent of this one, with more variables."""
    kept = {name: x for name, x in os.environ.items() if not name.startswith(("SP_", "PYTEST_"))}
    paths = [str(ROOT / "tests"), str(ROOT), *filter(None, [kept.get("PYTHONPATH")])]
    return kept | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"} | more


def printed(
    arguments: Sequence[str], folder: Path, variables: Mapping[str, str], seconds: float
) -> tuple[int | None, str]:
    """Run a command to its end, or to the end of its time.

    Returns:
        The exit code, None if the time was up; and its output and errors as one text.
    """
    code = None
    with tempfile.TemporaryFile("w+", errors="replace") as file:
        in_time = contextlib.suppress(subprocess.TimeoutExpired)
        with in_time, process(arguments, file.fileno(), folder, variables) as started:
            code = started.wait(seconds)
        file.seek(0)
        return code, file.read()


def output_of(
    arguments: Sequence[str],
    folder: Path,
    variables: Mapping[str, str],
    seconds: float,
    codes: Collection[int] = (0,),
) -> str:
    """Run a command as `printed` does. Return its output; fail unless its exit code is allowed."""
    code, text = printed(arguments, folder, variables, seconds)
    assert code in codes, f"exit code {code}\n{text}"
    return text


def program(path: Path, text: str) -> str:
    """Write a shell script that can be started by its path, and return the path."""
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def mpi_library() -> str:
    """Return the MPI library's name and version, asked in a new process: it must not start here."""
    asked = "name, numbers = MPI.get_vendor(); print(name, '.'.join(map(str, numbers)))"
    program = f"import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI; {asked}"
    code, text = printed([sys.executable, "-c", program], ROOT, os.environ, 60)
    return text.strip() if code == 0 else "no MPI"
