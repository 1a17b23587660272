"""Test which processes and files of the system belong to a launch, and how a process has ended."""

import mmap
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock, call

import pytest
from studies.commands import outside
from test_kit_deaths import assert_ended, wait_for

from sp_core.launch import deaths
from sp_core.launch.deaths import shared_files


def test_files_in_shared_memory_that_a_process_has_mapped_are_found() -> None:
    path = Path(os.fsdecode(b"/dev/shm/mpich_shm_\xd0%d" % os.getpid()))  # a name that is no UTF-8
    try:
        with path.open("w+b") as file:
            file.truncate(mmap.PAGESIZE)
            with mmap.mmap(file.fileno(), mmap.PAGESIZE):
                assert path in shared_files(os.getpid())
        assert path not in shared_files(os.getpid())
    finally:
        path.unlink()


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
    line = f"7f00-7f01 rw-s 00000000 00:1a 42    {mapped}".rstrip()
    other = "7f01-7f02 r--p 00000000 00:1a 43    /dev/shm/mpich_shm_2 (deleted)"
    found = deaths._SHARED.findall(f"{other}\n{line}\n{other}\n")
    assert found == ([] if name is None else [f"/dev/shm/{name}"])


@pytest.mark.parametrize("command", ["exit 3", "kill -SEGV $$", "true"])
def test_the_kernel_knows_how_a_child_has_ended(command: str) -> None:
    """Before its parent asks, and since Linux 6.15 also afterwards; of the living it knows none."""
    child = subprocess.Popen(["sh", "-c", f"read line; {command}"], stdin=subprocess.PIPE)
    pidfd = deaths._LIBC.syscall(deaths._PIDFD_OPEN, child.pid, 0)
    expected = {"exit 3": "exit code 3", "true": "exit code 0"}.get(command, "killed by SIGSEGV")
    version = [int(number) for number in re.findall(r"\d+", os.uname().release)[:2]]
    try:
        assert deaths._status_of(pidfd) is None
        assert child.stdin is not None
        child.stdin.close()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert deaths._cause(child.pid, pidfd) == expected
        child.wait()
        after = expected if version >= [6, 15] else "its exit code is not known"
        assert deaths._cause(child.pid, pidfd).startswith(after)
    finally:
        os.close(pidfd)
        child.kill()
        child.wait()


@pytest.fixture
def family(tmp_path: Path) -> Iterator[dict[str, int]]:
    """Return a leader with a child and, in a session of its own, a grandchild; two more processes.

    The two are not of the leader's session. SP_RUN_DIR of the "orphan" names `tmp_path`. The name
    of the grandchild is no UTF-8: the system has cut it inside a letter.
    """
    name = tmp_path / "a) T (b1234567\u0431"
    name.symlink_to(shutil.which("sleep") or "")
    program = f"""
import os, subprocess
outer = subprocess.Popen(["sh", "-c", "'{name}' 60; true"], start_new_session=True)
print(os.getpid(), outer.pid, flush=True)
outer.wait()
"""
    marks = {"orphan": str(tmp_path), "stranger": f"{tmp_path}x"}
    started = {
        name: subprocess.Popen(["sleep", "60"], env={**os.environ, "SP_RUN_DIR": mark})
        for name, mark in marks.items()
    }
    leader = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert leader.stdout is not None
    with leader.stdout as said:
        _, outer = map(int, said.readline().split())
    children = Path(f"/proc/{outer}/task/{outer}/children")
    wait_for(lambda: children.read_text().split())
    inner = int(children.read_text())
    wait_for(lambda: Path(f"/proc/{inner}/comm").read_bytes() == b"a) T (b1234567\xd0\n")
    wait_for(lambda: deaths.stat(inner)[:1] == ["S"])
    yield {"leader": leader.pid, "outer": outer, "inner": inner} | {
        name: one.pid for name, one in started.items()
    }
    for pid in (outer, inner):  # the outer ends when the inner does
        os.kill(pid, signal.SIGKILL)
    leader.wait(20)
    for one in started.values():
        one.kill()
        one.wait()


