"""The pytest plugin: one report, one exit code and one result file for all ranks of a launch.

It works beside pytest-mpi. Without `--with-mpi`, SP_PROFILE and `--hypothesis-profile`, if no test
uses `given` or `spmd`, it does nothing and imports nothing.
"""

import functools
import os
import pickle
import random
import shlex
from collections.abc import Generator, Iterator
from contextlib import suppress
from typing import Any

import pytest

from sp_core.testing import session as kit
from sp_core.testing.session import Session

_OPTIONS: dict[str, dict[str, Any]] = {
    "expect-ranks": {"type": int, "metavar": "N", "help": "fail unless the launch has N ranks"},
    "no-raw-replay": {
        "action": "store_true",
        "help": "do not run passed examples again without the checks between ranks",
    },
    "device": {
        "default": "cpu",
        "help": "device of the tests' tensors: cpu (the default), cuda",
    },
    "share-gpu": {"action": "store_true", "help": "let several ranks use one GPU"},
    "max-error-ratio": {
        "type": float,
        "help": "fail if a recorded error over bound is larger (default: the ini option, 0.5)",
    },
}


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add our options; `--with-mpi` and `--only-mpi` are pytest-mpi's."""
    group = parser.getgroup("sp_core", "tests on several ranks")
    for name, option in _OPTIONS.items():
        group.addoption(f"--sp-{name}", **option)
    parser.addini("sp_max_error_ratio", "largest recorded error over bound", default="0.5")


