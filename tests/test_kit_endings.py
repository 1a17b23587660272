"""Test when a launch is ended, its report and its exit code, without a process."""

import os
import signal
import subprocess
import threading
import time
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import ANY, Mock, call

import pytest

from sp_core.launch import command as command_module, results, signals, watch as watch_module
from sp_core.launch.command import Launch


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Return a stand-in for the module `time`: `now` is the time."""
    found = SimpleNamespace(now=100.0)
    found.monotonic = lambda: found.now
    monkeypatch.setattr(command_module, "time", found)
    return found


@pytest.fixture
def launch(
    clock: SimpleNamespace, tmp_path: Path, substitute: Any, request: pytest.FixtureRequest
) -> Any:
    """Return a launch of three ranks, of which mpiexec is simulated and no process is there.

    The parameter is the command, by default "tool -n".
    """
    process = Mock(pid=os.getpid())
    process.poll.return_value = None
    substitute(subprocess, Popen=Mock(return_value=process))
    substitute(
        command_module,
        Deaths=Mock,
        find_mpiexec=lambda: "mpiexec",
        environment=lambda folder: {"folder": str(folder)},
    )
    command = getattr(request, "param", "tool -n").split()
    made = Launch(3, command, [], tmp_path, 50.0)
    made.deaths = Mock(ranks=3, dead={})
    made.deaths.failed.return_value, made.deaths.first.return_value = False, None
    return made


LIMIT = "the launch has not ended after 50 s; --timeout sets another limit"
LATE = "a rank has failed, and the others go on"
HANG, DIED = "a rank has reached its time limit", "a rank died (mpiexec: exit code {})"
STATES: list[tuple[dict[str, Any], str]] = [
    ({}, ""),
    ({"hang": ""}, ""),
    ({"hang": "stacks", "code": 0}, HANG),
    ({"after": 50.0}, ""),
    ({"after": 50.5}, LIMIT),
    ({"after": 50.5, "session": True}, LIMIT),
    ({"after": 99.0, "code": 0}, ""),
    ({"failed": True, "after": 6.0}, ""),
    ({"failed": True, "after": 6.0, "since": 2.0}, ""),
    ({"failed": True, "after": 6.5, "since": 2.0}, LATE),
    ({"failed": True, "after": 6.5, "since": 2.0, "session": True}, ""),
    ({"failed": True, "after": 6.5, "since": 2.0, "code": 1}, ""),
    *(({"session": True, "code": code}, DIED.format(code)) for code in (0, 1)),
    ({"session": True, "code": 1, "result": True}, ""),
    ({"session": True}, ""),
    ({"cause": "killed by SIGKILL", "code": 1}, DIED.format(1)),
    ({"cause": "killed by SIGKILL", "code": 0}, ""),
    ({"cause": "killed by SIGKILL"}, ""),
    ({"cause": "exit code 1", "code": 1}, ""),
    ({"code": 1}, ""),
]


@pytest.mark.parametrize(("state", "reason"), STATES)
def test_a_launch_is_ended_for_these_reasons(
    state: dict[str, Any], reason: str, launch: Any, clock: SimpleNamespace, tmp_path: Path
) -> None:
    """`since`: when the launcher saw the failure first; it has looked once more in between."""
    launch.process.poll.return_value = state.get("code")
    launch.deaths.failed.return_value = state.get("failed", False)
    files = {"hang": "rank1.hang", "session": "started.txt", "result": "result.txt"}
    for name in files.keys() & state.keys():
        (tmp_path / files[name]).write_text(str(state[name]))
    if "cause" in state:
        launch.deaths.dead[2] = state["cause"]
        launch.deaths.first.return_value = 2
    seen = [state["since"], state["since"] + 0.5] if "since" in state else []
    for after in (*seen, state.get("after", 0.0)):
        clock.now = 100.0 + after
        found = launch.trouble(0.25)
    assert found == reason
    launch.deaths.look.assert_called_with(0.25)
    dumps = launch.deaths.dump.call_count
    assert dumps == bool(reason and "code" not in state)


@pytest.mark.parametrize(
    ("launch", "dead", "told", "after", "code", "expected"),
    [
        ("python x.py", 3, 0, 4.0, None, None),
        ("python x.py", 3, 0, 4.5, None, 0),
        ("python x.py", 3, 7, 4.5, None, 7),
        ("python x.py", 2, 0, 4.5, None, None),
        ("python x.py", 3, 0, 4.5, 5, 5),
        ("tool", 3, 0, 4.5, None, None),
    ],
    indirect=["launch"],
)
def test_mpiexec_may_run_a_moment_longer_than_its_ranks(
    dead: int,
    told: int,
    after: float,
    code: int | None,
    expected: int | None,
    launch: Any,
    clock: SimpleNamespace,
) -> None:
    """A tool may run on after the Python processes that it started as ranks."""
    clock.now += 1.0
    assert launch.ended() is None
    launch.deaths.dead.update(dict.fromkeys(range(dead), "a cause"))
    launch.deaths.exit_code.return_value = told
    launch.process.poll.return_value = code
    clock.now += after
    assert launch.ended() == expected


def test_a_file_that_appears_in_shared_memory_is_searched_for_at_once_and_again(
    launch: Any, clock: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Files of other programs appear all the time."""
    monkeypatch.setattr(command_module, "SHARED_MEMORY", tmp_path)
    monkeypatch.setattr(command_module, "shared_files", search := Mock(return_value=set()))
    searches = []
    for poll in range(7):
        (tmp_path / f"{'mpich_shm_' * (poll == 3)}{poll}").touch()
        launch.trouble(0.0)
        clock.now += 1 / 64
        searches.append(search.call_count)
    assert searches == [1, 1, 1, 2, 3, 3, 3]


