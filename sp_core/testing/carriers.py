"""Carry records and values between ranks, also by polled exchanges of MPI."""

from __future__ import annotations

import os
import pickle
import struct
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np

from sp_core.testing.outcome import Kind

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

T = TypeVar("T")
Steps = Generator[None, None, T]
"""Work that yields while it has to wait for other ranks."""
Ticket = Callable[[], list[Any] | None]
"""An exchange under way.

Returns what every rank gave, in rank order, or None as long as some rank has given nothing.
"""

_RECORD = struct.Struct("<q16s16s")
AFTER_SECONDS = 0.5
YIELD_SECONDS = 2e-4
"""About as long as ranks that have a core each take to meet."""
PAUSE_SHARE, LONGEST_PAUSE = 0.125, 5e-3
"""A rank that no example needs looks rarely and leaves the cores to the others.

No wait gets longer by more than this share.
"""


class Record(NamedTuple):
    """What one rank puts into a round.

    Its size is fixed, so that the exchange costs one small message.

    Attributes:
        kind: what the rank is about to do.
        digest: of its call.
        balance: hash of the messages that it sends, less that of those that it receives.
    """

    kind: Kind
    digest: int = 0
    balance: int = 0


class Carrier(ABC):
    """Carry records and values between the ranks of one communicator."""

    rank: int
    size: int

    def post(self, record: Record) -> Ticket:
        """Begin an exchange of records."""
        return self.share(record)

    @abstractmethod
    def share(self, value: object) -> Ticket:
        """Begin an exchange of values of any size."""

    @abstractmethod
    def drive(self, steps: Steps[T], what: str, *, ending: bool = False) -> T:
        """Run steps to their end and sleep in between.

        `ending`: this rank waits only for others to end.
        """

    def gather(self, value: object) -> list[Any]:
        """Return the value of every rank."""
        return self.drive(until(self.share(value)), "an exchange of values")


def until(ticket: Ticket) -> Steps[list[Any]]:
    """Wait for an exchange."""
    while (got := ticket()) is None:
        yield
    return got


def begun(steps: Steps[T]) -> Callable[[], T | None]:
    """Take the first step.

    Return a function that takes the next one, and returns the result at the end, None before.
    """
    result: list[T] = []

    def ask() -> T | None:
        if not result:
            try:
                next(steps)
            except StopIteration as end:
                result.append(end.value)
        return result[0] if result else None

    ask()
    return ask


def boxed(steps: Steps[T]) -> Steps[tuple[T]]:
    """Run steps. Return the result in a tuple, which is not None."""
    return ((yield from steps),)


def patiently(ready: Callable[[], T | None], stuck: Callable[[], object] = lambda: None) -> T:
    """Call until the answer is not None.

    In between let other processes run, then sleep, longer with time. `stuck` is called again and
    again when the wait is a long one; it may raise.
    """
    begin = time.perf_counter()
    while (got := ready()) is None:
        waited = time.perf_counter() - begin
        if waited > AFTER_SECONDS:
            stuck()
        if waited > YIELD_SECONDS:
            time.sleep(min(waited * PAUSE_SHARE, LONGEST_PAUSE))
        else:
            os.sched_yield()
    return got


def wait(request: Any) -> None:
    """Wait for an MPI request without keeping a core busy."""
    patiently(lambda: request.Test() or None)


class MpiCarrier(Carrier):
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

    def post(self, record: Record) -> Ticket:
        """Begin an exchange of records."""
        return begun(self._post(record))

    def _post(self, record: Record) -> Steps[list[Any]]:
        kind, *numbers = record
        packed = _RECORD.pack(kind, *(number.to_bytes(16, "little") for number in numbers))
        parts = yield from until(self._begin(packed))
        return [
            Record(Kind(kind), *(int.from_bytes(raw, "little") for raw in numbers))
            for kind, *numbers in map(_RECORD.unpack, parts)
        ]

    def share(self, value: object) -> Ticket:
        """Begin an exchange of picklable values."""
        return begun(self._share(pickle.dumps(value)))

    def _share(self, mine: bytes) -> Steps[list[Any]]:
        sizes = yield from until(self._begin(len(mine).to_bytes(8, "little")))
        longest = max(int.from_bytes(size, "little") for size in sizes)
        parts = yield from until(self._begin(mine.ljust(longest, b"\0")))
        return [pickle.loads(part) for part in parts]

    def _begin(self, mine: bytes) -> Ticket:
        """Begin an exchange of bytes, as many on every rank."""
        received = np.empty((self.size, len(mine)), np.uint8)
        request = self.comm.Iallgather(np.frombuffer(mine, np.uint8), received.reshape(-1))
        return lambda: [part.tobytes() for part in received] if request.Test() else None

    def drive(self, steps: Steps[T], what: str, *, ending: bool = False) -> T:
        """Run steps to their end and sleep in between."""
        return patiently(begun(boxed(steps)), lambda: self._stuck(what, ending))[0]

    def broadcast(self, value: object = None) -> Any:
        """Return the value of rank 0. The other ranks sleep until it comes."""
        mine = np.frombuffer(pickle.dumps(value), np.uint8).copy()
        size = np.array([mine.size])
        wait(self.comm.Ibcast(size, 0))
        raw = mine if self.rank == 0 else np.empty(size[0], np.uint8)
        wait(self.comm.Ibcast(raw, 0))
        return pickle.loads(raw.tobytes())
