"""Where a rank of a test session is, and what has come of its tests so far: kept where it outlives the process."""

from __future__ import annotations

from pathlib import Path

import pytest

from sp_core.launch import watch
from sp_core.launch.results import Ledger


class Diary:
    """A plugin of each rank.

    Args:
        directory: of the launch.
        config: pytest's.
        rank: only 0 keeps reports, which are those of all ranks.
    """

    def __init__(self, directory: Path, config: pytest.Config, rank: int) -> None:
        xml = config.getoption("xmlpath", None)
        self._ledger = None if rank else Ledger(directory, xml, config.getini("junit_suite_name") if xml else "")

    def pytest_collectstart(self, collector: pytest.Collector) -> None:
        """A file or folder is collected."""
        watch.note(f"collects {collector.nodeid or 'tests'}")

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        """Fixtures are set up."""
        watch.note(f"in the set-up of {item.nodeid}")

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_call(self, item: pytest.Item) -> None:
        """A test runs."""
        watch.note(f"in {item.nodeid}")

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> None:
        """Fixtures are torn down."""
        watch.note(f"in the tear-down of {item.nodeid}")

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Keep that a test begins."""
        self._keep(test=nodeid)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep the outcome of a phase of a test."""
        outcome = "error" if report.failed and report.when != "call" else report.outcome
        text = report.longreprtext if report.failed else ""
        self._keep(test=report.nodeid, outcome=outcome, seconds=report.duration, text=text)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        """Keep that a test has ended."""
        self._keep(test=nodeid, ended=True)

    def _keep(self, **line: object) -> None:
        if self._ledger is not None:
            self._ledger.add(**line)
