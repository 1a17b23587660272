"""Where the time of a step goes: named parts of the computation, without the communication inside them, and the communication."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from sp_core.communicator import Communicator

COMMUNICATION = "communication"
_OPERATION = "op:"


class Phases:
    """Seconds of this rank by phase; each phase without the phases inside it, and without the time spent waiting for others.

    Args:
        comms: whose waiting counts as communication.
        sync: waits until the device has done everything, so that a phase's kernels count in it.
    """

    def __init__(self, comms: Sequence[Communicator], sync: Callable[[], None]) -> None:
        self._comms, self._sync = comms, sync
        self._seconds: dict[str, float] = {}
        self._inside = [0.0]

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """What happens in this block belongs to the phase."""
        self._sync()
        start = self._computing()
        self._inside.append(0.0)
        try:
            yield
        finally:
            self._sync()
            elapsed = self._computing() - start
            self._seconds[name] = self._seconds.get(name, 0.0) + elapsed - self._inside.pop()
            self._inside[-1] += elapsed

    def note(self) -> dict[str, float]:
        """All seconds so far, by phase and by operation of the communicators."""
        waited = operations(self._comms)
        return {**self._seconds, COMMUNICATION: sum(waited.values()), **{_OPERATION + name: s for name, s in waited.items()}}

    def _computing(self) -> float:
        """A clock that stands still while this rank waits for others."""
        return time.perf_counter() - sum(comm.counters.total(control=True).seconds for comm in self._comms)


def operations(comms: Sequence[Communicator]) -> dict[str, float]:
    """Seconds of waiting by operation, `control` included."""
    found: dict[str, float] = {}
    for comm in comms:
        for name, count in comm.counters.snapshot().items():
            found[name] = found.get(name, 0.0) + count["seconds"]
    return found


def phase_names(notes: list[list[dict[str, float]]]) -> list[str]:
    """The phases that any rank noted."""
    names = {name for rank in notes for sample in rank for name in sample}
    return sorted(name for name in names if not name.startswith(_OPERATION))


def operation_key(name: str) -> str:
    """What the seconds of an operation are noted under."""
    return _OPERATION + name
