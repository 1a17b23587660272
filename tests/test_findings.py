"""Test the doctor's findings: every line of its report, with status and remedy."""

import sys
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from mpi4py import MPI

from sp_core import doctor
from sp_core.errors import CollectiveMismatch, DeviceError
from sp_core.findings import Finding
from sp_core.machine import python
from sp_core.transport import NAMES
from sp_core.tuning import FileError

pytestmark = pytest.mark.mpi_skip
MPIEXEC = str(Path(sys.executable).parent / "mpiexec")


def ranks(other: str | None = None) -> Any:
    """Return a stand-in for MPI.COMM_WORLD on two ranks; `other` is the other rank's value."""
    return SimpleNamespace(size=2, rank=0, allgather=lambda mine: [mine, other])


def tried(other: str | None) -> Callable[[], Finding]:
    return partial(doctor._try, ranks(other), "cpu", "host")


launched = partial(doctor._mpiexec, measure=False)
constants, measured = (partial(doctor._constants, measure=one) for one in (False, True))
aware = partial(doctor._cuda_aware, "libmpi.so")
LONE = {"_mpi_problem": lambda: None, "in_job": lambda: False, "cores": lambda: 2}
TWO = "ranks: 2\nranks: 2\n"
SLOTS = "There are not enough slots available in the system"
ROOM = (
    "export PRTE_MCA_rmaps_default_mapping_policy=slot:oversubscribe "
    "OMPI_MCA_rmaps_base_oversubscribe=true"
)
HOSTNAME = "run this and read its error: mpiexec -n 2 hostname"
GPU, NO_GPU = ({"torch.cuda.is_available": lambda there=there: there} for there in (True, False))
NAMED = {"torch.cuda.device_count": lambda: 2, "torch.cuda.get_device_name": "ABC".__getitem__}
LEVELS = (MPI.THREAD_SINGLE, MPI.THREAD_FUNNELED, MPI.THREAD_SERIALIZED, MPI.THREAD_MULTIPLE)
ONE_GPU = {"_gather": Mock(side_effect=DeviceError("one GPU"))}
SHARED = "DeviceError: ranks 0 and 1 have one GPU"
UNUSABLE = (
    f"it is not usable here: pass another transport of {NAMES['cpu']}, "
    "or another device; please report what you see"
)
SAME = "start all ranks with the same SP_TRANSPORT, SP_ALGORITHM and SP_NODES"
IN_JOB = {"in_job": lambda: True}
MORE_RANKS = "start more ranks, or leave out mpiexec and srun"
READ_IT = "run this and read its error: python -c 'from mpi4py import MPI'"
SERIALIZE = (
    "backward on CUDA calls MPI from a thread of its own: "
    "unset MPI4PY_RC_THREAD_LEVEL, or set it to serialized"
)
NO_CUDA = (
    "install a torch with CUDA on a machine with a GPU and its driver, or leave --device cuda out"
)


def starting(
    two: tuple[int | None, str], three: str = "", measured: tuple[int, str] | None = None
) -> dict[str, Any]:
    """Return replacements for mpiexec: its answers to two ranks, to three, and to a measurement."""
    start = (MPIEXEC, "-n", "2", *python())
    answers = {
        (*start, "-c", doctor.PROBE): two,
        (*start, "-m", "mpi4py", "-c", doctor.MEASURE): measured,
        (MPIEXEC, "-n", "3", "true"): (0, three),
    }
    return LONE | {
        "bounded": lambda command: answers[tuple(command)],
        "shutil.which": lambda name: None,
    }


def library(answer: int | None) -> dict[str, Any]:
    """Return replacements for an MPI library with this answer about GPU memory, or without one."""
    says = {} if answer is None else {"MPIX_Query_cuda_support": lambda: answer}
    return {"ctypes.CDLL": lambda path: SimpleNamespace(**says)}


def space(free: int) -> dict[str, Any]:
    return {"shutil.disk_usage": lambda folder: (2**30, 0, free)}


def measuring(size: int) -> dict[str, Any]:
    """Return replacements for a world of `size` ranks that count the measurements of constants."""
    world, kept = SimpleNamespace(size=size), list[object]()
    return {
        "_world": lambda: world,
        "faulthandler": Mock(),
        "measuring.keep": kept.append,
        "measuring.told": lambda measured: (True, f"measured: {kept.count(world)}"),
    }


