"""Use the kit's `pr` profile in every test: the same examples each time, and no deadlines."""

import gc
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from sp_core.launch.command import session_dir
from sp_core.machine import in_job
from sp_core.testing import profiles
from sp_core.testing.plugin import _runs_on_ranks

settings.load_profile(profiles.DEFAULT)
os.environ["SP_TUNING"] = "off"  # "auto" must not depend on earlier measurements on this machine

for name in [name for name in os.environ if name.startswith("PYTEST_XDIST_")]:
    del os.environ[name]  # programs that tests start are not workers of this session


RANKS = re.compile(r"\bspmd\b|mark\.ranks\b|from sp_core\.testing import (\([^)]*|.*)\bgiven\b")
"""A pattern that matches files with tests that run on ranks."""


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Do not import a file that has none of the wanted tests: on ranks, or marked `every_mpi`."""
    marked = "every_mpi" if config.option.markexpr == "every_mpi" else ""
    wanted = RANKS.pattern if config.getoption("--only-mpi", False) else marked
    is_test = collection_path.match("test_*.py")
    return True if is_test and not re.search(wanted, collection_path.read_text()) else None


def pytest_collection_finish(session: pytest.Session) -> None:
    """Freeze the objects that imports have made, so that the garbage collector skips them.

    Refuse a file with tests on ranks that RANKS does not match: `mpiexec` would leave it out.
    """
    gc.freeze()
    on_ranks = {item.path for item in session.items if _runs_on_ranks(item)}
    files = {path for path in on_ranks if path.match("test_*.py")}
    if hidden := sorted(str(path) for path in files if not RANKS.search(path.read_text())):
        what_to_do = "import `given` or `spmd` from sp_core.testing, or mark one test `ranks`, in"
        raise pytest.UsageError(f"mpiexec would leave out tests: {what_to_do} {', '.join(hidden)}")


@pytest.fixture(scope="session", autouse=True)
def _own_session_dir(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Give each worker its own session folder, because several may start mpiexec at once."""
    if not in_job():
        os.environ.update(session_dir(tmp_path_factory.mktemp("mpiexec")))


@pytest.fixture
def substitute(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return a function that gives a module or object other attributes until the test ends."""

    def others(owner: Any, **values: Any) -> None:
        for name, value in values.items():
            monkeypatch.setattr(owner, name, value)

    return others


@pytest.fixture
def loaded() -> Iterator[str]:
    """Name the loaded profile of Hypothesis, and load it again after the test."""
    yield (name := settings.get_current_profile_name())
    settings.load_profile(name)


@pytest.fixture
def only_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Repeat no example without the checks of the kit."""
    monkeypatch.setattr("sp_core.testing.session.current.raw_replay", False)


@pytest.fixture
def soon_stuck(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make waiting ranks report soon, so that deadlocks are found sooner."""
    monkeypatch.setattr("sp_core.testing.carriers.AFTER_SECONDS", 0.02)


@pytest.fixture
def short_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the slots of shared memory, so that tensors of tests need several slots."""
    monkeypatch.setattr("sp_core.transport.window.SLOT_BYTES", 1 << 11)
