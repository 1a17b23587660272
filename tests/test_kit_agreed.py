"""Test how the sessions of all ranks become one; the values of other ranks are simulated."""

import contextlib
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import ANY, Mock, call

import pytest
from kit.failing import driven

from sp_core import failing
from sp_core.launch import watch
from sp_core.testing import agreed
from sp_core.testing.agreed import Ranks
from sp_core.testing.session import Session, Tally

pytestmark = pytest.mark.mpi_skip  # the other ranks are simulated

POINT = "the end of collection"
ORDER = (
    "All ranks have the same tests, in different orders. If pytest-randomly orders them, pass "
    "-p no:randomly or one --randomly-seed. If pytest.mark.parametrize gets a set, give it a list."
)


@pytest.fixture
def kit(substitute: Any) -> Mock:
    """Replace what changes this process by stand-ins, whose calls are written down in order."""
    found = Mock(ENDED=watch.ENDED, STARTED=watch.STARTED, RESULT=watch.RESULT)
    substitute(agreed, watch=found, requests=found.requests, find_shared_gpu=found.find_shared_gpu)
    substitute(failing, hooked=False)
    return found


def ranks_of(folder: Path, rank: int, *others: Any) -> Any:
    """Return the plugin of one rank, without its constructor; `others` are the others' values."""

    def gather(value: Any) -> list[Any]:
        return [*others[:rank], value, *others[rank:]]

    made = object.__new__(Ranks)
    vars(made).update(
        rank=rank,
        size=1 + len(others),
        config=SimpleNamespace(option=SimpleNamespace(), cache=None),
        control=SimpleNamespace(gather=gather),
        _session=Session(),
        _watch=Mock(directory=folder),
        _lost=False,
        _complaints=[],
        _stdout=sys.stdout,
    )
    return made


PASSED, SKIPPED, ODD = ("passed", ""), ("skipped", "why"), ("skipped", "why else")
WRONG, OTHER, EMPTY = ("failed", "a\n b \n\n"), ("failed", "c\nd\n \n"), ("failed", " \n")
WHOLE = ("failed", "rank 0 has the whole report\n")


@pytest.mark.parametrize(
    ("reports", "text"),
    [
        ([PASSED] * 3, ""),
        ([WRONG] * 3, ""),
        ([SKIPPED, ODD], ""),
        ([PASSED, SKIPPED, PASSED], "disagree"),
        ([PASSED, WRONG, SKIPPED], "a\n b \n\n\n\nfailed on rank 1 of 3; this is what rank 1 says"),
        (
            [WRONG, PASSED, OTHER],
            "a\n b \n\n\n\nfailed on rank 0, 2 of 3; this is what rank 0 says\nrank 2: d",
        ),
        ([OTHER, EMPTY, WRONG, WHOLE], "c\nd\n \n\nrank 1: failed\nrank 2:  b "),
    ],
)
def test_the_first_rank_that_fails_explains_the_test(
    reports: list[tuple[str, str]], text: str, tmp_path: Path
) -> None:
    found = ranks_of(tmp_path, 0, *reports[1:])._judged(reports)
    said = ", ".join(f"rank {rank}: {word}" for rank, (word, _) in enumerate(reports))
    disagrees = f"the ranks disagree about the outcome of this test: {said}"
    assert found == (disagrees if text == "disagree" else text)


@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_at_different_points_of_the_session_end_it(tmp_path: Path, rank: int) -> None:
    same: Any = (POINT, [], 7)
    complaint: Any = ("a test", ["why:\nx"], 8)
    assert ranks_of(tmp_path, rank, same, same)._everyone(POINT, 6) == [
        *[7] * rank,
        6,
        *[7] * (2 - rank),
    ]
    lost = ranks_of(tmp_path, rank, same, complaint)
    with pytest.raises(pytest.exit.Exception) as caught:
        lost._everyone(POINT, 6)
    points = [f"  rank {n} is at {POINT}" for n in (0, 1)]
    head = "the ranks are at different points of the session:"
    assert str(caught.value).split("\n") == [head, *points, "  rank 2 is at a test", "why:", "x"]
    assert caught.value.returncode is None  # with one, pytest would not show the failures
    assert lost._lost


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("others", "only"),
    [
        (["a", "b", "c"], None),
        (["a", "c", "b"], {}),
        (["b"], {"mine": ["a", "c"]}),
        ([*"abc", *"1234567"], {"other": [*"12345"]}),
    ],
)
def test_ranks_that_collect_other_tests_are_refused(
    others: list[str], only: dict[str, list[str]] | None, rank: int, tmp_path: Path
) -> None:
    """Rank 0 says which tests are not on all ranks, and what each rank could not collect."""
    plugin = ranks_of(tmp_path, rank, (POINT, [], (others, ["its error"])))
    session = SimpleNamespace(items=[SimpleNamespace(nodeid=name) for name in "abc"])
    refused = contextlib.nullcontext() if only is None else pytest.raises(pytest.UsageError)
    caught: Any
    with refused as caught:
        try:
            raise KeyError("an import")
        except KeyError:
            plugin.pytest_collection_finish(session)
    if only is None:
        return
    told = ["the ranks collected different tests, or in another order:"]
    for number, who in enumerate(("mine", "other") if rank == 0 else ("other", "mine")):
        error = "its error" if who == "other" else plugin._complaints[0]
        told += [f"rank {number} {error}"]
        told += [f"  not on all ranks, but on rank {number}: {name}" for name in only.get(who, [])]
    if not only:
        told += [ORDER]
    assert plugin._complaints[0].startswith("left collection:\nTraceback")
    assert caught.value.args == (("\n".join(told),) if rank == 0 else ())