def probed(code: int | None, output: str) -> dict[str, Any]:
    return {"in_job": lambda: False, "bounded": lambda command: (code, output)}


def importing(error: Exception) -> dict[str, Any]:
    """Return replacements for a rank of a job on which the import of MPI raises an error."""
    return {"in_job": lambda: True, "importlib.import_module": Mock(side_effect=error)}


def noded(*nodes: int) -> dict[str, Any]:
    """Return replacements for a mesh whose ranks are in these nodes."""
    made = nullcontext({"all": SimpleNamespace(nodes=nodes)})
    return {"_world": lambda: "world", "_mesh": {"world": made}.__getitem__}


def gathered(world: Any, kind: str, name: str) -> str:
    return "" if (world.size, kind, name) == (2, "cpu", "host") else "swapped"


THROUGH = "tensors on a GPU travel through host memory, or by ipc"
UNMEASURED = f"{MPIEXEC} starts 2 ranks, but they could not measure"
FOUND: list[tuple[dict[str, Any], Callable[[], Finding | None], tuple[Any, ...]]] = [
    (
        {"_gather": gathered},
        tried(None),
        ("transport host", "ok", "cpu: an all-gather over 2 rank(s) came out right"),
    ),
    (
        {"_gather": lambda *given: "on 2 machines"},
        tried(None),
        (
            *("transport host", "note"),
            "cpu: no shared memory, on 2 machines; messages carry the collectives instead",
        ),
    ),
    (
        {"_gather": gathered},
        tried("RuntimeError: no link"),
        ("transport host", "broken", "cpu: RuntimeError: no link", UNUSABLE),
    ),
    (ONE_GPU, tried(SHARED), ("transport host", "note", "cpu: not available here: one GPU")),
    (
        ONE_GPU,
        tried("RuntimeError: lost"),
        ("transport host", "broken", "cpu: DeviceError: one GPU", UNUSABLE),
    ),
    ({"measuring.told": lambda measured: (True, "alpha")}, constants, ("constants", "ok", "alpha")),
    ({"measuring.told": lambda measured: (False, "no")}, constants, ("constants", "note", "no")),
    (measuring(2), measured, ("constants", "ok", "measured: 1")),
    (measuring(2), constants, ("constants", "ok", "measured: 0")),
    (measuring(1), measured, ("constants", "ok", "measured: 0")),
    (
        measuring(1) | IN_JOB,
        measured,
        (*("constants", "broken", "one rank cannot measure messages"), MORE_RANKS),
    ),
    (measuring(1) | IN_JOB, constants, ("constants", "ok", "measured: 0")),
    (measuring(2) | IN_JOB, measured, ("constants", "ok", "measured: 1")),
    (
        measuring(2) | {"measuring.keep": Mock(side_effect=FileError("Set SP_TUNING_DIR"))},
        measured,
        ("constants", "broken", "cannot be kept", "Set SP_TUNING_DIR"),
    ),
    (
        measuring(2) | {"measuring.keep": Mock(side_effect=CollectiveMismatch("they differ"))},
        measured,
        ("constants", "broken", "not measured: they differ", SAME),
    ),
    (
        GPU | library(None) | {"no_device_memory": lambda kind: f"{kind} broke"},
        aware,
        ("CUDA-aware", "note", f"no: cuda broke (the library cannot be asked); {THROUGH}"),
    ),
    (
        GPU | library(None) | {"no_device_memory": lambda kind: ""},
        aware,
        (
            *("CUDA-aware", "ok"),
            "yes, with transport='device': a process has tried it (the library cannot be asked)",
        ),
    ),
    *(
        (
            NO_GPU | here,
            aware,
            ("CUDA-aware", "note", f"the library {says}; not tried: no cuda device"),
        )
        for here, says in (
            (library(0), "says no"),
            (library(1), "says yes"),
            (library(2), "cannot be asked"),
            (library(None), "cannot be asked"),
            ({"ctypes.CDLL": Mock(side_effect=OSError)}, "cannot be asked"),
        )
    ),
    (GPU, partial(doctor._threads, LEVELS[1]), ("threads", "broken", "funneled", SERIALIZE)),
    (NO_GPU, partial(doctor._threads, LEVELS[0]), ("threads", "ok", "single")),
    (GPU, partial(doctor._threads, LEVELS[2]), ("threads", "ok", "serialized")),
    (GPU, partial(doctor._threads, LEVELS[3]), ("threads", "ok", "multiple")),
    (GPU | NAMED, partial(doctor._gpus, "cuda"), ("GPUs", "ok", "2: A, B")),
    (NO_GPU, partial(doctor._gpus, "cpu"), ("GPUs", "note", "none")),
    (
        NO_GPU,
        partial(doctor._gpus, "cuda"),
        ("GPUs", "broken", f"none that torch {torch.__version__} sees", NO_CUDA),
    ),
    (
        space(2**28 - 2**18),
        doctor._shared_memory,
        (
            *("/dev/shm", "note"),
            "1,024 MiB, 256 MiB free: little for many ranks; in a container pass --shm-size=1g",
        ),
    ),
    (space(2**28), doctor._shared_memory, ("/dev/shm", "ok", "1,024 MiB, 256 MiB free")),
    ({"Path": lambda folder: Path("/none")}, doctor._shared_memory, ("/dev/shm", "note", "absent")),
    (
        {"in_job": lambda: True},
        launched,
        ("mpiexec", "note", "not tried: mpiexec or srun has started this process"),
    ),
    (
        LONE | {"os.environ": {"SLURM_STEP_NUM_TASKS": "1"}},
        launched,
        ("mpiexec", "note", "not tried: mpiexec or srun has started this process"),
    ),
    (
        starting((0, TWO), measured=(0, "")) | {"os.environ": {"SLURM_STEP_NUM_TASKS": "1"}},
        partial(launched, measure=True),
        ("mpiexec", "ok", f"{MPIEXEC} starts 2 ranks"),
    ),
    (
        starting((0, TWO)) | {"_mpi_problem": lambda: "none"},
        launched,
        ("mpiexec", "note", "not tried: there is no MPI to try it with"),
    ),
    (
        LONE | {"find_mpiexec": Mock(side_effect=FileNotFoundError)},
        launched,
        ("mpiexec", "broken", "not found", doctor.GET_MPI),
    ),
    (
        LONE
        | {"find_mpiexec": lambda: "/bin/mpiexec"}
        | {"bounded": lambda command: (3, command[0])},
        launched,
        ("mpiexec", "broken", "/bin/mpiexec: exit code 3: /bin/mpiexec", HOSTNAME),
    ),
    (starting((0, TWO)), launched, ("mpiexec", "ok", f"{MPIEXEC} starts 2 ranks")),
    (
        starting((0, TWO), SLOTS),
        launched,
        (
            *("mpiexec", "note"),
            f"{MPIEXEC} starts 2 ranks. Open MPI refuses more ranks than cores: {ROOM}",
        ),
    ),
    (
        starting((1, TWO)),
        launched,
        ("mpiexec", "broken", f"{MPIEXEC}: exit code 1: ranks: 2", HOSTNAME),
    ),
    (
        starting((0, "ranks: 2")),
        launched,
        ("mpiexec", "broken", f"{MPIEXEC}: exit code 0: ranks: 2", HOSTNAME),
    ),
    (
        starting((0, TWO), measured=(0, "")),
        partial(launched, measure=True),
        ("mpiexec", "ok", f"{MPIEXEC} starts 2 ranks"),
    ),
    (
        starting(
            (0, TWO),
            measured=(1, "at once\nFileError: SP_TUNING_DIR 1\nFileError: SP_TUNING_DIR 2\n"),
        ),
        partial(launched, measure=True),
        ("mpiexec", "broken", UNMEASURED, "SP_TUNING_DIR 1"),
    ),
    (
        starting((0, TWO), measured=(-1, "FileError: none\nthe end")),
        partial(launched, measure=True),
        ("mpiexec", "broken", UNMEASURED, "the end"),
    ),
    (probed(0, ""), doctor._mpi_problem.__wrapped__, ()),
    (probed(1, "") | {"in_job": lambda: True}, doctor._mpi_problem.__wrapped__, ()),
    *(
        (
            probed,
            doctor._mpi_problem.__wrapped__,
            (
                *("MPI", "broken", "mpi4py is not installed"),
                f"pip install mpi4py, and an MPI library: {doctor.GET_MPI}",
            ),
        )
        for probed in (
            probed(1, "ModuleNotFoundError: No module named 'mpi4py'"),
            importing(ModuleNotFoundError("No module named 'mpi4py'")),
        )
    ),
    *(
        (
            here,
            doctor._mpi_problem.__wrapped__,
            ("MPI", "broken", f"mpi4py finds no MPI library: {said}", doctor.GET_MPI),
        )
        for said, error in (
            ("RuntimeError: cannot load MPI library", RuntimeError("cannot load MPI library")),
            ("ImportError: libmpi.so", ImportError("libmpi.so")),
        )
        for here in (probed(1, f"Traceback\n{said}"), importing(error))
    ),
    (
        probed(1, "") | {"bounded": Mock(side_effect=FileNotFoundError(2, "No usable folder"))},
        doctor._mpi_problem.__wrapped__,
        (
            *("MPI", "broken", "no file for temporary data can be made: No usable folder"),
            "set TMPDIR to a folder that can be written",
        ),
    ),
    (
        probed(14, "a\nAborted") | {"os.environ": {}},
        doctor._mpi_problem.__wrapped__,
        (
            *("MPI", "broken"),
            "MPI does not start, exit code 14. The environment has no HOME, which Open MPI needs",
            "export HOME=/tmp",
        ),
    ),
    *(
        (
            here,
            doctor._mpi_problem.__wrapped__,
            ("MPI", "broken", f"MPI does not start, exit code {said}", READ_IT),
        )
        for here, said in (
            (probed(-6, "a\nAborted"), "-6: Aborted"),
            (importing(RuntimeError("no symbol")), "1: RuntimeError: no symbol"),
        )
    ),
    (noded(0, 0, 4), doctor._nodes, ("nodes", "ok", "2; node of each rank: 0 0 4")),
    (
        {"_world": lambda: "world", "_mesh": Mock(side_effect=CollectiveMismatch("not equal"))},
        doctor._nodes,
        ("nodes", "broken", "no mesh: not equal", SAME),
    ),
    (noded(10, *[0] * 99), doctor._nodes, ("nodes", "ok", f"2; node of each rank: 10{' 0' * 99}")),
    (
        noded(10, 10, *[0] * 98),
        doctor._nodes,
        ("nodes", "ok", f"2; node of each rank: 10 10{' 0' * 95} ..."),
    ),
]
"""Replacements in the doctor, the check that runs, and the finding, which may be none."""


