"""Make communicators whose ranks are threads of one process, so tests need no mpiexec.

`ThreadComm` has the methods and the comparison of calls that `CheckedComm` has under MPI.

Transfers take the least favourable order that MPI allows. A send buffer is read as late as
possible. A receive buffer is spoiled (filled with 0xFF bytes) when the transfer starts, and filled
when it completes. So code that touches a buffer too early is wrong every time.
"""

from __future__ import annotations

import itertools
import pickle
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from sp_core.errors import CollectiveMismatch
from sp_core.testing.carriers import Steps, Stopped, ThreadCarrier
from sp_core.testing.comm import LockstepComm, forwarded
from sp_core.testing.lockstep import Call, Lockstep, Message
from sp_core.testing.signatures import (
    COLLECTIVES,
    Flow,
    contribution,
    deliver,
    op_of,
    require,
    view,
)
from sp_core.testing.specs import Array, read
from sp_core.testing.stuck import Family


class ThreadRequest:
    """The request of a transfer between threads, which completes only in `Test` or `Wait`.

    Args:
        comm: communicator on which the transfer began.
        what: describes the wait, for error messages.
        advance: completes the transfer if possible, and returns whether it is complete.
    """

    def __init__(self, comm: ThreadComm, what: str, advance: Callable[[], bool]) -> None:
        self._comm, self._what, self._advance = comm, what, advance
        self.done = False
        comm._requests.append(self)

    def __str__(self) -> str:
        return self._what

    def Test(self) -> bool:
        """Complete the transfer if possible, and return whether it is complete. Do not wait.

        Raises:
            PeerFailed: the transfer is incomplete, and a rank has left the example by an error.
        """
        if not self._over():
            self._comm.lockstep.waiting(self._what)
        return self.done

    def Wait(self) -> bool:
        """Wait until the transfer is complete, and return True.

        Raises:
            PeerFailed: a rank has left the example by an error.
            CollectiveMismatch: every rank waits and none can go on; on all of them.
        """
        self._comm.lockstep.carrier.drive(self._waiting(), self._what)
        return True

    def _waiting(self) -> Steps[None]:
        lockstep, is_first = self._comm.lockstep, True
        while not self._over():  # what is complete counts, also if a peer has failed since
            # begin a round once: otherwise ranks that all wait would wake each other for ever
            if is_first or lockstep.open is not None:
                lockstep.waiting(self._what)
            is_first = False
            yield

    def _over(self) -> bool:
        self._comm.progress()
        if not self.done and self._advance():
            self.done, self._advance = True, lambda: True  # releases the buffers
            self._comm._forget(self)
        return self.done


class _Draws:
    """A counter that ranks which are threads share; `take` returns 0, 1, 2, ... over all ranks.

    A call of a C iterator's `__next__` is never interrupted by another thread.

    Args:
        comm: communicator of this rank; a body that ends before `free` fails.
        numbers: `itertools.count()`, the same object on all ranks.
    """

    done = False  # listed with the requests: an example must not end before `free`

    def __init__(self, comm: ThreadComm, numbers: Iterator[int]) -> None:
        self._comm, self.take = comm, numbers.__next__
        comm._requests.append(self)

    def __str__(self) -> str:
        return "a counter"

    def free(self) -> None:
        """Note that this rank is done with the counter, so that its body may end."""
        self._comm._forget(self)


def spoil(buffer: Array | None) -> None:
    """Fill a buffer with bytes that no test expects (NaN in floating point)."""
    if buffer is not None:
        buffer.view(np.uint8)[:] = 0xFF


def _is_nobody(peer: int | None) -> bool:
    """Return whether `peer` is `MPI.PROC_NULL`, without importing mpi4py.

    A caller that has `MPI.PROC_NULL` has imported mpi4py.
    """
    mpi = sys.modules.get("mpi4py.MPI")
    return mpi is not None and peer == mpi.PROC_NULL


