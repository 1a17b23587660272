"""The communicator that test bodies get: mpi4py's methods, each preceded by one exchange of the lockstep protocol."""

from __future__ import annotations

import functools
import itertools
import operator
import sys
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, Self, cast

from sp_core.errors import CollectiveMismatch, RankError
from sp_core.testing import watchdog
from sp_core.testing.beginning import Beginning
from sp_core.testing.family import Family
from sp_core.testing.lockstep import Call, Lockstep, Request
from sp_core.testing.places import here
from sp_core.testing.signatures import array, call, listed, op_name

_ON_OBJECTS: dict[str, Callable[[Any, Any], Any]] = {"SUM": operator.add, "PROD": operator.mul, "MAX": max, "MIN": min}


class LockstepComm(ABC):
    """A communicator whose ranks agree on each call before they make it.

    It offers the methods that the library needs and refuses every other one: a call that is not checked could block for ever.

    Args:
        lockstep: this rank's side of the protocol.
        family: where to enter this communicator, so that the end of an example reaches all of them.
    """

    def __init__(self, lockstep: Lockstep, family: Family) -> None:
        self.lockstep = lockstep
        self.family = family
        self.rank: int = lockstep.carrier.rank
        self.size: int = lockstep.carrier.size
        self._announced: Counter[tuple[str, int, int]] = Counter()
        self._announced_for_later: Counter[tuple[str, int, int]] = Counter()
        self._exchanges = 0  # since the last clean-up; the same on all ranks
        self._requests: list[Any] = []  # begun, and not yet known to be complete
        self.children = itertools.count()
        self._freed = False
        family.members.append(self)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.lockstep.name}: rank {self.rank} of {self.size}{', freed' if self._freed else ''}>"

    def __bool__(self) -> bool:
        return not self._freed

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"{type(self).__name__} has no {name!r}: only calls that the lockstep protocol can check are offered. "
            "Add a rule in sp_core/testing/signatures.py and a method in comm.py."
        )

    def Get_rank(self) -> int:
        """The rank of the caller."""
        return self.rank

    def Get_size(self) -> int:
        """The number of ranks."""
        return self.size

    def Barrier(self) -> None:
        """mpi4py's `Barrier`."""
        self._run("Barrier")

    def Bcast(self, buf: Any, root: int = 0) -> None:
        """mpi4py's `Bcast`."""
        self._run("Bcast", buf, root)

    def Allgather(self, sendbuf: Any, recvbuf: Any) -> None:
        """mpi4py's `Allgather`."""
        self._run("Allgather", sendbuf, recvbuf)

    def Allgatherv(self, sendbuf: Any, recvbuf: Any) -> None:
        """mpi4py's `Allgatherv` with `[buffer, counts]` to receive into."""
        self._run("Allgatherv", sendbuf, recvbuf)

    def Allreduce(self, sendbuf: Any, recvbuf: Any, op: Any = None) -> None:
        """mpi4py's `Allreduce`."""
        self._run("Allreduce", sendbuf, recvbuf, op)

    def Reduce(self, sendbuf: Any, recvbuf: Any, op: Any = None, root: int = 0) -> None:
        """mpi4py's `Reduce`."""
        self._run("Reduce", sendbuf, recvbuf, op, root)

    def Reduce_scatter(self, sendbuf: Any, recvbuf: Any, recvcounts: Any = None, op: Any = None) -> None:
        """mpi4py's `Reduce_scatter`."""
        self._run("Reduce_scatter", sendbuf, recvbuf, recvcounts, op)

    def Alltoallv(self, sendbuf: Any, recvbuf: Any) -> None:
        """mpi4py's `Alltoallv` with `[buffer, counts]` on both sides."""
        self._run("Alltoallv", sendbuf, recvbuf)

    def Sendrecv(self, sendbuf: Any, dest: int, sendtag: int = 0, recvbuf: Any = None, source: int = -1, recvtag: int = 0) -> None:
        """mpi4py's `Sendrecv` from a named source; every rank of the communicator takes part."""
        self._run("Sendrecv", sendbuf, dest, sendtag, recvbuf, source, recvtag)

    def Ibarrier(self) -> Request:
        """mpi4py's `Ibarrier`."""
        return self._start("Barrier")

    def Ibcast(self, buf: Any, root: int = 0) -> Request:
        """mpi4py's `Ibcast`."""
        return self._start("Bcast", buf, root)

    def Iallgather(self, sendbuf: Any, recvbuf: Any) -> Request:
        """mpi4py's `Iallgather`. It does not wait for the other ranks: they may wait for something else from this one."""
        what = call("Allgather", self.rank, self.size, sendbuf, recvbuf, blocking=False)
        self._prepare(what)
        return Beginning(self, what, lambda: self._begin("Allgather", sendbuf, recvbuf))

    def Iallgatherv(self, sendbuf: Any, recvbuf: Any) -> Request:
        """mpi4py's `Iallgatherv`."""
        return self._start("Allgatherv", sendbuf, recvbuf)

    def Iallreduce(self, sendbuf: Any, recvbuf: Any, op: Any = None) -> Request:
        """mpi4py's `Iallreduce`."""
        return self._start("Allreduce", sendbuf, recvbuf, op)

    def Ireduce(self, sendbuf: Any, recvbuf: Any, op: Any = None, root: int = 0) -> Request:
        """mpi4py's `Ireduce`."""
        return self._start("Reduce", sendbuf, recvbuf, op, root)

    def Ireduce_scatter(self, sendbuf: Any, recvbuf: Any, recvcounts: Any = None, op: Any = None) -> Request:
        """mpi4py's `Ireduce_scatter`."""
        return self._start("Reduce_scatter", sendbuf, recvbuf, recvcounts, op)

    def Ialltoallv(self, sendbuf: Any, recvbuf: Any) -> Request:
        """mpi4py's `Ialltoallv`."""
        return self._start("Alltoallv", sendbuf, recvbuf)

    def barrier(self) -> None:
        """mpi4py's `barrier`."""
        self._run("Barrier")

    def bcast(self, obj: Any, root: int = 0) -> Any:
        """mpi4py's `bcast` of a picklable object."""
        return self._enter(call("bcast", self.rank, self.size, root), lambda: self._objects(obj))[root]

    def gather(self, sendobj: Any, root: int = 0) -> list[Any] | None:
        """mpi4py's `gather` of picklable objects."""
        objects: list[Any] = self._enter(call("gather", self.rank, self.size, root), lambda: self._objects(sendobj))
        return objects if self.rank == root else None

    def allgather(self, sendobj: Any) -> list[Any]:
        """mpi4py's `allgather` of picklable objects."""
        objects: list[Any] = self._enter(call("allgather", self.rank, self.size), lambda: self._objects(sendobj))
        return objects

    def allreduce(self, sendobj: Any, op: Any = None) -> Any:
        """mpi4py's `allreduce` of objects, in rank order; the sum unless another operation is given."""
        objects = self._enter(call("allreduce", self.rank, self.size, None, op), lambda: self._objects(sendobj))
        return functools.reduce(_ON_OBJECTS[op_name(op)], objects)

    def announce_exchange(
        self, sends: Iterable[tuple[int, int]] = (), recvs: Iterable[tuple[int, int]] = (), *, later: bool = False
    ) -> None:
        """Declare the point-to-point messages that follow; every rank of the communicator calls this.

        Args:
            sends: (destination, bytes) of each message that this rank will `Isend`.
            recvs: (source, bytes) of each message that this rank will `Irecv`.
            later: other calls may come before these messages are posted; the end of the body and `Free` may not.

        Raises:
            CollectiveMismatch: the messages sent are not the messages received.
        """
        sends, recvs = list(sends), list(recvs)
        self._enter(call("announce_exchange", self.rank, self.size, sends, recvs, later))
        self._exchanges += 1
        announced = self._announced_for_later if later else self._announced
        announced.update(("Isend", peer, nbytes) for peer, nbytes in sends)
        announced.update(("Irecv", peer, nbytes) for peer, nbytes in recvs)

    def announce_call(self, what: str) -> None:
        """Declare that this rank is about to do something, the same on every rank, that is no call of MPI."""
        self._enter(call("announce_call", self.rank, self.size, what))

    def watch(self, what: str) -> None:
        """Notice that a peer has left the example, while this rank waits for something that is no call of MPI."""
        self.progress()
        self.lockstep.waiting(what)

    def Isend(self, buf: Any, dest: int, tag: int = 0) -> Request:
        """mpi4py's `Isend` of an announced message."""
        self._take("Isend", dest, array(buf).nbytes)
        return self._send(buf, dest, tag)

    def Irecv(self, buf: Any, source: int, tag: int = 0) -> Request:
        """mpi4py's `Irecv` of an announced message from a named source."""
        self._take("Irecv", source, array(buf).nbytes)
        return self._receive(buf, source, tag)

    def Dup(self) -> Self:
        """mpi4py's `Dup`: the same ranks with messages of their own."""
        self._enter(call("Dup", self.rank, self.size))
        return self._dup(f"{self.lockstep.name}.{next(self.children)}")

    def Split(self, color: int = 0, key: int = 0) -> Any:
        """mpi4py's `Split`; a negative color (`MPI.UNDEFINED`) gives a false value instead of a communicator."""
        self._enter(call("Split", self.rank, self.size))
        return self._split(f"{self.lockstep.name}.{next(self.children)}", color, key)

    def Free(self) -> None:
        """mpi4py's `Free`. While an error is on its way out it is put off to the end of the example, not to hide the error."""
        if sys.exc_info()[0] is not None:
            self._freed = True
            return
        self.ensure_posted("Free", later=True)
        self._enter(call("Free", self.rank, self.size))
        self._complete()
        self._free()
        self.family.members.remove(self)

    def ensure_posted(self, before: str, *, later: bool = False) -> None:
        """Raise `CollectiveMismatch` where a message was announced and not posted (`later`: or begun and not found complete)."""
        if missing := self._announced + (self._announced_for_later if later else Counter()):
            raise CollectiveMismatch(f"{before} before all announced messages were posted; missing: {listed(missing)}")
        if later and (left := [request for request in self._requests if not request.done]):
            raise CollectiveMismatch(f"{before} before these were found complete by Test or Wait: {', '.join(map(str, left))}")

    def _run(self, op: str, *args: Any) -> None:
        self._enter(call(op, self.rank, self.size, *args), lambda: self._do(op, *args))
        watchdog.note(f"left {op}")

    def _start(self, op: str, *args: Any) -> Request:
        return cast("Request", self._enter(call(op, self.rank, self.size, *args, blocking=False), lambda: self._begin(op, *args)))

    def _enter(self, what: Call, then: Callable[[], Any] = lambda: None) -> Any:
        self._prepare(what)
        return self.lockstep.call(what, then)

    def _prepare(self, what: Call) -> None:
        if self._freed:
            raise RankError(f"{what.op} on a communicator ({self.lockstep.name}) that has been freed")
        self.ensure_posted(what.op)
        watchdog.note(f"in {what.op}({what.text}) at {here()}")
        self.progress()
        if self.lockstep.beginning is not None:
            self.lockstep.beginning.settle()

    def progress(self) -> None:
        """Let the other ranks complete what this one has started."""
        for member in self.family.members:
            member._release()

    def _take(self, op: str, peer: int, nbytes: int) -> None:
        announced = self._announced if self._announced[op, peer, nbytes] else self._announced_for_later
        if not announced[op, peer, nbytes]:
            left = listed(self._announced + self._announced_for_later) or "nothing"
            raise CollectiveMismatch(
                f"rank {self.rank}: {op} of {nbytes} bytes with rank {peer} was not announced; announced and not yet posted: {left}"
            )
        announced[op, peer, nbytes] -= 1

    @abstractmethod
    def _do(self, op: str, *args: Any) -> None:
        """Make the blocking call."""

    @abstractmethod
    def _begin(self, op: str, *args: Any) -> Request:
        """Make the non-blocking call."""

    @abstractmethod
    def _objects(self, value: Any) -> list[Any]:
        """Every rank's object."""

    @abstractmethod
    def _send(self, buf: Any, dest: int, tag: int) -> Request: ...

    @abstractmethod
    def _receive(self, buf: Any, source: int, tag: int) -> Request: ...

    @abstractmethod
    def _dup(self, name: str) -> Self: ...

    @abstractmethod
    def _split(self, name: str, color: int, key: int) -> Any: ...

    def _posts(self) -> int:
        """How often this rank has entered an exchange of this communicator."""
        return 0

    @abstractmethod
    def _release(self) -> None:
        """Let peers complete what this rank has started."""

    @abstractmethod
    def _complete(self) -> None:
        """Complete or undo what this rank has started and not waited for."""

    @abstractmethod
    def _free(self) -> None:
        """Give back what this communicator holds."""
