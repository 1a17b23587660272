"""Run some tests in order, tell which failed first, or how long each takes: a pytest plugin.

It draws examples and does not shrink them: red is enough. While coverage measures, it learns which
test runs: its own contexts name functions, and a parametrised test is many tests with one function.
"""

from __future__ import annotations

import json
import os
import time
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import Phase, settings

WITNESS = "SP_MUTANTS_WITNESS"
"""Names the file that gets the first failure, on rank 0."""
TESTS = "SP_MUTANTS_TESTS"
"""Names the file with the ids of the tests to run, one to a line, in order; all run if it is empty.
"""
REACH = "SP_MUTANTS_REACH"
"""Names the file that gets the seconds of each test, without the number of the rank and `.json`."""
TEST = "MUTANTS_TEST"
"""Names the test that runs, for the processes that it starts. Some tests remove names in SP_."""
RANK = ("OMPI_COMM_WORLD_RANK", "PMI_RANK")
LONGEST = 200
KIT = "test_kit_"
"""Files whose tests look at shrunk examples."""
ENDING = ("test_an_endless_loop_ends",)
"""Tests that end a thread from outside, which may then hold a lock of coverage for good."""


class Reach:
    """Tells coverage which test runs, and how long each takes that is green."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._seconds: dict[str, float] = {}
        self._useless: set[str] = set()

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Leave out the tests of ENDING."""
        items[:] = [item for item in items if item.name not in ENDING]

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Note that a test begins."""
        _enter(nodeid)
        self._seconds[nodeid] = -time.monotonic()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note a test that cannot kill: it is red without an edit, or skipped."""
        if not report.passed:
            self._useless.add(report.nodeid)

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        """Note that a test has ended."""
        _enter("")
        self._seconds[nodeid] = round(self._seconds[nodeid] + time.monotonic(), 3)

    def pytest_sessionfinish(self) -> None:
        """Write it down."""
        seconds = {test: s for test, s in self._seconds.items() if test not in self._useless}
        self._file.write_text(json.dumps(seconds))


def _enter(test: str) -> None:
    """Let the lines that run from now on count for a test, or for none."""
    from coverage import Coverage

    measuring = Coverage.current()
    assert measuring is not None
    measuring.switch_context(test)
    os.environ[TEST] = test


class Witness:
    """Writes down the first failure of a session."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._examples = 0

    def pytest_runtest_logstart(self) -> None:
        """Remember how many examples there were before a test."""
        self._examples = _examples()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Tell of a failure, the first time."""
        if not report.failed or self._file.exists():
            return
        crash = getattr(report.longrepr, "reprcrash", None)
        words = str(report.longrepr) if crash is None else str(crash.message)
        told = {"law": report.nodeid, "examples": _examples() - self._examples}
        told["words"] = " ".join(words.split())[:LONGEST]
        self._file.write_text(json.dumps(told))


def _examples() -> int:
    """Return how many examples there were; 0 if a fault of the kit keeps it from telling."""
    with suppress(Exception):
        from sp_core.testing import session

        return int(session.current.tally.examples)
    return 0


def _draw_only() -> None:
    """Let no profile shrink examples; a kit with a fault may have no profiles."""
    with suppress(Exception):
        from sp_core.testing import profiles

        for name in (profiles.DEFAULT, "quick", "brief"):
            kept = {*settings.get_profile(name).phases} - {Phase.shrink, Phase.explain}
            settings.register_profile(name, settings.get_profile(name), phases=kept)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep the tests that are wanted, in their order."""
    wanted = Path(os.environ[TESTS]).read_text().splitlines()
    if wanted:
        found = {item.nodeid: item for item in items}
        items[:] = [found[name] for name in wanted if name in found]


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    """Register what the environment asks for. Refuse a package outside this folder."""
    import sp_core

    if not Path(sp_core.__file__).is_relative_to(Path.cwd()):
        raise pytest.UsageError(
            f"{sp_core.__file__} would be tested, needed the copy in {Path.cwd()}"
        )
    if not any(KIT in Path(argument).name for argument in config.args):
        _draw_only()
    rank = next((os.environ[name] for name in RANK if name in os.environ), "")
    if rank in ("", "0"):
        config.pluginmanager.register(Witness(Path(os.environ[WITNESS])))
    if REACH in os.environ:
        config.pluginmanager.register(Reach(Path(f"{os.environ.pop(REACH)}{rank}.json")))
