"""A pytest plugin that tells which test failed first, and after how many examples. It does not shrink: red is enough."""

from __future__ import annotations

import json
import os
import time
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import Phase, settings
from mutants.trial import FILE, RANK

import sp_core

LONGEST = 200
KIT = "test_kit_"
"""Files whose tests look at shrunk examples."""


class Witness:
    """Writes down the first failure of a session, on rank 0."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._begin = time.monotonic()
        self._examples = 0

    def pytest_runtest_logstart(self) -> None:
        """Remember how many examples there were before a test."""
        self._examples = _examples()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Tell of a failure, the first time."""
        if not report.failed or self._file.exists():
            return
        told = {
            "law": report.nodeid,
            "examples": _examples() - self._examples,
            "seconds": round(time.monotonic() - self._begin, 1),
            "words": _words(report),
        }
        self._file.write_text(json.dumps(told))


def _examples() -> int:
    """Return how many examples there were; 0 if the kit cannot tell, because the fault is in the kit."""
    with suppress(Exception):
        from sp_core.testing import session

        return int(session.current.tally.examples)
    return 0


def _draw_only() -> None:
    """Let no profile shrink examples; a kit with a fault may have no profiles."""
    with suppress(Exception):
        from sp_core.testing import profiles

        for name in (profiles.DEFAULT, "quick", "brief"):
            phases = [
                phase
                for phase in settings.get_profile(name).phases
                if phase not in (Phase.shrink, Phase.explain)
            ]
            settings.register_profile(name, settings.get_profile(name), phases=phases)


def _words(report: pytest.TestReport) -> str:
    crash = getattr(report.longrepr, "reprcrash", None)
    text = str(report.longrepr) if crash is None else str(crash.message)
    return " ".join(text.split())[:LONGEST]


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    """Refuse to try another package than the one in this folder."""
    if not Path(sp_core.__file__).is_relative_to(Path.cwd()):
        raise pytest.UsageError(
            f"{sp_core.__file__} would be tested, needed the copy in {Path.cwd()}"
        )
    if not any(KIT in Path(argument).name for argument in config.args):
        _draw_only()
    if all(os.environ.get(name, "0") == "0" for name in RANK):
        config.pluginmanager.register(Witness(Path(os.environ[FILE])), "mutants_witness")
