"""`python -m sp_core doctor`: it says what works, and names a remedy for what does not."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, call

import pytest
import torch
from test_scaling import mpi_environment

from sp_core import doctor, machine
from sp_core.__main__ import main
from sp_core.collectives.api import all_gather
from sp_core.doctor import Finding
from sp_core.errors import DeviceError
from sp_core.mesh import fingerprint
from sp_core.testing import run_threads
from sp_core.transport import NAMES

pytestmark = [
    pytest.mark.mpi_skip,
    pytest.mark.starts_mpi,
]  # these start mpiexec, which must not be done inside mpiexec

ROOT = Path(__file__).resolve().parent.parent
DOCTOR = (sys.executable, "-m", "sp_core", "doctor")
MPIEXEC = str(Path(sys.executable).parent / "mpiexec")


def without_gpu() -> dict[str, str]:
    """That of a launch, no GPU, and a terminal in which no line is folded."""
    return {**mpi_environment(), "CUDA_VISIBLE_DEVICES": "", "COLUMNS": "10000"}


def examined(*command: str, **environment: str) -> tuple[int, str]:
    answer = subprocess.run(
        command,
        cwd=ROOT,
        env={**without_gpu(), **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return answer.returncode, answer.stdout + answer.stderr


def statuses(text: str) -> dict[str, str]:
    """Return the status of every subject of a report: each line has both, and says something."""
    table = [
        re.split(" {2,}", line, maxsplit=2)
        for line in text.partition("\n\n")[0].splitlines()
        if "WARNING" not in line
    ]
    assert all(
        len(line) == 3 and line[1] in ("ok", "note", "broken") and line[2] for line in table
    ), text
    return {
        subject: status for subject, status, _ in reversed(table)
    }  # of two on one subject the first


HERE = dict.fromkeys(
    ("python", "processor", "mpiexec", "MPI", "threads", "transport host", "transport window"), "ok"
)


@pytest.mark.every_mpi
def test_a_machine_that_works() -> None:
    code, text = examined(*DOCTOR, SP_NODES="0,0,1")  # for the three ranks of another launch
    assert code == 0, text
    assert statuses(text).items() >= HERE.items()
    assert (statuses(text)["CUDA-aware"], statuses(text)["transport ipc"]) == ("note", "note")
    assert "starts 2 ranks" in text
    assert "over 1 rank(s) came out right" in text
    assert "nothing is broken" in text


BAD = {
    "SP_TRANSPORT": "pigeon",
    "SP_ALGORITHM": "magic",
    "SP_TUNING": "/proc/nope",
    "SP_NODES": "0,one",
}


@pytest.mark.parametrize("name", sorted(BAD))
def test_a_variable_that_no_mesh_takes_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for other in BAD:
        monkeypatch.delenv(other, raising=False)
    monkeypatch.setenv(name, BAD[name])
    (finding,) = doctor._variables()
    remedy = f"unset {name}, or set it to what help(sp_core.Mesh) names"
    assert finding == Finding(name, "broken", finding.text, remedy)
    assert BAD[name].split(",")[-1] in finding.text
    monkeypatch.setenv(name, GOOD[name])
    assert [*doctor._variables()] == [Finding(name, "note", GOOD[name])]


GOOD = {"SP_TRANSPORT": "host", "SP_ALGORITHM": "ring", "SP_TUNING": "off", "SP_NODES": "0,5"}


@pytest.mark.parametrize("problem", [None, Finding("MPI", "broken", "none", "get one")])
@pytest.mark.parametrize("status", ["note", "broken"])
def test_what_needs_mpi_and_a_mesh_is_left_out_without(
    status: Any, problem: Finding | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each part is examined with the options that it needs."""
    parts: dict[str, Callable[..., Any]] = {
        "cpu_model": lambda: "Best 9",
        "cores": lambda: 7,
        "_shared_memory": lambda: "shm",
        "_gpus": lambda device: f"gpus {device}",
        "_variables": lambda: iter([Finding("SP_NODES", status, "1")]),
        "_mpiexec": lambda measure: f"mpiexec {measure}",
        "_mpi": lambda: iter(["mpi"]),
        "_mpi_problem": lambda: problem,
        "_constants": lambda measure: f"constants {measure}",
        "_nodes": lambda: "nodes",
        "_transports": lambda device: iter([f"transports {device}"]),
    }
    for part, found in parts.items():
        monkeypatch.setattr(doctor, part, found)
    needs_mpi = [] if problem else ["constants True"]
    needs_mesh = ["nodes", "transports cuda"] if needs_mpi and status == "note" else []
    assert [*doctor.examine("cuda", measure=True)] == [
        Finding("python", "ok", f"{platform.python_version()}, torch {torch.__version__}"),
        Finding("processor", "ok", "Best 9, 7 cores"),
        *("shm", "gpus cuda", Finding("SP_NODES", status, "1"), "mpiexec True", "mpi"),
        *(*needs_mpi, *needs_mesh),
    ]


