"""A pytest plugin that runs some tests in a given order, and can tell which lines of which files each test reaches.

Coverage's own contexts name functions; a parametrised test is many tests with one function, and
kills by the instance.
"""

from __future__ import annotations

import json
import os
import sqlite3
import time
from collections import defaultdict
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from mutants.trial import RANK

if TYPE_CHECKING:
    from coverage import Coverage

TESTS = "SP_MUTANTS_TESTS"
"""Names the file with the ids of the tests to run, one to a line, in order; without it all run."""
REACH = "SP_MUTANTS_REACH"
"""Names the file that gets what each test reaches; without it nothing is measured. Under mpiexec each rank adds its number."""

TEST = "MUTANTS_TEST"
"""Names the test that runs, for the processes that it starts. Some tests take away what begins with SP_."""

STARTED = """[run]
parallel = true
data_file = {file}.started
include = {package}
context = ${{{test}-}}
patch = _exit
"""
"""Settings of coverage in a process that a test starts: what it reaches counts for the test."""

measured: list[Reach] = []


class Order:
    """Run only these tests, in this order. A file is imported when the first of its tests is due.

    One of the first tests kills most edits, so most files are not needed.
    """

    def __init__(self, ids: list[str]) -> None:
        self._ids = ids
        self._files: dict[str, pytest.Collector] = {}
        self._items: dict[str, dict[str, pytest.Item]] = {}

    def pytest_collection(self, session: pytest.Session) -> bool:
        """Find the files."""
        session.perform_collect(dict.fromkeys(map(_file, self._ids)), genitems=False)
        return True

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Collector]) -> None:
        """Take the files, before pytest-mpi sees no mark at them and skips them."""
        if not self._files:
            self._files = {node.nodeid: node for node in items}
            items.clear()

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Run the tests to the first failure. For the tear-down pytest needs the file that is next."""
        for name, following in pairwise([*self._ids, ""]):
            item = self._imported(session, _file(name)).get(name)
            if item is not None:
                next_file = self._files.get(_file(following))
                item.config.hook.pytest_runtest_protocol(item=item, nextitem=next_file)
            if session.shouldfail:
                raise session.Failed(session.shouldfail)
        return True

    def _imported(self, session: pytest.Session, file: str) -> dict[str, pytest.Item]:
        """Return the tests of a file by their ids."""
        if file not in self._items:
            items = [*session.genitems(self._files[file])]
            session.config.hook.pytest_collection_modifyitems(
                session=session, config=session.config, items=items
            )
            self._items[file] = {item.nodeid: item for item in items}
            session.testscollected += len(items)
        return self._items[file]


def _file(test: str) -> str:
    return test.partition("::")[0]


class Reach:
    """Which lines each test reaches, and how long it takes. Lines reached outside of tests belong to the test ""."""

    def __init__(self, coverage: Coverage, file: Path) -> None:
        self._coverage = coverage
        self._file = file
        self._begin = 0.0
        self._seconds: dict[str, float] = {}
        self._useless: set[str] = set()
        os.environ[TEST] = ""

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """A test begins."""
        self._coverage.switch_context(nodeid)
        os.environ[TEST] = nodeid
        self._begin = time.monotonic()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """A test that is red without an edit, or is skipped, cannot kill."""
        if not report.passed:
            self._useless.add(report.nodeid)
        self._seconds[report.nodeid] = round(time.monotonic() - self._begin, 3)

    def pytest_runtest_logfinish(self) -> None:
        """A test has ended."""
        self._coverage.switch_context("")
        os.environ[TEST] = ""

    def pytest_sessionfinish(self) -> None:
        """Write it down."""
        from coverage import CoverageData
        from coverage.exceptions import CoverageException

        self._coverage.stop()
        data, here = [self._coverage.get_data()], Path.cwd()
        for file in self._file.parent.glob(f"{self._file.name}.started.*"):
            with suppress(
                CoverageException, sqlite3.Error
            ):  # the process was killed while it wrote
                data.append(CoverageData(str(file)))
                data[-1].read()
        files: dict[str, dict[int, set[str]]] = defaultdict(lambda: defaultdict(set))
        for part in data:
            for name in sorted(part.measured_files()):
                for line, tests in part.contexts_by_lineno(name).items():
                    files[str(Path(name).relative_to(here))][line].update(tests)
        seconds = {
            name: taken for name, taken in self._seconds.items() if name not in self._useless
        }
        self._file.write_text(json.dumps({"seconds": seconds, "lines": files}, default=sorted))


def pytest_addoption() -> None:
    """Begin to measure. Of all hooks this one comes first: before a plugin that is installed with the package imports it."""
    if REACH in os.environ:
        from coverage import Coverage

        rank = next((os.environ[name] for name in RANK if name in os.environ), "")
        file, package = f"{os.environ.pop(REACH)}{rank}", f"{Path.cwd()}/sp_core/*"
        settings = Path(f"{file}.started.ini")
        settings.write_text(STARTED.format(file=file, package=package, test=TEST))
        os.environ["COVERAGE_PROCESS_START"] = str(settings)
        coverage = Coverage(
            f"{file}.coverage", include=[package], concurrency="thread", config_file=False
        )
        coverage.start()
        measured.append(Reach(coverage, Path(file)))


def pytest_configure(config: pytest.Config) -> None:
    """Register what the environment asks for."""
    if TESTS in os.environ:
        ids = Path(os.environ[TESTS]).read_text().splitlines()
        config.pluginmanager.register(Order(ids), "mutants_order")
    for reach in measured:
        config.pluginmanager.register(reach, "mutants_reach")
