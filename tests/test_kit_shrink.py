"""Test the shrinking of examples that kill their launch, by an engine outside of the launch.

The results that are kept of a lost launch are tested, too.
"""

import os
import signal
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, call

import pytest
import torch
from hypothesis import strategies as st
from kit.failing import Alike, failure_of
from studies.commands import output_of, outside

from sp_core.launch import results, watch
from sp_core.testing import given, session, shrink_crash
from sp_core.testing.carriers import patiently
from sp_core.testing.outcome import FINISHED, Kind
from sp_core.testing.plan import (
    EXAMPLE,
    RESULT,
    UNASKED,
    Example,
    Result,
    Spec,
    feed,
    hand_over,
    is_fed,
    taken,
)
from sp_core.testing.shrink_crash import Jobs, Lost

pytestmark = pytest.mark.mpi_skip


def died(example: Example) -> Result:
    """Answer as a launch that dies of every example with two ranks or more and n >= 7."""
    if len(example.ranks) > 1 and example.values["n"] >= 7:
        raise Lost("rank 1 died first: killed by SIGSEGV", 1)
    return Result([FINISHED] * len(example.ranks), {})


@given(n=st.integers(0, 100), d=st.integers(0, 9))
def crashes(comm: Any, n: int, d: int) -> None:
    raise AssertionError("no example is run in this process")


@pytest.mark.parametrize("losses", [2, shrink_crash.LOSSES])
def test_an_example_that_a_launch_dies_of_is_shrunk(
    monkeypatch: pytest.MonkeyPatch, losses: int
) -> None:
    """At most `losses` launches are lost. No example is run twice."""
    jobs, started = Jobs(4, [], losses), Mock()
    asked = started.return_value.ask
    asked.side_effect = died
    monkeypatch.setattr(shrink_crash, "Job", started)
    monkeypatch.setattr(session, "current", session.Session(ranks=4, attempt=jobs.attempt))
    text = failure_of(crashes)
    assert "RankCrashed on rank 1 of 2: rank 1 died first: killed by SIGSEGV" in text or losses == 2
    assert "to keep this example: @example(nprocs=2, n=7, d=0)" in text or losses == 2
    assert "RankFailure[RankCrashed]" in text
    assert asked.call_count == len({str(each) for each in asked.call_args_list})
    assert jobs.launches == started.call_count in (jobs.lost, jobs.lost + 1)
    assert jobs.lost == 2 if losses == 2 else 0 < jobs.lost < losses


