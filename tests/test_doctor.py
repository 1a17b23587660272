"""Test `python -m sp_core doctor`, which reports what works, and a remedy for what does not."""

import io
import os
import platform
import re
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, call

import pytest
import torch
from studies.commands import ROOT, output_of
from test_scaling import mpi_environment

from sp_core import doctor, machine
from sp_core.collectives.api import all_gather
from sp_core.errors import DeviceError, PeerFailed
from sp_core.findings import Finding, of_all, report
from sp_core.mesh import fingerprint
from sp_core.testing import run_threads
from sp_core.transport import NAMES

# these start mpiexec, which must not be done inside mpiexec
pytestmark = [pytest.mark.mpi_skip, pytest.mark.starts_mpi]

DOCTOR = (sys.executable, "-m", "sp_core", "doctor")


def statuses(text: str) -> dict[str, str]:
    """Return the status of each subject in a report, after checking the syntax of every line."""
    lines = [line for line in text.partition("\n\n")[0].splitlines() if "WARNING" not in line]
    found = [re.fullmatch(r"(.+?) {2,}(ok|note|broken) {2,}(.+)", line) for line in lines]
    assert all(found), text
    return {one[1]: one[2] for one in reversed(found) if one}  # the first line of a subject counts


HERE = dict.fromkeys(
    ("python", "processor", "mpiexec", "MPI", "threads", "transport host", "transport window"), "ok"
)
NO_MPI4PY = "raise ModuleNotFoundError(\"No module named 'mpi4py'\", name='mpi4py')"
OTHER_NODE = ("SP_TRANSPORT=pigeon", "SP_TUNING=/proc/nope")  # a mesh reads the latter on rank 0
SAFE = (sys.executable, "-P", *DOCTOR[1:])
"""Started in a folder with another mpi4py.py, which is not imported."""
MEASURE = (*DOCTOR, "--measure")
TWO_RANKS = (str(Path(sys.executable).parent / "mpiexec"), "-n", "2", *DOCTOR)


