"""Give every test the kit's `pr` profile: the same examples each time, and no deadlines."""

import gc
import os
import re
from pathlib import Path

import pytest
from hypothesis import settings

from sp_core.launch.command import session_dir
from sp_core.machine import in_job
from sp_core.testing import profiles
from sp_core.testing.plugin import _runs_on_ranks

settings.load_profile(profiles.DEFAULT)
os.environ["SP_TUNING"] = (
    "off"  # what "auto" takes must not depend on what was once measured on this machine
)

for name in [name for name in os.environ if name.startswith("PYTEST_XDIST_")]:
    del os.environ[name]  # the programs that tests start are no workers of this session


RANKS = re.compile(r"\bspmd\b|mark\.ranks\b|from sp_core\.testing import .*\bgiven\b")
"""How a file is known to have tests that run on ranks."""


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Do not import, on every rank, a file without tests that run on ranks."""
    is_test = config.getoption("--only-mpi", False) and collection_path.match("test_*.py")
    return True if is_test and not RANKS.search(collection_path.read_text()) else None


def pytest_collection_finish(session: pytest.Session) -> None:
    """Freeze what the imports have left, so that the garbage collector need not visit it.

    Refuse a file that has tests on ranks and would be left out under `mpiexec`.
    """
    gc.freeze()
    on_ranks = {item.path for item in session.items if _runs_on_ranks(item)}
    files = {path for path in on_ranks if path.match("test_*.py")}
    if hidden := sorted(str(path) for path in files if not RANKS.search(path.read_text())):
        raise pytest.UsageError(f"tests on ranks, but no {RANKS.pattern}: {', '.join(hidden)}")


@pytest.fixture(scope="session", autouse=True)
def _own_session_dir(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Give each worker its own session folder, because others start an mpiexec meanwhile."""
    if not in_job():
        os.environ.update(session_dir(tmp_path_factory.mktemp("mpiexec")))


@pytest.fixture
def short_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the slots of shared memory, so that tensors of tests need several."""
    monkeypatch.setattr("sp_core.transport.window.SLOT_BYTES", 1 << 11)
