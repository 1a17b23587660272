"""One clock for all hosts, which are one machine: ranks begin together, at a time that they have agreed on."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

LEAD_SECONDS = 0.02  # until the last rank has heard of it, over links of a few milliseconds
LATE_SECONDS = 3e-4  # where a rank begins later than this, the sample is taken again
NAP_SECONDS = 2e-4
TRIES = 5


def begin(world: Intracomm) -> tuple[float, float]:
    """Wait for the time that rank 0 has chosen, mostly asleep. That time, and by how much this rank missed it.

    A barrier would let ranks go a link's delay apart; spinning would keep ranks that share a core from it; and in sleep alone a
    library that sends only when it is called would keep the news to itself.
    """
    start: float = world.bcast(time.perf_counter() + LEAD_SECONDS)
    while (left := start - time.perf_counter()) > 0:
        world.Iprobe()
        time.sleep(min(left, NAP_SECONDS))
    return start, time.perf_counter() - start


def sample(world: Intracomm, step: Callable[[], object]) -> float:
    """Seconds from the common beginning to the end on the last rank; of a few tries that in which ranks were least late."""
    tries: list[tuple[float, float]] = []
    for _ in range(TRIES):
        start, late = begin(world)
        step()
        ranks: list[tuple[float, float]] = world.allgather((time.perf_counter(), late))
        tries.append((max(late for _, late in ranks), max(end for end, _ in ranks) - start))
        if tries[-1][0] < LATE_SECONDS:
            break
    return min(tries)[1]
