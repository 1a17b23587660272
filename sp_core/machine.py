"""Read facts about this machine from the operating system, and run programs with a time limit."""

import hashlib
import os
import platform
import re
import socket
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

_CGROUPS, _CGROUP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
_CPUINFO = Path("/proc/cpuinfo")
_BOOT = Path("/proc/sys/kernel/random/boot_id")


def cores() -> int:
    """Return how many cores this process may use, by CPU affinity and by containers' quotas."""
    if not hasattr(os, "sched_getaffinity"):
        return node_cores()
    return _within_quota(len(os.sched_getaffinity(0)))


def node_cores() -> int:
    """Return the number of logical cores of the machine, at most the smallest CPU quota around us.

    The CPU affinity of this process does not change the number.
    """
    return _within_quota(os.cpu_count() or 1)


def memory() -> int:
    """Return the bytes of memory of this machine, or of a smaller container or job around us."""
    limits = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    told = _limits("memory", "memory.max", "memory.limit_in_bytes")
    limits += [int(text) for text in told if text.isdecimal()]
    return min(limits)


def cpu_model() -> str:
    """Return the name of the processor's model."""
    found = re.search(r"^model name\s*:\s*(.*)$", _text(_CPUINFO), re.MULTILINE)
    return found[1] if found else platform.processor() or platform.machine()


def node_name() -> str:
    """Return the host name."""
    return socket.gethostname()


def loaded_library(name: str) -> str | None:
    """Return the path of a shared library that this process has loaded; None if it has not.

    Args:
        name: the file's name up to ".so" or "-", such as "libmpi".
    """
    line = rf"^(?:\S+ +){{5}}(/.*/{name}(?:-\w+)?\.so[^ \n]*)"  # five fields, then the path
    found = re.search(line, _text(Path("/proc/self/maps")), re.MULTILINE)
    return found[1] if found else None


def node_number() -> int:
    """Return a number below 2^48 that identifies this node: a hash of host name and boot id."""
    name = f"{node_name()} {_text(_BOOT)}".encode()
    return int.from_bytes(hashlib.blake2b(name, digest_size=6).digest(), "little")


def home_or(other: str) -> str:
    """Return this user's folder, or `other` for a user without one."""
    home = os.path.expanduser("~")  # noqa: PTH111  # it returns "~" for a user without a folder
    return other if home == "~" else home


@contextmanager
def temporary_folder() -> Iterator[Path]:
    """Make a folder, and delete it with all that it holds when the block ends.

    Raises:
        OSError: it cannot be made.
    """
    try:
        made = tempfile.TemporaryDirectory(prefix="sp_core-")
    except OSError as error:
        raise OSError(
            f"no folder for temporary files can be made: {error.strerror}. Free space, or set "
            f"TMPDIR to a folder that can be written."
        ) from error
    with made as name:
        yield Path(name)


def _within_quota(cores: int) -> int:
    """Return `cores`, limited to the smallest quota around us: rounded down, at least 1."""
    for told in _limits("cpu", "cpu.max", "cpu.cfs_quota_us cpu.cfs_period_us"):
        if found := re.fullmatch(r"(\d+) (\d+)", told):  # no quota is "max", or -1
            cores = min(cores, max(1, int(found[1]) // int(found[2])))
    return cores


def _limits(kind: str, names: str, first_names: str) -> Iterator[str]:
    """Yield the text of the files that limit this process's cgroup, and of each group around it.

    Args:
        kind: the resource, as the first version of cgroups names it.
        names: the files of the second version, which names no kind.
        first_names: the files of the first version.
    """
    for line in _text(_CGROUP).splitlines():
        _, kinds, path = line.split(":", 2)
        if not kinds or kind in kinds.split(","):
            inner = _CGROUPS / kinds / path.lstrip("/")
            for folder in (inner, *inner.parents):
                files = (first_names if kinds else names).split()
                yield " ".join(_text(folder / file).strip() for file in files)


def _text(path: Path) -> str:
    """Return the text of a file of the system, or "" if it cannot be read."""
    try:
        return os.fsdecode(path.read_bytes())
    except OSError:
        return ""


LAUNCH_SECONDS = 60
JOB_VARIABLES = ("PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK")
JOB_SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS")
"""For each launcher its number of ranks; mpiexec may run inside a step of srun, so it is first."""


def in_job() -> bool:
    """Return whether mpiexec or srun has started this process as a rank, by its variables.

    A step of srun with one task is no job: it may be a shell, in which mpiexec is called.
    """
    return any(name in os.environ for name in JOB_VARIABLES) or _srun_tasks() > 1


def started_tasks() -> int:
    """Return how many ranks the innermost mpiexec or srun has started, by its variables, else 1."""
    return next((int(os.environ[name]) for name in JOB_SIZES if os.environ.get(name)), 1)


def _srun_tasks() -> int:
    return int(os.environ.get("SLURM_STEP_NUM_TASKS") or 1)


LOCAL_RANKS = ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID")


def local_rank(default: int = 0) -> int:
    """Return the number of this process on its node, as its launcher says, else `default`.

    Slurm's number counts only if srun has started several tasks: processes that a batch script or a
    single task starts all inherit 0.
    """
    names = LOCAL_RANKS if _srun_tasks() > 1 else LOCAL_RANKS[:-1]
    found = (os.environ.get(name, "") for name in names)
    return next((int(text) for text in found if text.isdecimal()), default)


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
                from sp_core.launch.deaths import kill_session  # only Linux has what it imports

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
        "export PRTE_MCA_rmaps_default_mapping_policy=slot:oversubscribe",
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
