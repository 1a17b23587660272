"""The checked communicator: an mpi4py communicator whose ranks agree on each call before they make it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, cast

import numpy as np

from sp_core.testing.comm import LockstepComm
from sp_core.testing.family import Family
from sp_core.testing.lockstep import Lockstep, Request
from sp_core.testing.mpi import MpiCarrier, patiently, wait
from sp_core.testing.outcome import Mismatched, capture, raise_for_peers
from sp_core.testing.signatures import call, op_name
from sp_core.testing.stuck import Detector, Report

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

    from sp_core.transport.counter import SharedCounter

_NUMBER_OF_REDUCTION = {"Allreduce": 2, "Reduce": 2, "Reduce_scatter": 3}


class _Request:
    """An MPI request that keeps its buffers alive, and whose test notices when a peer has left."""

    def __init__(self, comm: CheckedComm, raw: Any, buffers: Sequence[Any], what: str) -> None:
        self._comm = comm
        self._buffers: Sequence[Any] | None = buffers
        self._what = what
        self.raw = raw
        self.done = False

    def __str__(self) -> str:
        return f"a request that {self._what}" if self._what else "a collective"

    def Test(self) -> bool:
        """Make progress; True once the transfer is complete."""
        if not self.done and self.raw.Test():
            self.done, self._buffers = True, None
        if not self.done and self._what:
            self._comm.lockstep.waiting(self._what)
        return self.done

    def Wait(self) -> bool:
        """Wait until the transfer is complete."""
        return patiently(lambda: self.Test() or None)


class _Received(_Request):
    def __init__(self, comm: CheckedComm, raw: Any, buffer: Any, source: int) -> None:
        super().__init__(comm, raw, [buffer], f"waits for a message from rank {source} on {comm.lockstep.name}")
        self.source = source


class CheckedComm(LockstepComm):
    """Wraps an mpi4py communicator.

    As a context manager it tells the other ranks when its block ends, also by an error: they need not wait for ever.

    Args:
        raw: the communicator to make the calls on; freed by `Free`.
        family: where to enter this communicator.
        name: what error messages call it.
    """

    def __init__(self, raw: Intracomm, family: Family | None = None, name: str = "comm") -> None:
        self._raw = raw
        self._shadow = raw.Dup()
        self._carrier = MpiCarrier(self._shadow, self._look)
        self._sent: Counter[int] = Counter()
        self._completed: Counter[int] = Counter()
        super().__init__(Lockstep(self._carrier, name), family or Family())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        outcomes = self.family.finish(capture(error))
        self._shadow.Free()
        self._freed = True
        raise_for_peers(error, outcomes)

    @classmethod
    def root(cls, raw: Intracomm) -> CheckedComm:
        """The first communicator of an example, whose ranks also find out when they wait for each other for ever.

        `settle` has to follow each example.
        """
        made = cls(raw)
        made.family.detector = Detector(MpiCarrier(raw.Dup()).share, raw.rank)
        return made

    def settle(self, rounds: int) -> None:
        """Complete what the detector has begun, given the largest number of rounds of any rank."""
        detector = self.family.detector
        if detector is not None:
            patiently(lambda: detector.settle(rounds) or None)

    def _look(self, what: str, ending: bool) -> None:
        """Find out whether all ranks of the example wait, this one among them."""
        if self.family.detector is None:
            return
        posts = tuple((member.lockstep.name, member._posts()) for member in self.family.members)
        deadlock = self.family.detector.look(Report(posts, "" if ending else self.lockstep.name, self.size, what))
        if deadlock and not ending:
            raise Mismatched(deadlock)

    def _posts(self) -> int:
        return self._carrier.posts

    def _do(self, op: str, *args: Any) -> None:
        getattr(self._raw, op)(*_mpi_arguments(op, args))

    def _begin(self, op: str, *args: Any) -> Request:
        raw = getattr(self._raw, "I" + op.lower())(*_mpi_arguments(op, args))
        return self._keep(_Request(self, raw, args, ""))

    def _objects(self, value: Any) -> list[Any]:
        return self._carrier.gather(value)

    def _send(self, buf: Any, dest: int, tag: int) -> Request:
        self._sent[dest] += 1
        what = f"waits for rank {dest} to receive a message on {self.lockstep.name}"
        raw = self._raw.Issend(buf, dest, tag)  # not complete before the receive is there: long messages are sent so
        return self._keep(_Request(self, raw, [buf], what))

    def _receive(self, buf: Any, source: int, tag: int) -> Request:
        return self._keep(_Received(self, self._raw.Irecv(buf, source, tag), buf, source))

    def _keep(self, request: _Request) -> Request:
        self._settle()
        self._requests.append(request)
        return request

    def _settle(self) -> None:
        """Forget requests that are complete, but count the messages that have come."""
        self._completed.update(r.source for r in self._requests if r.done and isinstance(r, _Received))
        self._requests = [request for request in self._requests if not request.done]

    def _dup(self, name: str) -> CheckedComm:
        return CheckedComm(self._raw.Dup(), self.family, name)

    def _split(self, name: str, color: int, key: int) -> Any:
        from mpi4py import MPI

        made = self._raw.Split(color if color >= 0 else MPI.UNDEFINED, key)
        return CheckedComm(cast("Intracomm", made), self.family, f"{name}[{color}]") if made != MPI.COMM_NULL else made

    def alone(self) -> CheckedComm:
        """A communicator of this rank alone, which needs no other rank."""
        from mpi4py import MPI

        return CheckedComm(MPI.COMM_SELF.Dup(), self.family, f"{self.lockstep.name}.alone[{self.rank}]")

    def make_counter(self) -> SharedCounter:
        """A counter that these ranks share."""
        from sp_core.transport.counter import MpiCounter  # with it comes torch, which other projects may do without

        self._enter(call("make_counter", self.rank, self.size))
        return MpiCounter(self._raw)

    def _release(self) -> None:
        pass  # MPI itself moves what was started

    def _complete(self) -> None:
        if self._exchanges:
            self._clear_messages()
        for request in self._requests:
            wait(request.raw)
        self._requests.clear()
        self._announced.clear()
        self._announced_for_later.clear()
        self._exchanges = 0

    def _clear_messages(self) -> None:
        """Leave no message of a broken exchange for the next example to find."""
        for request in self._requests:
            if isinstance(request, _Received):
                self._cancel(request)
        self._settle()
        for source, sent in enumerate(self._carrier.gather(dict(self._sent))):
            self._drain(source, sent.get(self.rank, 0) - self._completed[source])
        self._sent.clear()
        self._completed.clear()

    def _cancel(self, request: _Received) -> None:
        """End a receive: its message may be there already, on its way, or never come."""
        from mpi4py import MPI

        if request.done:
            return
        status = MPI.Status()
        request.raw.Cancel()
        patiently(lambda: True if request.raw.Test(status) else None)
        request.done = True
        if status.Is_cancelled():
            self._completed[request.source] -= 1  # `_settle` counts it as come

    def _drain(self, source: int, count: int) -> None:
        from mpi4py import MPI

        for _ in range(count):
            message, status = self._probe(source)
            trash = np.empty(status.Get_count(MPI.BYTE), np.uint8)
            wait(message.Irecv([trash, MPI.BYTE]))

    def _probe(self, source: int) -> tuple[Any, Any]:
        from mpi4py import MPI

        status = MPI.Status()
        return patiently(lambda: self._raw.Improbe(source, MPI.ANY_TAG, status)), status

    def _free(self) -> None:
        self._freed = True
        self._raw.Free()
        self._shadow.Free()


def _mpi_arguments(op: str, args: tuple[Any, ...]) -> list[Any]:
    """The arguments as mpi4py wants them: its own reduction objects, and the sum where none is named."""
    place = _NUMBER_OF_REDUCTION.get(op)
    if place is None:
        return list(args)
    from mpi4py import MPI

    return [getattr(MPI, op_name(arg)) if index == place else arg for index, arg in enumerate(args)]
