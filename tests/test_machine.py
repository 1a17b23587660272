"""Test facts about a machine, and programs with a time limit."""

import os
import platform
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from sp_core import machine, transport
from sp_core.launch.bounded import LAUNCH_PROBLEMS, bounded, launch_problem
from sp_core.machine import JOB_SIZES, JOB_VARIABLES, LOCAL_RANKS
from sp_core.transport import named_device

HOSTNAME = "run this and read its error: mpiexec -n 2 hostname"


@pytest.fixture
def limit(tmp_path: Path, substitute: Any) -> Callable[[str, dict[str, str]], None]:
    """Return a function that sets the groups of this process, and the files that limit them."""

    def set_limits(groups: str, files: dict[str, str]) -> None:
        substitute(machine, _CGROUPS=tmp_path, _CGROUP=tmp_path / "cgroup")
        (tmp_path / "cgroup").write_text(groups)
        for name, text in files.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(f"{text}\n")

    return set_limits


@pytest.mark.parametrize(
    ("quota", "cores", "node"),
    [
        ("max 100000", 8, 16),
        ("300000 100000", 3, 3),
        ("290000 100000", 2, 2),
        ("900000 100000", 8, 9),
        ("50000 100000", 1, 1),
        ("300000 none", 8, 16),
        ("", 8, 16),
    ],
)
@pytest.mark.parametrize("group", ["0::/", "0::/outside", "3:cpu,cpuacct:/a\n0::/"])
def test_cores_respect_the_quota_of_a_container(
    group: str,
    quota: str,
    cores: int,
    node: int,
    limit: Any,
    monkeypatch: pytest.MonkeyPatch,
    substitute: Any,
) -> None:
    """This process may use 8 of the machine's 16 cores."""
    files = {"cpu.max": quota}
    if "cpuacct" in group:
        names = (f"cpu,cpuacct/a/cpu.cfs_{name}_us" for name in ("quota", "period"))
        files = dict(zip(names, quota.replace("max", "-1").split(), strict=False))
    limit(f"9:cpuset:/none\n{group}", files if quota else {})
    substitute(os, sched_getaffinity={0: range(8)}.__getitem__, cpu_count=lambda: 16)
    assert (machine.cores(), machine.node_cores()) == (cores, node)
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert machine.node_cores() == 1


