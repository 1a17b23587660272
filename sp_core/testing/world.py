"""Let ranks that are threads of one process wait for each other, and find deadlocks.

A deadlock is found at once, when every rank waits or has ended. For exchanges, steps and tickets
see `carriers`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

from sp_core.testing.carriers import Carrier, Steps, Ticket
from sp_core.testing.outcome import Mismatched

T = TypeVar("T")


class Stopped(BaseException):
    """Raised in a rank when all are to end because one hung. The rank itself has made no error."""


class World:
    """The state that the ranks of one run of a body share; these ranks are threads.

    Args:
        size: number of ranks.

    Attributes:
        changed: condition variable that guards the state and wakes ranks.
        version: number of changes so far, which tells a waiting rank that something has happened.
        stopped: whether a rank has hung, so that all are to end.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.changed = threading.Condition()
        self.version = 0
        self.stopped = False
        self._waiting: dict[int, tuple[str, bool]] = {}
        self._doomed: set[int] = set()
        self._deadlock = ""
        self._away: set[int] = set()
        self._shared: dict[Any, Any] = {}

    def touch(self) -> None:
        """Count a change of the state, and wake all ranks that wait."""
        with self.changed:
            self.version += 1
            self._waiting.clear()
            self.changed.notify_all()

    def shared(self, key: Any, make: Callable[[], T]) -> T:
        """Return the object stored under `key`. The first rank that asks makes it with `make`."""
        with self.changed:
            if key not in self._shared:
                self._shared[key] = make()
            value: T = self._shared[key]
            return value

    def put(self, key: Any, rank: int, value: Any, size: int) -> Ticket:
        """Give a rank's value to an all-gather, and return a function that polls for the result.

        That function (a ticket) returns None until all ranks have given a value, and then all
        values in rank order.

        Args:
            key: names the all-gather, the same on all its ranks.
            rank: of the caller among the ranks that take part.
            value: of this rank, which is not copied.
            size: number of ranks that take part.
        """
        values: dict[int, Any] = self.shared(key, dict)
        with self.changed:
            values[rank] = value
            if len(values) == size:
                del self._shared[key]
                self.touch()
        return lambda: [values[rank] for rank in range(size)] if len(values) == size else None

    def leave(self, rank: int) -> None:
        """Note that a rank has ended. Ranks that wait for it may then be in a deadlock."""
        with self.changed:
            self._away.add(rank)
            self.touch()

    def stop(self) -> None:
        """End all ranks: every rank that waits, now or later, raises `Stopped`."""
        self.stopped = True
        self.touch()

    def running(self) -> list[int]:
        """Return the ranks that neither wait nor have ended."""
        with self.changed:
            return [
                rank
                for rank in range(self.size)
                if rank not in self._waiting and rank not in self._away
            ]

    def drive(self, rank: int, steps: Steps[T], what: str, *, ending: bool = False) -> T:
        """Run a generator to its end and return its result.

        At each `yield` sleep until another rank has changed the state.

        Args:
            rank: of the caller in the world.
            steps: yields whenever it has to wait for other ranks.
            what: describes the wait, for the report of a deadlock.
            ending: this rank waits only for other ranks to end. A deadlock is reported to such
                ranks only if every waiting rank is one.

        Raises:
            Mismatched: every rank waits or has ended, and none can go on.
            Stopped: a rank has hung, so all are to end.
        """
        while True:
            seen = self.version
            try:
                next(steps)
            except StopIteration as stop:
                result: T = stop.value
                return result
            with self.changed:
                self._sleep(rank, seen, what, ending)

    def _sleep(self, rank: int, seen: int, what: str, ending: bool) -> None:
        while self.version == seen and not self.stopped:
            self._waiting[rank] = (what, ending)
            self._find_deadlock()
            if self.version == seen:
                self.changed.wait()
        if self.stopped:
            raise Stopped
        if rank in self._doomed:
            self._doomed.remove(rank)
            raise Mismatched(self._deadlock)

    def _find_deadlock(self) -> None:
        if len(self._waiting) + len(self._away) < self.size or self._doomed:
            return
        table = "".join(
            f"\n  rank {rank}: {what}" for rank, (what, _) in sorted(self._waiting.items())
        )
        self._deadlock = "every rank waits and none can go on:" + table
        stuck = {rank for rank, (_, ending) in self._waiting.items() if not ending}
        # If every rank only waits for other ranks to end, all of them raise.
        self._doomed = stuck or {*self._waiting}
        self.touch()


class ThreadCarrier(Carrier):
    """Exchange values between the ranks of one communicator, which are threads.

    Args:
        world: state shared by the threads.
        name: of the communicator; the same on all its ranks, and no other communicator's.
        rank: of this thread in the communicator.
        size: number of ranks of the communicator.
        world_rank: of this thread in the world.
    """

    def __init__(self, world: World, name: str, rank: int, size: int, world_rank: int) -> None:
        self.world, self.name, self.rank, self.size, self.world_rank = (
            world,
            name,
            rank,
            size,
            world_rank,
        )
        self._rounds = 0

    def share(self, value: object) -> Ticket:
        """Begin an all-gather of one value per rank, and return a function that polls for it.

        That function (a ticket) returns None until all ranks have begun the exchange, and then all
        values in rank order. Every rank calls `share`; none waits in it. The values are not copied.
        """
        self._rounds += 1
        return self.world.put((self.name, "round", self._rounds), self.rank, value, self.size)

    def drive(self, steps: Steps[T], what: str, *, ending: bool = False) -> T:
        """Run a generator to its end and return its result. Sleep whenever the generator yields."""
        return self.world.drive(self.world_rank, steps, what, ending=ending)
