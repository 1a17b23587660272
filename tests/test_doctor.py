"""`python -m sp_core doctor`: it says what works, and names a remedy for what does not."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from mpi4py import MPI
from test_scaling import mpi_environment

from sp_core import doctor, machine
from sp_core.__main__ import main
from sp_core.doctor import Finding
from sp_core.errors import DeviceError
from sp_core.mesh import fingerprint
from sp_core.tuning import FileError

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
    assert (finding.subject, finding.status) == (name, "broken")
    assert BAD[name].split(",")[-1] in finding.text
    assert name in finding.remedy
    here = {
        "_mpiexec": lambda measure: (),
        "_mpi": list,
        "_mpi_problem": lambda: None,
        "_constants": lambda measure: finding,
    }
    for part, found in {**here, "_transports": lambda device: pytest.fail("tried")}.items():
        monkeypatch.setattr(doctor, part, found)
    assert [found.subject for found in doctor.examine() if found and found.status == "broken"] == [
        name
    ] * 2


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


def ranks(other: str | None = None) -> Any:
    """The part of MPI.COMM_WORLD that the doctor uses, with what another rank says."""
    return SimpleNamespace(size=2, rank=0, allgather=lambda mine: [mine, other])


def tried(other: str | None, kind: str = "cpu") -> Callable[[], Finding]:
    return lambda: doctor._try(ranks(other), kind, "host")


def launched() -> Finding:
    return doctor._mpiexec(measure=False)


def constants() -> Finding:
    return doctor._constants(measure=False)


LONE = {"_mpi_problem": lambda: None, "in_job": lambda: False, "cores": lambda: 2}
TWO = "ranks: 2\nranks: 2\n"
SLOTS = "There are not enough slots available in the system"
GPU, NO_GPU = ({"torch.cuda.is_available": lambda there=there: there} for there in (True, False))
LEVELS = (MPI.THREAD_SINGLE, MPI.THREAD_FUNNELED, MPI.THREAD_SERIALIZED, MPI.THREAD_MULTIPLE)
SHARED = "DeviceError: ranks 0 and 1 have one GPU"


def starting(code: int | None, output: str, more: int = 0) -> dict[str, Any]:
    """An mpiexec that ends so for two ranks, and with the code `more` for three."""
    answers = {"2": (code, output), "3": (more, SLOTS * more)}
    return LONE | {"bounded": lambda command: answers[command[2]]}


def library(answer: int | None) -> dict[str, Any]:
    """An MPI library that says whether it reads the memory of GPUs, if it can."""
    says = {} if answer is None else {"MPIX_Query_cuda_support": lambda: answer}
    return NO_GPU | {"ctypes.CDLL": lambda path: SimpleNamespace(**says)}


def raising(error: Exception) -> dict[str, Any]:
    """A transport that fails here."""
    return {"_gather": Mock(side_effect=error)}


def space(free: int) -> dict[str, Any]:
    return {"shutil.disk_usage": lambda folder: (2**30, 0, free)}


FOUND: list[tuple[dict[str, Any], Callable[[], Finding], str, str]] = [
    ({"_gather": Mock()}, tried("RuntimeError: no such link"), "broken", "no such link it is not"),
    ({"_gather": lambda *given: "on 2 machines"}, tried(None), "note", "shared memory, on 2 mach"),
    ({"measuring.told": lambda: (True, "alpha")}, constants, "ok", "alpha"),
    ({"measuring.told": lambda: (False, "none")}, constants, "note", "none"),
    (
        LONE | {"sys.executable": "/none/python", "shutil.which": lambda _: None},
        launched,
        "broken",
        "not found",
    ),
    (raising(RuntimeError("no such link")), tried(None), "broken", "no such link"),
    (raising(DeviceError("ranks 0 and 1 have one GPU")), tried(SHARED, "cuda"), "note", "one GPU"),
    (raising(DeviceError("one GPU")), tried("RuntimeError: lost", "cuda"), "broken", "one GPU"),
    (NO_GPU, lambda: doctor._cuda_aware(None), "note", "cannot be asked; not tried: no cuda"),
    (
        GPU | {"no_device_memory": lambda kind: "it broke"},
        lambda: doctor._cuda_aware(None),
        "note",
        "no: it broke",
    ),
    (
        GPU | {"no_device_memory": lambda kind: ""},
        lambda: doctor._cuda_aware(None),
        "ok",
        "yes, with",
    ),
    *(
        (library(answer), lambda: doctor._cuda_aware("libmpi.so"), "note", text)
        for answer, text in ((0, "says no"), (1, "says yes"), (2, "be asked"), (None, "be asked"))
    ),
    (GPU, lambda: doctor._threads(LEVELS[1]), "broken", "funneled"),
    (NO_GPU, lambda: doctor._threads(LEVELS[0]), "ok", "single"),
    (GPU, lambda: doctor._threads(LEVELS[2]), "ok", "serialized"),
    (GPU, lambda: doctor._threads(LEVELS[3]), "ok", "multiple"),
    (space(2**28 - 1), doctor._shared_memory, "note", "1,024 MiB, "),
    (space(2**28), doctor._shared_memory, "ok", "1,024 MiB, "),
    (starting(0, TWO), launched, "ok", "starts 2 ranks"),
    (starting(0, TWO, 1), launched, "note", "MCA_rmaps_default_mapping_policy=:oversubscribe"),
    (starting(1, TWO), launched, "broken", "mpiexec -n 2 hostname"),
    (starting(0, "ranks: 1\nranks: 1\n"), launched, "broken", "belongs to another MPI"),
    (starting(1, SLOTS), launched, "broken", "mapping_policy=:oversubscribe"),
    (starting(None, ""), launched, "broken", "did not start within 60 s"),
    (starting(1, "attempt to run as root."), launched, "broken", "RUN_AS_ROOT_CONFIRM=1"),
    (
        {
            "_world": ranks,
            "measuring.keep": Mock(side_effect=FileError("Set SP_TUNING_DIR")),
        },
        lambda: doctor._constants(measure=True),
        "broken",
        "Set SP_TUNING_DIR",
    ),
]
"""What is so here, what is looked at, and the status and a part of the text or remedy."""


@pytest.mark.parametrize(("here", "look", "status", "text"), FOUND)
def test_what_is_found_has_a_status_and_a_remedy_where_it_is_broken(
    here: dict[str, Any],
    look: Callable[[], Finding],
    status: str,
    text: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in here.items():
        monkeypatch.setattr(f"sp_core.doctor.{name}", value)
    finding = look()
    assert finding.status == status, finding
    assert text in f"{finding.text} {finding.remedy}"
    assert bool(finding.remedy) == (status == "broken")


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


@pytest.mark.parametrize("name", ["SLURM_STEP_NUM_TASKS", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE"])
@pytest.mark.parametrize(("tasks", "status"), [("1", "ok"), ("4", "broken")])
def test_a_launcher_that_this_mpi_does_not_understand_is_broken(
    name: str, tasks: str, status: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then each of its ranks is alone."""
    monkeypatch.setenv(name, tasks)
    monkeypatch.setattr(doctor, "_mpi_problem", lambda: None)
    found = next(finding for finding in doctor._mpi() if finding.subject == "MPI")
    assert (found.status, bool(found.remedy)) == (status, status == "broken")
    assert (f"the launcher has started {tasks}" in found.text) == bool(found.remedy)


