"""Test launches of several processes.

A launch makes one report for all ranks, and ends in bounded time whatever happens to a rank.
"""

import json
import os
import re
import shutil
import sys
import xml.etree.ElementTree as ET
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import pytest
from kit.failing import assert_told
from studies.commands import output_of, outside
from test_kit_deaths import assert_ended

from sp_core.launch import watch
from sp_core.testing import session

pytestmark = [pytest.mark.mpi_skip, pytest.mark.starts_mpi]  # starts mpiexec itself

TESTS = Path(__file__).parent
KIT = TESTS / "kit"
SECONDS = 100
FAILED = {*range(1, 256)}
"""All exit codes of a command that has failed."""
PYTEST = ("-m", "pytest", "--color=no", "-p", "no:benchmark")


def run(*command: str, codes: Collection[int] = (0,), seconds: float = SECONDS, **env: str) -> str:
    """Run a command, which must end in time with one of these exit codes. Return its output."""
    kept = outside(COLUMNS="200", TERM="dumb")
    kept["HYPOTHESIS_STORAGE_DIRECTORY"] = str(TESTS.parent / ".hypothesis")
    return output_of([sys.executable, *command], KIT, kept | env, seconds, codes)


def launched(ranks: int, *command: str, timeout: int = 60, **how: Any) -> str:
    """Run a Python program on several ranks as `run` does."""
    options = ("-n", str(ranks), "--timeout", str(timeout), "--", "python")
    return run("-m", "sp_core.testing.launch", *options, *command, **how)


InProcess = Callable[..., tuple[int | None, str]]


@pytest.fixture
def pytest_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> InProcess:
    """Run pytest on the small tests in this process."""

    def run_here(*args: str, **env: str) -> tuple[int | None, str]:
        monkeypatch.setattr(session, "current", session.current)
        for name, value in env.items():
            monkeypatch.setenv(name, value)
        monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)
        case = shutil.copy(KIT / "case_small.py", tmp_path)
        alone = ("--import-mode=importlib", "-p", "no:faulthandler", "-c", os.devnull)
        code = pytest.main([*PYTEST[2:], *alone, *args, f"--rootdir={tmp_path}", str(case)])
        return int(code), "".join(capsys.readouterr())

    return run_here


@pytest.mark.every_mpi
def test_one_report_one_result_file_one_exit_code(tmp_path: Path) -> None:
    cache = "-o", f"cache_dir={tmp_path / 'cache'}"
    files = f"--junitxml={tmp_path / 'junit.xml'}", f"--basetemp={tmp_path / 'base'}", *cache
    text = launched(3, *PYTEST, "--with-mpi", "-q", *files, "case_session.py", codes={1})
    assert "the launch was ended" not in text
    assert text.count("short test summary info") == 1
    suite = ET.parse(tmp_path / "junit.xml").getroot().find("testsuite")
    assert suite is not None
    counts = {name: int(suite.attrib[name]) for name in ("tests", "failures", "errors", "skipped")}
    assert counts == {"tests": 11, "failures": 4, "errors": 1, "skipped": 4}
    assert_told(
        text,
        "AssertionError on rank 1 of 2",
        "@example(nprocs=2, n=5)",
        "python -m sp_core.testing.launch -n 3 -- python -m pytest --with-mpi",
        "failed on rank 1 of 3; this is what rank 1 says",
        "only here",
        "Captured stdout call on rank 1",
        "printed by rank 1",
        "the ranks disagree about the outcome of this test: "
        "rank 0: passed, rank 1: skipped, rank 2: passed",
        "worst error over bound: 0.5 in of the session",
        "worst error over bound: 0.25 in of one rank",
    )
    assert "LookupError" not in text
    failed = json.loads((tmp_path / "cache" / "v" / "cache" / "lastfailed").read_text())
    assert len(failed) == 5
    assert re.search(r"\nrank 2: \S*case_session\.py:\d+: AssertionError\n", text)
    counted = (
        r"mpi: 2 tests, \d+ examples \(\+ 3 raw\); examples by ranks \{1: \d+, 2: \d+, 3: \d+\}"
    )
    assert re.search(counted, text)


