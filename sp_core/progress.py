"""Let all operations that a rank has started make progress, whichever of them it waits for.

An algorithm that sends in several steps makes progress only while its rank polls it. A rank that
waits on one communicator must therefore poll all communicators. Otherwise ranks that wait in
different orders would wait for each other.

A rank may have several threads: autograd runs a backward in one thread for each device. One lock
lets only one of them at a time test operations that others can reach.
"""

import atexit
import ctypes
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, ClassVar
from weakref import WeakSet


class Progress:
    """Hold the communicators of one rank that have operations under way, whose memory MPI uses.

    Attributes:
        kept: agreements (`agreement.Question`) whose result nobody waits for. They are held until
            MPI no longer needs their memory.
        lost: transfers that an error has ended. MPI may use their memory as long as it runs.
        posting: the rank's open transports whose messages reach MPI only after a copy to the host.
        lock: held by the thread of this rank that tests an operation which `poll` can reach.
        held: every `Progress` that holds something, also of threads that have ended. None until
            `settle_at_exit` is called. Programs of one rank and the testing kit never call it.
    """

    held: ClassVar["set[Progress] | None"] = None

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._busy: dict[Any, None] = {}
        self.posting: WeakSet[Any] = WeakSet()
        self.kept: list[Any] = []
        self.lost: list[Any] = []
        self._settled = Locked(self._settle, self.lock)

    def add(self, source: Any) -> None:
        """Let every `poll` call `source.advance()` from now on, until `advance` returns False."""
        self._busy[source] = None

    def remove(self, source: Any) -> None:
        """Let `poll` leave out this source, whose operations end."""
        self._busy.pop(source, None)

    def keep(self, questions: Sequence[Any]) -> None:
        """Add agreements to `kept`, drop those that are complete, and let `poll` test the others.

        Other ranks may need them, and this rank need not wait for them.
        """
        self.kept += questions
        self._hold()
        self.advance()

    def advance(self) -> None:
        """Drop the agreements in `kept` that are complete, unless another thread polls."""
        if not self.lock.acquire(blocking=False):
            return
        try:
            self._settled.test()
        finally:
            self.lock.release()

    def _settle(self) -> None:
        mpi = sys.modules.get("mpi4py.MPI")
        if mpi is not None and mpi.Is_finalized():  # by the program: no test may follow
            self.kept.clear()
        for question in [*self.kept]:
            if not _goes_on(question):
                self.kept.remove(question)
        self._hold()

    def lose(self, transfers: Sequence[Any]) -> None:
        """Add transfers that an error has ended to `lost`."""
        self.lost += transfers
        self._hold()

    def _hold(self) -> None:
        if self.held is not None:
            self.held.discard(self)
            if self.kept or self.lost:  # another thread may have added some meanwhile
                self.held.add(self)

    def settle(self, seconds: float) -> None:
        """Complete the agreements in `kept` before this program ends: other ranks may need them.

        An agreement that is incomplete after `seconds`, or a transfer in `lost`, stays in memory
        until the process ends. MPI may write there in MPI_Finalize, when Python's objects are gone.
        """
        until = time.monotonic() + seconds
        while self.kept and time.monotonic() < until:
            self.advance()
            time.sleep(0.001)
        for held in (self.kept, self.lost):
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(held))

    @property
    def idle(self) -> bool:
        """Return whether this rank has no operations under way."""
        return not (self._busy or self.kept)

    def poll(self) -> None:
        """Let all operations that this rank has started make progress, without blocking.

        Call `poll` between parts of a long computation; it is cheap. It does nothing while another
        thread of this rank polls. A signal handler may call it, but must not wait.
        """
        if not self.lock.acquire(False):
            return
        try:
            for source in [*self._busy]:
                if not source.advance():
                    self._busy.pop(source, None)
            if self.kept:
                self.advance()
        finally:
            self.lock.release()


class Locked:
    """Test an operation while no other thread of this rank tests it or polls; a `Handle`.

    Args:
        test: tests an operation.
        lock: the lock of the rank's `Progress`.
    """

    def __init__(self, test: Callable[[], Any], lock: threading.RLock) -> None:
        self._test, self._lock, self._inside = test, lock, False

    def test(self) -> Any:
        """Return what the test of the operation returns, or False in the middle of that test."""
        with self._lock:
            if self._inside:  # a signal handler polls
                return False
            try:
                self._inside = True
                return self._test()
            finally:
                self._inside = False


def _goes_on(question: Any) -> bool:
    try:
        return not question.test()
    except RuntimeError:  # gloo's connections are closed, or the communicator is freed
        return False


_RANK = threading.local()


def settle_at_exit(seconds: float) -> None:
    """Call `settle` when the program ends, for each `Progress` that has something to hold.

    From now on such a `Progress` outlives its thread.
    """
    Progress.held = set()
    atexit.register(_settle_all, seconds)


def _settle_all(seconds: float) -> None:
    until = time.monotonic() + seconds
    for each in [*(Progress.held or ())]:
        each.settle(until - time.monotonic())


def of_this_rank() -> Progress:
    """Return the `Progress` of the rank that runs in this thread.

    A communicator calls this once, when it is made. A thread in which torch runs a backward then
    polls the same communicators. There is one `Progress` per thread, because tests run several
    ranks in one process.
    """
    found: Progress = vars(_RANK).setdefault("progress", Progress())
    return found
