"""Ranks as threads of one process: the same methods and the same protocol as under MPI, without mpiexec.

Transfers take the least favourable order that MPI allows: a send buffer is read as late as possible, a receive buffer is
spoiled when the transfer starts and filled when it completes. Code that touches a buffer too early is wrong here every time,
not now and then.
"""

from __future__ import annotations

import itertools
import pickle
import threading
from collections import defaultdict
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from sp_core.testing.comm import LockstepComm
from sp_core.testing.delivery import contribution, deliver, receives
from sp_core.testing.family import Family
from sp_core.testing.lockstep import Lockstep, Record, Steps, Ticket, until
from sp_core.testing.signatures import Array, array, call
from sp_core.testing.world import Stopped, World

if TYPE_CHECKING:
    from sp_core.transport.counter import SharedCounter

T = TypeVar("T")


class _Board:
    """The rounds of one communicator: a round is complete when every rank has put its value."""

    def __init__(self, world: World, size: int) -> None:
        self.world = world
        self.size = size
        self._rounds: dict[int, dict[int, Any]] = defaultdict(dict)
        self._next = [0] * size
        self._read: dict[int, int] = defaultdict(int)

    def put(self, rank: int, value: Any) -> Ticket:
        with self.world.changed:
            number = self._next[rank]
            self._next[rank] += 1
            self._rounds[number][rank] = value
            if len(self._rounds[number]) == self.size:
                self.world.touch()
        return _BoardTicket(self, number)

    def look(self, number: int) -> list[Any] | None:
        with self.world.changed:
            values = self._rounds[number]
            if len(values) < self.size:
                return None
            self._read[number] += 1
            if self._read[number] == self.size:
                del self._rounds[number], self._read[number]
            return [values[rank] for rank in range(self.size)]


class _BoardTicket:
    def __init__(self, board: _Board, number: int) -> None:
        self._board = board
        self._number = number
        self._got: list[Any] | None = None

    def poll(self) -> list[Any] | None:
        self._got = self._got or self._board.look(self._number)
        return self._got


class _ThreadCarrier:
    """One rank's access to the board of its communicator."""

    def __init__(self, world: World, board: _Board, rank: int, world_rank: int) -> None:
        self.rank = rank
        self.size = board.size
        self._world = world
        self._board = board
        self._world_rank = world_rank

    def post(self, record: Record) -> Ticket:
        return self._board.put(self.rank, record)

    def share(self, value: object) -> Ticket:
        return self._board.put(self.rank, value)

    def drive(self, steps: Steps[T], what: str, *, ending: bool = False) -> T:
        return self._world.drive(self._world_rank, steps, what, ending=ending)


class _Request:
    """A transfer that completes in `Test`."""

    def __init__(self, comm: ThreadComm, what: str) -> None:
        self._comm = comm
        self._what = what
        self.done = False

    def __str__(self) -> str:
        return self._what

    def Test(self) -> bool:
        """Make progress; True once the transfer is complete."""
        self._comm.progress()
        if not self.done and self._advance():
            self.done = True
            self._comm._forget(self)  # with its buffers
        if not self.done:
            self._comm.lockstep.waiting(self._what)
        return self.done

    def Wait(self) -> bool:
        """Wait until the transfer is complete."""
        while not self.Test():
            threading.Event().wait(1e-4)
        return True

    def _advance(self) -> bool:
        raise NotImplementedError


class _Collective(_Request):
    def __init__(self, comm: ThreadComm, op: str, args: tuple[Any, ...], ticket_of: Any) -> None:
        super().__init__(comm, f"a started {op}")
        self._op, self._args = op, args
        self._slots: dict[int, list[Array]] = ticket_of
        spoil(receives(op, comm.rank, args))

    def release(self) -> None:
        """Read what this rank gives; from now on the others can complete."""
        comm = self._comm
        self._slots.setdefault(comm.rank, contribution(self._op, comm.rank, comm.size, self._args))

    def _advance(self) -> bool:
        if len(self._slots) < self._comm.size:
            return False
        parts = [self._slots[rank] for rank in range(self._comm.size)]
        deliver(self._op, self._comm.rank, self._comm.size, parts, self._args)
        return True


class _Send(_Request):
    def __init__(self, comm: ThreadComm, buf: Any, slot: dict[str, Array]) -> None:
        super().__init__(comm, "a message to be sent")
        self._buf, self._slot = buf, slot

    def release(self) -> None:
        """Read the buffer; from now on the receiver can complete."""
        self._slot.setdefault("data", array(self._buf).copy())

    def _advance(self) -> bool:
        return "awaited" in self._slot  # MPI may keep a long message until there is a place for it