@pytest.mark.every_mpi
def test_ranks_in_a_step_of_slurm_are_started_without_a_step_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shell that srun has started holds the cores for which a step of MPICH's would wait.

    Slurm's variables in it make the shell look like a rank, for which MPICH's ranks do not start.
    """
    monkeypatch.delenv("HYDRA_LAUNCHER", raising=False)  # CI sets it
    (srun := tmp_path / "srun").write_text("#!/bin/sh\n[ $1 = --version ] || sleep 99\n")
    srun.chmod(0o700)
    here, given = os.uname().nodename, {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    given |= {f"SLURM_{name}": "1" for name in ("JOBID", "JOB_ID", "NNODES", "STEP_NUM_TASKS")}
    given |= {f"SLURM_{name}": here for name in ("NODELIST", "JOB_NODELIST", "STEP_NODELIST")}
    given |= {"SLURM_TASKS_PER_NODE": "2", "SLURM_NTASKS": "2", "SLURM_STEP_ID": "0"}
    given |= {"PMI_RANK": "0", "PMI_SIZE": "1", "PMI_FD": "9", "PMIX_NAMESPACE": "slurm.pmix.7.0"}
    text = launched(2, "-c", "from mpi4py import MPI; print('well')", timeout=20, **given)
    assert text.count("well") == 2, text


@pytest.mark.parametrize(
    ("fault", "cause", "place"),
    [
        (
            "exit",
            r"rank 1 died first: (exit code 1|its exit code is not known)",
            "in the body of test_average",
        ),
        ("loop", r"rank 1 waits for nobody: it is at .*sut\.py", "in Allgatherv"),
    ],
)
@pytest.mark.every_mpi
def test_a_rank_that_is_lost_ends_the_launch(fault: str, cause: str, place: str) -> None:
    command = (*PYTEST, "--with-mpi", "-q", "case_deaths.py")
    how: dict[str, Any] = {"SUT_FAULT": fault, "SP_WATCHDOG_S": "2"}
    text = launched(3, *command, codes=FAILED - {5}, seconds=60, **how)
    told = (
        "the launch was ended: ",
        cause,
        place,
        "---- rank 0: ",
        r"---- rank 2: .*\nlast place: waits for the next example of test_average",
        r"case_deaths\.py::test_average",
        r"test_average\(nprocs=2, n=[789], d=1, seed=0\)",
        "run it again: python -m sp_core.testing.launch -n 3",
    )
    assert [said for said in told if not re.search(said, text)] == [], text
    assert fault != "loop" or text.count("Timeout (0:00:02)!") == 3


@pytest.mark.parametrize(
    ("how", "code", "said"),
    [
        (
            {"CASE_COLLECT": "1"},
            4,
            "the ranks collected different tests, or in another order:\n"
            "  not on all ranks, but on rank 1: ",
        ),
        (
            {"CASE_ENDS": "0"},
            3,
            "the ranks are at different points of the session:\n"
            "  rank 0 is at the end of the session\n"
            "Interrupted: this rank runs no more tests\n"
            "  rank 1 is at tests/kit/case_small.py::test_ordinary setup\n",
        ),
        (
            {"CASE_EXIT": "1"},
            3,
            "  rank 1 is at the end of the session\n_pytest.outcomes.Exit: no licence",
        ),
        (
            {"CASE_EXIT": "0"},
            3,
            "  rank 0 is at the end of the session\n_pytest.outcomes.Exit: no licence\n",
        ),
    ],
    ids=["other tests", "an early end", "an exit of rank 1", "an exit of rank 0"],
)
def test_ranks_whose_sessions_differ_all_end(how: dict[str, str], code: int, said: str) -> None:
    command = (*PYTEST, "--with-mpi", "case_small.py")
    text = launched(2, *command, timeout=20, codes={code}, **how)
    assert text.count(said) == 1, text
    assert "the launch was ended" not in text
    assert ("= FAILURES =" in text) == ("CASE_EXIT" in how)


def test_options_of_the_kit_have_a_heading_of_their_own(pytest_here: InProcess) -> None:
    code, text = pytest_here("--help")
    assert code == 0, text
    assert re.search(r"\ntests on several ranks:\n  --sp-expect-ranks", text)


@pytest.mark.parametrize(
    ("args", "env", "said"),
    [
        (("--with-mpi", "--sp-expect-ranks", "4"), {}, "MPI says that this launch has 1"),
        (("--sp-expect-ranks", "4"), {}, "needs --with-mpi under mpiexec"),
        (("--with-mpi",), {"PMI_SIZE": "2"}, "MPI says that each is alone"),
        (("--with-mpi", "-n", "2"), {}, "pytest-xdist (-n) and --with-mpi cannot be combined"),
        ((), {"PMI_SIZE": "2"}, "or srun started 2 processes, but --with-mpi is missing"),
    ],
)
def test_a_process_that_cannot_be_meant_is_refused(
    pytest_here: InProcess, args: tuple[str, ...], env: dict[str, str], said: str
) -> None:
    code, text = pytest_here(*args, **env)
    assert code == 4, text
    assert said in text


@pytest.mark.parametrize(
    ("ratio", "option", "code"),
    [("0.6", [], 1), ("0.6", ["--sp-max-error-ratio=0.7"], 0)],
)
def test_an_error_too_near_its_bound_in_a_worker_of_xdist_fails_the_session(
    ratio: str, option: list[str], code: int
) -> None:
    command = (*PYTEST, "-n", "1", *option, "case_small.py")
    text = run(*command, codes={code}, CASE_RATIO=ratio)
    assert "threads: 1 tests, 4 examples" in text
    assert f"worst error over bound: {ratio} in of one test" in text
    assert "2 passed" in text


@pytest.mark.every_mpi
def test_a_single_process_may_be_a_launch_that_selects_what_has_ranks() -> None:
    options = ("--only-mpi", "-v", "--sp-expect-ranks", "1")
    text = run(*PYTEST, *options, "case_small.py", SP_PROFILE="explore", SP_EXAMPLES="")
    told = ("mpi: 1 tests, 1 examples (+ 1 raw)", "test_ranks PASSED", "test_ordinary SKIPPED")
    assert_told(text, *told)
    assert re.search(r"seed: \d+ \(again with --hypothesis-seed=\d+\)", text)


def test_the_plugin_does_nothing_where_nobody_uses_it(tmp_path: Path) -> None:
    unused = "{'mpi4py', 'hypothesis.core', 'torch'}"
    program = f"import sys\ndef test_x():\n    assert not {unused} & set(sys.modules)\n"
    (tmp_path / "test_x.py").write_text(program)
    options = ("-q", "-p", "no:hypothesispytest", str(tmp_path))
    text = run(*PYTEST, *options, OMPI_COMM_WORLD_SIZE="2", PMI_SIZE="2")
    assert "sp_core.testing" not in text


def test_a_skip_in_a_body_is_reported_at_the_test(tmp_path: Path) -> None:
    program = "import pytest\nfrom sp_core.testing import spmd\n@spmd(2)\ndef test_x(comm):\n"
    (tmp_path / "test_x.py").write_text(f"{program}    pytest.skip('odd')\n")
    assert "test_x.py:3: odd" in run(*PYTEST, "-q", "-rs", str(tmp_path))


@pytest.mark.parametrize(
    ("program", "codes", "said"),
    [
        (
            "w = MPI.COMM_WORLD; print(f'rank {w.rank}'); w.Barrier(); sys.exit(3)",
            *({3}, "(?s)(?=.*rank 0)(?=.*rank 1)"),
        ),
        ("1 / 0", FAILED, "ZeroDivisionError"),
    ],
)
@pytest.mark.every_mpi
def test_any_program_may_be_launched_and_its_end_is_told(
    program: str, codes: set[int], said: str
) -> None:
    text = launched(2, "-c", f"import sys; from mpi4py import MPI; {program}", codes=codes)
    assert re.search(said, text), text


ENDLESS = """
import time
import pytest
from sp_core.testing import spmd

