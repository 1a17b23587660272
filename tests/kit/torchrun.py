"""Run tests of `given` and `spmd` on ranks that torchrun has started, without mpi4py.

    torchrun --nproc-per-node 3 -m pytest -p kit.torchrun -p sp_core.testing.plugin tests/...

Every rank draws the same examples, because all have one seed and get the outcomes of all ranks.
"""

import os
import sys
import tempfile
from datetime import timedelta
from functools import cache

import pytest
from torch import distributed

from sp_core import failing
from sp_core.testing import session
from sp_core.testing.outcome import FINISHED, outcome_of
from sp_core.testing.plan import Example, Result, Spec, combined
from sp_core.testing.session import collected
from sp_core.transport.groups import GroupComm, over_ranks

LIMIT = timedelta(seconds=60)
FOLDER = tempfile.TemporaryDirectory(prefix="sp_core-")
os.environ["PYTEST_DEBUG_TEMPROOT"] = FOLDER.name
"""Each process has its own folder: pytest warns if another process deletes files that it lists."""


@pytest.hookimpl(trylast=True)
def pytest_configure() -> None:
    """Start the process group; nothing may import mpi4py."""
    sys.modules["mpi4py"] = None  # type: ignore[assignment]
    failing.hooked = True  # the session outlives the errors of its tests
    distributed.init_process_group("gloo", timeout=LIMIT)
    session.current.ranks, session.current.attempt = distributed.get_world_size(), attempt


def pytest_unconfigure() -> None:
    """End the process group."""
    distributed.destroy_process_group()


@cache
def world() -> GroupComm:
    """Return the communicator of all ranks; tests get communicators of their own."""
    return over_ranks(range(distributed.get_world_size()), LIMIT)


@cache
def communicator(ranks: tuple[int, ...]) -> GroupComm | None:
    """Return the communicator of an example's ranks; None on others. Every rank calls this."""
    mine = distributed.get_rank()
    made = world().Split(int(mine in ranks), ranks.index(mine) if mine in ranks else mine)
    return made if mine in ranks else None


def attempt(spec: Spec, example: Example) -> Result:
    """Run this rank's part of an example, and return the outcomes of all ranks."""
    comm, outcome = communicator(example.ranks), FINISHED
    with collected() as sink:
        if comm is not None:
            outcome = outcome_of(lambda: spec.run(comm, example))
    return combined(example, world().allgather((outcome, sink)))