@pytest.mark.parametrize(("here", "look", "wanted"), FOUND)
def test_what_is_found_has_a_status_and_a_remedy_where_it_is_broken(
    here: dict[str, Any],
    look: Callable[[], Finding | None],
    wanted: tuple[Any, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in here.items():
        monkeypatch.setattr(f"sp_core.doctor.{name}", value)
    finding = look()
    assert finding == (Finding(*wanted) if wanted else None)
    assert finding is None or bool(finding.remedy) == (finding.status == "broken")


@pytest.mark.parametrize("library", ["/libmpi.so", None])
@pytest.mark.parametrize(("tasks", "problem"), [(1, None), (2, None), (3, None), (3, "none")])
def test_mpi_is_named_with_its_ranks(
    tasks: int, problem: Any, library: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the launcher has started more ranks than this MPI finds, it belongs to another MPI."""
    mpi = Mock(COMM_WORLD=Mock(size=2), Query_thread=lambda: "single")
    mpi.get_vendor.return_value = ("Best MPI", (4, 1))
    here: dict[str, Any] = {
        "mpi4py.MPI": mpi,
        "mpi4py.__version__": "4.1.0",
        "sp_core.doctor._mpi_problem": lambda: problem,
        "sp_core.doctor.started_tasks": lambda: tasks,
        "sp_core.doctor.mpi_library": lambda: library,
        "sp_core.doctor._threads": lambda level: level,
        "sp_core.doctor._cuda_aware": lambda library: library,
    }
    for name, value in here.items():
        monkeypatch.setattr(name, value)
    text = f"Best MPI 4.1, mpi4py 4.1.0, 2 rank(s), {library or 'library file not found'}"
    broken = ("broken", f"{text}; the launcher has started {tasks}", doctor.OTHER_LAUNCHER)
    wanted = Finding("MPI", *(broken if tasks == 3 else ("ok", text)))
    assert [*doctor._mpi()] == ([problem] if problem else [wanted, "single", library])
