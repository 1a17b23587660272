"""One clock for all hosts, which are one machine: ranks begin together, at a time that they have agreed on."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

LEAD_SECONDS = 0.02  # until the last rank has heard of it, over links of a few milliseconds
SPIN_SECONDS = 5e-4


def begin(world: Intracomm) -> float:
    """Wait, mostly asleep, for the time that rank 0 has chosen; that time. A barrier would let ranks go a delay apart."""
    start: float = world.bcast(time.perf_counter() + LEAD_SECONDS)
    left = start - time.perf_counter()
    if left < 0:
        raise RuntimeError(f"a rank heard {-left * 1e3:.1f} ms too late when to begin; this machine is too busy to measure anything.")
    time.sleep(max(left - SPIN_SECONDS, 0.0))
    while time.perf_counter() < start:
        pass
    return start


def sample(world: Intracomm, step: Callable[[], object]) -> float:
    """Seconds from the common beginning to the end on the last rank."""
    start = begin(world)
    step()
    ends: list[float] = world.allgather(time.perf_counter())
    return max(ends) - start
