"""One clock for all ranks: that of rank 0, by which the spans of a merged trace are ordered."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from torch.profiler import record_function

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

ANCHOR = "clock anchor"
TRIES = 20


def offset(world: Intracomm) -> float:
    """Seconds that this rank's `perf_counter` is ahead of rank 0's.

    Returns:
        0 where the difference is less than its own uncertainty, as for ranks of one node, which share one clock.

    Communication:
        20 short messages to and from every rank, one rank after another.

    Source: Cristian 1989, Probabilistic clock synchronization, doi:10.1007/BF01784024.
    """
    mine = 0.0
    for rank in range(1, world.size):
        if world.rank == 0:
            for _ in range(TRIES):
                world.send(time.perf_counter(), rank)
                world.recv(source=rank)
        elif world.rank == rank:
            mine = _best([_round_trip(world) for _ in range(TRIES)])
    return mine


def _round_trip(world: Intracomm) -> tuple[float, float, float]:
    """When this rank began to wait, what rank 0's clock said meanwhile, and when the answer was there."""
    start = time.perf_counter()
    theirs = world.recv(source=0)
    end = time.perf_counter()
    world.send(None, 0)
    return start, theirs, end


def _best(trips: list[tuple[float, float, float]]) -> float:
    """The offset from the shortest trip, which leaves the least room for error."""
    start, theirs, end = min(trips, key=lambda trip: trip[2] - trip[0])
    found, doubt = (start + end) / 2 - theirs, (end - start) / 2
    return 0.0 if abs(found) <= doubt else found


def anchors() -> list[tuple[float, float]]:
    """Leave marks in the profile, and say between which times of `perf_counter` each was made."""
    made = []
    for number in range(TRIES):
        start = time.perf_counter()
        with record_function(f"{ANCHOR} {number}"):
            pass
        made.append((start, time.perf_counter()))
    return made
