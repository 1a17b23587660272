"""The pytest plugin: one report, one exit code and one result file for all ranks of a launch. Works beside pytest-mpi.

Where no test uses `given` or `spmd` and `--with-mpi` is not there, it does nothing and imports nothing.
"""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from sp_core.testing import remarks, session
from sp_core.testing.remarks import Remarks
from sp_core.testing.session import Session
from sp_core.testing.tally import Tally

if TYPE_CHECKING:
    from collections.abc import Generator

    from sp_core.testing.agreed import Ranks

_RANKS: pytest.StashKey[Ranks] = pytest.StashKey()
_SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
MAX_ERROR_RATIO = 0.5


def pytest_addoption(parser: pytest.Parser) -> None:
    """Our options; `--with-mpi` and `--only-mpi` are pytest-mpi's."""
    group = parser.getgroup("sp_core", "tests on several ranks")
    group.addoption("--sp-expect-ranks", type=int, metavar="N", help="fail unless the launch has N ranks")
    group.addoption(
        "--sp-no-raw-replay", action="store_true", help="do not run passed examples again without the checks between ranks"
    )
    group.addoption("--sp-device", choices=("cpu", "cuda"), default="cpu", help="where tests put their tensors (default: cpu)")
    group.addoption("--sp-share-gpu", action="store_true", help="let several ranks use one GPU")
    group.addoption(
        "--sp-max-error-ratio", type=float, help="fail where a recorded error over bound is larger (default: the ini option, 0.5)"
    )
    group.addoption("--sp-tally", metavar="FILE", help="write what was drawn, and the worst errors, to a JSON file")
    parser.addini("sp_max_error_ratio", "largest recorded error over bound", default=str(MAX_ERROR_RATIO))


def _with_mpi(config: pytest.Config) -> bool:
    return bool(config.getoption("--with-mpi", False) or config.getoption("--only-mpi", False))


def _launched_size() -> int:
    return max(int(os.environ.get(name, "1")) for name in _SIZES)


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Find out where we are, before other plugins look at their options."""
    config.addinivalue_line(
        "markers", "ranks: an ordinary test that runs alone, and under mpiexec on every rank (also with --only-mpi)"
    )
    session = Session(device=config.getoption("--sp-device"), share_gpu=config.getoption("--sp-share-gpu"))
    session.raw_replay = not config.getoption("--sp-no-raw-replay")
    session.begin()
    _choose_profile(config, session)
    if session.seed is not None:
        session.command = f"python -m pytest --hypothesis-seed={session.seed} {{test}}"
    if _with_mpi(config):
        from sp_core.testing.agreed import Ranks

        config.stash[_RANKS] = ranks = Ranks(config, session)
        config.pluginmanager.register(ranks, "sp_core_ranks")
    elif (expected := config.getoption("--sp-expect-ranks")) is not None:
        raise pytest.UsageError(
            f"--sp-expect-ranks {expected} needs --with-mpi under mpiexec: without it ranks are threads of this process."
        )


def _choose_profile(config: pytest.Config, session: Session) -> None:
    """Our profiles must be known before Hypothesis looks for the one that the command line names."""
    named, seed = config.getoption("--hypothesis-profile", None), config.getoption("--hypothesis-seed", None)
    if seed is not None and str(seed).isdigit():
        session.seed = int(seed)
    if not named and not os.environ.get("SP_PROFILE"):
        return
    from sp_core.testing import profiles

    try:
        profiles.load_from_environment()
    except ValueError as problem:
        raise pytest.UsageError(str(problem)) from None
    if session.seed is None and profiles.draws_at_random(named):
        session.seed = random.SystemRandom().randrange(2**32)


def pytest_unconfigure(config: pytest.Config) -> None:
    """Give back what `pytest_configure` took."""
    if (ranks := config.stash.get(_RANKS, None)) is not None:
        ranks.close()


def _is_ours(item: pytest.Item) -> bool:
    return getattr(getattr(item, "obj", None), "sp_core_ranks", False)


def _runs_on_ranks(item: pytest.Item) -> bool:
    return _is_ours(item) or item.get_closest_marker("ranks") is not None


def pytest_itemcollected(item: pytest.Item) -> None:
    """Our tests get the marker by which pytest-mpi selects, and may use fixtures of function scope."""
    if _with_mpi(item.config) and _runs_on_ranks(item):
        item.add_marker("mpi")
    if not _is_ours(item):
        return
    from sp_core.testing.profiles import allow_fixtures

    allow_fixtures(getattr(item, "obj", None))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Refuse a launch of several processes that were not told of each other."""
    size = _launched_size()
    if size > 1 and not _with_mpi(config) and any(map(_runs_on_ranks, items)):
        raise pytest.UsageError(
            f"mpiexec started {size} processes, but --with-mpi is missing, so each would run every test by itself. "
            "Add --with-mpi, or leave mpiexec out: then ranks are threads."
        )


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Remember which test runs, for the command that runs it again."""
    session.current.node_id = "::".join([os.path.relpath(item.path), *item.nodeid.split("::")[1:]])
    return (yield)


@pytest.hookimpl(wrapper=True, trylast=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Show the text of our failures as it is: it has the traceback that matters."""
    report = yield
    error = None if call.excinfo is None else call.excinfo.value
    if report.failed and hasattr(type(error), "rank_failure"):
        report.longrepr = f"{type(error).__name__}\n{error}"
    return report


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """A recorded error too near its bound fails the session."""
    if session.exitstatus == pytest.ExitCode.OK and _too_large(session.config):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
    _leave_tally(session.config)
    if _RANKS in session.config.stash:
        session.config.stash[_RANKS].leave_result(int(session.exitstatus))


def _leave_tally(config: pytest.Config) -> None:
    tally = session.current.tally
    tally.ratios = remarks.session.ratios
    if hasattr(config, "workeroutput"):
        config.workeroutput["sp_core"] = tally.text()
    elif (file := config.getoption("--sp-tally")) is not None:
        Path(file).write_text(tally.text())


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Add what a worker of pytest-xdist has drawn."""
    told = getattr(node, "workeroutput", {}).get("sp_core")
    if told is not None:
        found = Tally.parse(told)
        session.current.tally.merge(found)
        remarks.session.merge(Remarks(ratios=found.ratios))


def _limit(config: pytest.Config) -> float:
    option = config.getoption("--sp-max-error-ratio")
    return float(config.getini("sp_max_error_ratio")) if option is None else float(option)


def _too_large(config: pytest.Config) -> dict[str, float]:
    """Recorded ratios above the limit; NaN is above any."""
    limit = _limit(config)
    return {name: ratio for name, ratio in remarks.session.ratios.items() if not ratio <= limit}


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """One line of counts, and the worst error over bound."""
    current, ratios = session.current, remarks.session.ratios
    if not current.tally.tests and not ratios and not remarks.session.notes:
        return
    terminalreporter.section("sp_core.testing")
    terminalreporter.write_line(current.summary())
    if current.seed is not None:
        terminalreporter.write_line(f"seed: {current.seed} (again with --hypothesis-seed={current.seed})")
    for note in remarks.session.notes:
        terminalreporter.write_line(note)
    for name, ratio in sorted(ratios.items(), key=lambda item: -item[1]):
        late = name in _too_large(config)
        text = f"worst error over bound: {ratio:.3g} in {name}" + (f", above the limit {_limit(config):g}: FAILED" if late else "")
        terminalreporter.write_line(text, red=late)
