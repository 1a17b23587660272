"""Run the programs that the doctor starts, each with a time limit."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Mapping

LAUNCH_SECONDS = 60
JOB_VARIABLES = ("PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK", "SLURM_STEP_ID")


def in_job() -> bool:
    """Return whether mpiexec or srun has started this process."""
    return any(name in os.environ for name in JOB_VARIABLES)


def bounded(
    command: list[str], *, seconds: float = LAUNCH_SECONDS, env: Mapping[str, str] | None = None
) -> tuple[int | None, str]:
    """Run a command.

    Return its exit code, or None after a time limit, and its output. Everything that it started is
    ended.
    """
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=env,
        )
        try:
            code: int | None = process.wait(seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            process.wait()
            code = None
        output.seek(0)
        return code, output.read()


HOSTNAME = "see what is in the way: mpiexec -n 2 hostname"
LAUNCH_PROBLEMS = {
    "run as root": (
        "Open MPI refuses to run as root",
        "export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1, or do not work as root",
    ),
    "not enough slots": (
        "Open MPI refuses more ranks than cores",
        "export PRTE_MCA_rmaps_default_mapping_policy=:oversubscribe",
    ),
    "ranks: 1": (
        "its ranks do not find each other",
        "this mpiexec belongs to another MPI than mpi4py's: use the one of the same environment",
    ),
}
"""By a part of the output of a failed launch, what went wrong and what to do."""


def launch_problem(code: int | None, output: str) -> tuple[str, str]:
    """Return what went wrong with a launch, and what to do."""
    if known := [problem for part, problem in LAUNCH_PROBLEMS.items() if part in output]:
        return known[0]
    if code is None:
        return f"two ranks did not start within {LAUNCH_SECONDS} s", HOSTNAME
    return f"exit code {code}: {last_line(output)}", HOSTNAME


def last_line(output: str) -> str:
    """Return the last line of a program's output."""
    return (output.strip().splitlines() or ["it printed nothing"])[-1]