class _Receive(_Request):
    def __init__(self, comm: ThreadComm, buf: Any, slot: dict[str, Array], source: int) -> None:
        super().__init__(comm, f"a message from rank {source}")
        self._buf, self._slot = array(buf), slot
        slot["awaited"] = np.empty(0)  # a mark only: nobody but its owner may keep the buffer alive
        spoil(self._buf)

    def _advance(self) -> bool:
        if "data" not in self._slot:
            return False
        data = self._slot["data"]
        if data.nbytes != self._buf.nbytes:
            raise ValueError(
                f"{self._what} has {data.nbytes} bytes, its buffer {self._buf.nbytes}: messages of one tag came in another order"
            )
        self._buf[:] = data.view(self._buf.dtype)
        return True


class _Draws:
    """A counter of ranks that are threads: one step of an iterator in C is never interrupted by another thread."""

    def __init__(self, numbers: Iterator[int]) -> None:
        self._numbers = numbers

    def take(self) -> int:
        """The next number."""
        return next(self._numbers)

    def free(self) -> None:
        """Nothing to give back."""


def spoil(buffer: Array | None) -> None:
    """Fill a buffer with bytes that no test expects (NaN in floating point)."""
    if buffer is not None:
        buffer.view(np.uint8)[:] = 0xFF


class ThreadComm(LockstepComm):
    """A communicator whose ranks are threads of this process; `run_threads` makes it."""

    def __init__(self, world: World, name: str, rank: int, size: int, *, world_rank: int, family: Family) -> None:
        self._world = world
        self._name = name
        self._world_rank = world_rank
        board = world.shared(("board", name), lambda: _Board(world, size))
        self._carrier = _ThreadCarrier(world, board, rank, world_rank)
        self._pending: list[_Collective | _Send] = []
        self._counts: dict[tuple[Any, ...], int] = defaultdict(int)
        super().__init__(Lockstep(self._carrier, name), family)

    def progress(self) -> None:
        """As in the base class; ends this rank if the run was given up."""
        if self._world.stopped:
            raise Stopped
        super().progress()

    def _exchange(self, value: Any) -> list[Any]:
        return self._carrier.drive(until(self._carrier.share(value)), "an exchange of data")

    def _do(self, op: str, *args: Any) -> None:
        mine = contribution(op, self.rank, self.size, args)
        deliver(op, self.rank, self.size, self._exchange(mine), args)

    def _slot(self, side: str, *key: Any) -> dict[Any, Any]:
        """What sender and receiver of one transfer share; transfers of one key are told apart by their order on each side."""
        number = self._counts[side, *key]
        self._counts[side, *key] += 1
        slot: dict[Any, Any] = self._world.shared((self._name, *key, number), dict)
        return slot

    def _begin(self, op: str, *args: Any) -> _Request:
        request = _Collective(self, op, args, self._slot("member", "collective"))
        self._pending.append(request)
        return self._kept(request)

    def _send(self, buf: Any, dest: int, tag: int) -> _Request:
        request = _Send(self, buf, self._slot("sender", self.rank, dest, tag))
        self._pending.append(request)
        return self._kept(request)

    def _receive(self, buf: Any, source: int, tag: int) -> _Request:
        return self._kept(_Receive(self, buf, self._slot("receiver", source, self.rank, tag), source))

    def _kept(self, request: _Request) -> _Request:
        self._requests.append(request)
        return request

    def _forget(self, request: _Request) -> None:
        self._requests = [other for other in self._requests if other is not request]

    def _objects(self, value: Any) -> list[Any]:
        return [pickle.loads(raw) for raw in self._exchange(pickle.dumps(value))]

    def _dup(self, name: str) -> ThreadComm:
        return ThreadComm(self._world, name, self.rank, self.size, world_rank=self._world_rank, family=self.family)

    def _split(self, name: str, color: int, key: int) -> ThreadComm | None:
        choices = self._exchange((color, key))
        if color < 0:
            return None
        ranks = sorted((k, rank) for rank, (c, k) in enumerate(choices) if c == color)
        mine = ranks.index((key, self.rank))
        name = f"{name}[{color}]"
        return ThreadComm(self._world, name, mine, len(ranks), world_rank=self._world_rank, family=self.family)

    def alone(self) -> ThreadComm:
        """A communicator of this rank alone, which needs no other rank."""
        name = f"{self._name}.alone[{self._world_rank}]"
        return ThreadComm(self._world, name, 0, 1, world_rank=self._world_rank, family=self.family)

    def make_counter(self) -> SharedCounter:
        """A counter that these ranks share."""
        self._enter(call("make_counter", self.rank, self.size))
        return _Draws(self._world.shared((self._name, "counter", next(self.children)), itertools.count))

    def _release(self) -> None:
        pending, self._pending = self._pending, []
        for request in pending:
            request.release()

    def _complete(self) -> None:
        self._requests.clear()
        self._announced.clear()
        self._announced_for_later.clear()

    def _free(self) -> None:
        self._freed = True