@pytest.mark.parametrize(
    ("told", "limits", "memory"),
    [
        ("", {}, 4096),
        ("0::/", {"memory.max": "max"}, 4096),
        ("0::/", {"memory.max": "1000"}, 1000),
        ("0::/", {"memory.max": "5000"}, 4096),
        ("0::/job/step", {"job/step/memory.max": "max", "job/memory.max": "2000"}, 2000),
        ("0::/not/here", {"memory.max": "1000"}, 1000),
        ("5:cpu:/a\n4:memory:/a:b\n0::/", {"memory/a:b/memory.limit_in_bytes": "900"}, 900),
        ("5:cpu:/a\n0::/", {"cpu/a/memory.max": "9", "memory/memory.limit_in_bytes": "8"}, 4096),
    ],
)
def test_memory_is_that_of_the_machine_or_of_the_smallest_container_around(
    told: str, limits: dict[str, str], memory: int, limit: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a container the path may be that of the system outside, which is not there."""
    monkeypatch.setattr(os, "sysconf", {"SC_PHYS_PAGES": 4, "SC_PAGE_SIZE": 1024}.__getitem__)
    limit(told, limits)
    assert machine.memory() == memory


@pytest.mark.parametrize(
    ("lines", "processor", "name"),
    [
        ("flags : a\nmodel name\t: Best 9\nmodel name : Other\n", "", "Best 9"),
        ("model name\t: Caf\udce9\n", "", "Caf\udce9"),  # a byte that is no UTF-8
        ("", "Chip", "Chip"),
        ("", "", platform.machine()),
    ],
)
def test_the_processor_has_the_name_that_the_system_gives(
    lines: str, processor: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cpuinfo").write_bytes(os.fsencode(lines))
    monkeypatch.setattr(machine, "_CPUINFO", tmp_path / "cpuinfo")
    monkeypatch.setattr("sp_core.machine.platform.processor", lambda: processor)
    assert machine.cpu_model() == name


def test_a_library_is_found_among_those_that_are_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    paths = ["/usr/lib/libmpi-best.so.40.30", "/my venv/lib/libmpich.so.12 (deleted)"]
    lines = [f"7f-8f r-xp 00000000 08:01 7   {path}" for path in paths]
    monkeypatch.setattr(machine, "_text", {Path("/proc/self/maps"): "\n".join(lines)}.get)
    assert machine.loaded_library("libmpi") == "/usr/lib/libmpi-best.so.40.30"
    assert machine.loaded_library("libmpich") == "/my venv/lib/libmpich.so.12"
    assert machine.loaded_library("libnone") is None


@pytest.mark.parametrize(
    ("names", "found"),
    [
        ("libmpi_cxx.so.40 libmpi_mpifh.so.40 libmpi.so.40", "libmpi.so.40"),
        ("libmpicxx.so.12 libmpich.so.12", "libmpich.so.12"),  # of Debian and Ubuntu
        ("libmpi_gtl_cuda.so.0 libmpi_gnu_123.so.12", "libmpi_gnu_123.so.12"),  # of Cray
        ("libmpi_ibm_mpifh.so.3 libmpi_ibm.so.3", "libmpi_ibm.so.3"),
        ("libmpi-5f3a.so.40", "libmpi-5f3a.so.40"),
        ("libmpifort.so.12 libmpi_usempif08.so.40 libmpi_java.so.40 libempich.so", None),
    ],
)
def test_the_library_of_mpi_is_found_under_the_names_that_distributors_give_it(
    names: str, found: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = [f"7f-8f r-xp 00000000 08:01 7   /lib/{name}" for name in names.split()]
    monkeypatch.setattr(machine, "_text", {Path("/proc/self/maps"): "\n".join(lines)}.get)
    assert machine.mpi_library() == (found and f"/lib/{found}")


def test_the_number_of_a_node_is_that_of_its_host_and_boot(substitute: Any) -> None:
    substitute(machine, node_name=lambda: "host", _text={machine._BOOT: "7-8"}.get)
    assert machine.node_number() == 193650345241001  # computed with b2sum


LONE = {"SLURM_STEP_NUM_TASKS": "1", "PMI_RANK": "0", "PMI_SIZE": "1", "PMIX_NAMESPACE": "s.0"}
"""Slurm sets these for a step of one task; PMI_* or PMIX_* if MpiDefault is pmi2 or pmix."""


@pytest.mark.parametrize(
    ("variables", "job", "tasks", "local"),
    [
        ({}, False, 1, 7),
        *(({name: "4"}, True, 1, 7) for name in JOB_VARIABLES),
        *(({name: "4"}, name.startswith("SLURM"), 4, 7) for name in JOB_SIZES),
        ({"SLURM_LOCALID": "0"}, False, 1, 7),
        ({"SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_ID": "0", "SLURM_LOCALID": "0"}, False, 1, 7),
        ({"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_ID": "0", "SLURM_LOCALID": "0"}, True, 2, 0),
        *(({name: "3", "SLURM_LOCALID": "0"}, False, 1, 3) for name in LOCAL_RANKS[:-1]),
        ({"MV2_COMM_WORLD_LOCAL_RANK": "3", "SLURM_LOCALID": "0"}, False, 1, 3),
        ({"PMI_LOCAL_RANK": "3", "SLURM_LOCALID": "0"}, False, 1, 3),
        ({"SLURM_STEP_NUM_TASKS": "4", "OMPI_COMM_WORLD_SIZE": "2"}, True, 2, 7),
        ({"SLURM_STEP_NUM_TASKS": "4", "PMI_SIZE": "2"}, True, 2, 7),
        ({"SLURM_STEP_NUM_TASKS": "4", "PMI_SIZE": ""}, True, 4, 7),
        ({"SLURM_STEP_NUM_TASKS": "1", "PMI_SIZE": "4"}, False, 4, 7),
        ({"SLURM_STEP_NUM_TASKS": "1", "PMI_SIZE": "4", "PMI_RANK": "0"}, True, 4, 7),
        (LONE, False, 1, 7),
        (LONE | {"MPI_LOCALRANKID": "0"}, True, 1, 0),
        (LONE | {"OMPI_COMM_WORLD_RANK": "0"}, True, 1, 7),
    ],
)
def test_a_launcher_says_whether_this_is_a_job_its_ranks_and_the_rank_on_the_node(
    variables: dict[str, str], job: bool, tasks: int, local: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch script, a shell by srun and what they start inherit that they are task 0 of one.

    In a shell that srun has started, mpiexec may start fewer ranks: its number counts.
    """
    monkeypatch.setattr(os, "environ", variables)
    assert (machine.in_job(), machine.started_tasks()) == (job, tasks)
    assert machine.local_rank(7) == local
    by_slurm = not any(name in variables for name in LOCAL_RANKS[:-1])
    assert machine.local_rank(7, tasks + 1) == (7 if by_slurm else local)


@pytest.mark.parametrize(
    ("variables", "left"),
    [
        (LONE | {"SLURM_STEP_ID": "0", "SLURM_STEPID": "0"}, {"SLURM_STEP_NUM_TASKS"}),
        (LONE | {"MPI_LOCALRANKID": "0"}, {*LONE, "MPI_LOCALRANKID"}),
        (LONE | {"SLURM_STEP_NUM_TASKS": "2"}, {*LONE}),
        ({"PMIX_RANK": "0"}, {"PMIX_RANK"}),
    ],
    ids=["a shell", "mpiexec in a shell", "two tasks", "no step"],
)
def test_only_a_process_that_is_no_rank_loses_the_variables_of_its_step(
    variables: dict[str, str], left: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = {"PMIX_MCA_gds": "hash", "PMIX_INSTALL_PREFIX": "/opt/pmix", "PATH": ""}
    monkeypatch.setattr(os, "environ", variables | kept)
    machine.leave_step()
    assert {*os.environ} - {"PYTEST_CURRENT_TEST"} == left | {*kept}


@pytest.mark.parametrize(
    ("script", "limit", "answer", "ending"),
    [
        ("echo said; echo told >&2; echo $X; exit 3", {}, (3, "said\ntold\nso\n"), 3),
        (r"printf '\377'", {}, (0, "\ufffd"), 0),
        (
            "echo said; (sleep 3; echo on) >$PIPE & wait; sleep 3",
            {"seconds": 1.0},
            (None, "said\n"),
            -9,
        ),
        (
            "echo said; setsid sh -c 'sleep 3; echo on' >$PIPE; sleep 3",
            {"seconds": 1.0},
            (None, "said\n"),
            -9,
        ),
    ],
)
def test_a_program_and_what_it_started_are_ended_after_its_time(
    script: str,
    limit: Any,
    answer: tuple[int | None, str],
    ending: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The limit is 60 s unless `seconds` is passed. Output until then is returned.

    The scripts sleep at their end, so that they do not end by themselves if their child is killed
    before them.
    """
    os.mkfifo(tmp_path / "pipe")
    pipe = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    env = {**os.environ, "X": "so", "PIPE": str(tmp_path / "pipe")}
    waited: list[tuple[float | None, subprocess.Popen[bytes]]] = []

    class Told(subprocess.Popen[bytes]):
        def wait(self, timeout: float | None = None) -> int:
            waited.append((timeout, self))
            return super().wait(timeout)

    monkeypatch.setattr(subprocess, "Popen", Told)
    assert bounded(["sh", "-c", script], env=env, **limit) == answer
    assert waited[0][0] == limit.get("seconds", 60)
    assert waited[0][1].returncode == ending
    os.set_blocking(pipe, True)
    with os.fdopen(pipe) as written:
        assert written.read() == ""


def test_a_program_whose_wait_is_interrupted_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupted(subprocess.Popen[bytes]):
        def wait(self, timeout: float | None = None) -> int:
            if timeout:
                started.append(self)
                raise KeyboardInterrupt
            return super().wait(timeout)

    started: list[Interrupted] = []
    monkeypatch.setattr(subprocess, "Popen", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        bounded(["sleep", "60"])
    assert [each.returncode for each in started] == [-9]


def test_a_child_imports_from_the_working_directory_only_if_this_process_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is asked in a directory that is there, and in one that was deleted."""
    (gone := tmp_path / "gone").mkdir()
    monkeypatch.chdir(gone)
    for first, flags in (("", []), (str(gone), []), (str(tmp_path), ["-P"])):
        monkeypatch.setattr(sys, "path", [first, *sys.path])
        assert machine.python() == [sys.executable, *flags]
    gone.rmdir()
    assert machine.python() == [sys.executable, "-P"]


TWO = "two ranks did not start within 60 s"


@pytest.mark.parametrize(
    ("code", "output", "wanted"),
    [
        (None, "", (TWO, HOSTNAME)),
        (3, "a\n b\n\n", ("exit code 3:  b", HOSTNAME)),
        (3, " \n", ("exit code 3: it printed nothing", HOSTNAME)),
        *((None, f"a {part} b", problem) for part, problem in LAUNCH_PROBLEMS.items()),
        (0, " ".join(LAUNCH_PROBLEMS), LAUNCH_PROBLEMS["run as root"]),
    ],
)
def test_a_launch_that_fails_has_a_problem_and_a_remedy(
    code: int | None, output: str, wanted: tuple[str, str]
) -> None:
    assert launch_problem(code, output) == wanted


def test_processes_that_a_task_of_slurm_starts_have_devices_of_their_own(substitute: Any) -> None:
    """They inherit the task's number on its node. Here each of two tasks starts four."""
    substitute(os, environ={"SLURM_STEP_NUM_TASKS": "2", "SLURM_LOCALID": "0"})
    substitute(transport, count_devices=lambda kind: 4)
    substitute(torch.accelerator, current_device_index=lambda: 0)
    assert {str(named_device("cuda", rank)) for rank in range(8)} == {"cuda:0"}
    substitute(torch.distributed, is_initialized=lambda: True, get_world_size=lambda: 8)
    assert [named_device("cuda", rank).index for rank in range(8)] == [*range(4), *range(4)]