@pytest.fixture
def endless():
    yield
    while True:
        time.sleep(0.1)

@spmd(2)
def test_x(comm, endless):
    assert comm.size == 3
"""


def test_a_rank_that_hangs_after_a_failure_is_ended_with_its_stacks(tmp_path: Path) -> None:
    """At a failure pytest's faulthandler plugin cancels the process's only timer for stacks."""
    (path := tmp_path / "test_x.py").write_text(ENDLESS)
    command = (*PYTEST, "--with-mpi", str(path))
    # pytest collects within the time of the first phase, also where nothing is compiled yet
    text = launched(2, *command, codes={1}, SP_WATCHDOG_S="2", SP_WATCHDOG_PHASE_S="15")
    assert "a rank has reached its time limit" in text
    assert re.search(r'test_x\.py", line (9|10) in endless', text), text
    assert "SIGALRM" not in text


HANGING = """
import os, sys, time
from mpi4py import MPI

def wait_for_nobody():
    if MPI.COMM_WORLD.rank == 1:
        time.sleep(60)

if __name__ == "__main__":
    os.write(1, f"{os.getpid()} {sys.argv[1:]} {__file__}\\n".encode())  # in one piece
    wait_for_nobody()
    MPI.COMM_WORLD.Barrier()
"""


@pytest.mark.parametrize("way", ["file", "module"])
@pytest.mark.every_mpi
def test_a_program_that_hangs_is_killed_and_its_stacks_are_told(way: str, tmp_path: Path) -> None:
    (tmp_path / "hanging.py").write_text(HANGING)
    program = {
        "file": ["-u", str(tmp_path / "hanging.py")],
        "module": ["-W", "error", "-m", "hanging"],
    }[way]
    paths = os.pathsep.join([str(tmp_path), outside()["PYTHONPATH"]])
    start = ("-m", "sp_core", "run", "-n", "2", "--timeout", "3", "--", "python")
    text = run(*start, *program, "--fast", "7", codes={1}, PYTHONPATH=paths)
    pids = re.findall(rf"(\d+) \['--fast', '7'\] {tmp_path / 'hanging.py'}", text)
    assert len(pids) == 2, text
    assert_ended(pids)
    assert "the launch has not ended after 3 s" in text
    first, second = text.split("---- rank ")[1:]
    assert 'hanging.py", line 12 in <module>' in first
    assert 'hanging.py", line 7 in wait_for_nobody' in second
    assert "watch.py" not in first + second


LEAVING = """
import os, sys, time
from mpi4py import MPI
if (child := os.fork()) == 0:
    if "session" in sys.argv:
        os.setsid()
    if "closed" in sys.argv:
        os.closerange(0, 100)
    time.sleep(100)
    os._exit(0)
