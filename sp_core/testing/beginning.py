"""Non-blocking calls of the checked communicator, for which a rank need not wait until all ranks have made them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from sp_core.testing.lockstep import Call, Request, meanwhile

if TYPE_CHECKING:
    from sp_core.testing.comm import LockstepComm


class Beginning:
    """A request for a call that is made when all ranks have announced it. Until then this rank can do other work.

    Args:
        comm: the communicator on which it is made.
        what: the call.
        make: makes it.
    """

    def __init__(self, comm: LockstepComm, what: Call, make: Callable[[], Request]) -> None:
        self._comm, self._what = comm, comm.lockstep.told(what)
        self._steps = comm.lockstep.begin(what, self._what, make)
        self._made: Request | None = None
        self._is_driven = False
        self._before: Beginning | None = comm.lockstep.beginning
        comm.lockstep.beginning = self

    def step(self) -> bool:
        """Look whether all ranks have announced the call, and then make it; True once it is made."""
        if self._made is None and not self._is_driven:
            self._comm.progress()
            try:
                if self._before is not None and not self._before.step():
                    return False
                self._before = None
                next(self._steps)
            except BaseException as end:
                self._end()
                if not isinstance(end, StopIteration):
                    raise
                self._made = end.value
        return self._made is not None

    def settle(self) -> Request:
        """Wait until all ranks have announced the call, and make it."""
        if self._made is None:
            if self._before is not None:
                self._before.settle()
            self._end()
            self._is_driven = True
            self._made = self._comm.lockstep.carrier.drive(meanwhile(self._steps), self._what)
        return self._made

    def _end(self) -> None:
        if self._comm.lockstep.beginning is self:
            self._comm.lockstep.beginning = None

    def Test(self) -> bool:
        """Make progress; True once the call is complete."""
        return self.step() and self.settle().Test()

    def Wait(self) -> bool:
        """Wait until the call is complete."""
        return self.settle().Wait()

    def forget(self) -> None:
        """Let the example end before the call is complete."""
        ended = (self._made, getattr(self._made, "transfer", None))
        self._comm._requests = [other for other in self._comm._requests if all(other is not one for one in ended)]


def abandon(requests: Iterable[Any]) -> None:
    """Let the example end before these requests are complete: the program keeps their memory, and nobody waits for them."""
    for request in requests:
        if isinstance(beginning := getattr(request, "beginning", request), Beginning):
            beginning.forget()
