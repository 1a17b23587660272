"""Ranks as threads of one process: the same methods and the same protocol as under MPI, without mpiexec.

Transfers take the least favourable order that MPI allows: a send buffer is read as late as possible, a receive buffer is
spoiled when the transfer starts and filled when it completes. Code that touches a buffer too early is wrong here every time,
not now and then.
"""

from __future__ import annotations

import itertools
import pickle
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from sp_core.errors import CollectiveMismatch
from sp_core.testing.comm import LockstepComm
from sp_core.testing.delivery import contribution, deliver, view
from sp_core.testing.family import Family
from sp_core.testing.lockstep import Call, Lockstep, Message, Record, Steps, Ticket, until
from sp_core.testing.signatures import COLLECTIVES, Flow, require
from sp_core.testing.specs import Array, read
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
        if not self._over():
            self._comm.lockstep.waiting(self._what)
        return self.done

    def Wait(self) -> bool:
        """Wait until the transfer is complete; where no rank can go on, all of them learn it."""
        self._comm._carrier.drive(self._waiting(), self._what)
        return True

    def _waiting(self) -> Steps[None]:
        heard = self._comm.lockstep.waiting  # once: else ranks that all wait would wake each other for ever
        heard(self._what)
        while not self._over():
            yield
            if self._comm.lockstep.is_open:
                heard(self._what)

    def _over(self) -> bool:
        self._comm.progress()
        if not self.done and self._advance():
            self.done = True
            self._comm._forget(self)  # with its buffers
        return self.done

    def _advance(self) -> bool:
        raise NotImplementedError


class _Collective(_Request):
    def __init__(self, comm: ThreadComm, op: str, flow: Flow, slots: dict[int, dict[int, Array]]) -> None:
        super().__init__(comm, f"a started {op}")
        self._op, self._flow, self._slots = op, flow, slots
        for _, part in flow.takes:
            spoil(part.view)

    def release(self) -> bool:
        """Read what this rank gives; from now on the others can complete."""
        self._slots.setdefault(self._comm.rank, contribution(self._flow))
        self._comm._touch()
        return True

    def _advance(self) -> bool:
        if len(self._slots) < self._comm.size:
            return False
        deliver(self._op, self._comm.rank, [self._slots[rank] for rank in range(self._comm.size)], self._flow)
        return True


class _Send(_Request):
    def __init__(self, comm: ThreadComm, numbers: Array, slot: dict[str, Array]) -> None:
        super().__init__(comm, "a message to be sent")
        self._numbers, self._slot = numbers, slot

    def release(self) -> bool:
        """Read the buffer as late as MPI may, which keeps a long message until there is a place for it.

        Returns:
            Whether the receiver can complete.
        """
        if "awaited" not in self._slot:
            return False
        self._slot.setdefault("data", self._numbers.copy())
        self._comm._touch()
        return True

    def _advance(self) -> bool:
        return "data" in self._slot


class _Receive(_Request):
    def __init__(self, comm: ThreadComm, numbers: Array, slot: dict[str, Array], message: Message) -> None:
        super().__init__(comm, f"a message from rank {message.source}")
        self._buf, self._slot, self._message = numbers, slot, message
        slot["awaited"] = np.empty(0)  # a mark only: nobody but its owner may keep the buffer alive
        spoil(self._buf)
        comm._touch()

    def _advance(self) -> bool:
        if "data" not in self._slot:
            return False
        data = self._slot["data"]
        if data.nbytes != self._buf.nbytes:
            raise CollectiveMismatch(
                f"{self._what} has {data.nbytes} bytes, its buffer {self._buf.nbytes}: "
                "the ranks' sizes differ, or messages of one tag came in another order"
            )
        self._buf[:] = data.view(self._buf.dtype)
        self._comm.lockstep.received.append(self._message)
        return True


class _Draws:
    """A counter of ranks that are threads: one step of an iterator in C is never interrupted by another thread."""

    def __init__(self, comm: ThreadComm, numbers: Iterator[int]) -> None:
        self._comm, self._numbers = comm, numbers
        self.done = False  # as a request: an example must not end before it is freed

    def __str__(self) -> str:
        return "a counter"

    def take(self) -> int:
        """The next number."""
        return next(self._numbers)

    def free(self) -> None:
        """Let the example end."""
        self._comm._forget(self)


def spoil(buffer: Array | None) -> None:
    """Fill a buffer with bytes that no test expects (NaN in floating point)."""
    if buffer is not None:
        buffer.view(np.uint8)[:] = 0xFF