@pytest.mark.parametrize(
    ("command", "variables", "code", "found", "told"),
    [
        pytest.param(
            SAFE,
            {"SP_NODES": "0,0,1", "PYTHONPATH": str(ROOT)},  # meant for a launch of three ranks
            0,
            {**HERE, "CUDA-aware": "note", "transport ipc": "note"},
            {"starts 2 ranks": 1, "over 1 rank(s) came out right": 3, "nothing is broken": 1},
            marks=pytest.mark.every_mpi,
            id="one rank",
        ),
        pytest.param(
            ("sh", "-c", '"$@" 2>&-', "sh", *DOCTOR),
            {},
            0,
            HERE,
            {"nothing is broken": 1},
            id="no standard error",
        ),
        pytest.param(
            DOCTOR,
            {f"SLURM_STEP_{name}": "1" for name in ("ID", "NUM_TASKS")}
            | {"PMI_RANK": "0", "PMI_SIZE": "1", "PMI_FD": "9", "PMIX_NAMESPACE": "slurm.pmix.7.0"},
            0,
            {**HERE, "mpiexec": "note"},
            {"over 1 rank(s) came out right": 3, "nothing is broken": 1},
            marks=pytest.mark.every_mpi,
            id="a shell of Slurm",
        ),
        pytest.param(
            TWO_RANKS,
            {"SP_NODES": "4,9"},
            0,
            {**HERE, "mpiexec": "note", "constants": "note"},
            {
                "2; node of each rank: 0 1": 1,
                "transport window": 1,
                "over 2 rank(s) came out right": 3,  # messages, shared memory, torch.distributed
            },
            marks=pytest.mark.every_mpi,
            id="two ranks make one report",
        ),
        pytest.param(
            (*TWO_RANKS[:2], "1", *DOCTOR, ":", "-n", "1", "env", *OTHER_NODE, *DOCTOR),
            {},
            1,
            {"MPI": "ok", "constants": "note", "SP_TRANSPORT": "broken"},
            {"rank 1: ": 1, "/proc/nope": 0, "transport host": 0, "1 broken": 1},
            marks=pytest.mark.every_mpi,
            id="ranks find different things",
        ),
        pytest.param(
            DOCTOR,
            {"MPI4PY_LIBMPI": "/nonexistent/libmpi.so"},
            1,
            {"MPI": "broken", "mpiexec": "note"},
            {"mpi4py finds no MPI library": 1, "pip install mpich": 1},
            id="no MPI library",
        ),
        pytest.param(
            DOCTOR,
            {"PYTHONPATH": f"{{tmp}}:{ROOT}"},
            1,
            {"MPI": "broken", "mpiexec": "note"},
            {"mpi4py is not installed": 1, "pip install mpi4py": 1},
            id="no mpi4py",
        ),
        pytest.param(
            DOCTOR,
            {"PYTHONPATH": f"{{tmp}}:{ROOT}", "PMI_RANK": "0", "SP_NODES": "0"},
            1,
            {"MPI": "broken", "mpiexec": "note", "python": "ok", "SP_NODES": "note"},
            {"mpi4py is not installed": 1, "pip install mpi4py": 1},
            id="no mpi4py in a job",
        ),
        pytest.param(
            (*DOCTOR, "--device", "cuda", "--measure"),
            {"SP_TUNING": "off", "SP_TUNING_DIR": "/proc/nope"},
            1,
            {**HERE, "mpiexec": "broken", "GPUs": "broken"},
            {
                "install a torch with CUDA": 1,
                "/proc/nope/tuning-": 1,
                "Set SP_TUNING_DIR to a folder that can.": 1,
                "off, by SP_TUNING": 1,
            },
            id="no GPU, and constants that cannot be kept",
        ),
        pytest.param(
            MEASURE,
            {"SP_ALGORITHM": "magic"},
            1,
            {"mpiexec": "ok", "SP_ALGORITHM": "broken", "constants": "broken"},
            {"starts 2 ranks": 1, "not measured: a variable is broken": 1, "2 broken": 1},
            id="nothing is measured with a variable that no mesh takes",
        ),
        pytest.param(
            MEASURE,
            {"SP_TUNING": "{tmp}/mine.json", "SP_TUNING_DIR": "{tmp}/kept"}
            | {"SP_NODES": "0,0,1"},  # meant for a launch of three ranks
            1,
            {"mpiexec": "ok", "SP_TUNING": "broken", "constants": "ok"},
            {"mine.json: there is no such file": 1, "{tmp}/kept/tuning-": 1, "1 broken": 1},
            id="constants are measured though the named file is missing",
        ),
        pytest.param(
            (*TWO_RANKS[:2], "1", *MEASURE, ":", "-n", "1", "env", "SP_ALGORITHM=ring", *MEASURE),
            {"SP_TUNING_DIR": "{tmp}/kept"},
            1,
            {"MPI": "ok", "constants": "broken", "nodes": "broken"},
            {"constants: start all ranks with the same SP_TRANSPORT": 1, "2 broken": 1},
            id="ranks with different variables cannot measure",
        ),
    ],
)
def test_a_machine_is_examined(
    command: tuple[str, ...],
    variables: dict[str, str],
    code: int,
    found: dict[str, str],
    told: dict[str, int],
    tmp_path: Path,
) -> None:
    """No GPU is visible and no line is wrapped. Without `--measure` nothing is measured."""
    (tmp_path / "mpi4py.py").write_text(NO_MPI4PY)
    places = {"CUDA_VISIBLE_DEVICES": "", "COLUMNS": "10000", "SP_TUNING_DIR": f"{tmp_path}/none"}
    given = {name: value.format(tmp=tmp_path) for name, value in variables.items()}
    place = tmp_path if command == SAFE else ROOT
    text = output_of(command, place, mpi_environment() | places | given, 120, {code})
    text = text.replace(str(tmp_path), "{tmp}")
    assert statuses(text).items() >= found.items()
    assert {part: text.count(part) for part in told} == told
    kept = [f"{{tmp}}/kept/{path.name}" in text for path in tmp_path.glob("kept/tuning-*.json")]
    assert kept == [True] * ("{tmp}/kept/tuning-" in told)
    assert not (tmp_path / "none").exists()


VARIABLES = {
    "SP_TRANSPORT": ("host", "pigeon", "pigeon"),
    "SP_ALGORITHM": ("ring", "magic", "magic"),
    "SP_TUNING": ("off", "/proc/nope", "/proc/nope"),
    "SP_NODES": ("0,5", "0,one", "one"),
    "SP_NODES in a job": ("5", "0,1", "given for 1 ranks"),
}
"""A good value of each variable, a wrong one, and a part of the text about the wrong one."""


