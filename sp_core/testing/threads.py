"""Ranks as threads of one process.

The same methods and the same protocol as under MPI, without mpiexec.

Transfers take the least favourable order that MPI allows: a send buffer is read as late as
possible, and a receive buffer is spoiled when the transfer starts and filled when it completes. So
code that touches a buffer too early is wrong every time.
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
from sp_core.testing.carriers import Steps
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
from sp_core.testing.world import Stopped, ThreadCarrier


class _Request:
    """A transfer that completes in `Test`.

    Args:
        comm: its communicator.
        what: describes it.
        advance: completes it if possible, and returns whether it is complete.
    """

    def __init__(self, comm: ThreadComm, what: str, advance: Callable[[], bool]) -> None:
        self._comm, self._what, self._advance = comm, what, advance
        self.done = False
        comm._requests.append(self)

    def __str__(self) -> str:
        return self._what

    def Test(self) -> bool:
        """Make progress and return whether the transfer is complete."""
        if not self._over():
            self._comm.lockstep.waiting(self._what)
        return self.done

    def Wait(self) -> bool:
        """Wait until the transfer is complete. If no rank can go on, all of them raise."""
        self._comm.lockstep.carrier.drive(self._waiting(), self._what)
        return True

    def _waiting(self) -> Steps[None]:
        heard = (
            self._comm.lockstep.waiting
        )  # once: otherwise ranks that all wait would wake each other for ever
        heard(self._what)
        while not self._over():
            yield
            if self._comm.lockstep.open is not None:
                heard(self._what)

    def _over(self) -> bool:
        self._comm.progress()
        if not self.done and self._advance():
            self.done, self._advance = True, lambda: True  # releases the buffers
            self._comm._forget(self)
        return self.done


class _Draws:
    """A counter of ranks that are threads.

    One step of an iterator in C is never interrupted by another thread.
    """

    done = False  # as a request: an example must not end before it is freed

    def __init__(self, comm: ThreadComm, numbers: Iterator[int]) -> None:
        self._comm, self.take = comm, numbers.__next__
        comm._requests.append(self)

    def __str__(self) -> str:
        return "a counter"

    def free(self) -> None:
        """Let the example end."""
        self._comm._forget(self)


def spoil(buffer: Array | None) -> None:
    """Fill a buffer with bytes that no test expects (NaN in floating point)."""
    if buffer is not None:
        buffer.view(np.uint8)[:] = 0xFF


def _is_nobody(peer: int | None) -> bool:
    """Return whether this is `MPI.PROC_NULL`. A caller that has it has imported mpi4py."""
    mpi = sys.modules.get("mpi4py.MPI")
    return mpi is not None and peer == mpi.PROC_NULL


class ThreadComm(LockstepComm):
    """A communicator whose ranks are threads of this process. `run_threads` makes it."""

    _pickle = pickle

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"{type(self).__name__} has no {name!r}. Ranks that are threads have collectives of "
            "buffers and messages with a named source; docs/tutorials/testing.md lists them. Run "
            "this test under mpiexec, where every call of mpi4py is there."
        )

    def __init__(self, carrier: ThreadCarrier, family: Family) -> None:
        self._carrier, self._world = carrier, carrier.world
        self._pending: list[
            Callable[[], bool]
        ] = []  # read the buffer of a transfer, and return whether its receivers can complete
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
        """Let the other ranks complete what this one has started.

        End this rank if the run was given up.
        """
        if self._world.stopped:
            raise Stopped
        super().progress()

    def _collective(
        self, form: str, args: Sequence[Any], given: Mapping[str, Any]
    ) -> _Request | None:
        def make(flow: Flow) -> _Request | None:
            op = op_of(form)
            if form != op:
                return self._started(op, flow)
            deliver(op, self.rank, self._carrier.gather(contribution(flow)), flow)
            return None

        made: _Request | None = self._agree_on(form, args, given, make)
        return made

    def _started(self, op: str, flow: Flow) -> _Request:
        slots = self._slot("member", "collective")
        given = [part.view for _, part in flow.gives if part.view is not None]
        for _, part in flow.takes:
            if part.view is not None and not any(
                map(partial(np.may_share_memory, part.view), given)
            ):
                spoil(part.view)  # with MPI.IN_PLACE the input is there, and is read later

        def release() -> bool:
            slots[self.rank] = contribution(flow)
            return True

        def advance() -> bool:
            complete = len(slots) == self.size
            if complete:
                deliver(op, self.rank, [slots[rank] for rank in range(self.size)], flow)
            return complete

        self._pending.append(release)
        return _Request(self, f"a started {op}", advance)

    def _slot(self, side: str, *key: Any) -> dict[Any, Any]:
        """Return what sender and receiver of one transfer share.

        Transfers of one key are counted on each side.
        """
        self._counts[side, *key] += 1
        slot: dict[Any, Any] = self._world.shared(
            (self._carrier.name, *key, self._counts[side, *key]), dict
        )
        return slot

    def Isend(self, buf: Any, dest: int, tag: int = 0) -> _Request:
        """Begin to send.

        The buffer is read as late as MPI may, which keeps a long message until a receive is
        there.
        """
        if _is_nobody(dest):
            return _Request(self, "a message to nobody", lambda: True)
        message, numbers = self._message("Isend", buf, self.rank, dest, tag)
        slot = self._slot("sender", self.rank, dest, tag)
        self.lockstep.sent.append(message)

        def release() -> bool:
            if "awaited" in slot:
                slot["data"] = numbers.copy()
            return "data" in slot

        self._pending.append(release)
        what = f"rank {dest} to receive a message with tag {tag}"
        return _Request(self, what, lambda: "data" in slot)

    def Irecv(self, buf: Any, source: int, tag: int = 0) -> _Request:
        """Begin to receive a message of exactly this length, of one source and one tag."""
        if _is_nobody(source):
            return _Request(self, "a message from nobody", lambda: True)
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

        return _Request(self, what, advance)

    def Send(self, buf: Any, dest: int, tag: int = 0) -> None:
        """Send."""
        self.Isend(buf, dest, tag).Wait()

    def Recv(self, buf: Any, source: int, tag: int = 0) -> None:
        """Receive, as `Irecv`."""
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
        """Send and receive, from a named source."""
        requests = self.Irecv(recvbuf, source, recvtag), self.Isend(sendbuf, dest, sendtag)
        for request in requests:
            request.Wait()

    def _message(
        self, op: str, buf: Any, source: int, dest: int, tag: int
    ) -> tuple[Message, Array]:
        """Return a message and its numbers.

        If any message has been announced, this one must have been.
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
        if self._exchanges:
            self._take(op, peer, part.nbytes)
        return Message(source, dest, tag, part.nbytes, part.kind), view(part)

    def _forget(self, request: _Request | _Draws) -> None:
        self._requests = [other for other in self._requests if other is not request]

    def Dup(self) -> ThreadComm:
        """Make a communicator of the same ranks with messages of their own."""
        self._enter(Call("Dup"))
        return self._made(f"{next(self.children)}", self.rank, self.size)

    def Split(self, color: int = 0, key: int = 0) -> ThreadComm | None:
        """Make a communicator of the ranks of one color.

        A negative color (`MPI.UNDEFINED`) gives None.
        """
        choices = self._enter(Call("Split"), lambda: self._carrier.gather((color, key)))
        name = f"{next(self.children)}[{color}]"
        ranks = sorted((k, rank) for rank, (c, k) in enumerate(choices) if c == color)
        return None if color < 0 else self._made(name, ranks.index((key, self.rank)), len(ranks))

    def alone(self) -> ThreadComm:
        """Return a communicator of this rank alone, which needs no other rank."""
        return self._made(f"alone[{self._carrier.world_rank}]", 0, 1)

    def make_counter(self) -> _Draws:
        """Return a counter that these ranks share."""
        self._enter(Call("make_counter"))
        return _Draws(
            self,
            self._world.shared(
                (self._carrier.name, "counter", next(self.children)), itertools.count
            ),
        )

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