class ThreadComm(LockstepComm):
    """A communicator whose ranks are threads of this process; `run_threads` makes it."""

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"{type(self).__name__} has no {name!r}: ranks that are threads have the collectives of a whole communicator and the "
            "messages that the library announces. Run this test under mpiexec, where every call of mpi4py is there."
        )

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

    def _touch(self) -> None:
        """Wake the ranks that wait: something has changed."""
        with self._world.changed:
            self._world.touch()

    def _exchange(self, value: Any) -> list[Any]:
        return self._carrier.drive(until(self._carrier.share(value)), "an exchange of data")

    def _collective(self, op: str, form: str, args: Sequence[Any], given: Mapping[str, Any]) -> _Request | None:
        def make(flow: Flow) -> _Request | None:
            if form != op:
                request = _Collective(self, op, flow, self._slot("member", "collective"))
                self._pending.append(request)
                return self._kept(request)
            deliver(op, self.rank, self._exchange(contribution(flow)), flow)
            return None

        made: _Request | None = self._agree_on(op, form, args, given, make)
        return made

    def _slot(self, side: str, *key: Any) -> dict[Any, Any]:
        """What sender and receiver of one transfer share; transfers of one key are told apart by their order on each side."""
        number = self._counts[side, *key]
        self._counts[side, *key] += 1
        slot: dict[Any, Any] = self._world.shared((self._name, *key, number), dict)
        return slot

    def Isend(self, buf: Any, dest: int, tag: int = 0) -> _Request:
        """mpi4py's `Isend`."""
        message, numbers = self._message("Isend", buf, self.rank, dest, tag)
        self.lockstep.sent.append(message)
        request = _Send(self, numbers, self._slot("sender", self.rank, dest, tag))
        self._pending.append(request)
        return self._kept(request)

    def Irecv(self, buf: Any, source: int, tag: int = 0) -> _Request:
        """mpi4py's `Irecv` from a named source, with a named tag, of exactly as much."""
        message, numbers = self._message("Irecv", buf, source, self.rank, tag)
        return self._kept(_Receive(self, numbers, self._slot("receiver", source, self.rank, tag), message))

    def Send(self, buf: Any, dest: int, tag: int = 0) -> None:
        """mpi4py's `Send`."""
        self.Isend(buf, dest, tag).Wait()

    def Recv(self, buf: Any, source: int, tag: int = 0) -> None:
        """mpi4py's `Recv`, as `Irecv`."""
        self.Irecv(buf, source, tag).Wait()

    def Sendrecv(self, sendbuf: Any, dest: int, sendtag: int = 0, recvbuf: Any = None, source: int = -1, recvtag: int = 0) -> None:
        """mpi4py's `Sendrecv`, from a named source."""
        requests = self.Irecv(recvbuf, source, recvtag), self.Isend(sendbuf, dest, sendtag)
        for request in requests:
            request.Wait()

    def _message(self, op: str, buf: Any, source: int, dest: int, tag: int) -> tuple[Message, Array]:
        """A message that is announced where any has been, and its numbers."""
        peer, part = (dest if op == "Isend" else source), read(buf, "", 1, writable=op == "Irecv").parts[0]
        require(0 <= peer < self.size, f"{op}: rank {peer} is not one of the {self.size} ranks of this communicator")
        if self._exchanges:
            self._take(op, peer, part.nbytes)
        return Message(source, dest, tag, part.nbytes, part.kind), view(part)

    def _kept(self, request: _Request) -> _Request:
        self._requests.append(request)
        return request

    def _forget(self, request: _Request | _Draws) -> None:
        self._requests = [other for other in self._requests if other is not request]

    def Dup(self) -> ThreadComm:
        """mpi4py's `Dup`: the same ranks with messages of their own."""
        self._enter(Call("Dup"))
        name = f"{self._name}.{next(self.children)}"
        return ThreadComm(self._world, name, self.rank, self.size, world_rank=self._world_rank, family=self.family)

    def Split(self, color: int = 0, key: int = 0) -> ThreadComm | None:
        """mpi4py's `Split`; a negative color (`MPI.UNDEFINED`) gives a false value instead of a communicator."""
        choices = self._enter(Call("Split"), lambda: self._exchange((color, key)))
        name = f"{self._name}.{next(self.children)}[{color}]"
        if color < 0:
            return None
        ranks = sorted((k, rank) for rank, (c, k) in enumerate(choices) if c == color)
        return ThreadComm(
            self._world, name, ranks.index((key, self.rank)), len(ranks), world_rank=self._world_rank, family=self.family
        )

    @property
    def _pickle(self) -> Any:
        return pickle

    def alone(self) -> ThreadComm:
        """A communicator of this rank alone, which needs no other rank."""
        name = f"{self._name}.alone[{self._world_rank}]"
        return ThreadComm(self._world, name, 0, 1, world_rank=self._world_rank, family=self.family)

    def make_counter(self) -> SharedCounter:
        """A counter that these ranks share."""
        self._enter(Call("make_counter"))
        counter = _Draws(self, self._world.shared((self._name, "counter", next(self.children)), itertools.count))
        self._requests.append(counter)
        return counter

    def _release(self) -> None:
        pending, self._pending = self._pending, []
        self._pending = [request for request in pending if not request.release()]

    def _free(self) -> None:
        self._freed = True


def _call(op: str, form: str) -> Callable[..., _Request | None]:
    return lambda self, *args, **given: self._collective(op, form, args, given)


for _op in COLLECTIVES:
    if not _op.startswith("Neighbor") and _op != "Alltoallw":
        setattr(ThreadComm, _op, _call(_op, _op))
        setattr(ThreadComm, f"I{_op.lower()}", _call(_op, f"I{_op.lower()}"))
