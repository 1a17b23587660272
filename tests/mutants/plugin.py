"""Run chosen tests in order, and record the first failure or every test's time: a pytest plugin.

Failing examples are not shrunk, because the first failure is enough. If coverage measures, the
plugin tells it the id of the running test. Coverage itself would name only the test's function,
which many parametrised tests share.
"""

import json
import os
import time
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import Phase, settings

WITNESS = "SP_MUTANTS_WITNESS"
"""The environment variable with the path of the file to which rank 0 writes the first failure."""
TESTS = "SP_MUTANTS_TESTS"
"""The variable with the path of a file of test ids, one a line, in order; all run if it is empty.
"""
REACH = "SP_MUTANTS_REACH"
"""The variable with the path, without rank and `.json`, of the file for the tests' seconds."""
TEST = "MUTANTS_TEST"
"""The variable that tells processes started by a test its id. Some tests remove names with SP_."""
RANK = ("OMPI_COMM_WORLD_RANK", "PMI_RANK")
LONGEST = 200
KIT = "test_kit_"
"""The beginning of the names of files whose tests look at shrunk examples."""
ENDING = ("test_an_endless_loop_ends",)
"""Tests that end a thread from outside. The thread may then never release a lock of coverage."""


class Reach:
    """Tell coverage which test runs, and record how long each passing test takes."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._seconds: dict[str, float] = {}
        self._useless: set[str] = set()

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Leave out the tests named in ENDING."""
        items[:] = [item for item in items if item.name not in ENDING]

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Record that a test begins."""
        _enter(nodeid)
        self._seconds[nodeid] = -time.monotonic()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Record a test that cannot kill an edit, because it fails without one or is skipped."""
        if not report.passed:
            self._useless.add(report.nodeid)

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        """Record that a test has ended."""
        _enter("")
        self._seconds[nodeid] = round(self._seconds[nodeid] + time.monotonic(), 3)

    def pytest_sessionfinish(self) -> None:
        """Write the seconds of each test to the file."""
        seconds = {test: s for test, s in self._seconds.items() if test not in self._useless}
        self._file.write_text(json.dumps(seconds))


def _enter(test: str) -> None:
    """Make coverage assign the lines that run from now on to a test, or to none if it is ""."""
    from coverage import Coverage

    measuring = Coverage.current()
    assert measuring is not None
    measuring.switch_context(test)
    os.environ[TEST] = test


class Witness:
    """Write the first failure of a session to a file."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._examples = 0

    def pytest_runtest_logstart(self) -> None:
        """Remember how many examples were drawn before this test."""
        self._examples = _examples()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Write a failure if it is the first."""
        if not report.failed or self._file.exists():
            return
        crash = getattr(report.longrepr, "reprcrash", None)
        words = str(report.longrepr) if crash is None else str(crash.message)
        told = {
            "law": report.nodeid,
            "examples": _examples() - self._examples,
            "words": " ".join(words.split())[:LONGEST],
        }
        self._file.write_text(json.dumps(told))


def _examples() -> int:
    """Return how many examples the kit has drawn; 0 if a planted fault hides the number."""
    with suppress(Exception):
        from sp_core.testing import session

        return int(session.current.tally.examples)
    return 0


def _draw_only() -> None:
    """Turn off shrinking in every profile; a kit with a planted fault may lack the profiles."""
    with suppress(Exception):
        from sp_core.testing import profiles

        for name in (profiles.DEFAULT, "quick", "brief"):
            kept = {*settings.get_profile(name).phases} - {Phase.shrink, Phase.explain}
            settings.register_profile(name, settings.get_profile(name), phases=kept)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep only the tests that the file in TESTS names, in its order."""
    wanted = Path(os.environ[TESTS]).read_text().splitlines()
    if wanted:
        found = {item.nodeid: item for item in items}
        items[:] = [found[name] for name in wanted if name in found]


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    """Register the plugins that the environment asks for; refuse sp_core from another folder."""
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
