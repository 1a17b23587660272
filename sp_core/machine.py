"""Read facts about this machine, and about this process, from the operating system."""

import hashlib
import os
import platform
import re
import socket
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_CGROUPS, _CGROUP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
_CPUINFO = Path("/proc/cpuinfo")
_BOOT = Path("/proc/sys/kernel/random/boot_id")


def require_linux() -> None:
    """Refuse other systems, which lack the calls that tell how a process ends.

    Raises:
        OSError: this system is not Linux.
    """
    if sys.platform != "linux":
        raise OSError(
            f"sp_core needs Linux, and this system is {sys.platform}. Use a Linux machine or a "
            "container."
        )


def cores() -> int:
    """Return how many cores this process may use, by CPU affinity and by containers' quotas."""
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
        name: a pattern for the file's name up to ".so" or "-", such as "libcudart".
    """
    line = rf"^(?:\S+ +){{5}}(/.*/{name}(?:-\w+)?\.so[^ \n]*)"  # five fields, then the path
    found = re.search(line, _text(Path("/proc/self/maps")), re.MULTILINE)
    return found[1] if found else None


def mpi_library() -> str | None:
    """Return the path of the MPI library that this process has loaded; None if it is not found.

    It is libmpich in Debian, and libmpi_gnu_123 or the like on a Cray. Libraries of other
    languages and for GPU memory lie beside it.
    """
    return loaded_library(r"libmpi(?:ch)?(?:_(?!\w*(?:cxx|gtl|java|mpifh|usempi))\w+)?")


def node_number() -> int:
    """Return a number below 2^48 that identifies this node: a hash of host name and boot id."""
    name = f"{node_name()} {_text(_BOOT)}".encode()
    return int.from_bytes(hashlib.blake2b(name, digest_size=6).digest(), "little")


def python() -> list[str]:
    """Return the words that start this Python.

    The new process imports from the working directory, which may be a downloaded folder, only if
    this process searches it first.
    """
    first = {""}
    with suppress(OSError):  # the directory was deleted
        first.add(str(Path.cwd()))
    return [sys.executable, *([] if sys.path[0] in first else ["-P"])]


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


JOB_VARIABLES = ("PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK")
JOB_SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS")
"""For each launcher its number of ranks; mpiexec may run inside a step of srun, so it is first."""
MPIEXEC_VARIABLES = ("OMPI_COMM_WORLD_RANK", "MPI_LOCALRANKID")
"""Variables that mpiexec of Open MPI and of MPICH sets for a rank, and that Slurm does not set."""


def in_job() -> bool:
    """Return whether mpiexec or srun has started this process as a rank, by its variables.

    A step of srun with one task is no job: it may be a shell, in which mpiexec is called. There
    Slurm sets PMI_RANK or PMIX_RANK if its MpiDefault is pmi2 or pmix.
    """
    is_lone = "SLURM_STEP_NUM_TASKS" in os.environ and _srun_tasks() == started_tasks() == 1
    names = MPIEXEC_VARIABLES if is_lone else JOB_VARIABLES
    return any(name in os.environ for name in names) or _srun_tasks() > 1


def leave_step() -> None:
    """Remove the variables by which Slurm makes a lone process look like a rank to MPI.

    With PMI_* MPICH starts neither here nor in the ranks of an mpiexec, and with the step's number
    Open MPI 4 does not start here. In a job nothing is removed.
    """
    if "SLURM_STEP_NUM_TASKS" in os.environ and not in_job():
        for name in [*os.environ]:
            # PMIX_MCA_* and PMIX_INSTALL_PREFIX are the user's
            if re.match(r"PMI_|PMIX_(?!MCA_|INSTALL_PREFIX)|SLURM_STEP_?ID$", name):
                del os.environ[name]


def started_tasks() -> int:
    """Return how many ranks the innermost mpiexec or srun has started, by its variables, else 1."""
    return next((int(os.environ[name]) for name in JOB_SIZES if os.environ.get(name)), 1)


def _srun_tasks() -> int:
    return int(os.environ.get("SLURM_STEP_NUM_TASKS") or 1)


LOCAL_RANKS = (
    *("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID"),
    *("MV2_COMM_WORLD_LOCAL_RANK", "PMI_LOCAL_RANK", "SLURM_LOCALID"),
)
"""Of torchrun, Open MPI, MPICH, MVAPICH 2, PALS and Slurm; Slurm's is last, see `local_rank`."""


def local_rank(default: int = 0, processes: int = 2) -> int:
    """Return the number of this process on its node, as its launcher says, else `default`.

    Slurm's number counts only if srun has started at least `processes` tasks. Processes that a
    batch script or a task starts itself inherit the number of that task, so several have the same.
    """
    names = LOCAL_RANKS if _srun_tasks() >= processes else LOCAL_RANKS[:-1]
    found = (os.environ.get(name, "") for name in names)
    return next((int(text) for text in found if text.isdecimal()), default)