def test_what_a_rank_could_not_do_is_kept_for_the_report(tmp_path: Path, kit: Mock) -> None:
    plugin = ranks_of(tmp_path, 1)
    for failed in (True, False):
        report = SimpleNamespace(failed=failed, nodeid="test_x.py", longreprtext="why")
        plugin.pytest_collectreport(report)
    plugin.pytest_internalerror(KeyError("odd"))
    with pytest.raises(pytest.exit.Exception) as caught:
        pytest.exit("stop")
    plugin.pytest_keyboard_interrupt(caught)
    told = ["could not collect test_x.py:\nwhy", "'odd'", "_pytest.outcomes.Exit: stop"]
    assert plugin._complaints == told
    for nodeid in ("tests", ""):
        plugin.pytest_collectstart(SimpleNamespace(nodeid=nodeid))
    plugin.pytest_runtest_logstart("test_x")
    notes = [call.note("collects tests")] * 2 + [call.note("in test_x")]
    assert kit.mock_calls == [each for note in notes for each in (note, call.progress())]


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("place", "expected", "said"),
    [
        (POINT, pytest.exit.Exception, "(?s)start of the session.*in use"),
        ("an error at the start of the session", OSError, "^the port is in use$"),
    ],
)
def test_an_error_at_the_start_of_the_session_reaches_all_ranks(
    place: str, expected: type[BaseException], said: str, rank: int, tmp_path: Path
) -> None:
    plugin = ranks_of(tmp_path, rank, (place, [], None))
    with pytest.raises(expected, match=said):
        driven(plugin.pytest_sessionstart(), OSError("the port is in use"))


def item_of(*, marked: bool) -> Any:
    """Return the item of a test, which may be expected to fail."""
    marks = {"xfail": pytest.mark.xfail} if marked else {}
    return SimpleNamespace(nodeid="test_x", get_closest_marker=marks.get)


@pytest.mark.parametrize(
    ("mine", "is_expected", "other", "outcome", "stays"),
    [
        ("passed", False, "passed", "passed", True),
        ("passed", False, "failed", "failed", False),
        ("passed", False, "xfailed", "failed", False),
        ("passed", True, "xpassed", "passed", True),
        ("skipped", True, "xfailed", "skipped", True),
        ("skipped", True, "skipped", "failed", False),
        ("failed", True, "failed", "failed", True),
    ],
)
def test_a_report_fails_on_every_rank_or_on_none(
    mine: str,
    other: str,
    outcome: str,
    tmp_path: Path,
    kit: Mock,
    *,
    is_expected: bool,
    stays: bool,
) -> None:
    """A report that stays is that of this rank. Ranks that are lost exchange nothing."""
    item, call_of = item_of(marked=is_expected), Mock()
    for lost in (False, True):
        report = SimpleNamespace(outcome=mine, longreprtext="", longrepr="own", when="call")
        report.sections = [("Captured log call", "mine")]
        said = [("Captured stdout call", "theirs")] if other == "failed" else []
        if is_expected:
            report.wasxfail = "reason"
        plugin = ranks_of(tmp_path, 0, ("test_x call", [], ((other, ""), said, "", False)))
        plugin._lost = lost
        found = driven(plugin.pytest_runtest_makereport(item, call_of), report)
        assert found is report
        assert found.outcome == (mine if lost else outcome)
        assert (found.longrepr == "own", hasattr(found, "wasxfail")) == (
            (True, is_expected) if stays or lost else (False, False)
        )
        more = [] if lost else [(f"{name} on rank 1", text) for name, text in said]
        assert report.sections == [("Captured log call", "mine"), *more]
    assert kit.mock_calls == [call.progress()] * 2