@pytest.mark.parametrize("what", VARIABLES)
def test_a_variable_that_no_mesh_takes_is_named(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for other in VARIABLES:
        monkeypatch.delenv(other, raising=False)
    monkeypatch.setattr(doctor, "in_job", lambda: " in a job" in what)
    name, (good, bad, text) = what.partition(" ")[0], VARIABLES[what]
    monkeypatch.setenv(name, good)
    assert [*doctor._variables()] == [Finding(name, "note", good)]
    monkeypatch.setenv(name, bad)
    (finding,) = doctor._variables()
    remedy = f"unset {name}, or set it to what help(sp_core.Mesh) names"
    assert finding == Finding(name, "broken", finding.text, remedy)
    assert text in finding.text


@pytest.mark.parametrize("problem", [None, Finding("MPI", "broken", "none", "get one")])
@pytest.mark.parametrize(("status", "nodes"), [("note", "ok"), ("note", "broken"), ("broken", "")])
@pytest.mark.parametrize("name", ["SP_ALGORITHM", "SP_TUNING"])
def test_what_needs_mpi_and_a_mesh_is_left_out_without(
    name: str, status: Any, nodes: Any, problem: Finding | None, substitute: Any
) -> None:
    """The other parts are examined, each with the options that it needs.

    `status` is that of a variable of any rank, `nodes` that of the first mesh. Measuring needs no
    SP_TUNING.
    """
    variable, mpi, mesh = (Finding(one, "ok", "") for one in ("SP_NODES", "MPI", "nodes"))
    other, mesh = Finding(name, status, "rank 1: x"), replace(mesh, status=nodes)
    substitute(
        doctor,
        cpu_model=lambda: "Best 9",
        cores=lambda: 7,
        _shared_memory=lambda: Finding("shm", "ok", ""),
        _gpus=lambda device: Finding("GPUs", "broken", device),
        _variables=lambda: iter([variable]),
        _mpiexec=lambda measure: Finding("mpiexec", "ok", measure),
        _mpi=lambda: iter([mpi]),
        _mpi_problem=lambda: problem,
        _world=lambda: "world",
        of_all=lambda mine, world: [*mine, other],
        _constants=lambda measure: f"constants {measure}",
        _nodes=lambda: mesh,
        _transports=lambda device: iter([f"transports {device}"]),
    )
    unmeasured = Finding(
        *("constants", "broken", "not measured: a variable is broken"),
        "first follow the other remedies, then measure again",
    )
    measures = status == "note" or name == "SP_TUNING"
    needs_mpi = [] if problem else [other, "constants True" if measures else unmeasured]
    needs_mesh = [mesh] if needs_mpi and status == "note" else []
    needs_nodes = ["transports cuda"] if needs_mesh and nodes == "ok" else []
    assert [*doctor.examine("cuda", measure=True)] == [
        Finding("python", "ok", f"{platform.python_version()}, torch {torch.__version__}"),
        Finding("processor", "ok", f"Best 9, 7 of {os.cpu_count()} logical cores"),
        *(Finding("shm", "ok", ""), Finding("GPUs", "broken", "cuda"), variable),
        *(Finding("mpiexec", "ok", True), mpi),  # type: ignore[arg-type]
        *(*needs_mpi, *needs_mesh, *needs_nodes),
    ]


def test_rank_0_reports_what_other_ranks_find_broken() -> None:
    """What rank 0 has found itself is told once, and constants are read on rank 0 only."""
    both, constants = (Finding(name, "broken", "x", "y") for name in ("threads", "SP_TUNING"))
    gpus = Finding("GPUs", "broken", "none", "get one")
    seen = [Finding("GPUs", "ok", "1: A"), both]
    told = [seen, [gpus, both, constants], [Finding("GPUs", "note", "2"), both], [gpus]]
    world: Any = SimpleNamespace(allgather=lambda mine: [*told[:3], mine])
    assert of_all(told[3], world) == [*seen, replace(gpus, text="rank 1: none")]


LIMIT = call.dump_traceback_later(300, exit=True, file=1)  # standard output: sys.stderr is None


@pytest.mark.parametrize(("status", "code"), [("ok", 0), ("note", 0), ("broken", 1)])
@pytest.mark.parametrize(("rank", "job"), [(0, True), (1, True), (1, False)])
def test_the_first_rank_prints_and_all_return_whether_something_is_broken(
    status: Any, code: int, rank: int, job: bool, substitute: Any
) -> None:
    """The command would end after five minutes, and print all stacks. Nothing stays in a buffer."""
    found, limit = [Finding("python", "ok", "3"), Finding("MPI", status, "4", "do")], Mock()
    substitute(sys, stdout=io.TextIOWrapper(shown := io.BytesIO()), stderr=None)
    substitute(
        doctor,
        examine=lambda device, measure: iter(found),
        in_job=lambda: job,
        _world=lambda: SimpleNamespace(rank=rank),
        faulthandler=limit,
    )
    assert doctor.main() == code
    assert limit.mock_calls == [LIMIT, call.cancel_dump_traceback_later()]
    assert shown.getvalue().decode() == ("" if rank and job else f"{report(found)}\n")


def test_an_error_of_some_ranks_that_measure_is_raised(monkeypatch: Any, substitute: Any) -> None:
    """Variables do not explain it. The limit of the command is suspended, and holds again."""
    substitute(sys, stderr=None)
    limit, world = Mock(**{"keep.side_effect": PeerFailed("rank 1 has left")}), Mock(size=2)
    substitute(doctor, faulthandler=limit, _world=lambda: world)
    monkeypatch.setattr("sp_core.measuring.keep", limit.keep)
    with pytest.raises(PeerFailed, match="rank 1 has left"):
        doctor._constants(measure=True)
    assert limit.mock_calls == [call.cancel_dump_traceback_later(), call.keep(world), LIMIT]


def test_constants_are_found_again_whichever_cores_mpiexec_binds_to(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = fingerprint()
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    assert machine.cores() == 1
    assert fingerprint() == before
    assert int(before["cores"]) <= (os.cpu_count() or 1)


@pytest.mark.parametrize("device", [None, "cuda"])
@pytest.mark.parametrize(("here", "count"), [(0, 0), (1, 1), (0, 1)])
def test_every_transport_is_tried_whose_device_a_rank_has(
    device: str | None, here: int, count: int, substitute: Any
) -> None:
    """If only another rank has one, each rank takes part."""
    world = SimpleNamespace(allgather=lambda mine: [mine, count])
    substitute(
        doctor,
        _world=lambda: world,
        _try=lambda *given: given,
        count_devices={"cuda": 0}.__getitem__,
    )
    kinds = NAMES if count else ("cpu",)
    tried = [(world, kind, name) for kind in kinds for name in NAMES[kind]]
    why = "not tried: no cuda device"
    missing = [Finding(f"transport {name}", "note", why) for name in NAMES["cuda"]]
    assert [*doctor._transports(device)] == tried + missing * (not count and not device)


@pytest.mark.parametrize(("name", "why"), [("host", ""), ("window", "no room")])
@pytest.mark.parametrize("wrong", [False, True])
def test_a_trial_gathers_from_all_ranks_and_looks_at_the_numbers(
    wrong: bool, name: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trial returns the reason why there is no shared memory, if the transport needs it."""
    monkeypatch.setattr("sp_core.communicator.make_window", lambda *given: (None, "no room"))
    if wrong:
        monkeypatch.setattr(
            doctor, "all_gather", lambda mine, comm: all_gather(mine + 1, comm=comm)
        )

    def body(comm: Any) -> str | None:
        with pytest.raises(RuntimeError, match="not the ones") if wrong else nullcontext():
            return doctor._gather(comm, "cpu", name)
        return None

    assert run_threads(2, body) == [None if wrong else why] * 2


@pytest.mark.parametrize(
    ("others", "status"), [("DeviceError: no GPU", "note"), ("OSError: torn", "broken")]
)
def test_a_transport_is_broken_if_it_fails_in_another_way_on_one_rank(
    others: str, status: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If all ranks say that their device has no such transport, that is no fault."""
    monkeypatch.setattr(doctor, "_gather", Mock(side_effect=DeviceError("no GPU")))
    world: Any = SimpleNamespace(allgather=lambda mine: [mine, others])
    assert doctor._try(world, "cuda", "ipc").status == status


def test_a_trial_runs_on_the_gpus_that_a_mesh_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Mock(side_effect=DeviceError)
    monkeypatch.setattr(doctor, "_mesh", made)
    world: Any = SimpleNamespace(rank=5)
    with pytest.raises(DeviceError):
        doctor._gather(world, "cuda", "ipc")
    made.assert_called_once_with(world, device="cuda", transport="ipc")


def test_a_report_fits_the_terminal_and_repeats_what_is_broken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In a file the lines of a report may have 10000 columns."""
    monkeypatch.setenv("COLUMNS", "30")
    found = [Finding("a", "ok", "fine and well-made"), Finding("b c", "broken", "torn", "sew it")]
    table = ["a    ok      fine and", " " * 13 + "well-made", "b c  broken  torn"]
    assert report(found).splitlines() == [*table, "", "1 broken:", "  b c: sew it"]
    assert report(found[:1]).splitlines()[1:] == ["", "nothing is broken"]
    monkeypatch.delenv("COLUMNS")
    monkeypatch.setattr(os, "get_terminal_size", Mock(side_effect=OSError))
    for words, lines in ((9_989, 1), (9_990, 2)):
        text = report([Finding("a", "ok", "b " + "c" * (words - 2))])
        assert text.count("\n") == lines + 1