@pytest.mark.parametrize(("status", "code"), [("ok", 0), ("note", 0), ("broken", 1)])
@pytest.mark.parametrize(("rank", "job"), [(0, True), (1, True), (1, False)])
def test_the_first_rank_prints_and_all_return_whether_something_is_broken(
    status: Any,
    code: int,
    rank: int,
    job: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """It all ends after two minutes, with the stacks."""
    found, limit = [Finding("python", "ok", "3"), Finding("MPI", status, "4", "do")], Mock()
    monkeypatch.setattr(doctor, "examine", lambda device, measure: iter(found))
    monkeypatch.setattr(doctor, "in_job", lambda: job)
    monkeypatch.setattr(doctor, "_world", lambda: SimpleNamespace(rank=rank))
    monkeypatch.setattr(doctor, "faulthandler", limit)
    assert doctor.main() == code
    assert limit.mock_calls == [
        call.dump_traceback_later(120, exit=True),
        call.cancel_dump_traceback_later(),
    ]
    said = "" if rank and job else f"{doctor.report(found)}\n"
    assert capsys.readouterr().out == said


def test_constants_are_found_again_whichever_cores_mpiexec_binds_to(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = fingerprint()
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    assert machine.cores() == 1
    assert fingerprint() == before
    assert int(before["cores"]) <= (os.cpu_count() or 1)


@pytest.mark.every_mpi
def test_on_two_ranks_there_is_one_report(tmp_path: Path) -> None:
    places = {"SP_NODES": "4,9", "SP_TUNING_DIR": str(tmp_path)}
    code, text = examined(MPIEXEC, "-n", "2", *DOCTOR, **places)
    assert code == 0, text
    assert "2; node of each rank: 0 1" in text
    assert statuses(text).items() >= {**HERE, "mpiexec": "note", "constants": "note"}.items()
    assert [*tmp_path.iterdir()] == []  # nothing is measured that was not asked for
    assert (
        text.count("over 2 rank(s) came out right") == 3
    )  # messages, shared memory, torch.distributed
    assert text.count("transport window") == 1


def test_without_an_mpi_library() -> None:
    code, text = examined(*DOCTOR, MPI4PY_LIBMPI="/nonexistent/libmpi.so")
    assert code == 1
    assert statuses(text).items() >= {"MPI": "broken", "mpiexec": "note"}.items()
    assert "mpi4py finds no MPI library" in text
    assert "pip install mpich" in text


def test_without_mpi4py(tmp_path: Path) -> None:
    (tmp_path / "mpi4py.py").write_text(
        "raise ModuleNotFoundError(\"No module named 'mpi4py'\", name='mpi4py')"
    )
    code, text = examined(*DOCTOR, PYTHONPATH=f"{tmp_path}:{ROOT}")
    assert code == 1
    assert "mpi4py is not installed" in text
    assert "pip install mpi4py" in text


@pytest.mark.parametrize(("device", "count"), [(None, 0), ("cuda", 0), (None, 1), ("cuda", 1)])
def test_every_transport_is_tried_whose_device_is_here(
    device: str | None, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "_world", lambda: "world")
    monkeypatch.setattr(doctor, "_try", lambda *given: given)
    monkeypatch.setattr(doctor, "count_devices", {"cuda": count}.__getitem__)
    tried = [("world", kind, name) for kind, names in NAMES.items() for name in names]
    missing = [
        Finding(f"transport {name}", "note", "not tried: no cuda device") for name in NAMES["cuda"]
    ]
    if not count:
        tried = [(*one,) for one in tried if one[1] == "cpu"]
    wanted = [*tried, *([] if count or device else missing)]
    assert [*doctor._transports(device)] == wanted


@pytest.mark.parametrize("in_job", [False, True])
def test_outside_of_a_job_all_ranks_share_a_node(
    in_job: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SP_NODES", "4,9")
    monkeypatch.setattr(doctor, "in_job", lambda: in_job)

    def body(comm: Any) -> tuple[int, ...]:
        with doctor._mesh(comm) as mesh:
            return mesh["all"].nodes

    assert run_threads(2, body) == [(0, 1) if in_job else (0, 0)] * 2


@pytest.mark.parametrize(("name", "why"), [("host", ""), ("window", "no room")])
@pytest.mark.parametrize("wrong", [False, True])
def test_a_trial_gathers_from_all_ranks_and_looks_at_the_numbers(
    wrong: bool, name: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It returns why there is no shared memory, if the transport needs it."""
    monkeypatch.setattr("sp_core.communicator.make_window", lambda *given: (None, "no room"))
    if wrong:
        monkeypatch.setattr(
            doctor, "all_gather", lambda mine, comm: all_gather(mine + 1, comm=comm)
        )

    def body(comm: Any) -> str | None:
        refused = pytest.raises(RuntimeError, match="not the ones")
        with refused if wrong else nullcontext():
            return doctor._gather(comm, "cpu", name)
        return None

    assert run_threads(2, body) == [None if wrong else why] * 2


def test_a_trial_takes_the_gpus_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Mock(side_effect=DeviceError)
    monkeypatch.setattr(doctor, "_mesh", made)
    monkeypatch.setattr(doctor, "count_devices", {"cuda": 3}.__getitem__)
    world: Any = SimpleNamespace(rank=5)
    with pytest.raises(DeviceError):
        doctor._gather(world, "cuda", "ipc")
    made.assert_called_once_with(world, device=torch.device("cuda", 2), transport="ipc")


@pytest.mark.parametrize(
    ("arguments", "device", "measure"),
    [((), None, False), (("--measure",), None, True), (("--device", "cpu"), "cpu", False)],
)
def test_the_command_passes_its_options_on(
    arguments: tuple[str, ...], device: str | None, measure: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = Mock(return_value=7)
    monkeypatch.setattr(doctor, "main", made)
    assert main(["doctor", *arguments]) == 7
    made.assert_called_once_with(device, measure=measure)


def test_nodes_for_another_number_of_ranks_are_named_in_a_job(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SP_NODES", "0,1")
    monkeypatch.setattr(doctor, "in_job", lambda: True)
    (finding,) = (each for each in doctor._variables() if each.status == "broken")
    assert "given for 1 ranks" in finding.text


def test_a_report_fits_the_terminal_and_repeats_what_is_broken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "30")
    found = [Finding("a", "ok", "fine and well-made"), Finding("b c", "broken", "torn", "sew it")]
    table = ["a    ok      fine and", " " * 13 + "well-made", "b c  broken  torn"]
    assert doctor.report(found).splitlines() == [*table, "", "1 broken:", "  b c: sew it"]
    assert doctor.report(found[:1]).splitlines()[1:] == ["", "nothing is broken"]


@pytest.mark.parametrize(("words", "lines"), [(9_989, 1), (9_990, 2)])
def test_a_file_has_lines_of_10000_columns(
    words: int, lines: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.setattr(os, "get_terminal_size", Mock(side_effect=OSError))
    report = doctor.report([Finding("a", "ok", "b " + "c" * (words - 2))])
    assert report.count("\n") == lines + 1


def test_a_gpu_that_is_not_there_and_constants_that_cannot_be_kept_are_broken() -> None:
    code, text = examined(*DOCTOR, "--device", "cuda", "--measure", SP_TUNING_DIR="/proc/nope")
    assert code == 1
    assert statuses(text).items() >= {**HERE, "mpiexec": "broken", "GPUs": "broken"}.items()
    assert "install a torch with CUDA" in text
    assert "/proc/nope/tuning-" in text
    assert "Set SP_TUNING_DIR to a folder that can." in text
