"""Let everything that a rank has started make progress, whichever of it the rank waits for.

An algorithm that sends in several steps makes progress only while its rank polls it. A rank that
waits on one communicator must therefore poll all of them. Otherwise ranks that wait in different
orders would wait for each other.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, Protocol
from weakref import WeakKeyDictionary


class Question(Protocol):
    """A comparison over the ranks that is under way, and MPI's request of it."""

    request: Any

    def test(self) -> bool:
        """Return whether it is answered."""
        ...


class Source(Protocol):
    """A communicator on which something may have been started."""

    def advance(self) -> bool:
        """Let everything started make progress. Return False once nothing is left."""
        ...


class Progress:
    """The communicators of one rank on which something has been started. They are weakly referenced."""

    def __init__(self) -> None:
        self._busy: WeakKeyDictionary[Source, None] = WeakKeyDictionary()
        self.kept: list[Question] = []

    def add(self, source: Source) -> None:
        """Poll a communicator from now on, until nothing on it is left."""
        self._busy[source] = None

    def keep(self, questions: Sequence[Question]) -> None:
        """Keep questions, whose answers nobody waits for any more, until MPI has done with their memory."""
        self.kept = [question for question in self.kept if not question.test()] + list(questions)

    @property
    def idle(self) -> bool:
        """Whether nothing is started."""
        return not self._busy

    def poll(self) -> None:
        """Let everything started make progress. Call it between pieces of a long computation; it is cheap."""
        for source in list(self._busy):
            if not source.advance():
                self._busy.pop(source, None)


class _Rank(threading.local):
    """The progress of the rank that runs in this thread. Tests run several ranks in one process."""

    def __init__(self) -> None:
        self.progress = Progress()


_RANK = _Rank()


def of_this_rank() -> Progress:
    """Return the progress of the rank whose thread calls this.

    A communicator asks once, when it is made. Threads in which torch runs a backward then poll the
    same communicators.
    """
    return _RANK.progress
