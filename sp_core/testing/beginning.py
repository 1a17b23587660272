"""Non-blocking calls of the checked communicator, for which a rank need not wait until all ranks have made them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from sp_core.testing.lockstep import Call, meanwhile

if TYPE_CHECKING:
    from sp_core.testing.comm import LockstepComm


class Beginning:
    """A request for a call that is made when all ranks have announced it. Until then this rank can do other work.

    Args:
        comm: the communicator of the call.
        call: the call.
        make: makes it, and returns its request.
    """

    def __init__(self, comm: LockstepComm, call: Call, make: Callable[[], Any]) -> None:
        self._comm = comm
        self._what, self._steps = comm.lockstep.begin(call, make)
        self._made: Any = None
        self._is_driven = False
        self._before: Beginning | None = comm.lockstep.beginning
        comm.lockstep.beginning = self

    def step(self) -> bool:
        """Find out whether all ranks have announced the call, and then make it. Return whether it is made."""
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

    def settle(self) -> Any:
        """Wait until all ranks have announced the call, make it, and return its request."""
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
        """Make progress and return whether the call is complete."""
        return self.step() and bool(self.settle().Test())

    def Wait(self) -> bool:
        """Wait until the call is complete."""
        return bool(self.settle().Wait())


def abandon(requests: Iterable[Any]) -> None:
    """Let the example end before these requests are complete. The program keeps their memory, and no rank waits for them."""
    for request in requests:
        beginning = getattr(request, "beginning", request)
        if isinstance(beginning, Beginning):
            ended = (beginning._made, getattr(beginning._made, "transfer", None))
            beginning._comm._requests = [other for other in beginning._comm._requests if all(other is not one for one in ended)]
