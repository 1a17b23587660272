"""Let ranks that are threads of one process wait for each other, and find when none can go on."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

from sp_core.testing.carriers import Carrier, Steps, Ticket
from sp_core.testing.outcome import Mismatched

T = TypeVar("T")


class Stopped(BaseException):
    """Raised in a rank when the run as a whole was given up. It is no error of the rank."""


class World:
    """Everything that the ranks of one run share."""

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
        """Wake all ranks that wait."""
        with self.changed:
            self.version += 1
            self._waiting.clear()
            self.changed.notify_all()

    def shared(self, key: Any, make: Callable[[], T]) -> T:
        """Return the object of that name. The first rank that asks makes it."""
        with self.changed:
            if key not in self._shared:
                self._shared[key] = make()
            value: T = self._shared[key]
            return value

    def put(self, key: Any, rank: int, value: Any, size: int) -> Ticket:
        """Give a rank's value to a round of so many ranks."""
        values: dict[int, Any] = self.shared(key, dict)
        with self.changed:
            values[rank] = value
            if len(values) == size:
                del self._shared[key]
                self.touch()
        return lambda: [values[rank] for rank in range(size)] if len(values) == size else None

    def leave(self, rank: int) -> None:
        """Say that a rank has ended, so that no rank can wait for it."""
        with self.changed:
            self._away.add(rank)
            self.touch()

    def stop(self) -> None:
        """Wake every waiting rank for good."""
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
        """Run steps to their end. Between two of them sleep until another rank has done something.

        Args:
            rank: of the caller.
            steps: work of this rank.
            what: describes the wait if no rank can go on.
            ending: this rank only waits for the others to end, so a deadlock is not its own.
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
        # If all ranks wait for the others to end, nobody is stuck elsewhere: all of them are.
        self._doomed = stuck or {*self._waiting}
        self.touch()


class ThreadCarrier(Carrier):
    """Exchange between the ranks of one communicator, which are threads.

    Args:
        world: of all ranks.
        name: of the communicator, the same on all its ranks.
        rank, size: of the communicator.
        world_rank: of this rank in the world.
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
        """Begin an exchange of values."""
        self._rounds += 1
        return self.world.put((self.name, "round", self._rounds), self.rank, value, self.size)

    def drive(self, steps: Steps[T], what: str, *, ending: bool = False) -> T:
        """Run steps to their end, and sleep in between."""
        return self.world.drive(self.world_rank, steps, what, ending=ending)