def test_files_are_searched_for_at_most_a_fiftieth_of_the_time(
    launch: Any, clock: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A search takes 0.001 s, then 0.1 s. All files that were found once go with the launch."""
    begins: list[float] = []
    monkeypatch.setattr(command_module, "SHARED_MEMORY", tmp_path / "none")

    def search(leader: int) -> set[Path]:
        begins.append(clock.now)
        clock.now += 0.001 if len(begins) < 3 else 0.1
        (tmp_path / f"shared-{len(begins)}").touch()
        return {tmp_path / f"shared-{len(begins)}"}

    monkeypatch.setattr(command_module, "shared_files", search)
    while len(begins) < 5:
        launch.trouble(0.0)
        clock.now += 1 / 64
    pauses = [after - before for before, after in pairwise(begins)]
    assert pauses == [pytest.approx(each, abs=0.02) for each in (0.26, 0.26, 5.01, 5.01)]
    killed = Mock()
    monkeypatch.setattr(command_module, "kill_session", killed)
    launch.end()
    killed.assert_called_once_with(os.getpid(), tmp_path)
    launch.process.wait.assert_called_once_with()
    launch.deaths.close.assert_called_once_with()
    assert [*tmp_path.glob("shared-*")] == []


@pytest.mark.parametrize("flying", ["", "test_x(n=3)"])
def test_a_report_tells_the_suspects_then_each_rank_then_the_example(
    flying: str, launch: Any, tmp_path: Path
) -> None:
    launch.deaths.suspects.return_value = ["rank 1 died"]
    launch.deaths.story.side_effect = "story {}".format
    if flying:
        (tmp_path / watch_module.IN_FLIGHT).write_bytes(flying.encode() + b"\xc3")
    results.Ledger(tmp_path, None).pytest_runtest_logstart("test_x")
    told = [f"example in flight: {flying}\ufffd"] if flying else []
    head, *lines = launch.report("the reason").splitlines()
    assert head.strip("= ") == "the launch was ended: the reason"
    assert lines == [
        "rank 1 died",
        *(f"story {rank}" for rank in range(3)),
        *told,
        "tests that had ended: none",
        "test under way: test_x",
    ]


LEFT = "all ranks have ended; the processes that they have left are ended, too\n"


@pytest.mark.parametrize(
    ("reasons", "ended", "files", "code", "printed"),
    [
        (["", ""], [0, 0], {}, 0, "suspects\n" * 0),
        (["", ""], [3, 3], {}, 3, "suspects\n"),
        (["", ""], [-9, -9], {}, 137, "suspects\na signal has killed mpiexec: 9\n"),
        (["", ""], [3, 3], {"started": ""}, 3, ""),
        (["", ""], [0, 0], {"started": "", "result": "4"}, 4, ""),
        (["", ""], [3, 3], {"started": "", "result": "0"}, 3, ""),
        (["", "", ""], [None, 0, 0], {}, 0, ""),
        (["late"], [None], {}, 1, "report of late\n"),
        (["late"], [0], {"result": "2"}, 1, "report of late\n"),
        (["late"], [5], {"result": "2"}, 5, "report of late\n"),
        (["", "late"], [0, 0], {}, 1, "report of late\n"),
        (["", "", "late"], [None, None, None], {}, 1, "report of late\n"),
        (["", ""], [0, 0, "poll"], {}, 0, LEFT),
        (["", ""], [1, 1, "poll"], {}, 1, LEFT),
    ],
)
def test_a_launch_has_the_exit_code_of_its_session_else_of_mpiexec(
    reasons: list[str],
    ended: list[Any],
    files: dict[str, str],
    code: int,
    printed: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """`ended`: what mpiexec's exit code is at each look; "poll" says that its process runs on."""
    made, written = Mock(run_dir=tmp_path), Mock()
    made.process.poll.return_value = None if "poll" in ended else 0
    made.trouble.side_effect, made.ended.side_effect = reasons, ended
    made.report.side_effect = "report of {}".format
    made.deaths.suspects.return_value = ["suspects"]
    for name, text in files.items():
        (tmp_path / f"{name}.txt").write_text(text)
    constructed = Mock(return_value=made)
    monkeypatch.setattr(command_module, "Launch", constructed)
    monkeypatch.setattr(results, "write_junit", written)
    assert command_module.run(2, ["tool"], timeout=0.5, mpi_args=["-x"]) == code
    assert capsys.readouterr().err == printed
    reports = [each for each in reasons if each]
    assert written.mock_calls == [call(tmp_path, f"report of {each}") for each in reports]
    made.end.assert_called_once_with()
    assert constructed.call_args.args[:3] == (2, ["tool"], ["-x"])
    assert constructed.call_args.args[4] == 0.5


def test_a_report_that_cannot_be_printed_is_in_the_junit_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, written = Mock(run_dir=tmp_path), Mock()
    made.trouble.return_value, made.report.return_value = "late", "report"
    monkeypatch.setattr(command_module, "Launch", Mock(return_value=made))
    monkeypatch.setattr(results, "write_junit", written)
    monkeypatch.setattr("sys.stderr", Mock(write=Mock(side_effect=BrokenPipeError)))
    with pytest.raises(BrokenPipeError):
        command_module.run(2, ["tool"], timeout=0.5)
    written.assert_called_once()
    made.end.assert_called_once_with()


@pytest.mark.parametrize("while_it", ["begins", "is ended"])
@pytest.mark.parametrize("number", [signal.SIGINT, *signals.ENDING])
def test_a_signal_waits_until_a_launch_has_begun_or_its_ranks_are_ended(
    number: signal.Signals,
    while_it: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Else a second Ctrl-C leaves ranks that nobody watches. A thread of torch may receive it.

    The results of tests so far are printed, and are in the JUnit file.
    """
    waited, over = [], threading.Event()
    threading.Thread(target=over.wait, args=(60,)).start()
    made = Mock(run_dir=tmp_path)
    made.trouble.side_effect = KeyboardInterrupt
    results.Ledger(tmp_path, str(tmp_path / "junit.xml")).pytest_runtest_logstart("test_x.py::y")

    def interrupted(*_: object, **__: object) -> Mock:
        os.kill(os.getpid(), number)
        time.sleep(0.1)
        waited.append(number)
        over.set()
        return made

    made.end.side_effect = interrupted if while_it == "is ended" else None
    begin = interrupted if while_it == "begins" else Mock(return_value=made)
    monkeypatch.setattr(command_module, "Launch", begin)
    # a shell ignores SIGINT and SIGQUIT in commands that it runs in the background
    usual: Any = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
    with signals.handled([number], usual), pytest.raises((KeyboardInterrupt, SystemExit)):
        command_module.run(1, ["tool"], timeout=1.0, leave_seconds=2.5)
    made.deaths.pass_on.assert_called_once_with(ANY, 2.5, made.process.poll)
    assert waited == [number]
    assert made.trouble.called == (while_it == "is ended")
    made.end.assert_called_once_with()
    assert "test under way: test_x.py::y" in capsys.readouterr().err
    assert 'error message="the launch was interrupted"' in (tmp_path / "junit.xml").read_text()


def test_of_the_signals_that_were_held_back_the_first_is_handled() -> None:
    came = list[int]()
    with signals.handled((signal.SIGINT, signal.SIGTERM), lambda number, _: came.append(number)):
        with signals.signals_held_back():
            signal.raise_signal(signal.SIGTERM)
            signal.raise_signal(signal.SIGINT)
            assert came == []
        assert came == [signal.SIGTERM]