def test_nodes_for_another_number_of_ranks_are_named_in_a_job(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SP_NODES", "0,1")
    monkeypatch.setattr(doctor, "in_job", lambda: True)
    (finding,) = (each for each in doctor._variables() if each.status == "broken")
    assert "given for 1 ranks" in finding.text


def test_a_report_fits_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    report = doctor.report([doctor.Finding("constants", "note", "a word or two " * 20)])
    assert max(map(len, report.splitlines())) <= 80
    assert report.count("word") == 20


def test_a_broken_finding_is_repeated_with_its_remedy() -> None:
    found = [doctor.Finding("a", "ok", "fine"), doctor.Finding("b", "broken", "torn", "sew it")]
    assert "1 broken:\n  b: sew it" in doctor.report(found)
    assert "nothing is broken" in doctor.report(found[:1])


@pytest.mark.parametrize(
    ("quota", "cores"),
    [("max 100000", 8), ("300000 100000", 3), ("50000 100000", 1), ("nonsense", 8)],
)
def test_cores_respect_the_quota_of_a_container(
    quota: str, cores: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cpu.max").write_text(quota)
    monkeypatch.setattr(machine, "_QUOTA", tmp_path / "cpu.max")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    assert machine.cores() == cores


def test_a_gpu_that_is_not_there_and_constants_that_cannot_be_kept_are_broken() -> None:
    code, text = examined(*DOCTOR, "--device", "cuda", "--measure", SP_TUNING_DIR="/proc/nope")
    assert code == 1
    assert statuses(text).items() >= {**HERE, "mpiexec": "broken", "GPUs": "broken"}.items()
    assert "install a torch with CUDA" in text
    assert "/proc/nope/tuning-" in text
    assert "Set SP_TUNING_DIR to a folder that can." in text


@pytest.mark.parametrize(
    ("lines", "name"),
    [("flags : a\nmodel name : Best 9\nmodel name : Other\n", "Best 9"), ("", platform.machine())],
)
def test_the_processor_has_the_name_that_the_system_gives(
    lines: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cpuinfo").write_text(lines)
    monkeypatch.setattr(machine, "_CPUINFO", tmp_path / "cpuinfo")
    monkeypatch.setattr("sp_core.machine.platform.processor", lambda: "")
    assert machine.cpu_model() == name