STRICT = "[XPASS(strict)] known"


@pytest.mark.usefixtures("kit")
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("mine", "other", "outcome", "said"),
    [
        (("passed", ""), ("xfailed", "why"), "skipped", "why"),
        (("failed", STRICT), ("xfailed", "why"), "skipped", "why"),
        (("skipped", "why"), ("failed", STRICT), "skipped", "why"),
        (("failed", STRICT), ("failed", STRICT), "failed", STRICT),
        (("passed", ""), ("failed", STRICT), "failed", STRICT),
        (("failed", STRICT), ("passed", ""), "failed", STRICT),
        (("passed", ""), ("skipped", "why"), "failed", "the ranks disagree"),
    ],
)
def test_an_expected_failure_on_one_rank_is_one_on_all(
    mine: Any, other: Any, outcome: str, said: str, rank: int, tmp_path: Path
) -> None:
    """Here its condition may hold on one rank only, so that the other passes as any test."""
    told: Any = other, [], "known", other in (("passed", ""), ("failed", STRICT))
    plugin = ranks_of(tmp_path, rank, ("test_x setup", [], told))
    report: Any = SimpleNamespace(outcome=mine[0], longreprtext=mine[1], longrepr=mine[1])
    vars(report).update(when="setup", sections=[])
    if mine[0] == "skipped":
        report.wasxfail = "known"
    driven(plugin.pytest_runtest_makereport(item_of(marked=True), Mock()), report)
    assert report.outcome == outcome
    assert getattr(report, "wasxfail", "") == ("known" if outcome == "skipped" else "")
    assert report.longrepr.startswith(said)


def test_a_rank_tells_the_end_of_a_long_output(tmp_path: Path, kit: Mock) -> None:
    plugin = ranks_of(tmp_path, 0, ("test_x call", [], (WRONG, [], "", False)))
    told = plugin.control.gather = Mock(wraps=plugin.control.gather)
    report = SimpleNamespace(outcome="failed", longreprtext="", when="call")
    report.sections = [("all", "ab" * 10_000), ("cut", "cd" * 10_000 + "e")]
    driven(plugin.pytest_runtest_makereport(item_of(marked=False), Mock()), report)
    ((_, _, (_, sections, *_)),) = told.call_args.args
    assert sections == [("all", "ab" * 10_000), ("cut", "...d" + "cd" * 9_999 + "e")]


