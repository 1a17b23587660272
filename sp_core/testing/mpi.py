"""The protocol carried by MPI: polled exchanges on a communicator of their own, so that a waiting rank sleeps."""

from __future__ import annotations

import os
import pickle
import struct
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from sp_core.testing.lockstep import Record, Steps, Ticket, until
from sp_core.testing.outcome import Kind
from sp_core.testing.stuck import AFTER_SECONDS

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

    from sp_core.testing.lockstep import Request

T = TypeVar("T")
_RECORD = struct.Struct("<q16s16s16s")
YIELD_SECONDS = 2e-4
"""About as long as ranks that have a core each take to meet."""
PAUSE_SHARE, LONGEST_PAUSE = 0.125, 5e-3
"""A rank that no example needs looks rarely, and leaves the cores to the others; no wait gets longer by more than this share."""
HEADER_BYTES = 2048


def patiently(ready: Callable[[], T | None]) -> T:
    """Call until the answer is not None: let other processes run in between, then sleep, the longer the longer it has taken."""
    begin = time.perf_counter()
    while (got := ready()) is None:
        waited = time.perf_counter() - begin
        if waited > YIELD_SECONDS:
            time.sleep(min(waited * PAUSE_SHARE, LONGEST_PAUSE))
        else:
            os.sched_yield()
    return got


def drive(steps: Steps[T], look: Callable[[], None] = lambda: None) -> T:
    """Run steps to their end, sleeping in between; `look` is called after each that was not the last."""
    result: list[T] = []

    def ready() -> bool | None:
        try:
            next(steps)
        except StopIteration as stop:
            result.append(stop.value)
            return True
        look()
        return None

    patiently(ready)
    return result[0]


def wait(request: Any) -> None:
    """Wait for an MPI request without keeping a core busy."""
    patiently(lambda: True if request.Test() else None)


class _RecordTicket:
    def __init__(self, comm: Intracomm, record: Record) -> None:
        self._mine = np.frombuffer(packed(record), np.uint8)
        self._all = np.empty(comm.size * _RECORD.size, np.uint8)
        self._request = comm.Iallgather(self._mine, self._all)

    def poll(self) -> list[Record] | None:
        if not self._request.Test():
            return None
        raw = self._all.tobytes()
        return [unpacked(raw[start : start + _RECORD.size]) for start in range(0, len(raw), _RECORD.size)]


def packed(record: Record) -> bytes:
    """A record as bytes, always as many."""
    kind, *numbers = record
    return _RECORD.pack(kind, *(number.to_bytes(16, "little") for number in numbers))


def unpacked(raw: bytes) -> Record:
    """What `packed` has made."""
    kind, *numbers = _RECORD.unpack(raw)
    return Record(Kind(kind), *(int.from_bytes(number, "little") for number in numbers))


class _ValueTicket:
    """Two exchanges, one after the other: of the sizes, then of the pickled values."""

    def __init__(self, comm: Intracomm, value: object) -> None:
        self._comm = comm
        self._mine = np.frombuffer(pickle.dumps(value), np.uint8)
        self._sizes = np.empty(comm.size, np.int64)
        self._request: Request = comm.Iallgather(np.array([self._mine.size], np.int64), self._sizes)
        self._all: np.ndarray[Any, Any] | None = None

    def poll(self) -> list[Any] | None:
        if not self._request.Test():
            return None
        if self._all is None:
            self._all = np.empty(int(self._sizes.sum()), np.uint8)
            self._request = self._comm.Iallgatherv(self._mine, [self._all, self._sizes.tolist()])
            return self.poll()
        return [pickle.loads(part.tobytes()) for part in np.split(self._all, np.cumsum(self._sizes)[:-1])]


class MpiCarrier:
    """Exchanges between the ranks of one MPI communicator.

    Args:
        comm: a communicator that nobody else sends on.
        stuck: called again and again when a wait is a long one; may raise.
    """

    def __init__(self, comm: Intracomm, stuck: Callable[[str, bool], None] = lambda what, ending: None) -> None:
        self.comm = comm
        self.rank: int = comm.rank
        self.size: int = comm.size
        self._stuck = stuck

    def post(self, record: Record) -> Ticket:
        """Begin an exchange of records."""
        return _RecordTicket(self.comm, record)

    def share(self, value: object) -> Ticket:
        """Begin an exchange of picklable values."""
        return _ValueTicket(self.comm, value)

    def drive(self, steps: Steps[T], what: str, *, ending: bool = False) -> T:
        """Run steps to their end, sleeping in between."""
        begin = time.monotonic()

        def look() -> None:
            if time.monotonic() - begin > AFTER_SECONDS:
                self._stuck(what, ending)

        return drive(steps, look)

    def gather(self, value: object) -> list[Any]:
        """The value of every rank."""
        return self.drive(until(self.share(value)), "gather")

    def broadcast(self, value: object = None) -> Any:
        """The value of rank 0. The other ranks sleep until it comes."""
        header = np.zeros(HEADER_BYTES, np.uint8)
        raw = pickle.dumps(value) if self.rank == 0 else b""
        room = HEADER_BYTES - 8
        if self.rank == 0:
            header[:8] = np.frombuffer(struct.pack("<q", len(raw)), np.uint8)
            header[8 : 8 + min(len(raw), room)] = np.frombuffer(raw[:room], np.uint8)
        wait(self.comm.Ibcast(header, 0))
        size = struct.unpack("<q", header[:8].tobytes())[0]
        if size <= room:
            return pickle.loads(header[8 : 8 + size].tobytes())
        rest = np.frombuffer(raw[room:], np.uint8).copy() if self.rank == 0 else np.empty(size - room, np.uint8)
        wait(self.comm.Ibcast(rest, 0))
        return pickle.loads(header[8:].tobytes() + rest.tobytes())
