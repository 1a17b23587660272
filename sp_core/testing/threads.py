"""Make communicators whose ranks are threads of one process, so tests need no mpiexec.

`ThreadComm` has many methods of `CheckedComm` and the same checks between ranks.

Transfers take the least favourable order that MPI allows. A send buffer is read as late as
possible. A receive buffer is spoiled (filled with 0xFF bytes) when the transfer starts, and filled
when it completes. So code that touches a buffer too early is wrong every time.
"""

import itertools
import pickle
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np

from sp_core.errors import CollectiveMismatch
from sp_core.testing.carriers import Steps, ThreadCarrier
from sp_core.testing.comm import LockstepComm, forwarded
from sp_core.testing.lockstep import UNCOUNTED, Call, Lockstep, Message, abandon
from sp_core.testing.signatures import (
    COLLECTIVES,
    Flow,
    contribution,
    deliver,
    op_of,
    require_reducible,
    view,
)
from sp_core.testing.specs import Array, Part, read, require
from sp_core.testing.stuck import Family


class _OfThreads:
    """Say of a name that communicators and requests of threads lack where it is."""

    __hash__ = None  # type: ignore[assignment]  # those of mpi4py have none either

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"{type(self).__name__} has no {name!r}. Ranks that are threads have collectives of "
            "buffers and messages with a named source; docs/tutorials/testing.md lists them. Run "
            "this test under mpiexec, where every call of mpi4py is there."
        )


class ThreadRequest(_OfThreads):
    """The request of a transfer between threads, which completes only in `Test` or `Wait`.

    Args:
        comm: communicator on which the transfer began.
        what: describes the wait, for error messages.
        advance: completes the transfer if possible, and returns whether it is complete.
    """

    def __init__(self, comm: "ThreadComm", what: str, advance: Callable[[], bool]) -> None:
        self._comm, self.what, self._advance = comm, what, advance
        self.done = False
        comm._requests.append(self)

    def Test(self) -> bool:
        """Complete the transfer if possible, and return whether it is complete. Do not wait.

        Raises:
            PeerFailed: the transfer is incomplete, and a rank has left the example by an error.
        """
        if not self._over():
            self._comm.lockstep.waiting(self.what)
        return self.done

    def Wait(self) -> bool:
        """Wait until the transfer is complete, and return True.

        Raises:
            PeerFailed: a rank has left the example by an error.
            CollectiveMismatch: on every rank: all ranks wait and none can go on.
        """
        self._comm.lockstep.carrier.drive(self._waiting(), self.what)
        return True

    def _waiting(self) -> Steps[None]:
        lockstep, is_first = self._comm.lockstep, True
        while not self._over():  # a complete transfer counts, even if a peer has failed since
            # begin a round once: otherwise ranks that all wait would wake each other for ever
            if is_first or lockstep.open is not None:
                lockstep.waiting(self.what)
            is_first = False
            yield

    def _over(self) -> bool:
        self._comm.progress()
        if not self.done and self._advance():
            self.done, self._advance = True, lambda: True  # releases the buffers
        return self.done


ANY_TAG = -1  # as in mpi4py


