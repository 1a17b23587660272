"""A pytest plugin that runs some tests in a given order, and can tell which lines of which files each test reaches.

Coverage's own contexts name functions; a parametrised test is many tests with one function, and kills by the instance.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from coverage import Coverage

TESTS = "SP_MUTANTS_TESTS"
"""Names the file with the ids of the tests to run, one to a line, in order; without it all run."""
REACH = "SP_MUTANTS_REACH"
"""Names the file that gets what each test reaches; without it nothing is measured."""


measured: list[Reach] = []


class Order:
    """Only these tests, in this order."""

    def __init__(self, ids: list[str]) -> None:
        self._turn = {name: turn for turn, name in enumerate(ids)}

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Leave out the others."""
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in self._turn])
        items[:] = sorted((item for item in items if item.nodeid in self._turn), key=lambda item: self._turn[item.nodeid])


class Reach:
    """Which lines each test reaches, and how long it takes. Lines reached outside of tests belong to the test ""."""

    def __init__(self, coverage: Coverage, file: Path) -> None:
        self._coverage = coverage
        self._file = file
        self._begin = 0.0
        self._seconds: dict[str, float] = {}
        self._useless: set[str] = set()

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """A test begins."""
        self._coverage.switch_context(nodeid)
        self._begin = time.monotonic()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """A test that is red without an edit, or is skipped, cannot kill."""
        if not report.passed:
            self._useless.add(report.nodeid)
        self._seconds[report.nodeid] = round(time.monotonic() - self._begin, 3)

    def pytest_runtest_logfinish(self) -> None:
        """A test has ended."""
        self._coverage.switch_context("")

    def pytest_sessionfinish(self) -> None:
        """Write it down."""
        self._coverage.stop()
        data, here = self._coverage.get_data(), Path.cwd()
        files = {str(Path(name).relative_to(here)): data.contexts_by_lineno(name) for name in sorted(data.measured_files())}
        seconds = {name: taken for name, taken in self._seconds.items() if name not in self._useless}
        self._file.write_text(json.dumps({"seconds": seconds, "lines": files}))


def pytest_addoption() -> None:
    """Begin to measure. Of all hooks this one comes first: before a plugin that is installed with the package imports it."""
    if REACH in os.environ:
        from coverage import Coverage

        file, package = os.environ[REACH], f"{Path.cwd()}/sp_core/*"
        coverage = Coverage(f"{file}.coverage", include=[package], concurrency="thread", config_file=False)
        coverage.start()
        measured.append(Reach(coverage, Path(file)))


def pytest_configure(config: pytest.Config) -> None:
    """Register what the environment asks for."""
    if TESTS in os.environ:
        config.pluginmanager.register(Order(Path(os.environ[TESTS]).read_text().splitlines()), "mutants_order")
    for reach in measured:
        config.pluginmanager.register(reach, "mutants_reach")
