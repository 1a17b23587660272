"""Give every test the kit's `pr` profile: the same examples each time, and no deadlines."""

import gc
import os

import pytest
from hypothesis import settings

from sp_core.launch.command import session_dir
from sp_core.probing import in_job
from sp_core.testing import profiles

settings.load_profile(profiles.DEFAULT)
os.environ["SP_TUNING"] = (
    "off"  # what "auto" takes must not depend on what was once measured on this machine
)

for name in [name for name in os.environ if name.startswith("PYTEST_XDIST_")]:
    del os.environ[name]  # the programs that tests start are no workers of this session


def pytest_collection_finish() -> None:
    """Freeze what the imports have left, so that the garbage collector need not visit it."""
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def _own_session_dir(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Give each worker its own session folder, because others start an mpiexec meanwhile."""
    if not in_job():
        os.environ.update(session_dir(tmp_path_factory.mktemp("mpiexec")))


@pytest.fixture
def short_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the slots of shared memory, so that tensors of tests need several."""
    monkeypatch.setattr("sp_core.transport.window.SLOT_BYTES", 1 << 11)
