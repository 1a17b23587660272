"""The communicator that test bodies get, for processes and threads alike.

It has mpi4py's methods. An example is one run of a test's body on all its ranks; a rank leaves it
when the body returns or raises. Before each collective a rank announces its call: it sends a record
of the call to the other ranks, which compare the records (see `lockstep`).
"""

import functools
import itertools
import operator
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from sp_core.errors import CollectiveMismatch, RankError
from sp_core.observer import Observer
from sp_core.testing.lockstep import Beginning, Call, Lockstep
from sp_core.testing.signatures import Flow, bind, exchange, flow, op_name, op_of
from sp_core.testing.specs import require
from sp_core.testing.stuck import Family


def _reduced(op: Any, objects: Sequence[Any]) -> Any:
    """Return the reduction of objects in rank order, None without objects. `op` None adds."""
    return functools.reduce(op or operator.add, objects) if objects else None


class LockstepComm(Observer, ABC):
    """A communicator whose ranks check, before each collective, that all make the same call.

    If the calls differ, every rank raises `CollectiveMismatch` instead of blocking. If a rank has
    left the example (one run of the test's body) by an error, the other ranks raise `PeerFailed`.

    A call that returns a request also waits until all ranks have made it. Only `Iallgather`, and
    the call after `announce_early`, return at once.

    Args:
        lockstep: this rank's side of the check.
        family: this rank's communicators in the example, which this one joins. The example ends on
            all of them together.
    """

    _pickle: Any
    _root_error: Callable[[str], Exception] = ValueError
    _raw: Any  # the communicator of mpi4py; ranks that are threads have none

    def __init__(self, lockstep: Lockstep, family: Family) -> None:
        self.lockstep = lockstep
        self.family = family
        self._begun: list[Any] = []
        self.children = itertools.count()
        self._freed = self._early = False
        family.members.append(self)

    def __repr__(self) -> str:
        return (
            f"<{type(self).__name__} {self.lockstep.name}: rank {self.rank} of "
            f"{self.size}{', freed' if self._freed else ''}>"
        )

    def __bool__(self) -> bool:
        return not self._freed

    @property
    def _requests(self) -> list[Any]:
        """The requests that are begun, and not yet known to be complete."""
        self._begun = [request for request in self._begun if not request.done]
        return self._begun

    def Get_rank(self) -> int:
        """Return the rank of the caller."""
        return self.lockstep.carrier.rank

    def Get_size(self) -> int:
        """Return the number of ranks."""
        return self.lockstep.carrier.size

    rank, size = property(Get_rank), property(Get_size)

    def barrier(self) -> None:
        """Wait until every rank has called this, as mpi4py's `barrier`."""
        self._collective("Barrier", (), {})

    def bcast(self, obj: Any, root: int = 0) -> Any:
        """Return the root's picklable object on every rank, as mpi4py's `bcast`."""
        return self._on_objects("bcast", obj if self.rank == root else None, root)[root]

    def gather(self, sendobj: Any, root: int = 0) -> list[Any] | None:
        """Return all ranks' picklable objects on the root, None elsewhere, as mpi4py's `gather`."""
        objects = self._on_objects("gather", sendobj, root)
        return objects if self.rank == root else None

    def scatter(self, sendobj: Sequence[Any] | None, root: int = 0) -> Any:
        """Return one of the root's picklable objects to each rank, as mpi4py's `scatter`."""
        mine = self._one_each("scatter", sendobj, self.size) if self.rank == root else None
        return self._on_objects("scatter", mine, root)[root][self.rank]

    def allgather(self, sendobj: Any) -> list[Any]:
        """Return the picklable objects of all ranks, as mpi4py's `allgather`."""
        return self._on_objects("allgather", sendobj)

    def alltoall(self, sendobj: Sequence[Any] | None) -> list[Any]:
        """Send one picklable object to each rank and return those received, as in mpi4py."""
        return [
            objects[self.rank]
            for objects in self._on_objects(
                "alltoall", self._one_each("alltoall", sendobj, self.size)
            )
        ]

    def reduce(self, sendobj: Any, op: Any = None, root: int = 0) -> Any:
        """Combine all ranks' objects on the root in rank order, as mpi4py's `reduce`.

        The default is to add.
        """
        objects = self._on_objects("reduce", sendobj, root, op)
        return _reduced(op, objects) if self.rank == root else None

    def allreduce(self, sendobj: Any, op: Any = None) -> Any:
        """Combine all ranks' objects on every rank, in rank order, as mpi4py's `allreduce`."""
        return _reduced(op, self._on_objects("allreduce", sendobj, None, op))

    def scan(self, sendobj: Any, op: Any = None) -> Any:
        """Combine the objects of this rank and those before it, as mpi4py's `scan`."""
        return _reduced(op, self._on_objects("scan", sendobj, None, op)[: self.rank + 1])

    def exscan(self, sendobj: Any, op: Any = None) -> Any:
        """Combine the objects of the ranks before this one, as mpi4py's `exscan`.

        Return None on rank 0.
        """
        return _reduced(op, self._on_objects("exscan", sendobj, None, op)[: self.rank])

    def announce_exchange(
        self,
        sends: Iterable[tuple[int, int]] = (),
        recvs: Iterable[tuple[int, int]] = (),
        *,
        later: bool = False,
    ) -> None:
        """Check, before point-to-point messages begin, that each send has a matching receive.

        They match if they name each other's ranks and the same number of bytes. Every rank of the
        communicator calls this and waits for all.

        Args:
            sends: (destination, bytes) of each message that this rank will `Isend`.
            recvs: (source, bytes) of each message that this rank will `Irecv`.
            later: whether other calls may come before these messages are posted.

        Raises:
            CollectiveMismatch: on every rank: a send has no matching receive, or a receive no
                matching send.
        """
        with self._named("announce_exchange"):
            what = exchange(self.rank, self.size, list(sends), list(recvs), later)
        self._enter(what)

    def announce_call(self, what: str) -> None:
        """Check that all ranks pass the same `what`, the name of an operation outside MPI.

        Every rank calls this and waits for all.
        """
        self._enter(Call("announce_call", (what,), text=what))

    def announce_early(self) -> None:
        """Let the next collective return a request at once, before all ranks have called it.

        The collective begins when every rank has called it.
        """
        self._early = True

    def watch(self, what: str) -> None:
        """Raise `PeerFailed` if a peer has left the example by an error.

        A wait outside MPI calls this again and again; `what` describes the wait.
        """
        self.progress()
        self.lockstep.waiting(what)

    def Free(self) -> None:
        """Free the communicator, as mpi4py's `Free`. Every rank calls this.

        While an exception is handled, the communicator is only marked as freed, so that no second
        error hides the exception. The end of the example then frees it.

        Raises:
            RankError: this is the communicator of a test's body or of a `with` block.
        """
        is_first = self.family.held and self is self.family.members[0]
        if sys.exception() is not None:
            self._freed = not is_first
            return
        if is_first:
            self.family.stopped = True
            raise RankError(
                f"Free on {self.lockstep.name}, which the end of the body or block frees. "
                "Pass comm.Dup() to code that frees its communicator."
            )
        self.ensure_complete("Free")
        self._enter(self.lockstep.ending("Free"))
        self.family.stopped |= self.lockstep.stopped
        self._free()
        self.family.members = [other for other in self.family.members if other is not self]

    Disconnect = Free

    def ensure_complete(self, before: str) -> None:
        """Raise `CollectiveMismatch` if a request is not known to be complete.

        `before`: the call that this rank is about to make, for the error message.
        """
        if self._requests:
            self.family.stopped = True
            raise CollectiveMismatch(
                f"{before} before these were found complete by Test or Wait, or freed: "
                f"{', '.join(request.what for request in self._requests)}"
            )

    @contextmanager
    def _named(self, op: str) -> Iterator[None]:
        """Put the call and the rank in front of the text of an error in the call's arguments."""
        try:
            yield
        except (ValueError, TypeError, KeyError, BufferError) as problem:
            self.family.stopped = True
            raise type(problem)(f"{op} on rank {self.rank} of {self.size}: {problem}") from problem

    def _on_objects(
        self, op: str, value: Any, root: int | None = None, reduction: Any = None
    ) -> list[Any]:
        """Check that the ranks agree on a collective; return all ranks' objects, in rank order.

        Each object is pickled first, because an object that cannot be pickled must not leave other
        ranks waiting.

        Args:
            op: the name of mpi4py's method, such as "bcast".
            value: this rank's object.
            root: the rank of the root, if the method has a root.
            reduction: the operation that combines objects, if the method has one.
        """
        self._check_root(op, root)
        with self._named(op):
            pickled = self._pickle.dumps(value)
        name = op_name(reduction)
        text = "".join(
            f"{key}={given}"
            for key, given in (("root", root), ("op", reduction and name))
            if given is not None
        )
        everyone = self._enter(
            Call(op, (root, name), text=text), lambda: self.lockstep.carrier.gather(pickled)
        )
        return [self._pickle.loads(raw) for raw in everyone]

    def _one_each(self, op: str, sendobj: Sequence[Any] | None, number: int) -> list[Any]:
        """Return `sendobj` as a list of `number` objects; if it is None, a list of `number` Nones.

        Raise ValueError if `sendobj` has a different number of objects.
        """
        objects = [None] * number if sendobj is None else list(sendobj)
        with self._named(op):
            require(len(objects) == number, f"{len(objects)} objects for {number} ranks")
        return objects

    def _collective(self, form: str, args: Sequence[Any], given: Mapping[str, Any]) -> Any:
        """Make a collective on buffers, if the ranks agree on it. Return a request or None.

        After `announce_early`, and for `Iallgather`, return a request at once: the collective is
        made when all ranks have announced it.

        Args:
            form: the name of mpi4py's method, such as "Bcast", "Ibcast" or "Bcast_init".
            args, given: positional and named arguments of the method.
        """
        op = op_of(form)
        with self._named(form):
            values = bind(op, args, given)
            edges = self._raw.inoutedges if op.startswith("Neighbor") else ((), ())
            found = flow(op, self.rank, self.size, values, edges)
            self._check_buffers(found)
        self._check_root(form, values.get("root"))
        what = found.call(form, self.rank)
        self._allow(what)
        beginning = Beginning(self, what, lambda: self._make(form, found, args, given))
        early, self._early = self._early or form == "Iallgather", False
        # do not wait for an early one: other ranks may wait for a different call of this rank
        return self._later(beginning) if early else beginning.settle()

    def _check_buffers(self, flow: Flow) -> None:
        """Raise ValueError if ranks of this kind cannot make the collective with these buffers."""

    def _later(self, beginning: Beginning) -> Any:
        """Return the request of a collective that not all ranks have announced yet."""
        return beginning

    def _check_root(self, op: str, root: int | None) -> None:
        if root is not None and not 0 <= root < self.size:
            raise self._root_error(
                f"{op} on rank {self.rank}: root {root} is not one of the {self.size} ranks of "
                "this communicator"
            )

    def _enter(self, what: Call, then: Callable[[], Any] = lambda: None) -> Any:
        """Wait for all ranks, check that they agree on the call `what`, and return `then()`."""
        self._allow(what)
        return Beginning(self, what, then).settle()

    def _allow(self, what: Call) -> None:
        """Raise `RankError` if the communicator is freed."""
        if self._freed:
            self.family.stopped = True
            raise RankError(
                f"{what.op} on {self.lockstep.name}, which Free, or the end of its example or "
                "block, has freed"
            )

    def progress(self) -> None:
        """Hand over the data of started sends and collectives, so that peers can complete."""
        self.family.release()

    @abstractmethod
    def _make(self, form: str, flow: Flow, args: Sequence[Any], given: Mapping[str, Any]) -> Any:
        """Make a collective on buffers, on which the ranks agree.

        Args:
            form, args, given: as in `_collective`.
            flow: this rank's part in the collective.

        Returns:
            The request, or None for a blocking method.
        """

    def _complete(self, clean: bool) -> None:
        """Forget the messages and requests of an example.

        `clean`: whether to complete the messages under way first, which is needed if the example
        failed on some rank. All ranks pass the same value.
        """
        if clean:
            self._clear()
        self._begun = []
        self.lockstep.forget()

    def _clear(self) -> None:
        """Complete the messages under way, if the next example could receive them."""

    @abstractmethod
    def _free(self) -> None:
        """Free the communicator, without a check over the ranks."""


def forwarded(method: str, name: str) -> Callable[..., Any]:
    """Return a method that passes its arguments on to `self.<method>(name, args, given)`."""
    return lambda self, *args, **given: getattr(self, method)(name, args, given)
