"""Carry the protocol by MPI: polled exchanges on a communicator of their own, so that a waiting rank sleeps."""

from __future__ import annotations

import os
import pickle
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from sp_core.testing.lockstep import BytesCarrier, Steps, Ticket, begun, boxed
from sp_core.testing.stuck import AFTER_SECONDS

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

T = TypeVar("T")
YIELD_SECONDS = 2e-4
"""About as long as ranks that have a core each take to meet."""
PAUSE_SHARE, LONGEST_PAUSE = 0.125, 5e-3
"""A rank that no example needs looks rarely and leaves the cores to the others. No wait gets longer by more than this share."""


def patiently(ready: Callable[[], T | None]) -> T:
    """Call until the answer is not None. In between let other processes run, then sleep, longer with time."""
    begin = time.perf_counter()
    while (got := ready()) is None:
        waited = time.perf_counter() - begin
        if waited > YIELD_SECONDS:
            time.sleep(min(waited * PAUSE_SHARE, LONGEST_PAUSE))
        else:
            os.sched_yield()
    return got


def drive(steps: Steps[T], look: Callable[[], object] = lambda: None) -> T:
    """Run steps to their end and sleep in between. `look` is called after each but the last."""
    ask = begun(boxed(steps))

    def ready() -> tuple[T] | None:
        if (done := ask()) is None:
            look()
        return done

    return patiently(ready)[0]


def wait(request: Any) -> None:
    """Wait for an MPI request without keeping a core busy."""
    patiently(lambda: request.Test() or None)


class MpiCarrier(BytesCarrier):
    """Exchange between the ranks of one MPI communicator.

    Args:
        comm: a communicator that nobody else sends on.
        stuck: called again and again when a wait is a long one; may raise.
    """

    def __init__(
        self, comm: Intracomm, stuck: Callable[[str, bool], None] = lambda what, ending: None
    ) -> None:
        self.comm = comm
        self.rank, self.size = comm.rank, comm.size
        self._stuck = stuck

    def begin(self, mine: bytes) -> Ticket:
        """Begin an exchange of bytes, as many on every rank."""
        received = np.empty((self.size, len(mine)), np.uint8)
        request = self.comm.Iallgather(np.frombuffer(mine, np.uint8), received)
        return lambda: [part.tobytes() for part in received] if request.Test() else None

    def drive(self, steps: Steps[T], what: str, *, ending: bool = False) -> T:
        """Run steps to their end and sleep in between."""
        begin = time.monotonic()
        return drive(
            steps,
            lambda: self._stuck(what, ending) if time.monotonic() - begin > AFTER_SECONDS else None,
        )

    def broadcast(self, value: object = None) -> Any:
        """Return the value of rank 0. The other ranks sleep until it comes."""
        mine = np.frombuffer(pickle.dumps(value), np.uint8).copy()
        size = np.array([mine.size])
        wait(self.comm.Ibcast(size, 0))
        raw = mine if self.rank == 0 else np.empty(size[0], np.uint8)
        wait(self.comm.Ibcast(raw, 0))
        return pickle.loads(raw.tobytes())
