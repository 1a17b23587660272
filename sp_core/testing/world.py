"""What ranks that are threads of one process share: rounds of records, mailboxes, and one condition to wait on."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

from sp_core.testing.lockstep import Steps
from sp_core.testing.outcome import Mismatched

T = TypeVar("T")


class Stopped(BaseException):
    """Raised in a rank when the run as a whole was given up; not an error of the rank."""


class World:
    """Everything shared by the ranks of one run."""

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
        """Wake everybody who waits; call it with the condition held."""
        self.version += 1
        self._waiting.clear()
        self.changed.notify_all()

    def shared(self, key: Any, make: Callable[[], T]) -> T:
        """The object of that name, made by whoever asks first."""
        with self.changed:
            if key not in self._shared:
                self._shared[key] = make()
            value: T = self._shared[key]
            return value

    def forget(self, key: Any) -> None:
        """Drop a shared object."""
        with self.changed:
            self._shared.pop(key, None)

    def leave(self, rank: int) -> None:
        """Say that a rank has ended, so nobody can wait for it."""
        with self.changed:
            self._away.add(rank)
            self.touch()

    def stop(self) -> None:
        """Wake every waiting rank for good."""
        with self.changed:
            self.stopped = True
            self.touch()

    def running(self) -> list[int]:
        """The ranks that neither wait nor have ended."""
        with self.changed:
            return [rank for rank in range(self.size) if rank not in self._waiting and rank not in self._away]

    def drive(self, rank: int, steps: Steps[T], what: str, *, ending: bool = False) -> T:
        """Run steps to their end; sleep until another rank has done something whenever they have to wait.

        Args:
            rank: of the caller.
            steps: what to run.
            what: what to say about this rank where nobody can go on.
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
        table = "".join(f"\n  rank {rank}: {what}" for rank, (what, _) in sorted(self._waiting.items()))
        self._deadlock = "every rank waits and none can go on:" + table
        self._doomed = {rank for rank, (_, ending) in self._waiting.items() if not ending}
        self.touch()