def test_all_processes_of_a_launch_are_killed_and_no_others(
    family: dict[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here `kill` writes down what it is told: a wrong id might be that of any process."""
    leader, outer, inner = (family[name] for name in ("leader", "outer", "inner"))
    assert deaths.stat(inner)[:2] == ["S", str(outer)]
    assert deaths.stat(leader)[3] == str(leader)
    assert deaths.stat(1 << 30) == []
    assert deaths.processes_of(leader) == {leader, outer, inner}
    killed, late = Mock(), [{leader, outer, inner}, {leader, outer, inner, 7}]
    with monkeypatch.context() as patch:
        patch.setattr(os, "kill", killed.kill)
        patch.setattr(os, "killpg", killed.killpg)
        deaths.kill_session(leader, tmp_path)
        patch.setattr(deaths, "processes_of", lambda _: late.pop(0) if late else set())
        patch.setattr(deaths, "_marked", lambda _: {8})
        killed.kill.side_effect = ProcessLookupError
        before = len(killed.mock_calls)
        deaths.kill_session(leader, tmp_path)
    first, second = killed.mock_calls[:before], killed.mock_calls[before:]
    for calls, others in ((first, [family["orphan"]]), (second, [7, 8])):
        assert calls[-1] == call.killpg(leader, signal.SIGKILL)
        expected = [call.kill(pid, signal.SIGKILL) for pid in (leader, outer, inner, *others)]
        assert sorted(calls[:-1]) == sorted(expected)


SAVING = """
import os, signal, sys, time
folder, number, rank = sys.argv[1], int(sys.argv[2]), os.environ.get("OMPI_COMM_WORLD_RANK")
is_first = (rank or os.environ["PMI_RANK"]) == "0"
signal.signal(number, signal.default_int_handler if is_first else signal.SIG_IGN)
try:
    open(f"{folder}/{os.getpid()}", "x").close()
    time.sleep(60)
except KeyboardInterrupt:
    time.sleep(0.5)
    open(f"{folder}/saved", "x").close()
"""


@pytest.mark.every_mpi
@pytest.mark.starts_mpi
@pytest.mark.mpi_skip
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ranks_handle_a_signal_to_the_launcher_before_they_are_killed(
    number: signal.Signals, tmp_path: Path
) -> None:
    """Rank 1 ignores the signal, and is killed soon."""
    python = "env", "--default-signal=INT", sys.executable  # a shell in the background ignores it
    start = (*python, "-m", "sp_core", "run", "-n", "2", "--", "python", "-c", SAVING)
    with subprocess.Popen([*start, str(tmp_path), str(int(number))], env=outside()) as launcher:
        try:
            wait_for(lambda: len([*tmp_path.iterdir()]) == 2)
            pids = [path.name for path in tmp_path.iterdir()]
            launcher.send_signal(number)
            assert launcher.wait(30) == 128 + number
        finally:
            launcher.terminate()
    assert (tmp_path / "saved").exists()
    assert_ended(pids)


TYPED = "from mpi4py import MPI; MPI.COMM_WORLD.rank or print(input() + '!')"
TERMINAL = "import pty, sys; sys.exit(pty.spawn(sys.argv[1:]) >> 8)"
"""A program that runs a command in a terminal, where it types what the program reads."""


@pytest.mark.every_mpi
@pytest.mark.starts_mpi
@pytest.mark.mpi_skip
def test_rank_0_reads_what_is_typed_at_a_terminal() -> None:
    start = (sys.executable, "-m", "sp_core", "run", "-n", "2", "--", "python", "-c", TYPED)
    done = subprocess.run(
        (sys.executable, "-c", TERMINAL, *start),
        input=b"hello\n",
        env=outside(),
        stdout=subprocess.PIPE,
        timeout=60,
        check=True,
    )
    assert done.stdout.count(b"hello!") == 1