@pytest.mark.parametrize(("method", "is_taken"), [("signal", True), ("thread", None)])
def test_the_alarm_stays_the_kits_if_pytest_timeout_would_set_it(
    method: str, is_taken: bool | None, tmp_path: Path
) -> None:
    """pytest-timeout sets no timer if another plugin's hook has returned a value."""
    plugin = ranks_of(tmp_path, 0)
    assert plugin.pytest_timeout_set_timer(SimpleNamespace(method=method)) is is_taken
    assert any("--timeout-method=thread" in note for note in plugin._session.notes) == bool(
        is_taken
    )


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("lost", ["", "before", "now"])
@pytest.mark.parametrize("status", [2, 3])
def test_a_session_ends_with_the_worst_status_and_all_notes(
    status: int, lost: str, rank: int, tmp_path: Path, kit: Mock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks that are at different points end with an internal error, which rank 0 prints.

    Rank 0 also prints the internal error of another rank.
    """
    point, printed = "the end of the session", Mock()
    monkeypatch.setattr(sys, "__stderr__", printed)
    values = (status, {"out": 0.5, "in": 0.1}, {"theirs": None}, ["an odd error"])
    other: Any = ("a test" if lost == "now" else point, [], values)
    plugin = ranks_of(tmp_path, rank, other)
    plugin._lost = lost == "before"
    plugin._session = Session(tally=Tally(ratios={"out": 0.25, "in": 0.2}), notes={"mine": None})
    session = SimpleNamespace(exitstatus=pytest.ExitCode.TESTS_FAILED)
    assert driven(plugin.pytest_sessionfinish(session), "result") == "result"
    assert session.exitstatus == (3 if lost else status)
    assert plugin._session.tally.ratios == {"out": 0.25 if lost else 0.5, "in": 0.2}
    assert [*plugin._session.notes] == (["mine"] if lost else ["mine", "theirs"])
    told = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert told == ({} if rank else {watch.RESULT: "3" if lost else str(status)})
    said = "".join(each.args[0] for each in printed.write.mock_calls)
    assert ("different points" in said) == (lost == "now" and rank == 0)
    assert ("an odd error" in said) == (not lost and rank == 0 and status == 3)
    assert kit.mock_calls == [call.progress()]


@pytest.mark.parametrize(
    ("status", "error", "written"),
    [
        (0, ValueError("too slow"), "3"),
        (1, ValueError("too slow"), "1"),
        (0, pytest.exit.Exception("too slow", 77), "77"),
    ],
)
def test_an_error_in_the_summary_of_another_plugin_ends_the_session_regularly(
    status: int, error: BaseException, written: str, tmp_path: Path, kit: Mock
) -> None:
    plugin = ranks_of(tmp_path, 0)
    with pytest.raises(type(error), match="too slow"):
        driven(plugin.pytest_sessionfinish(SimpleNamespace(exitstatus=status)), error)
    assert (tmp_path / watch.RESULT).read_text() == written


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("has_cache", [True, False])
def test_only_rank_0_writes_to_the_terminal_and_to_files(
    rank: int, tmp_path: Path, kit: Mock, monkeypatch: pytest.MonkeyPatch, *, has_cache: bool
) -> None:
    plugin, written = ranks_of(tmp_path, rank, None), Mock()
    if has_cache:
        plugin.config.cache = SimpleNamespace(set=written)
    option = plugin.config.option
    option.xmlpath = option.benchmark_json = option.color = option.log_file = "given"
    option.report_log = option.htmlpath = option.benchmark_histogram = "given"
    option.json_report_file = "given"
    usual = sys.stdout
    monkeypatch.setattr(sys, "stdout", usual)
    if rank:
        plugin._be_quiet()
        assert sys.stdout.name == "/dev/null"
        names = ["xmlpath", "benchmark_json", "benchmark_histogram", "report_log", "htmlpath"]
        names += ["json_report_file"]
        values = dict.fromkeys(names) | {"color": "given", "log_file": os.devnull}
        assert vars(option) == values | {"basetemp": str(tmp_path / "tmp-rank1")}
        sys.stdout.close()
    (tmp_path / watch.RESULT).touch()  # of an earlier session of this launch
    assert driven(plugin.pytest_sessionstart(), "result") == "result"
    assert sys.stdout is usual
    assert (tmp_path / watch.STARTED).exists()
    assert (tmp_path / watch.RESULT).exists() == bool(rank)
    plugin._watch.enable.assert_called_once_with()
    if has_cache:
        plugin.config.cache.set("key", 1)
    assert written.call_count == (has_cache and not rank)


@pytest.mark.parametrize(
    ("options", "refused"),
    [
        ({"cov_source": [True], "no_cov": False}, "pytest-cov"),
        ({"cov_source": [True], "no_cov": True}, None),
        ({"allure_report_dir": "a"}, "allure-pytest.* --junitxml"),
        ({"allure_report_dir": None}, None),
    ],
)
def test_reports_that_all_ranks_would_write_are_refused(
    options: dict[str, Any], refused: str | None, kit: Mock, tmp_path: Path
) -> None:
    kit.start.return_value.directory = tmp_path
    kit.config.getoption = lambda name, default=None: options.get(name, default)
    with pytest.raises(pytest.UsageError, match=refused) if refused else contextlib.nullcontext():
        Ranks(kit.config, Session()).control.comm.Free()


@pytest.mark.parametrize("xml", [None, "junit.xml"])
def test_a_session_watches_this_rank_until_it_ends(
    xml: str | None, kit: Mock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger, session = Mock(), Session()
    monkeypatch.setattr(agreed, "Ledger", ledger)
    kit.start.return_value.directory = tmp_path
    options = {"xmlpath": xml, "numprocesses": None, "--sp-expect-ranks": 1}
    kit.config.getoption = lambda name, default=None: options.get(name, default)
    kit.config.getini = {"junit_suite_name": "a suite"}.get
    plugin = Ranks(kit.config, session)
    assert kit.mock_calls == [
        *(call.requests.install(), call.start(0), call.limit_phases()),
        call.config.add_cleanup(kit.stop),
        call.config.pluginmanager.register(ledger.return_value),
        call.find_shared_gpu(session, ANY),
    ]
    assert ledger.mock_calls == [call(tmp_path, xml, "a suite" if xml else "")]
    assert failing.hooked
    assert session.control is plugin.control
    assert plugin.control.gather("x") == ["x"]
    plugin.control.comm.Free()
