"""Launches of several processes: one report for all ranks, and an end in bounded time whatever happens to a rank."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from sp_core.launch import command as command_module
from sp_core.launch import deaths, watch
from sp_core.launch.command import SESSION_DIR, SESSION_DIR_HERE, environment
from sp_core.testing.plugin import pytest_addoption

pytestmark = [pytest.mark.mpi_skip, pytest.mark.starts_mpi]  # starts mpiexec itself

TESTS = Path(__file__).parent
KIT = TESTS / "kit"
PLUGIN = (
    []
    if any(e.value == "sp_core.testing.plugin" for e in entry_points(group="pytest11"))
    else ["-p", "sp_core.testing.plugin"]
)
SECONDS = 100
PATHS = [str(TESTS), str(TESTS.parent), *filter(None, [os.environ.get("PYTHONPATH")])]


def run(command: list[str], **env: str) -> subprocess.CompletedProcess[str]:
    """Run a command; output and errors come as one text."""
    path = os.pathsep.join(PATHS)
    clean = {
        name: value for name, value in os.environ.items() if not name.startswith(("SP_", "PYTEST_"))
    }
    return subprocess.run(
        [sys.executable, *command],
        env={
            **clean,
            "PYTHONPATH": path,
            "COLUMNS": "200",
            "TERM": "dumb",
            "HYPOTHESIS_STORAGE_DIRECTORY": str(TESTS.parent / ".hypothesis"),
            **env,
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=SECONDS,
        cwd=KIT,
    )


def pytest_on(ranks: int, *args: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run pytest under mpiexec."""
    launch = [
        "-m",
        "sp_core.testing.launch",
        "-n",
        str(ranks),
        "--timeout",
        str(SECONDS - 10),
        "--",
    ]
    return run(
        [*launch, "python", "-m", "pytest", "--color=no", "-p", "no:benchmark", *PLUGIN, *args],
        **env,
    )