open(f"{sys.argv[1]}/{child}", "x").close()  # mpiexec may lose what a rank prints
MPI.COMM_WORLD.Barrier()
if MPI.COMM_WORLD.rank == 1 and "fail" in sys.argv:
    os._exit(7)
MPI.COMM_WORLD.Barrier()
"""


@pytest.mark.parametrize("how", ["", "session", "fail", "closed fail"])
@pytest.mark.every_mpi
def test_processes_that_ranks_leave_are_ended_with_the_launch(how: str, tmp_path: Path) -> None:
    command = ("-c", LEAVING, str(tmp_path), *how.split())
    codes = FAILED if "fail" in how else {0}
    text = launched(2, *command, timeout=90, codes=codes, seconds=60)
    children = [path.name for path in tmp_path.iterdir()]
    assert len(children) == 2, text
    assert_ended(children)


@pytest.mark.every_mpi
def test_a_rank_that_waits_for_the_others_at_its_end_is_told_apart() -> None:
    program = (
        "from mpi4py import MPI\ncomm = MPI.COMM_WORLD\nif comm.rank == 0: comm.recv(source=1)\n"
        "if comm.rank == 2: raise SystemExit(0)"
    )
    text = launched(3, "-c", program, timeout=3, codes={1})
    assert "died first" not in text
    first, *others = text.split("---- rank ")[1:]
    assert '"<string>", line 3 in <module>' in first
    assert [rank for rank in others if f"last place: {watch.ENDED}" not in rank] == []


@pytest.mark.every_mpi
def test_a_rank_killed_in_shared_memory_is_reported_soon_and_leaves_no_file() -> None:
    text = launched(2, str(KIT / "killed.py"), codes=FAILED, seconds=30)
    assert re.search(
        "rank 1 died first: (killed by SIGKILL|its exit code is not known)|signal 9|Killed", text
    )
    mapped = re.findall(r"/dev/shm/\S+", text)
    assert mapped, text
    assert [path for path in mapped if Path(path).exists()] == []
