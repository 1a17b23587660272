"""Run a program with a time limit, and explain a launch of mpiexec that failed."""

import subprocess
import tempfile
from collections.abc import Mapping
from contextlib import suppress

from sp_core.launch.deaths import kill_session

LAUNCH_SECONDS = 60


def bounded(
    command: list[str], *, seconds: float = LAUNCH_SECONDS, env: Mapping[str, str] | None = None
) -> tuple[int | None, str]:
    """Run a command with a time limit, in a session of its own.

    The command and the processes that it started are killed after the limit, and if an exception,
    such as KeyboardInterrupt, ends the wait.

    Args:
        command: program and arguments. Standard input is empty.
        seconds: the time limit.
        env: the environment variables; None for those of this process.

    Returns:
        The exit code, or None if the limit was reached; the output, standard error included. A byte
        that is no text in the encoding of this process becomes U+FFFD.

    Raises:
        OSError: the program cannot be started.
    """
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=env,
        )
        code: int | None = None
        try:
            with suppress(subprocess.TimeoutExpired):
                code = process.wait(seconds)
        finally:
            if code is None:
                kill_session(process.pid)
                process.wait()
        output.seek(0)
        return code, output.read()


HOSTNAME = "run this and read its error: mpiexec -n 2 hostname"
LAUNCH_PROBLEMS = {
    "run as root": (
        "Open MPI refuses to run as root",
        "export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1, or do not work as root",
    ),
    "not enough slots": (
        "Open MPI refuses more ranks than cores",
        "export PRTE_MCA_rmaps_default_mapping_policy=slot:oversubscribe "
        "OMPI_MCA_rmaps_base_oversubscribe=true",
    ),
    "step creation temporarily disabled": (
        "it starts ranks by srun, which waits for cores that another step of this job holds",
        "export HYDRA_LAUNCHER=fork, with which MPICH starts all ranks on this node",
    ),
    "ranks: 1": (
        "its ranks do not find each other",
        "this mpiexec belongs to another MPI than mpi4py's: use the one of the same environment",
    ),
}
"""For each text in the output of a failed launch: the fault, and its remedy."""


def launch_problem(code: int | None, output: str) -> tuple[str, str]:
    """Return two texts about a failed launch: the fault, and its remedy.

    Args:
        code: mpiexec's exit code; None if it reached the time limit.
        output: what mpiexec printed.
    """
    if known := [problem for part, problem in LAUNCH_PROBLEMS.items() if part in output]:
        return known[0]
    if code is None:
        return f"two ranks did not start within {LAUNCH_SECONDS} s", HOSTNAME
    return f"exit code {code}: {last_line(output)}", HOSTNAME


def last_line(output: str) -> str:
    """Return the last line of a program's output, or a text that says there is none."""
    return (output.strip().splitlines() or ["it printed nothing"])[-1]
