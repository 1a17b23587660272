"""Run some tests in order, tell which failed first, or which lines each reaches: a pytest plugin.

It draws examples and does not shrink them: red is enough. Coverage's own contexts name functions;
a parametrised test is many tests with one function, and kills by the instance.
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
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import Phase, settings

if TYPE_CHECKING:
    from coverage import Coverage

WITNESS = "SP_MUTANTS_WITNESS"
"""Names the file that gets the first failure, on rank 0."""
TESTS = "SP_MUTANTS_TESTS"
"""Names the file with the ids of the tests to run, one to a line, in order; without it all run."""
REACH = "SP_MUTANTS_REACH"
"""Names the file that gets what each test reaches, without the number of the rank and `.json`."""
TEST = "MUTANTS_TEST"
"""Names the test that runs, for the processes that it starts. Some tests remove names in SP_."""
RANK = ("OMPI_COMM_WORLD_RANK", "PMI_RANK")
LONGEST = 200
KIT = "test_kit_"
"""Files whose tests look at shrunk examples."""

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
        session.perform_collect(list(dict.fromkeys(map(file_of, self._ids))), genitems=False)
        return True

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Collector]) -> None:
        """Take the files, before pytest-mpi sees no mark at them and skips them."""
        if not self._files:
            self._files = {node.nodeid: node for node in items}
            items.clear()

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Run the tests to the first failure. Pytest needs the next file for the tear-down."""
        for name, following in pairwise([*self._ids, ""]):
            item = self._imported(session, file_of(name)).get(name)
            if item is not None:
                next_file = self._files.get(file_of(following))
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


def file_of(test: str) -> str:
    """Return the file of a test."""
    return test.partition("::")[0]


ENDING = ("test_an_endless_loop_ends",)
"""Tests that end a thread from outside, which may then hold a lock of coverage for good."""


class Reach:
    """Tells which lines each test reaches, and its time. Lines outside of tests belong to ""."""

    def __init__(self, coverage: Coverage, file: Path) -> None:
        self._coverage, self._file = coverage, file
        self._begin = 0.0
        self._seconds: dict[str, float] = {}
        self._useless: set[str] = set()
        os.environ[TEST] = ""

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Leave out the tests of ENDING."""
        items[:] = [item for item in items if item.name not in ENDING]

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Note that a test begins."""
        self._coverage.switch_context(nodeid)
        os.environ[TEST] = nodeid
        self._begin = time.monotonic()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note a test that cannot kill: it is red without an edit, or skipped."""
        if not report.passed:
            self._useless.add(report.nodeid)
        self._seconds[report.nodeid] = round(time.monotonic() - self._begin, 3)

    def pytest_runtest_logfinish(self) -> None:
        """Note that a test has ended."""
        self._coverage.switch_context("")
        os.environ[TEST] = ""

    def pytest_sessionfinish(self) -> None:
        """Write it down."""
        from coverage import CoverageData
        from coverage.exceptions import CoverageException

        self._coverage.stop()
        data, here = [self._coverage.get_data()], Path.cwd()
        for file in self._file.parent.glob(f"{self._file.name}.started.*"):
            # A process may have been killed while it wrote.
            with suppress(CoverageException, sqlite3.Error):
                data.append(CoverageData(str(file)))
                data[-1].read()
        lines: dict[str, dict[int, set[str]]] = defaultdict(lambda: defaultdict(set))
        for part in data:
            for name in part.measured_files():
                for line, tests in part.contexts_by_lineno(name).items():
                    lines[str(Path(name).relative_to(here))][line].update(tests)
        seconds = {test: s for test, s in self._seconds.items() if test not in self._useless}
        self._file.write_text(json.dumps({"seconds": seconds, "lines": lines}, default=sorted))


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


def pytest_addoption() -> None:
    """Begin to measure, before an installed plugin of the package imports it."""
    if REACH not in os.environ:
        return
    from coverage import Coverage

    rank = next((os.environ[name] for name in RANK if name in os.environ), "")
    file, package = f"{os.environ.pop(REACH)}{rank}.json", f"{Path.cwd()}/sp_core/*"
    started = Path(f"{file}.started.ini")
    started.write_text(STARTED.format(file=file, package=package, test=TEST))
    os.environ["COVERAGE_PROCESS_START"] = str(started)
    options: dict[str, Any] = {"include": [package], "concurrency": "thread", "config_file": False}
    coverage = Coverage(f"{file}.coverage", **options)
    coverage.start()
    measured.append(Reach(coverage, Path(file)))


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    """Register what the environment asks for. Refuse a package outside this folder."""
    if WITNESS in os.environ:
        import sp_core

        if not Path(sp_core.__file__).is_relative_to(Path.cwd()):
            raise pytest.UsageError(
                f"{sp_core.__file__} would be tested, needed the copy in {Path.cwd()}"
            )
        if not any(KIT in Path(argument).name for argument in config.args):
            _draw_only()
        if all(os.environ.get(name, "0") == "0" for name in RANK):
            config.pluginmanager.register(Witness(Path(os.environ[WITNESS])))
    if TESTS in os.environ:
        config.pluginmanager.register(Order(Path(os.environ[TESTS]).read_text().splitlines()))
    for reach in measured:
        config.pluginmanager.register(reach)
