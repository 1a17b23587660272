"""Let everything that a rank has started make progress, whichever of it the rank waits for.

An algorithm that sends in several steps makes progress only while its rank polls it. A rank that
waits on one communicator must therefore poll all of them. Otherwise ranks that wait in different
orders would wait for each other.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

from sp_core.errors import RankError


class Progress:
    """The communicators of one rank on which something has been started.

    They are weakly referenced.

    Attributes:
        kept: comparisons whose answers nobody waits for any more, until MPI has done with their
            memory. `requests` are MPI's requests of each.
    """

    def __init__(self) -> None:
        self._busy: WeakKeyDictionary[Any, None] = WeakKeyDictionary()
        self.kept: list[Any] = []

    def add(self, source: Any) -> None:
        """Call a communicator's `advance` in every poll from now on, until it is False."""
        self._busy[source] = None

    def keep(self, questions: Sequence[Any]) -> None:
        """Keep comparisons whose answers nobody waits for any more."""
        self.kept = [question for question in self.kept if not _has_ended(question)]
        self.kept += questions

    @property
    def idle(self) -> bool:
        """Whether nothing is started."""
        return not self._busy

    def poll(self) -> None:
        """Let everything started make progress.

        Call it between pieces of a long computation; it is cheap.
        """
        for source in list(self._busy):
            if not source.advance():
                self._busy.pop(source, None)


def _has_ended(question: Any) -> bool:
    try:
        return bool(question.test())
    except RankError:  # over gloo, where its ranks have closed the connections since
        return True


_RANK = threading.local()


def of_this_rank() -> Progress:
    """Return the progress of the rank whose thread calls this.

    A communicator asks once, when it is made. Threads in which torch runs a backward then poll the
    same communicators. Tests run several ranks in one process.
    """
    found: Progress = vars(_RANK).setdefault("progress", Progress())
    return found