def pytest_alone(*args: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run pytest in one process."""
    return run(["-m", "pytest", "--color=no", "-p", "no:benchmark", *PLUGIN, *args], **env)


def test_one_report_one_result_file_one_exit_code(tmp_path: Path) -> None:
    result = pytest_on(
        3,
        "--with-mpi",
        "-q",
        f"--junitxml={tmp_path / 'junit.xml'}",
        f"--basetemp={tmp_path / 'base'}",
        "case_session.py",
    )
    text = result.stdout
    assert result.returncode == 1, text
    assert "the launch was ended" not in text
    assert text.count("short test summary info") == 1
    suite = ET.parse(tmp_path / "junit.xml").getroot().find("testsuite")
    assert suite is not None
    counts = {name: int(suite.attrib[name]) for name in ("tests", "failures", "errors", "skipped")}
    assert counts == {"tests": 8, "failures": 4, "errors": 1, "skipped": 1}
    assert "AssertionError on rank 1 of 2" in text
    assert "@example(nprocs=2, n=5)" in text
    assert "python -m sp_core.testing.launch -n 3 -- python -m pytest --with-mpi" in text
    assert "failed on rank 1 of 3; this is what rank 1 says" in text
    assert "only here" in text
    assert (
        "the ranks disagree about the outcome of this test: rank 0: passed, rank 1: skipped, rank 2: passed"
        in text
    )
    assert "rank 0: xpassed, rank 1: xfailed, rank 2: xpassed" in text
    assert "LookupError" not in text
    assert "worst error over bound: 0.5 in of the session" in text
    assert re.search(
        r"mpi: 2 tests, \d+ examples \(\+ 3 raw\); examples by ranks \{1: \d+, 2: \d+, 3: \d+\}",
        text,
    )


@pytest.mark.parametrize(
    ("fault", "cause", "place"),
    [
        (
            "exit",
            r"rank 1 died first: (exit code 1|how is not known here)",
            "in the body of test_average",
        ),
        (
            "kill",
            r"rank 1 died first: (killed by SIGKILL|how is not known here)",
            "in the body of test_average",
        ),
        ("loop", r"rank 1 waits for nobody: it is at .*sut\.py", "in Allgatherv"),
    ],
)
def test_a_rank_that_is_lost_ends_the_launch(fault: str, cause: str, place: str) -> None:
    begin = time.monotonic()
    result = pytest_on(3, "--with-mpi", "-q", "case_deaths.py", SUT_FAULT=fault, SP_WATCHDOG_S="3")
    text = result.stdout
    assert result.returncode not in (0, 5), text
    assert time.monotonic() - begin < 60
    assert "the launch was ended: " in text
    assert re.search(cause, text), text
    assert place in text
    assert "---- rank 0: " in text
    assert "---- rank 2: " in text
    assert "case_deaths.py::test_average" in text
    assert re.search(r"test_average\(nprocs=2, n=[789], d=1\)", text)
    assert "run it again: python -m sp_core.testing.launch -n 3" in text
    if fault == "loop":
        assert "sut.py" in text
        assert text.count("Timeout (0:00:03)!") == 3


def test_a_launch_of_another_size_is_refused() -> None:
    result = pytest_on(2, "--with-mpi", "--sp-expect-ranks", "3", "case_small.py")
    assert result.returncode == 4, result.stdout
    assert (
        result.stdout.count("--sp-expect-ranks 3 was given, but MPI says that this launch has 2")
        == 1
    ), result.stdout


def test_single_processes_are_refused_where_ranks_are_expected() -> None:
    for with_mpi, said in (
        (["--with-mpi"], "this launch has 1"),
        ([], "needs --with-mpi under mpiexec"),
    ):
        result = pytest_alone(*with_mpi, "--sp-expect-ranks", "4", "case_small.py")
        assert result.returncode == 4, result.stdout
        assert said in result.stdout


def test_a_launch_that_is_not_told_so_is_refused() -> None:
    result = pytest_on(2, "case_small.py")
    assert result.returncode == 4, result.stdout
    assert "mpiexec started 2 processes, but --with-mpi is missing" in result.stdout


def test_ranks_that_collect_different_tests_are_refused() -> None:
    result = pytest_on(2, "--with-mpi", "case_small.py", CASE_COLLECT="1")
    assert result.returncode == 4, result.stdout
    assert "the ranks collected different tests" in result.stdout
    assert "not on all ranks, but on rank 1: " in result.stdout


def test_xdist_is_refused() -> None:
    result = pytest_alone("--with-mpi", "-n", "2", "case_small.py")
    assert result.returncode == 4, result.stdout
    assert "pytest-xdist (-n) and --with-mpi cannot be combined" in result.stdout


def test_only_mpi_selects_what_has_ranks_and_the_seed_is_told() -> None:
    result = pytest_on(
        2, "--only-mpi", "-v", "--sp-expect-ranks", "2", "case_small.py", SP_PROFILE="explore"
    )
    assert result.returncode == 0, result.stdout
    assert "test_ranks PASSED" in result.stdout
    assert "test_ordinary SKIPPED" in result.stdout
    assert re.search(r"seed: \d+ \(again with --hypothesis-seed=\d+\)", result.stdout)


@pytest.mark.parametrize(
    ("ratio", "option", "code"),
    [("0.6", [], 1), ("nan", [], 1), ("0.6", ["--sp-max-error-ratio=0.7"], 0)],
)
def test_an_error_too_near_its_bound_fails_the_session(
    ratio: str, option: list[str], code: int
) -> None:
    result = pytest_alone(*option, "case_small.py", CASE_RATIO=ratio)
    assert result.returncode == code, result.stdout
    assert f"worst error over bound: {ratio} in of one test" in result.stdout
    assert "2 passed" in result.stdout


@pytest.mark.parametrize(("ratio", "code"), [("0.4", 0), ("0.6", 1)])
def test_what_workers_of_xdist_have_seen_is_in_the_report(ratio: str, code: int) -> None:
    result = pytest_alone("-n", "2", "case_small.py", CASE_RATIO=ratio)
    assert result.returncode == code, result.stdout
    assert "threads: 1 tests, 4 examples" in result.stdout
    assert f"worst error over bound: {ratio} in of one test" in result.stdout


def test_a_single_process_may_be_a_launch() -> None:
    result = pytest_alone("--with-mpi", "--sp-expect-ranks", "1", "case_small.py", CASE_TIER="mpi")
    assert result.returncode == 0, result.stdout
    assert "mpi: 1 tests, 1 examples (+ 1 raw)" in result.stdout


def test_the_plugin_does_nothing_where_nobody_uses_it(tmp_path: Path) -> None:
    (tmp_path / "test_x.py").write_text(
        "import sys\ndef test_x():\n    assert not {'mpi4py', 'hypothesis.core'} & set(sys.modules)\n"
    )
    result = pytest_alone(
        "-q", "-p", "no:hypothesispytest", str(tmp_path), OMPI_COMM_WORLD_SIZE="2", PMI_SIZE="2"
    )
    assert result.returncode == 0, result.stdout
    assert "sp_core.testing" not in result.stdout


def test_another_plugin_may_have_the_common_options() -> None:
    result = pytest_alone(
        "-p",
        "common_options",
        "--device=tpu",
        "case_small.py",
        PYTHONPATH=os.pathsep.join([str(KIT), *PATHS]),
    )
    assert result.returncode == 0, result.stdout
    assert "2 passed" in result.stdout


def test_each_option_of_the_plugin_has_its_prefix() -> None:
    parser = pytest.Parser(_ispytest=True)
    pytest_addoption(parser)
    names = [
        name for group in parser._groups for option in group.options for name in option.names()
    ]
    assert len(names) == 6
    assert [name for name in names if not name.startswith("--sp-")] == []
    assert [name for name in parser._inidict if not name.startswith("sp_")] == []


def test_launches_share_no_folder_of_the_library_unless_one_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(SESSION_DIR, raising=False)
    monkeypatch.delenv(SESSION_DIR_HERE, raising=False)
    assert environment(tmp_path)[SESSION_DIR_HERE] == str(tmp_path)
    monkeypatch.setenv(SESSION_DIR_HERE, "/here")
    assert environment(tmp_path)[SESSION_DIR_HERE] == "/here"
    monkeypatch.delenv(SESSION_DIR_HERE)
    monkeypatch.setenv(SESSION_DIR, "/everywhere")
    assert environment(tmp_path)[SESSION_DIR] == "/everywhere"
    assert SESSION_DIR_HERE not in environment(tmp_path)


def launched(program: str, *options: str) -> subprocess.CompletedProcess[str]:
    """Run a program that is no test session."""
    return run(["-m", "sp_core.testing.launch", "-n", "2", *options, "--", "python", "-c", program])


def test_mpiexec_is_the_one_beside_python_else_that_on_the_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command_module.sys, "executable", str(tmp_path / "python"))
    monkeypatch.setattr(command_module.shutil, "which", lambda name: None)
    with pytest.raises(FileNotFoundError, match="Install one of the wheels"):
        command_module.find_mpiexec()
    monkeypatch.setattr(command_module.shutil, "which", lambda name: f"/path/{name}")
    assert command_module.find_mpiexec() == "/path/mpiexec"
    (tmp_path / "mpiexec").touch()
    assert command_module.find_mpiexec() == str(tmp_path / "mpiexec")


@pytest.mark.parametrize(
    ("mapped", "name"),
    [
        ("/dev/shm/sm_segment.host.0", "sm_segment.host.0"),
        ("/dev/shm/mpich_shm_1", "mpich_shm_1"),
        ("/dev/shm/folder/mpich_shm_1", None),
        ("/dev/shm/mpich_shm_1/other", None),
        ("/dev/shm/mpich_shm_1 (deleted)", None),
        ("/dev/shm/somebody", None),
        ("/tmp/mpich_shm_1", None),
        ("", None),
    ],
)
def test_files_of_an_mpi_library_in_shared_memory_are_known_by_name(
    mapped: str, name: str | None
) -> None:
    found = deaths.mpi_file(f"7f00-7f01 rw-s 00000000 00:1a 42    {mapped}".rstrip())
    assert found == (None if name is None else Path("/dev/shm") / name)


def test_other_programs_may_be_launched() -> None:
    result = launched("from mpi4py import MPI; print(f'rank {MPI.COMM_WORLD.rank}')")
    assert (result.returncode, sorted(re.findall(r"rank \d", result.stdout))) == (
        0,
        ["rank 0", "rank 1"],
    )  # lines may run together
    assert launched("import sys; sys.exit(3)").returncode == 3


def test_a_launch_that_takes_too_long_is_killed_with_all_its_processes(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    program = (
        f"import os, time; open({str(pids)!r}, 'a').write(f'{{os.getpid()}}\\n'); time.sleep(60)"
    )
    begin = time.monotonic()
    result = launched(program, "--timeout", "3")
    assert result.returncode == 1
    assert "the launch has not ended after 3 s" in result.stdout
    assert time.monotonic() - begin < 20
    for pid in pids.read_text().split():
        assert (
            not Path(f"/proc/{pid}").exists()
            or "Z" in Path(f"/proc/{pid}/stat").read_text().split()[2]
        )


HANGING = """
import os, sys, time
from mpi4py import MPI

def wait_for_nobody():
    if MPI.COMM_WORLD.rank == 1:
        time.sleep(60)

if __name__ == "__main__":
    os.write(1, f"{sys.argv[1:]} {__file__}\\n".encode())  # in one piece
    wait_for_nobody()
    MPI.COMM_WORLD.Barrier()
"""


@pytest.mark.parametrize("way", ["file", "module"])
def test_the_stacks_of_a_plain_program_that_hangs_are_told(way: str, tmp_path: Path) -> None:
    (tmp_path / "hanging.py").write_text(HANGING)
    program = {
        "file": ["-u", str(tmp_path / "hanging.py")],
        "module": ["-W", "error", "-m", "hanging"],
    }[way]
    paths = os.pathsep.join([str(tmp_path), *PATHS])
    result = run(
        [
            "-m",
            "sp_core",
            "run",
            "-n",
            "2",
            "--timeout",
            "4",
            "--",
            "python",
            *program,
            "--fast",
            "7",
        ],
        PYTHONPATH=paths,
    )
    assert result.returncode == 1, result.stdout
    assert result.stdout.count(f"['--fast', '7'] {tmp_path / 'hanging.py'}") == 2, result.stdout
    assert "the launch has not ended after 4 s" in result.stdout
    first, second = result.stdout.split("---- rank ")[1:]
    assert 'hanging.py", line 12 in <module>' in first
    assert 'hanging.py", line 7 in wait_for_nobody' in second
    assert "watch.py" not in first + second


@pytest.mark.parametrize("end", ["pass", "raise SystemExit(0)"])
def test_a_rank_that_waits_for_the_others_at_its_end_is_told_apart(end: str) -> None:
    program = f"from mpi4py import MPI\ncomm = MPI.COMM_WORLD\nif comm.rank == 0: comm.recv(source=1)\n{end}"
    result = run(
        ["-m", "sp_core", "run", "-n", "2", "--timeout", "4", "--", "python", "-c", program]
    )
    assert result.returncode == 1, result.stdout
    assert "died first" not in result.stdout
    first, second = result.stdout.split("---- rank ")[1:]
    assert '"<string>", line 3 in <module>' in first
    assert f"last place: {watch.ENDED}" in second


def test_what_a_plain_program_dies_of_is_told() -> None:
    result = launched(
        "from mpi4py import MPI; import os, time; time.sleep(1); os.kill(os.getpid(), 9 * MPI.COMM_WORLD.rank)"
    )
    assert result.returncode != 0, result.stdout
    assert re.search(
        "rank 1 died first: (killed by SIGKILL|how is not known here)|signal 9|Killed",
        result.stdout,
    ), result.stdout
    result = launched("import time; 1 / 0")
    assert result.returncode != 0
    assert "ZeroDivisionError" in result.stdout


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("hostname -s", "hostname -s"),
        ("python -V", "PYTHON -V"),
        ("python a.py -m b", "PYTHON WATCH a.py -m b"),
        ("/opt/python3.11 -uX dev -W error -m a -c", "/opt/python3.11 -uX dev -W error -m a -c"),
        (
            "/opt/python3.11 -u -X dev -W error -m a -c",
            "/opt/python3.11 -u -X dev -W error WATCH -m a -c",
        ),
        ("python3 -c pass", "PYTHON WATCH -c pass"),
        ("pythonic -c pass", "pythonic -c pass"),
        ("python -", "PYTHON -"),
    ],
)
def test_python_programs_are_watched(command: str, expected: str) -> None:
    names = {"PYTHON": sys.executable, "WATCH": watch.__file__}
    assert command_module.watched(command.split()) == [
        names.get(word, word) for word in expected.split()
    ]


def test_a_rank_killed_in_shared_memory_is_reported_soon_and_leaves_no_file() -> None:
    begin = time.monotonic()
    result = run(
        [
            "-m",
            "sp_core.testing.launch",
            "-n",
            "2",
            "--timeout",
            "60",
            "--",
            "python",
            str(KIT / "killed.py"),
        ]
    )
    assert time.monotonic() - begin < 30
    assert result.returncode != 0, result.stdout
    assert re.search("signal 9|SIGKILL|Killed", result.stdout), result.stdout
    mapped = re.findall(r"/dev/shm/\S+", result.stdout)
    assert mapped, result.stdout
    assert [path for path in mapped if Path(path).exists()] == []
