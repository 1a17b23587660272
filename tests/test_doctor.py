"""`python -m sp_core doctor`: it says what works, and names a remedy for what does not."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import pytest
from mpi4py import MPI
from test_scaling import mpi_environment

from sp_core import doctor, machine, probing
from sp_core.__main__ import main
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
    """That of a launch, and no GPU."""
    return {**mpi_environment(), "CUDA_VISIBLE_DEVICES": ""}


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
    code, text = examined(*DOCTOR)
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


def test_constants_that_cannot_be_kept_are_broken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kept = Mock(side_effect=FileError("Set SP_TUNING_DIR"))
    monkeypatch.setattr("sp_core.doctor.measuring.keep", kept)
    for ranks, measure in ((2, False), (1, True)):
        monkeypatch.setattr(MPI, "COMM_WORLD", SimpleNamespace(size=ranks))
        assert doctor._constants(measure=measure).status == "note"
    assert not kept.called
    monkeypatch.setattr(MPI, "COMM_WORLD", SimpleNamespace(size=2))
    found = doctor._constants(measure=True)
    assert (found.status, found.text) == ("broken", "cannot be kept")
    assert found.remedy == "Set SP_TUNING_DIR"


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
    code, text = examined(MPIEXEC, "-n", "2", *DOCTOR, SP_TUNING_DIR=str(tmp_path))
    assert code == 0, text
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


def test_a_gpu_that_must_be_there_and_is_not() -> None:
    code, text = examined(*DOCTOR, "--device", "cuda")
    assert code == 1
    assert statuses(text).items() >= {**HERE, "GPUs": "broken"}.items()
    assert "install a torch with CUDA" in text


class TwoRanks:
    """The part of a communicator that `_try` uses, with an answer of another rank."""

    size = 2

    def __init__(self, other: str | None) -> None:
        self.other = other

    def allgather(self, mine: str | None) -> list[str | None]:
        return [mine, self.other]


@pytest.mark.parametrize(
    ("mine", "other"), [("no such link", None), (None, "RuntimeError: no such link")]
)
def test_a_transport_that_fails_on_one_rank_is_broken_on_all(
    mine: str | None, other: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gather(*_: object) -> None:
        if mine:
            raise RuntimeError(mine)

    monkeypatch.setattr(doctor, "_gather", gather)
    finding = doctor._try(
        cast("Any", TwoRanks(other)), "cpu", "host"
    )  # a stand-in that has what is needed
    assert finding.status == "broken"
    assert "no such link" in finding.text
    assert finding.remedy


@pytest.mark.parametrize(
    ("code", "output", "remedy"),
    [
        (1, "prterun has detected an attempt to run as root.", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1"),
        (
            1,
            "There are not enough slots available in the system",
            "PRTE_MCA_rmaps_default_mapping_policy=:oversubscribe",
        ),
        (0, "ranks: 1\nranks: 1\n", "belongs to another MPI"),
        (None, "", "mpiexec -n 2 hostname"),
        (7, "boom", "mpiexec -n 2 hostname"),
    ],
)
def test_a_launch_that_fails_has_a_remedy(code: int | None, output: str, remedy: str) -> None:
    assert remedy in probing.launch_problem(code, output)[1]


def test_a_transport_that_says_why_it_is_not_here_is_not_broken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def gather(*_: object) -> None:
        raise DeviceError("ranks 0 and 1 have one GPU")

    monkeypatch.setattr(doctor, "_gather", gather)
    same = "DeviceError: ranks 0 and 1 have one GPU"
    assert doctor._try(cast("Any", TwoRanks(same)), "cuda", "distributed").status == "note"
    assert (
        doctor._try(cast("Any", TwoRanks("RuntimeError: lost")), "cuda", "distributed").status
        == "broken"
    )


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


@pytest.mark.parametrize(
    ("gpu", "reason", "status", "text"),
    [
        (False, "", "note", "not tried: no cuda device"),
        (True, "it broke", "note", "no: it broke"),
        (True, "", "ok", "yes, with"),
    ],
)
def test_an_mpi_that_reads_gpu_memory_is_tried_where_there_is_a_gpu(
    gpu: bool, reason: str, status: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sp_core.doctor.torch.cuda.is_available", lambda: gpu)
    monkeypatch.setattr(doctor, "no_device_memory", lambda kind: reason)
    finding = doctor._cuda_aware(None)
    assert (finding.subject, finding.status) == ("CUDA-aware", status)
    assert text in finding.text
    assert "the library cannot be asked" in finding.text


@pytest.mark.parametrize(
    ("answer", "text"),
    [(0, "says no"), (1, "says yes"), (2, "cannot be asked"), (None, "cannot be asked")],
)
def test_the_library_is_asked_whether_it_reads_gpu_memory(
    answer: int | None, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = (
        SimpleNamespace()
        if answer is None
        else SimpleNamespace(MPIX_Query_cuda_support=lambda: answer)
    )
    monkeypatch.setattr("sp_core.doctor.ctypes.CDLL", lambda path: library)
    assert text in doctor._cuda_aware("libmpi.so").text


@pytest.mark.parametrize(
    ("level", "gpu", "status"),
    [(1, True, "broken"), (1, False, "ok"), (2, True, "ok"), (3, True, "ok")],
)
def test_backward_on_a_gpu_needs_an_mpi_that_takes_calls_from_threads(
    level: int, gpu: bool, status: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sp_core.doctor.torch.cuda.is_available", lambda: gpu)
    found = doctor._threads(
        [MPI.THREAD_SINGLE, MPI.THREAD_FUNNELED, MPI.THREAD_SERIALIZED, MPI.THREAD_MULTIPLE][level]
    )
    assert (found.subject, found.status, bool(found.remedy)) == (
        "threads",
        status,
        status == "broken",
    )
    assert found.text == ["single", "funneled", "serialized", "multiple"][level]


@pytest.mark.parametrize(("free", "status"), [(2**28 - 1, "note"), (2**28, "ok")])
def test_little_shared_memory_is_noticed(
    free: int, status: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sp_core.doctor.shutil.disk_usage", lambda folder: (2**30, 0, free))
    found = doctor._shared_memory()
    assert (found.subject, found.status) == ("/dev/shm", status)
    assert found.text.startswith("1,024 MiB, ")


@pytest.mark.parametrize(
    ("code", "output", "status"),
    [(0, "ranks: 2\nranks: 2\n", "ok"), (0, "ranks: 1\nranks: 1\n", "broken")],
)
@pytest.mark.parametrize("failed", [0, 1])
def test_an_mpiexec_is_broken_unless_its_ranks_know_each_other(
    code: int, output: str, status: str, failed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "_mpi_problem", lambda: None)
    monkeypatch.setattr(doctor, "in_job", lambda: False)
    monkeypatch.setattr(doctor, "bounded", lambda command: (code + failed, output))
    found = doctor._mpiexec(measure=False)
    assert (found.subject, found.status) == ("mpiexec", "broken" if failed else status)


def test_an_mpiexec_that_refuses_more_ranks_than_cores_is_noted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(doctor, "_mpi_problem", lambda: None)
    monkeypatch.setattr(doctor, "in_job", lambda: False)
    monkeypatch.setattr(doctor, "cores", lambda: 2)
    answers = {"2": (0, "ranks: 2\nranks: 2\n"), "3": (1, "There are not enough slots available")}
    monkeypatch.setattr(doctor, "bounded", lambda command: answers[command[2]])
    found = doctor._mpiexec(measure=False)
    assert found.status == "note"
    assert "export PRTE_MCA_rmaps_default_mapping_policy=:oversubscribe" in found.text


def test_alone_the_doctor_says_where_constants_cannot_be_kept() -> None:
    code, text = examined(*DOCTOR, "--measure", SP_TUNING_DIR="/proc/nope")
    assert code == 1
    assert statuses(text)["mpiexec"] == "broken"
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


def test_a_busy_machine_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = iter(
        ["cpu  100 0 0 300 0 0 0 0 0 0\n", "cpu  130 0 0 340 30 0 0 0 0 0\n"]
    )  # 30 ticks of work, 70 of nothing
    stat = tmp_path / "stat"
    monkeypatch.setattr(machine, "_STAT", stat)
    stat.write_text(next(lines))
    monkeypatch.setattr("sp_core.machine.time.sleep", lambda _: stat.write_text(next(lines)))
    assert machine.busy_share() == pytest.approx(0.3)
    monkeypatch.setattr(machine, "_STAT", tmp_path / "absent")
    monkeypatch.setattr("sp_core.machine.time.sleep", lambda _: None)
    assert machine.busy_share() == 0.0