@pytest.mark.parametrize(
    "make",
    [
        lambda n: torch.full((2, 2), n, dtype=torch.bfloat16),
        lambda n: torch.tensor(complex(n, 1)).conj(),
        lambda n: torch.eye(2).mul(n).to_sparse(),
        lambda n: torch.nn.Parameter(torch.full((3,), float(n))),
    ],
    ids=["plain", "conjugate", "sparse", "parameter"],
)
def test_an_example_with_new_tensors_of_the_same_values_is_the_same(
    make: Callable[[int], torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = Jobs(2, [])
    monkeypatch.setattr(jobs, "_ask", asked := Mock())
    kept = [Example((0, 1), {"x": make(n)}) for n in (1, 1, 2)]  # at different addresses
    for example in kept:
        jobs.attempt(Spec(crashes, {}, crashes, {}), example)
    assert [each.args[1] for each in asked.call_args_list] == [kept[0], kept[2]]


def test_a_launch_tries_the_examples_that_it_is_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(watch.RUN_DIR, str(tmp_path))
    assert not is_fed()
    (tmp_path / UNASKED).touch()
    assert is_fed()
    with ThreadPoolExecutor() as pool:
        fed = pool.submit(feed, lambda example: Result([FINISHED] * example.values["n"], {}))
        for n in range(3):
            hand_over(tmp_path / EXAMPLE, Example((0, 1), {"n": n}))
            (result,) = patiently(lambda: taken(tmp_path / RESULT))
            assert len(result.outcomes) == n
        assert not is_fed()
        hand_over(tmp_path / EXAMPLE, None)
        fed.result()
    assert list(tmp_path.iterdir()) == []


def phase_of(when: str, outcome: str) -> SimpleNamespace:
    """Return a stand-in for pytest's report of one phase of a test."""
    failed = outcome in ("failed", "error")
    told = {"outcome": "failed" if failed else outcome, "failed": failed, "when": when}
    return SimpleNamespace(
        **told, duration=0.5, longreprtext=f"{when} \x1b{outcome}\n\ta\x00é\u2028\n"
    )


CALL, TEARDOWN = "call failed\n\taé\n", "teardown error\n\taé\n"
CASES: dict[str, tuple[list[str], str, str, str, list[Any]]] = {
    "test_x.py::a": (["passed"] * 3, "passed", "test_x", "a", []),
    "tests/test_x.py::a[std::sum]": (["passed"], "passed", "tests.test_x", "a[std::sum]", []),
    "tests/[gpu]/test_x.py::a": (["passed"], "passed", "tests.[gpu].test_x", "a", []),
    "tests/test_x.py::b": (
        *(["passed", "failed", "rerun"], "failed", "tests.test_x", "b"),
        [("failure", "call failed", CALL)],
    ),
    "tests/test_x.py::c": (
        *(["passed", "passed", "error"], "error", "tests.test_x", "c"),
        [("error", "teardown error", TEARDOWN)],
    ),
    "tests/test_x.py::d": (
        *(["passed", "failed", "error"], "error", "tests.test_x", "d"),
        [("error", "call failed", CALL + TEARDOWN)],
    ),
    "tests/a/test_x.py::C::D::e": (
        *(["skipped"], "skipped", "tests.a.test_x.C.D", "e"),
        [("skipped", "", None)],
    ),
    "tests/a.txt": (
        *(["passed", "skipped", "passed"], "skipped", "tests.a.txt", "tests/a.txt"),
        [("skipped", "", None)],
    ),
}
"""Phases of tests, and what is told of each test: its outcome, class, name, and what is in it.

In a JUnit file a test has these: tag, message and text.
"""


@pytest.mark.parametrize("is_last_under_way", [True, False])
def test_what_is_known_of_a_lost_launch_becomes_a_junit_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_last_under_way: bool
) -> None:
    """The file's path may have `~` and variables, as in pytest."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("ONE", "one")
    results.Ledger(tmp_path, "other.xml").pytest_runtest_logstart("test_of_an_earlier_session")
    ledger = results.Ledger(tmp_path, "~/new/$ONE/junit.xml", "a suite")
    last, where = ("the launch",) * 2, "the launch"
    cases = dict(CASES)
    if is_last_under_way:
        last, where = ("tests.test_x", "f"), "tests/test_x.py::f"
        cases[where] = ["passed"], "error", *last, []
    for name, (phases, *_) in cases.items():
        ledger.pytest_runtest_logstart(name)
        for phase, outcome in zip(("setup", "call", "teardown"), phases, strict=False):
            ledger.pytest_runtest_logreport(phase_of(phase, outcome))
        if name != where:
            ledger.pytest_runtest_logfinish()
    with (tmp_path / results.FILE).open("a") as file:
        file.write('{"test": "tests/test_x.py::g"')  # an incomplete line, written as the rank died
    assert results.told(tmp_path) == [
        "tests that had ended: 3 passed, 2 skipped, 1 failed, 2 error",
        *(f"  {CASES[f'tests/test_x.py::{name}'][1]}: tests/test_x.py::{name}" for name in "bcd"),
        *([f"test under way: {where}"] if is_last_under_way else []),
    ]
    results.write_junit(tmp_path, "rank 1 died first")
    (suite,) = ET.parse(tmp_path / "new" / "one" / "junit.xml").getroot()
    expected = {"name": "a suite", "tests": "9", "failures": "1", "errors": "3", "skipped": "2"}
    assert suite.attrib == expected
    died = ("error", "rank 1 died first", "rank 1 died first")
    found = [
        (case.attrib, [(bad.tag, bad.get("message"), bad.text) for bad in case]) for case in suite
    ]
    assert found == [
        *(
            ({"classname": where, "name": name, "time": f"{0.5 * len(phases):.3f}"}, children)
            for phases, _, where, name, children in CASES.values()
        ),
        ({"classname": last[0], "name": last[1], "time": "0.000"}, [died]),
    ]


def test_nothing_is_written_where_nothing_was_asked_for(tmp_path: Path) -> None:
    for _ in range(2):  # before the session has begun, and afterwards
        assert results.told(tmp_path) == []
        results.write_junit(tmp_path, "")
        results.Ledger(tmp_path, None)
    assert [path.name for path in tmp_path.iterdir()] == [results.FILE]


@pytest.fixture
def launch(monkeypatch: pytest.MonkeyPatch) -> Mock:
    """Replace launches by stand-ins, which print a text and make a report of a reason."""
    found = Mock()
    found.configure_mock(**{"trouble.return_value": "", "ended.return_value": None})
    found.report.side_effect, found.deaths.first.return_value = "report: {}".format, 3

    def started(*arguments: Any, output: int) -> Mock:
        os.write(output, b"no such test\xc3")
        found.arguments = arguments
        return found

    monkeypatch.setattr(shrink_crash, "Launch", started)
    return found


@pytest.mark.parametrize("asked", [True, False])
@pytest.mark.parametrize("late", [True, False])
@pytest.mark.parametrize(
    ("trouble", "ended", "reason"),
    [
        (["", "it hangs"], None, "it hangs"),
        (["", "", ""], 4, "a rank died (mpiexec: exit code 4)"),
        (["it hangs"], 0, "it hangs"),
    ],
)
def test_an_example_is_blamed_only_for_a_launch_that_has_asked_for_one(
    trouble: list[str],
    ended: int | None,
    reason: str,
    launch: Mock,
    monkeypatch: pytest.MonkeyPatch,
    *,
    asked: bool,
    late: bool,
) -> None:
    """A launch that asks for none in time is ended with its stacks."""
    launch.trouble.side_effect = trouble
    launch.ended.side_effect = [*[None] * (len(trouble) - 1), ended]
    job = shrink_crash.Job(2, "tests/test_x.py::test_y", ["-x"])
    now = job.begin + shrink_crash.START_SECONDS + late
    monkeypatch.setattr(shrink_crash, "time", Mock(monotonic=lambda: now))
    words = ["python", "-m", "pytest", "--with-mpi", "-x", "tests/test_x.py::test_y"]
    folder = launch.arguments[3]
    assert launch.arguments == (2, words, (), folder)
    if asked:
        (folder / UNASKED).unlink()
    with pytest.raises(Lost if asked else shrink_crash.NotStarted) as caught:
        job.ask(Example((0, 1), {"n": 3}))
    is_ended = late and not asked and not trouble[0]
    reason = "no example was asked for within 600 s" if is_ended else reason
    text = f"the launch has ended before it asked for an example:\nno such test�\nreport: {reason}"
    assert caught.value.args == ((f"report: {reason}", 3) if asked else (text,))
    assert launch.trouble.call_args == call(shrink_crash.POLL_SECONDS)
    assert launch.deaths.dump.called == is_ended
    job.close()


@pytest.mark.parametrize("patience", [None, 0.5])
def test_a_launch_answers_and_may_end_by_itself(patience: float | None, launch: Mock) -> None:
    """It gets a time in which to end; then it is ended, and its folder is removed."""
    job, answer = shrink_crash.Job(2, "test_x.py", []), Result([FINISHED], {})
    folder = launch.arguments[3]

    def late(_: float) -> str:
        if launch.trouble.call_count == 3:
            hand_over(folder / RESULT, answer)
        return ""

    def told_to_end(seconds: float) -> None:
        assert taken(folder / EXAMPLE) == (None,)
        raise subprocess.TimeoutExpired("mpiexec", seconds)

    launch.trouble.side_effect, launch.process.wait.side_effect = late, told_to_end
    assert job.ask(Example((0,), {"n": 3})) == answer
    assert taken(folder / EXAMPLE) == (Example((0,), {"n": 3}),)
    job.close(*([] if patience is None else [patience]))
    launch.process.wait.assert_called_once_with(patience or shrink_crash.END_SECONDS)
    launch.end.assert_called_once_with()
    assert not folder.exists()


def test_each_test_has_a_launch_which_ends_before_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """An example runs once. A launch that is lost gets no time to end, and is not closed again."""
    did, jobs = Mock(), Jobs(4, ["-x"], losses=1)
    done = Result([FINISHED], {})
    did.start.return_value.ask.side_effect = [done, done, Lost("died", 9)]
    monkeypatch.setattr(shrink_crash, "Job", did.start)
    monkeypatch.setattr(session, "current", session.Session())
    jobs.pytest_configure(Mock(getoption={}.get))
    assert (session.current.ranks, session.current.attempt) == (4, jobs.attempt)
    examples = [Example((2, 1), {"n": Alike(n)}) for n in range(4)]
    specs: list[Any] = [SimpleNamespace(test_id=name) for name in "ab"]
    for _ in range(2):
        found = [jobs.attempt(specs[n > 0], examples[n]) for n in range(4)]
    assert [result.outcomes for result in (*found[:2], found[3])] == [
        *[[FINISHED]] * 2,
        [FINISHED] * 2,
    ]
    crash, woken = found[2].outcomes
    assert (crash.kind, crash.type, crash.message, woken.kind) == (
        *(Kind.FAIL, "RankCrashed", "died"),
        Kind.WOKEN,
    )
    jobs.pytest_sessionfinish()
    job = call.start()
    assert did.mock_calls == [
        *(call.start(4, "a", ["-x"]), job.ask(examples[0]), job.close()),
        *(call.start(4, "b", ["-x"]), job.ask(examples[1]), job.ask(examples[2])),
        job.close(patience=0.0),
    ]
    terminal = Mock()
    jobs.pytest_terminal_summary(terminal)
    terminal.write_line.assert_called_once_with("2 launches of 4 ranks, 1 of them lost")


@pytest.mark.parametrize("losses", [None, 3])
def test_the_words_of_the_command_reach_pytest(
    losses: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    main, jobs = Mock(return_value=1), Mock()
    monkeypatch.setattr(pytest, "main", main)
    monkeypatch.setattr(shrink_crash, "Jobs", jobs)
    more = [] if losses is None else ["--losses", str(losses)]
    assert shrink_crash.main(["-n", "4", *more, "test_x.py", "--", "-k", "y"]) == 1
    jobs.assert_called_once_with(4, ["-k", "y"], losses or 25)
    (words,), plugins = main.call_args
    assert words[2:] == ["-k", "y", "test_x.py"]
    assert plugins == {"plugins": [jobs.return_value]}


@pytest.mark.parametrize(
    ("control", "workers", "said"),
    [(Mock(), None, "only the launches use MPI"), (None, 4, "add -- -n 0")],
)
def test_the_search_refuses_what_would_start_no_launch(
    control: Mock | None, workers: int | None, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "current", session.Session(control=control))
    config: Any = Mock(getoption={"numprocesses": workers}.get)
    with pytest.raises(pytest.UsageError, match=said):
        Jobs(4, []).pytest_configure(config)


@pytest.mark.parametrize(
    ("test", "number", "code"),
    [
        ("@pytest.mark.mpi\n@given(n=st.just(1))\ndef test_x(comm, n): ...", 0, 0),
        ("@given(n=st.just(1))\ndef test_x(comm, n): ...", signal.SIGTERM, 2),
        ("def test_x(): ...", 0, 5),
    ],
)
def test_a_search_that_starts_no_launch_or_gets_a_signal_has_not_passed(
    test: str,
    number: int,
    code: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A signal that would end the search alone first ends its launch."""

    def ask(example: Example) -> Result:
        os.kill(os.getpid(), number)
        return Result([FINISHED] * len(example.ranks), {})

    imports = "import pytest\nfrom hypothesis import strategies as st\n"
    imports += "from sp_core.testing import given\n"
    path = tmp_path / f"{tmp_path.name}.py"  # a name of its own: modules stay in this process
    path.write_text(imports + test)
    monkeypatch.setattr(session, "current", session.current)
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)
    monkeypatch.setattr(shrink_crash, "Job", started := Mock())
    started.return_value.ask.side_effect = ask
    alone = ("--import-mode=importlib", "-p", "no:faulthandler", "-c", os.devnull)
    words = ["-n", "2", str(path), "--", *alone, f"--rootdir={tmp_path}"]
    assert shrink_crash.main(words) == code
    assert started.called == started.return_value.close.called == (code != 5)
    assert ("no example was sent to a launch" in capsys.readouterr().err) == (code == 5)


def test_the_search_is_a_program(tmp_path: Path) -> None:
    command = (sys.executable, "-m", "sp_core.testing.shrink_crash", "--help")
    assert "number of ranks of each launch" in output_of(command, tmp_path, outside(), 60)


def test_a_first_line_that_is_incomplete_asks_for_nothing(tmp_path: Path) -> None:
    (tmp_path / results.FILE).write_text('{"xml": "junit.xml", "suite": "')
    assert results.read(tmp_path) == ({"xml": None}, {})
