"""Exchange values between ranks without blocking inside MPI, and wait by polling.

An exchange is an all-gather of one value per rank: every rank of a communicator begins it, and it
is complete when all ranks have. A round is an exchange of `Record`s. Steps are a generator that
yields while it waits for other ranks. `MpiCarrier` makes exchanges between processes,
`world.ThreadCarrier` between threads.
"""

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
"""A generator that does a job in steps and returns the result.

It yields whenever it has to wait for other ranks. Each `next` polls again.
"""
Ticket = Callable[[], list[Any] | None]
"""A function that polls an exchange under way.

It returns the values of all ranks in rank order, or None while a rank has not begun the exchange.
"""

_RECORD = struct.Struct("<q16s16s")
AFTER_SECONDS = 0.5
"""A wait is a long one, and looks for a deadlock, after so many seconds."""
YIELD_SECONDS = 2e-4
"""A wait yields the core for so many seconds, and then sleeps between polls.

Ranks that have a core each take about as long to meet.
"""
PAUSE_SHARE, LONGEST_PAUSE = 0.125, 5e-3
"""Between polls a wait sleeps for PAUSE_SHARE of its time so far, at most LONGEST_PAUSE seconds.

A rank that waits long so leaves its core to other ranks. No wait gets longer by more than the
share.
"""


class Record(NamedTuple):
    """What one rank contributes to a round.

    The size is fixed, so that a round is one small message per rank.

    Attributes:
        kind: whether the rank is about to make a call, waits for a message, or is done, and how.
        digest: hash of the call and of the arguments that must be equal on all ranks.
        balance: sum of the hashes of the messages sent, less that of the messages received, modulo
            2**128. The balances of all ranks add up to 0 if each message is received as sent.
    """

    kind: Kind
    digest: int = 0
    balance: int = 0


class Carrier(ABC):
    """Exchange values between the ranks of one communicator.

    Attributes:
        rank: of the caller in this communicator.
        size: number of ranks.
    """

    rank: int
    size: int

    def post(self, record: Record) -> Ticket:
        """Begin an all-gather of one record per rank, and return a function that polls for it.

        That function (a ticket) returns None until all ranks have begun, and then all records in
        rank order. Every rank calls `post`; none waits in it.
        """
        return self.share(record)

    @abstractmethod
    def share(self, value: object) -> Ticket:
        """Begin an all-gather of one value per rank, and return a function that polls for it.

        That function (a ticket) returns None until all ranks have begun the exchange, and then all
        values in rank order. Every rank calls `share`; none waits in it. The values may differ in
        size.
        """

    @abstractmethod
    def drive(self, steps: Steps[T], what: str, *, ending: bool = False) -> T:
        """Run a generator to its end and return its result. Sleep while it waits for other ranks.

        Args:
            steps: yields whenever it has to wait for other ranks.
            what: describes the wait, for the report of a deadlock.
            ending: whether this rank waits only for other ranks to end; they then cause a deadlock.
        """

    def gather(self, value: object) -> list[Any]:
        """Return the values of all ranks, in rank order. Every rank calls this and waits."""
        return self.drive(until(self.share(value)), "an exchange of values")


def until(ticket: Ticket) -> Steps[list[Any]]:
    """Return a generator that yields until an exchange is complete.

    Its result is the list of all ranks' values, in rank order. `ticket` polls the exchange.
    """
    while (got := ticket()) is None:
        yield
    return got


def begun(steps: Steps[T]) -> Callable[[], T | None]:
    """Run a generator to its first `yield`, and return a function that continues the generator.

    Each call of that function runs the generator to its next `yield`. A call returns None until the
    generator has ended, and then the generator's result.
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
    """Return a generator whose result is that of `steps` in a 1-tuple, which is never None."""
    return ((yield from steps),)


def patiently(ready: Callable[[], T | None], stuck: Callable[[], object] = lambda: None) -> T:
    """Call `ready` until it returns something other than None, and return that.

    Between the calls let other processes run. In a long wait sleep, ever longer.

    Args:
        ready: polls for the result.
        stuck: called at each poll once the wait is a long one; it may raise.
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
    """Exchange values between processes, by non-blocking all-gathers of MPI.

    Args:
        comm: an mpi4py communicator on which nobody else communicates.
        stuck: called with `what` and `ending` of `drive` at each poll of a long wait; it may raise.
    """

    def __init__(
        self, comm: Intracomm, stuck: Callable[[str, bool], None] = lambda what, ending: None
    ) -> None:
        self.comm = comm
        self.rank, self.size = comm.rank, comm.size
        self._stuck = stuck

    def post(self, record: Record) -> Ticket:
        """Begin an all-gather of 40 bytes per rank, and return a function that polls for it.

        That function (a ticket) returns None until all ranks have begun, and then all records in
        rank order. Every rank calls `post`; none waits in it.
        """
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
        """Begin an all-gather of picklable values, and return a function that polls for the result.

        That function (a ticket) returns None until all ranks have begun the exchange, and then all
        values in rank order. Every rank calls `share`; none waits in it. Two all-gathers of MPI
        carry it: of the sizes of the pickles, and of the pickles.
        """
        return begun(self._share(pickle.dumps(value)))

    def _share(self, mine: bytes) -> Steps[list[Any]]:
        sizes = yield from until(self._begin(len(mine).to_bytes(8, "little")))
        longest = max(int.from_bytes(size, "little") for size in sizes)
        parts = yield from until(self._begin(mine.ljust(longest, b"\0")))
        return [pickle.loads(part) for part in parts]

    def _begin(self, mine: bytes) -> Ticket:
        """Begin an all-gather of bytes, and return a function that polls for the result.

        Every rank gives equally many bytes. The function returns None until the all-gather is
        complete, and then the bytes of each rank, in rank order.
        """
        received = np.empty((self.size, len(mine)), np.uint8)
        request = self.comm.Iallgather(np.frombuffer(mine, np.uint8), received.reshape(-1))
        return lambda: [part.tobytes() for part in received] if request.Test() else None

    def drive(self, steps: Steps[T], what: str, *, ending: bool = False) -> T:
        """Run a generator to its end and return its result. Sleep whenever the generator yields."""
        return patiently(begun(boxed(steps)), lambda: self._stuck(what, ending))[0]

    def broadcast(self, value: object = None) -> Any:
        """Return rank 0's value on every rank. Every rank calls this and waits for the transfer.

        Args:
            value: picklable; that of other ranks than 0 is ignored.
        """
        mine = np.frombuffer(pickle.dumps(value), np.uint8).copy()
        size = np.array([mine.size])
        wait(self.comm.Ibcast(size, 0))
        raw = mine if self.rank == 0 else np.empty(size[0], np.uint8)
        wait(self.comm.Ibcast(raw, 0))
        return pickle.loads(raw.tobytes())