class ThreadComm(_OfThreads, LockstepComm):
    """A communicator whose ranks are threads of this process. `run_threads` makes it.

    It has mpi4py's collectives on buffers and on objects. It also has messages, but none from any
    source (MPI.ANY_SOURCE). Before each collective the ranks check that all make the same call. If
    the calls differ, every rank raises `CollectiveMismatch`.

    Args:
        carrier: exchanges values between the ranks.
        family: this rank's communicators in the current test example; this one is added to them.
    """

    _pickle = pickle

    def __init__(self, carrier: ThreadCarrier, family: Family) -> None:
        self._carrier, self._world = carrier, carrier.world
        super().__init__(Lockstep(carrier, carrier.name), family)

    def _made(self, name: str, rank: int, members: Sequence[int]) -> "ThreadComm":
        name = f"{self._carrier.name}.{name}"
        return ThreadComm(ThreadCarrier(self._world, name, rank, members), self.family)

    def _check_buffers(self, flow: Flow) -> None:
        for _, part in (*flow.gives, *flow.takes):
            view(part)
        require_reducible(flow)

    def _make(
        self, form: str, flow: Flow, args: Sequence[Any], given: Mapping[str, Any]
    ) -> ThreadRequest | None:
        op = op_of(form)
        if form != op:
            then = partial(deliver, op, self.rank, flow)
            return self._begin(f"a started {op}", None, flow, then)
        mine = {peer: contribution(flow, peer) for peer in dict(flow.gives)}
        everyone = enumerate(self._carrier.gather(mine))
        came = {rank: parts[self.rank] for rank, parts in everyone if self.rank in parts}
        deliver(op, self.rank, flow, came)
        return None

    def _begin(
        self, what: str, tag: int | None, flow: Flow, then: Callable[[dict[int, Array]], None]
    ) -> ThreadRequest:
        """Begin a message or a collective, and return the request.

        Args:
            what: describes the wait, for error messages.
            tag: the message's tag; its send buffer is read when the receiver has begun. None for a
                collective, whose send buffer is read when this rank next calls the communicator.
            flow: the parts of this rank's buffers that it sends and receives.
            then: called with the received parts by source, when all have arrived.
        """
        gives = {dest: self._slot("sender", self.rank, dest, tag) for dest in dict(flow.gives)}
        takes = {rank: self._slot("receiver", rank, self.rank, tag) for rank in dict(flow.takes)}
        given = [view(part) for _, part in flow.gives]
        for _, part in flow.takes:
            # with MPI.IN_PLACE this part is the input, and is read later
            if not any(map(partial(np.may_share_memory, view(part)), given)):
                view(part).view(np.uint8)[:] = 0xFF  # NaN in floating point
        for slot in (*takes.values(), *(gives.values() if tag is None else ())):
            slot["awaited"] = True
        self._carrier.wake(takes)

        def release() -> bool:
            for dest, slot in gives.items():
                if "awaited" in slot and "data" not in slot:
                    slot["data"] = contribution(flow, dest)
                    self._carrier.wake([dest])
            return all("data" in slot for slot in gives.values())

        def advance() -> bool:
            complete = all("data" in slot for slot in (*gives.values(), *takes.values()))
            if complete:
                then({source: slot["data"] for source, slot in takes.items()})
                self.lockstep.received += [
                    Message(source, self.rank, takes[source]["tag"], part.nbytes, part.kind)
                    for source, part in flow.takes
                    if tag is not None
                ]
            return complete

        self.family.pending.append(release)
        return ThreadRequest(self, what, advance)

    def _slot(self, side: str, source: int, dest: int, tag: int | None) -> dict[str, Any]:
        """Return a dict that the sender and the receiver of one message share.

        A call gets the dict of the other side's first call whose tag fits and that has no partner.
        The order within each side decides the pairs, and not which side calls first.

        Args:
            side: "sender" or "receiver".
            source, dest: ranks of the sender and of the receiver.
            tag: the message's tag, or ANY_TAG for a receive; None for a collective.
        """
        alone: list[dict[str, Any]]
        with self._world.lock:
            alone = self._world.shared((self._carrier.name, source, dest, tag is None), [])
            for place, slot in enumerate(alone):
                fits = tag == slot["tag"] or ANY_TAG in (tag, slot["tag"])
                if fits and slot["side"] != side:
                    slot["tag"] = tag if side == "sender" else slot["tag"]
                    return alone.pop(place)
            alone.append({"side": side, "tag": tag})
            return alone[-1]

    def Isend(self, buf: Any, dest: int, tag: int = 0) -> ThreadRequest:
        """Begin to send `buf` to rank `dest`, and return the request.

        The buffer is read only when the receiver has posted its receive, as MPI may do with a long
        message.
        """
        tag, part = self._end("Isend", buf, dest, tag, 0)
        if part is None:
            return ThreadRequest(self, "a message to or from nobody", lambda: True)
        self.lockstep.sent.append(Message(self.rank, dest, tag, part.nbytes, part.kind))
        what = f"rank {dest} to receive a message with tag {tag}"
        return self._begin(what, tag, Flow(gives=((dest, part),)), lambda came: None)

    def Irecv(self, buf: Any, source: int, tag: int = ANY_TAG) -> ThreadRequest:
        """Begin to receive a message from rank `source` with tag `tag`, and return the request.

        By default it takes any tag.

        The buffer is filled with 0xFF bytes until the message is there. `Test` and `Wait` raise
        `CollectiveMismatch` for a message of a different length.
        """
        tag, part = self._end("Irecv", buf, source, tag, ANY_TAG)
        if part is None:
            return ThreadRequest(self, "a message to or from nobody", lambda: True)
        nbytes = part.nbytes
        wanted, flow = "any tag" if tag == ANY_TAG else f"tag {tag}", Flow(takes=((source, part),))
        what = f"a message from rank {source} with {wanted}"

        def arrived(came: dict[int, Array]) -> None:
            if came[source].nbytes != nbytes:
                raise CollectiveMismatch(
                    f"{what} has {came[source].nbytes} bytes, its buffer {nbytes}: "
                    "the ranks' sizes differ, or messages of one tag came in another order"
                )
            deliver("Irecv", self.rank, flow, came)

        return self._begin(what, tag, flow, arrived)

    def Send(self, buf: Any, dest: int, tag: int = 0) -> None:
        """Send `buf` to rank `dest`, and wait until the receiver has posted its receive."""
        self.Isend(buf, dest, tag).Wait()

    def Recv(self, buf: Any, source: int, tag: int = ANY_TAG) -> None:
        """Receive a message as `Irecv`, and wait for it."""
        self.Irecv(buf, source, tag).Wait()

    def Sendrecv(
        self,
        sendbuf: Any,
        dest: int,
        sendtag: int = 0,
        recvbuf: Any = None,
        source: Any = None,
        recvtag: int = ANY_TAG,
    ) -> None:
        """Send to rank `dest`, receive from rank `source`, and wait for both messages.

        `source` has to be a rank: receiving from any source needs mpiexec.
        """
        for request in self.Irecv(recvbuf, source, recvtag), self.Isend(sendbuf, dest, sendtag):
            request.Wait()

    def _end(
        self, op: str, buf: Any, peer: int | None, tag: int, least: int
    ) -> tuple[int, Part | None]:
        """Return a message's tag as a number, and its memory: None if `peer` is MPI.PROC_NULL.

        Raise ValueError if the tag is below `least`, or `peer` is no rank of this communicator.
        Raise RankError if the communicator is freed.

        Args:
            op: "Isend" or "Irecv".
            buf: the buffer specification of the message.
            peer, tag, least: the rank of the other side; the tag, and the least that may be given.
        """
        self._allow(Call(op))
        with self._named(op):
            require(int(tag) >= least, f"no message has the tag {tag}. Pass 0 or more.")
        # a caller that has MPI.PROC_NULL has imported mpi4py
        if peer == getattr(sys.modules.get("mpi4py.MPI"), "PROC_NULL", ""):
            return int(tag), None
        require(
            peer is not None and 0 <= peer < self.size,
            f"{op}: rank {peer} is not one of the {self.size} ranks of this communicator. Name one "
            "rank; a receive from any source needs mpiexec.",
        )
        (part,) = read(buf, "", self.size, writable=op == "Irecv").parts
        return int(tag), part

    def Dup(self) -> "ThreadComm":
        """Return a communicator of the same ranks, whose messages are separate from this one's.

        Every rank calls this.
        """
        self._enter(Call("Dup"))
        return self._made(f"{next(self.children)}", self.rank, self._carrier.members)

    def Split(self, color: int = 0, key: int = 0) -> Any:
        """Return a communicator of the ranks with this rank's color, in the order of their keys.

        Every rank calls this. A negative color (`MPI.UNDEFINED`) gives `MPI.COMM_NULL`, or None if
        mpi4py is not imported.
        """
        with self._named("Split"):
            color, key = int(color), int(key)
        choices = self._enter(Call("Split"), lambda: self._carrier.gather((color, key)))
        name = f"{next(self.children)}[{color}]"
        chosen = [rank for rank, (c, _) in enumerate(choices) if c == color]
        ranks = sorted(chosen, key=lambda rank: choices[rank][1])
        members = [self._carrier.members[rank] for rank in ranks]
        if color < 0:
            return getattr(sys.modules.get("mpi4py.MPI"), "COMM_NULL", None)
        return self._made(name, ranks.index(self.rank), members)

    def alone(self) -> "ThreadComm":
        """Return a communicator of this rank alone, which needs no other rank."""
        rank = self._carrier.world_rank
        return self._made(f"alone[{rank}]", 0, [rank])

    def abandoned(self) -> None:
        """Tell the other ranks that this one has left, and let the example end.

        The transfers of this communicator may then stay incomplete, and their messages are not
        compared.
        """
        self._world.shared((self._carrier.name, "left"), []).append(self.rank)
        self.lockstep.sent.append(Message(self.rank, self.rank, 0, 0, UNCOUNTED))
        abandon(self._requests)

    def first_left(self) -> int | None:
        """Return the first rank that left the communicator after an error, or None."""
        left: list[int] = self._world.shared((self._carrier.name, "left"), [])
        return left[0] if left else None

    def make_counter(self) -> Any:
        """Return an object whose `take` gives 0, 1, 2, ... to whichever rank asks next.

        Every rank calls this. `free` has to be called before the end of the body. A call of a C
        iterator's `__next__` is never interrupted by another thread.
        """
        self._enter(Call("make_counter"))
        key = self._carrier.name, "counter", next(self.children)
        freed = ThreadRequest(self, "a counter", lambda: False)
        return SimpleNamespace(
            take=self._world.shared(key, itertools.count()).__next__,
            free=partial(setattr, freed, "done", True),
        )

    def _free(self) -> None:
        self._freed = True


for _op in COLLECTIVES:
    if not _op.startswith("Neighbor") and _op != "Alltoallw":
        for _form in (_op, f"I{_op.lower()}"):
            setattr(ThreadComm, _form, forwarded("_collective", _form))