def _with_mpi(config: pytest.Config) -> bool:
    return bool(config.getoption("--with-mpi", False) or config.getoption("--only-mpi", False))


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Set up the session of `sp_core.testing`, before other plugins look at their options.

    At the end of a pytest that runs inside another one, the other's session is back in its place.

    Load the profile of SP_PROFILE, and choose a seed if the profile draws at random. Hypothesis
    itself loads the profile that the command line names, which must be known by then.
    """
    config.addinivalue_line(
        "markers",
        "ranks: an ordinary test that runs alone, and under mpiexec on every rank (also with "
        "--only-mpi)",
    )
    config.add_cleanup(functools.partial(setattr, kit, "current", kit.current))
    kit.current = session = Session(
        device=config.getoption("--sp-device"),
        share_gpu=config.getoption("--sp-share-gpu"),
        raw_replay=not config.getoption("--sp-no-raw-replay"),
    )
    named, seed = (config.getoption(f"--hypothesis-{x}", None) for x in ("profile", "seed"))
    session.profile = named
    with suppress(ValueError, TypeError):
        seed = int(seed)  # as Hypothesis takes it, to which every other text is a seed, too
    session.seed = getattr(config, "workerinput", {}).get("sp_core_seed", seed)
    if named or os.environ.get("SP_PROFILE"):
        from sp_core.testing import profiles

        try:
            is_random = profiles.load(named)
        except ValueError as problem:
            raise pytest.UsageError(str(problem)) from None
        if session.seed is None and is_random:
            session.seed = random.SystemRandom().randrange(2**32)
    if _with_mpi(config):
        from sp_core.testing.agreed import Ranks

        config.pluginmanager.register(Ranks(config, session), "sp_core_ranks")
    elif (expected := config.getoption("--sp-expect-ranks")) is not None:
        raise pytest.UsageError(
            f"--sp-expect-ranks {expected} needs --with-mpi under mpiexec: without it ranks are "
            "threads of this process."
        )


def _is_ours(item: pytest.Item) -> bool:
    return getattr(getattr(item, "obj", None), "sp_core_ranks", False)


def _runs_on_ranks(item: pytest.Item) -> bool:
    return _is_ours(item) or item.get_closest_marker("ranks") is not None


def pytest_itemcollected(item: pytest.Item) -> None:
    """Add pytest-mpi's marker `mpi` to tests that run on ranks, if the session uses MPI.

    A test marked `mpi_skip` or `mpi_break` gets no marker, so `--only-mpi` skips it, too. A test
    marked `mpi_xfail` is expected to fail under `--only-mpi`, too.

    Let tests of `given` and `spmd` use function-scoped fixtures: suppress Hypothesis' health check
    `function_scoped_fixture`.
    """
    left_out = any(map(item.get_closest_marker, ("mpi_skip", "mpi_break")))
    if _with_mpi(item.config) and _runs_on_ranks(item) and not left_out:
        item.add_marker("mpi")
        if item.get_closest_marker("mpi_xfail"):
            item.add_marker(pytest.mark.xfail(reason="test fails under mpi"))
    if _is_ours(item):
        from sp_core.testing.profiles import allow_fixtures

        allow_fixtures(getattr(item, "obj", None))


def _runs_again(config: pytest.Config, items: list[pytest.Item]) -> bool:
    """Return whether pytest-rerunfailures or pytest-retry is to run tests that fail again."""
    is_marked = any(item.get_closest_marker("flaky") for item in items)
    if not config.pluginmanager.hasplugin("rerunfailures"):
        return is_marked and config.pluginmanager.hasplugin("pytest-retry")
    count = config.getoption("reruns", None)
    if count is None:
        with suppress(ValueError):  # older versions have no such setting
            count = int(config.getini("reruns") or 0)
    is_asked = count or config.getoption("force_reruns", None)
    return bool(is_asked) or is_marked


@pytest.hookimpl(trylast=True)  # after pytest has left out tests by -k and -m
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Refuse what tests on ranks cannot bear: other plugins, and a launch without `--with-mpi`.

    Raises:
        pytest.UsageError: pytest-forked is to run a test on ranks, or any test under MPI;
            pytest-rerunfailures or pytest-retry is to run tests again under MPI; or several
            processes were started without `--with-mpi`, and tests run on ranks.
    """
    texts = []
    ours = [item for item in items if _with_mpi(config) or _runs_on_ranks(item)]
    forks = config.getoption("forked", None)  # None without pytest-forked
    if forks is not None and any(forks or item.get_closest_marker("forked") for item in ours):
        texts.append(
            "pytest-forked (--forked, or the mark forked) was given. The forked process loses what "
            "tests on ranks record, and a rank of MPI must not fork. Leave it out."
        )
    if _with_mpi(config) and _runs_again(config, items):
        texts.append(
            "pytest-rerunfailures or pytest-retry and --with-mpi cannot be combined: each rank "
            "would decide alone whether to run a test again. Leave --reruns and --retries out. If "
            "the ini file or a mark flaky asks for it, pass -p no:rerunfailures or "
            "-p no:pytest-retry."
        )
    if texts:
        raise pytest.UsageError(*([] if getattr(kit.current.control, "rank", 0) else texts))
    if _with_mpi(config) or not ours:
        return
    from sp_core.machine import started_tasks

    if (size := started_tasks()) > 1:
        raise pytest.UsageError(
            f"mpiexec or srun started {size} processes, but --with-mpi is missing, so each would "
            "run every test by itself. "
            "Add --with-mpi, or leave the launcher out: then ranks are threads."
        )


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Remember the id of the running test, for the command that runs it again."""
    # pytest-xdist adds a group's name to the test's own id
    classes = getattr(item.parent, "nodeid", "").split("::")[1:]
    path = os.path.relpath(item.path, item.config.invocation_params.dir)
    kit.current.node_id = "::".join([path, *classes, item.name])
    return (yield)


@pytest.hookimpl(wrapper=True, tryfirst=True, specname="pytest_runtest_makereport")
def pytest_refuse_subtests() -> Generator[None, object, object]:
    """Refuse the report of a subtest in a body that runs on ranks.

    Raises:
        TypeError: the body uses pytest's `subtests`, or `subTest` of unittest.
    """
    if getattr(kit.thread, "sink", None) is not None:
        raise TypeError(
            "a body that runs on ranks cannot use `subtests` or `subTest`: other ranks would not "
            "see a subtest that fails. Use plain `assert`, or pytest.mark.parametrize."
        )
    return (yield)


@pytest.hookimpl(wrapper=True, trylast=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Report a `RankFailure` by its text alone, which has the traceback that matters.

    Report a skip in a body at the line of the test, as no line of the body is in the traceback.
    """
    error = getattr(call.excinfo, "value", None)
    if isinstance(error, pytest.skip.Exception) and call.when == "call" and _is_ours(item):
        error._use_item_location = True
    report = yield
    error = getattr(call.excinfo, "value", None)  # set only now for a unittest.TestCase
    if report.failed and "RankFailure" in [kind.__name__ for kind in type(error).__mro__]:
        report.longrepr = f"{type(error).__name__}\n{error}"
    return report


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail the session if a recorded ratio of error to bound is above the limit.

    A worker of pytest-xdist also hands its counts to the main process.
    """
    config = session.config
    if session.exitstatus == pytest.ExitCode.OK and any(late for _, late in _worst(config)):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
    if hasattr(config, "workeroutput"):
        config.workeroutput["sp_core"] = pickle.dumps(kit.current.tally)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Hand the seed to a worker of pytest-xdist, so that all workers draw from the same one."""
    node.workerinput["sp_core_seed"] = kit.current.seed


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Add the counts of a worker of pytest-xdist that has ended."""
    if told := getattr(node, "workeroutput", {}).get("sp_core"):
        kit.current.tally.merge(pickle.loads(told))


def _worst(config: pytest.Config) -> Iterator[tuple[str, bool]]:
    """Yield a line for each recorded ratio of error to bound, and whether it is above the limit.

    The greatest ratio comes first. NaN is above any limit.
    """
    option = config.getoption("--sp-max-error-ratio")
    limit = float(config.getini("sp_max_error_ratio") if option is None else option)
    for name, ratio in sorted(kit.current.tally.ratios.items(), key=lambda item: -item[1]):
        late = f", above the limit {limit:g}: FAILED" if not ratio <= limit else ""
        yield f"worst error over bound: {ratio:.3g} in {name}{late}", bool(late)


def pytest_terminal_summary(
    terminalreporter: "pytest.TerminalReporter", config: pytest.Config
) -> None:
    """Write to the terminal how many tests and examples ran, the seed, notes, and error ratios.

    The ratio of a compared quantity, such as "ring dq", is its greatest error / allowed error.
    """
    current = kit.current
    if not current.tally.tests and not current.tally.ratios and not current.notes:
        return
    terminalreporter.section("sp_core.testing")
    again = shlex.quote(f"--hypothesis-seed={current.seed}")
    seed = f"seed: {current.seed} (again with {again})"
    for line in (current.summary(), *([] if current.seed is None else [seed]), *current.notes):
        terminalreporter.write_line(line)
    for text, late in _worst(config):
        terminalreporter.write_line(text, red=late)
