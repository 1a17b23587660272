"""Test the hooks of the pytest plugin, each by itself."""

import math
import os
import random
import shlex
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, call

import pytest
from hypothesis import HealthCheck, settings
from kit.failing import driven
from studies.commands import outside, printed

from sp_core.testing import plugin, session
from sp_core.testing.outcome import failure_class
from sp_core.testing.session import Session, Tally


@pytest.fixture
def current(monkeypatch: pytest.MonkeyPatch) -> Session:
    found = Session()
    monkeypatch.setattr(session, "current", found)
    return found


def config(limit: str = "0.5", **options: object) -> Any:
    """Return a stand-in for pytest's configuration; names of options have no dashes here."""

    def getoption(name: str, default: object = None) -> object:
        return options.get(name.lstrip("-").replace("-", "_"), default)

    return Mock(
        getoption=getoption,
        getini={"sp_max_error_ratio": limit, "reruns": options.get("reruns_ini")}.get,
        spec=["getoption", "getini", "addinivalue_line", "pluginmanager", "add_cleanup"],
    )


RANDOM = 2**32 - 1
XFAIL = pytest.mark.xfail(reason="test fails under mpi")


@pytest.mark.parametrize(
    ("profile", "options", "seed"),
    [
        ("", {}, None),
        ("", {"hypothesis_seed": "7"}, 7),
        ("", {"hypothesis_seed": 7}, 7),
        ("", {"hypothesis_seed": "-7"}, -7),
        ("", {"hypothesis_seed": "random"}, "random"),
        ("soak", {"hypothesis_seed": ""}, ""),
        *((name, {}, None) for name in ("pr", "quick", "brief")),
        *((name, {}, RANDOM) for name in ("soak", "explore")),
        ("explore", {"hypothesis_seed": "7"}, 7),
        *(("explore", {"hypothesis_profile": name}, None) for name in ("quick", "one's own")),
        ("", {"hypothesis_profile": "soak"}, RANDOM),
    ],
)
def test_a_seed_is_chosen_where_examples_differ_in_every_run(
    profile: str,
    options: dict[str, Any],
    seed: int | str | None,
    current: Session,
    loaded: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A worker of pytest-xdist has the seed of the main process."""
    monkeypatch.setenv("SP_PROFILE", profile)
    monkeypatch.setattr(random, "SystemRandom", lambda: Mock(randrange=lambda most: most - 1))
    more = {"sp_device": "a", "sp_share_gpu": "b"}
    plugin.pytest_configure(config(**more, **options))
    plugin.pytest_configure_node(node := SimpleNamespace(workerinput={}))
    named = profile or ("pr" if "hypothesis_profile" in options else loaded)
    assert settings.get_current_profile_name() == named
    expected: dict[str, Any] = {"device": "a", "share_gpu": "b", "raw_replay": True}
    assert session.current == Session(
        **expected, seed=seed, profile=options.get("hypothesis_profile")
    )
    worker = config(**options)
    worker.workerinput = node.workerinput
    monkeypatch.setattr(random, "SystemRandom", lambda: Mock(randrange=lambda most: 1))
    plugin.pytest_configure(worker)
    assert session.current.seed == seed
    plugin.pytest_configure(config(sp_no_raw_replay=True))
    assert not session.current.raw_replay


def test_a_session_inside_another_ends_with_the_other_in_its_place(current: Session) -> None:
    inner = config()
    plugin.pytest_configure(inner)
    assert session.current is not current
    for added in inner.add_cleanup.call_args_list:
        added.args[0]()
    assert session.current is current


@pytest.mark.parametrize(
    "size",
    [
        {},
        {"PMI_SIZE": "1"},
        {"OMPI_COMM_WORLD_SIZE": "2"},
        {"PMI_SIZE": "3", "OMPI_COMM_WORLD_SIZE": ""},
        {"SLURM_STEP_NUM_TASKS": "4"},
    ],
)
@pytest.mark.parametrize("option", [{}, {"with_mpi": True}, {"only_mpi": True}])
@pytest.mark.parametrize(
    ("kind", "mark"),
    [
        ("of the kit", ""),
        ("of the kit", "mpi_skip"),
        ("of the kit", "mpi_break"),
        ("of the kit", "mpi_xfail"),
        ("marked", "ranks"),
        ("ordinary", ""),
    ],
)
def test_tests_on_ranks_are_marked_under_mpi_and_refused_without(
    size: dict[str, str],
    option: dict[str, Any],
    kind: str,
    mark: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A test that pytest-mpi leaves out is not marked. One that is expected to fail is marked so.

    Only tests of the kit have their health check suppressed.
    """

    def test() -> None:
        """Do nothing."""

    vars(test).update(sp_core_ranks=kind == "of the kit")
    item = Mock(obj=test, config=config(**option))
    item.get_closest_marker.side_effect = {mark: 1}.get
    plugin.pytest_itemcollected(item)
    is_marked = option and kind != "ordinary" and mark not in ("mpi_skip", "mpi_break")
    marks = ["mpi", *([XFAIL] if mark == "mpi_xfail" else [])] if is_marked else []
    assert item.add_marker.mock_calls == [call(each) for each in marks]
    own = getattr(item.obj, "_hypothesis_internal_use_settings", None)
    assert (
        own is not None and HealthCheck.function_scoped_fixture in own.suppress_health_check
    ) == (kind == "of the kit")
    monkeypatch.setattr(os, "environ", {**size})
    alone = option or kind == "ordinary" or "1" in size.values() or not size
    plain = Mock(obj=None, get_closest_marker=lambda name: None)
    plugin.pytest_collection_modifyitems(config(), [plain])
    if alone:
        plugin.pytest_collection_modifyitems(config(**option), [plain, item])
    else:
        started = max(size.values())
        with pytest.raises(pytest.UsageError, match=f"mpiexec or srun started {started} processes"):
            plugin.pytest_collection_modifyitems(config(**option), [plain, item])


@pytest.mark.parametrize("rank", [None, 0, 1])
@pytest.mark.parametrize("ours", [True, False])
@pytest.mark.parametrize("mark", ["", "forked"])
@pytest.mark.parametrize("option", [{}, {"forked": False}, {"forked": True}])
def test_tests_on_ranks_are_not_forked(
    option: dict[str, Any], mark: str, rank: int | None, current: Session, *, ours: bool
) -> None:
    """Under MPI no test is. Every rank raises the error, and only rank 0 prints it.

    Without pytest-forked there is no such option, and its mark means nothing.
    """
    is_rank = rank is not None
    current.control = Mock(rank=rank) if is_rank else None
    item = Mock(obj=SimpleNamespace(sp_core_ranks=ours), get_closest_marker={mark: 1}.get)
    is_refused = option and (option["forked"] or mark) and (ours or is_rank)
    with pytest.raises(pytest.UsageError) if is_refused else nullcontext() as error:
        plugin.pytest_collection_modifyitems(config(with_mpi=is_rank, **option), [item])
    assert ("Leave it out" in str(error)) == bool(is_refused and not rank)


@pytest.mark.parametrize(
    ("name", "options", "mark", "ini", "repeats"),
    [
        ("rerunfailures", {"reruns": 2}, "", "", True),
        ("rerunfailures", {"force_reruns": 1}, "", "", True),
        ("rerunfailures", {"reruns": None}, "flaky", "", True),
        ("rerunfailures", {"reruns": None}, "", "3", True),
        ("rerunfailures", {"reruns": None}, "", "0", False),
        ("rerunfailures", {"reruns": 0}, "", "3", False),
        ("pytest-retry", {}, "flaky", "", True),
        ("pytest-retry", {}, "", "", False),
    ],
)
@pytest.mark.parametrize("with_mpi", [True, False])
@pytest.mark.parametrize("has_plugin", [True, False])
def test_no_rank_runs_a_test_again(
    name: str,
    options: dict[str, Any],
    mark: str,
    ini: str,
    *,
    repeats: bool,
    with_mpi: bool,
    has_plugin: bool,
) -> None:
    """pytest-retry has marked all tests if its option or the ini file asks for it."""
    given = config(with_mpi=with_mpi, reruns_ini=ini, **options)
    given.pluginmanager.hasplugin = {name: has_plugin}.get
    item = Mock(obj=None, get_closest_marker={mark: 1}.get)
    is_refused = with_mpi and has_plugin and repeats
    with pytest.raises(pytest.UsageError) if is_refused else nullcontext() as error:
        plugin.pytest_collection_modifyitems(given, [item])
    assert (f"-p no:{name}" in str(error)) == bool(is_refused)


def test_the_running_test_is_known_by_a_path_from_where_pytest_began(
    current: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A test may have changed the working directory, and removed it."""
    (gone := tmp_path / "gone").mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    parent = SimpleNamespace(nodeid="rootdir/test_x.py::C")
    item: Any = SimpleNamespace(path=tmp_path / "a" / "test_x.py", parent=parent, name="y[::]")
    item.config = SimpleNamespace(invocation_params=SimpleNamespace(dir=tmp_path))
    item.nodeid = f"{parent.nodeid}::y[::]@a y[::]"  # pytest-xdist adds the name of a group
    assert driven(plugin.pytest_runtest_protocol(item), "result") == "result"
    assert current.node_id == "a/test_x.py::C::y[::]"


@pytest.mark.parametrize("when", ["setup", "call"])
@pytest.mark.parametrize("ours", [True, False])
@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize(
    ("error", "text"),
    [
        (
            failure_class("KeyError", "", 0)("what each rank did"),
            "RankFailure[KeyError]\nwhat each rank did",
        ),
        (KeyError("x"), "own"),
        (pytest.skip.Exception("why"), "own"),
        (None, "own"),
    ],
)
def test_a_failure_of_ranks_is_its_text_and_a_skip_is_at_the_test(
    error: BaseException | None, text: str, when: str, *, ours: bool, is_late: bool
) -> None:
    """Of a unittest.TestCase pytest sets the error late, in an inner hook."""
    if isinstance(error, pytest.skip.Exception):
        error._use_item_location = False
    excinfo = None if error is None else SimpleNamespace(value=error)
    item: Any = SimpleNamespace(obj=SimpleNamespace(sp_core_ranks=ours))
    failed = error is not None and not isinstance(error, pytest.skip.Exception)
    report: Any = SimpleNamespace(failed=failed, longrepr="own")
    info: Any = SimpleNamespace(excinfo=None if is_late else excinfo, when=when)
    hook = plugin.pytest_runtest_makereport(item, info)
    next(hook)
    info.excinfo = excinfo
    with pytest.raises(StopIteration) as end:
        hook.send(report)
    assert end.value.value is report
    assert report.longrepr == text
    if isinstance(error, pytest.skip.Exception):
        assert error._use_item_location == (ours and when == "call" and not is_late)


LINE = "worst error over bound: "


@pytest.mark.parametrize(
    ("ratios", "ini", "option", "lines"),
    [
        ({}, "0.5", None, []),
        ({"a": 0.25, "b": 0.5, "c": 0.375}, "0.5", None, ["0.5 in b", "0.375 in c", "0.25 in a"]),
        (
            {"a": 0.25, "b": 0.5},
            "0.4",
            None,
            ["0.5 in b, above the limit 0.4: FAILED", "0.25 in a"],
        ),
        ({"a": 0.5}, "0.4", 0.5, ["0.5 in a"]),
        ({"a": 0.5}, "0.9", 0.0, ["0.5 in a, above the limit 0: FAILED"]),
        ({"a": math.nan}, "0.9", None, ["nan in a, above the limit 0.9: FAILED"]),
    ],
)
@pytest.mark.parametrize("status", [0, 2])
def test_errors_over_their_bounds_are_told_and_fail_a_session(
    ratios: dict[str, float],
    ini: str,
    option: float | None,
    lines: list[str],
    status: int,
    current: Session,
) -> None:
    current.tally.ratios = ratios
    session_of: Any = SimpleNamespace(
        config=config(ini, sp_max_error_ratio=option), exitstatus=status
    )
    plugin.pytest_sessionfinish(session_of)
    assert session_of.exitstatus == (1 if status == 0 and "FAILED" in str(lines) else status)
    terminal: Any = Mock()
    plugin.pytest_terminal_summary(terminal, session_of.config)
    told = [call.write_line(f"{LINE}{line}", red="FAILED" in line) for line in lines]
    assert terminal.mock_calls[2:] == told


@pytest.mark.parametrize("seed", [None, 0, 7, "", "a b"])
@pytest.mark.parametrize(
    ("tally", "notes"), [(Tally(), {}), (Tally(tests=1), {}), (Tally(), {"b": None, "a": None})]
)
def test_the_summary_is_told_where_the_kit_was_used(
    tally: Tally, notes: dict[str, None], seed: int | str | None, current: Session
) -> None:
    current.tally, current.notes, current.seed = tally, notes, seed
    terminal: Any = Mock()
    plugin.pytest_terminal_summary(terminal, config())
    lines = [current.summary(), *notes]
    if seed is not None:
        lines.insert(1, f"seed: {seed} (again with {shlex.quote(f'--hypothesis-seed={seed}')})")
    expected = [call.section("sp_core.testing"), *(call.write_line(line) for line in lines)]
    assert terminal.mock_calls == (expected if tally.tests or notes else [])


OLDEST = "import pytest; vars(pytest).pop('TerminalReporter', 0); import sp_core.testing"
"""The oldest pytest has no name for the type of the terminal's reporter."""
PR, SOAK = (
    "from hypothesis import settings as s; "
    f"s.register_profile({name!r}, max_examples=7); s.load_profile({name!r})"
    for name in ("pr", "soak")
)
KIT = "from sp_core.testing import profiles as p"
NUMBERS = "print(s().max_examples, p.chosen({}).max_examples, p.name(), p.load('soak'))"
EXPLORE = "x = p.settings.get_profile('explore'); print(x.database is None, x.derandomize)"
PROGRAMS: dict[str, tuple[str, dict[str, str], str]] = {
    "the oldest pytest suffices for the plugin": (f"{OLDEST}.plugin", {}, ""),
    "the oldest pytest suffices for the search": (f"{OLDEST}.shrink_crash", {}, ""),
    "a project's own pr stays": (f"{PR}; {KIT}; {NUMBERS}", {}, "7 7 pr True\n"),
    "a project's own pr replaces ours": (f"{KIT}; {PR}; {NUMBERS}", {}, "7 7 pr True\n"),
    "a project's own soak stays": (f"{SOAK}; {KIT}; {NUMBERS}", {}, "7 7 pr False\n"),
    "a project's own soak replaces ours": (f"{KIT}; {SOAK}; {NUMBERS}", {}, "7 7 pr False\n"),
    "a CI server changes no settings": (f"{KIT}; {EXPLORE}", {"CI": "1"}, "False False\n"),
}


@pytest.mark.parametrize("case", PROGRAMS)
def test_what_a_new_process_finds(case: str, tmp_path: Path) -> None:
    program, more, expected = PROGRAMS[case]
    command = [sys.executable, "-c", program]
    assert printed(command, tmp_path, outside(**more), 60) == (0, expected)


def test_a_worker_that_has_crashed_has_no_counts(current: Session) -> None:
    for crashed in (SimpleNamespace(), SimpleNamespace(workeroutput={})):
        plugin.pytest_testnodedown(crashed)
    assert current.tally == Tally()