class ThreadComm(LockstepComm):
    """A communicator whose ranks are threads of this process. `run_threads` makes it.

    It has mpi4py's collectives on buffers and on objects, and messages with a named source. The
    ranks compare each collective first; different calls are a `CollectiveMismatch` on every rank.

    Args:
        carrier: exchanges values between the ranks.
        family: communicators of this rank in the example, which this one joins.
    """

    _pickle = pickle

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"{type(self).__name__} has no {name!r}. Ranks that are threads have collectives of "
            "buffers and messages with a named source; docs/tutorials/testing.md lists them. Run "
            "this test under mpiexec, where every call of mpi4py is there."
        )

    def __init__(self, carrier: ThreadCarrier, family: Family) -> None:
        self._carrier, self._world = carrier, carrier.world
        # functions that copy the send buffer of a transfer, and return whether they have done so
        self._pending: list[Callable[[], bool]] = []
        self._counts: dict[tuple[Any, ...], int] = defaultdict(int)
        super().__init__(Lockstep(carrier, carrier.name), family)

    def _made(self, name: str, rank: int, size: int) -> ThreadComm:
        return ThreadComm(
            ThreadCarrier(
                self._world, f"{self._carrier.name}.{name}", rank, size, self._carrier.world_rank
            ),
            self.family,
        )

    def progress(self) -> None:
        """Copy the send buffers that other ranks wait for, so that these ranks can complete.

        Raises:
            Stopped: a rank has hung, so all are to end.
        """
        if self._world.stopped:
            raise Stopped
        super().progress()

    def _collective(
        self, form: str, args: Sequence[Any], given: Mapping[str, Any]
    ) -> ThreadRequest | None:
        def make(flow: Flow) -> ThreadRequest | None:
            op = op_of(form)
            if form != op:
                return self._started(op, flow)
            deliver(op, self.rank, self._carrier.gather(contribution(flow)), flow)
            return None

        made: ThreadRequest | None = self._agree_on(form, args, given, make)
        return made

    def _started(self, op: str, flow: Flow) -> ThreadRequest:
        slots = self._slot("member", "collective")
        given = [part.view for _, part in flow.gives if part.view is not None]
        for _, part in flow.takes:
            if part.view is not None and not any(
                map(partial(np.may_share_memory, part.view), given)
            ):
                spoil(part.view)  # with MPI.IN_PLACE this part is the input, and is read later

        def release() -> bool:
            slots[self.rank] = contribution(flow)
            return True

        def advance() -> bool:
            complete = len(slots) == self.size
            if complete:
                deliver(op, self.rank, [slots[rank] for rank in range(self.size)], flow)
            return complete

        self._pending.append(release)
        return ThreadRequest(self, f"a started {op}", advance)

    def _slot(self, side: str, *key: Any) -> dict[Any, Any]:
        """Return a dict that the sender and the receiver of one transfer share.

        The n-th call of one side gets the dict of the n-th call of the other side with the same
        key.

        Args:
            side: "sender", "receiver", or "member" of a collective.
            key: tells transfers apart: source, destination and tag, or "collective".
        """
        self._counts[side, *key] += 1
        slot: dict[Any, Any] = self._world.shared(
            (self._carrier.name, *key, self._counts[side, *key]), {}
        )
        return slot

    def Isend(self, buf: Any, dest: int, tag: int = 0) -> ThreadRequest:
        """Begin to send `buf` to rank `dest`, and return the request.

        The buffer is read only when the receiver has posted its receive, as MPI may do with a long
        message.
        """
        if _is_nobody(dest):
            return ThreadRequest(self, "a message to nobody", lambda: True)
        message, numbers = self._message("Isend", buf, self.rank, dest, tag)
        slot = self._slot("sender", self.rank, dest, tag)
        self.lockstep.sent.append(message)

        def release() -> bool:
            if "awaited" in slot:
                slot["data"] = numbers.copy()
            return "data" in slot

        self._pending.append(release)
        what = f"rank {dest} to receive a message with tag {tag}"
        return ThreadRequest(self, what, lambda: "data" in slot)

    def Irecv(self, buf: Any, source: int, tag: int = 0) -> ThreadRequest:
        """Begin to receive a message from rank `source` with tag `tag`, and return the request.

        The buffer is filled with 0xFF bytes until the message is there. `Test` and `Wait` raise
        `CollectiveMismatch` for a message of another length.
        """
        if _is_nobody(source):
            return ThreadRequest(self, "a message from nobody", lambda: True)
        message, numbers = self._message("Irecv", buf, source, self.rank, tag)
        slot = self._slot("receiver", source, self.rank, tag)
        what = f"a message from rank {source} with tag {tag}"
        slot["awaited"] = True
        spoil(numbers)
        self._world.touch()

        def advance() -> bool:
            if "data" not in slot:
                return False
            data = slot["data"]
            if data.nbytes != numbers.nbytes:
                raise CollectiveMismatch(
                    f"{what} has {data.nbytes} bytes, its buffer {numbers.nbytes}: "
                    "the ranks' sizes differ, or messages of one tag came in another order"
                )
            numbers[:] = data.view(numbers.dtype)
            self.lockstep.received.append(message)
            return True

        return ThreadRequest(self, what, advance)

    def Send(self, buf: Any, dest: int, tag: int = 0) -> None:
        """Send `buf` to rank `dest`, and wait until the receiver has posted its receive."""
        self.Isend(buf, dest, tag).Wait()

    def Recv(self, buf: Any, source: int, tag: int = 0) -> None:
        """Receive a message as `Irecv`, and wait for it."""
        self.Irecv(buf, source, tag).Wait()

    def Sendrecv(
        self,
        sendbuf: Any,
        dest: int,
        sendtag: int = 0,
        recvbuf: Any = None,
        source: Any = None,
        recvtag: int = 0,
    ) -> None:
        """Send to rank `dest`, receive from rank `source`, and wait for both messages.

        `source` has to be a rank: receiving from any source needs mpiexec.
        """
        requests = self.Irecv(recvbuf, source, recvtag), self.Isend(sendbuf, dest, sendtag)
        for request in requests:
            request.Wait()

    def _message(
        self, op: str, buf: Any, source: int, dest: int, tag: int
    ) -> tuple[Message, Array]:
        """Return the description of a message, and its buffer as an array.

        Args:
            op: "Isend" or "Irecv".
            buf: mpi4py's buffer specification.
            source: rank that sends.
            dest: rank that receives.
            tag: of the message.

        Raises:
            ValueError: the other rank is not in this communicator, or the buffer is not one.
            CollectiveMismatch: messages are announced on this communicator, and not this one.
        """
        peer, part = (
            (dest if op == "Isend" else source),
            read(buf, "", 1, writable=op == "Irecv").parts[0],
        )
        require(
            peer is not None and 0 <= peer < self.size,
            f"{op}: rank {peer} is not one of the {self.size} ranks of this communicator. Name one "
            "rank; a receive from any source needs mpiexec.",
        )
        return Message(source, dest, tag, part.nbytes, part.kind), view(part)

    def _forget(self, request: ThreadRequest | _Draws) -> None:
        self._requests = [other for other in self._requests if other is not request]

    def Dup(self) -> ThreadComm:
        """Return a communicator of the same ranks, whose messages are separate from this one's.

        Every rank calls this.
        """
        self._enter(Call("Dup"))
        return self._made(f"{next(self.children)}", self.rank, self.size)

    def Split(self, color: int = 0, key: int = 0) -> ThreadComm | None:
        """Return a communicator of the ranks with this rank's color, in the order of their keys.

        Every rank calls this. A negative color (`MPI.UNDEFINED`) gives None.
        """
        choices = self._enter(Call("Split"), lambda: self._carrier.gather((color, key)))
        name = f"{next(self.children)}[{color}]"
        ranks = sorted((k, rank) for rank, (c, k) in enumerate(choices) if c == color)
        return None if color < 0 else self._made(name, ranks.index((key, self.rank)), len(ranks))

    def alone(self) -> ThreadComm:
        """Return a communicator of this rank alone, which needs no other rank."""
        return self._made(f"alone[{self._carrier.world_rank}]", 0, 1)

    def make_counter(self) -> _Draws:
        """Return an object whose `take` gives 0, 1, 2, ... to whichever rank asks next.

        Every rank calls this. `free` has to be called before the end of the body.
        """
        self._enter(Call("make_counter"))
        key = self._carrier.name, "counter", next(self.children)
        return _Draws(self, self._world.shared(key, itertools.count()))

    def _release(self) -> None:
        pending, self._pending = self._pending, []
        self._pending = [release for release in pending if not release()]
        if len(self._pending) < len(pending):
            self._world.touch()

    def _free(self) -> None:
        self._freed = True


for _op in COLLECTIVES:
    if not _op.startswith("Neighbor") and _op != "Alltoallw":
        for _form in (_op, f"I{_op.lower()}"):
            setattr(ThreadComm, _form, forwarded("_collective", _form))
