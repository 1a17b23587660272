"""Names and sizes for what a communicator does, put around its methods from outside, so that the library itself stays as it is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from torch.profiler import record_function

from sp_core.communicator import Communicator
from sp_core.schedules import Operation
from sp_core.transport import Done, Handle, Messages

PREFIX = "communication #"
T = TypeVar("T")


@dataclass
class Call:
    """One call of a communicator.

    Args:
        operation: as in its counters.
        kind: "run" until it is done, "start" without waiting, "wait" for what was started, "agree" on arguments.
        bytes_sent: by this rank since its last call of the operation, from the counters; of a wait, those of its start too.
        transfer: number of the call that started what is waited for.
    """

    operation: str
    kind: str
    bytes_sent: int = 0
    transfer: int | None = None


class Log:
    """Gives every communication of a rank a span in the profile, named PREFIX and the number of its `Call`."""

    def __init__(self, comm: Communicator) -> None:
        self.calls: list[Call] = []
        self._comm = comm
        self._started: dict[int, tuple[Handle, int]] = {}
        self._told = Counter({name: comm.counters[name].bytes_sent for name in comm.counters.snapshot()})
        run, start, exchange, wait, agree = comm.run, comm.start, comm.exchange, comm.wait, comm._agree

        def named_run(operation: Operation, *buffers: Any) -> None:
            self._span(Call(operation.op.value, "run"), lambda: run(operation, *buffers))

        def named_start(operation: Operation, *buffers: Any) -> Handle:
            return self._begin(Call(operation.op.value, "start"), lambda: start(operation, *buffers))

        def named_exchange(sends: Messages, recvs: Messages, name: str = "exchange") -> Handle:
            return self._begin(Call(name, "start"), lambda: exchange(sends, recvs, name))

        def named_wait(handle: Handle, name: str) -> None:
            if isinstance(handle, Done):
                return wait(handle, name)  # nothing was sent
            if id(handle) not in self._started:  # an algorithm of this library, which posts its messages as it goes
                return self._span(Call(name, "run"), lambda: wait(handle, name))
            number = self._started.pop(id(handle))[1]
            return self._span(Call(name, "wait", self.calls[number].bytes_sent, number), lambda: wait(handle, name))

        def named_agree(*arguments: Any) -> tuple[int, ...]:
            return self._span(Call("control", "agree"), lambda: agree(*arguments))

        named = {"run": named_run, "start": named_start, "exchange": named_exchange, "wait": named_wait, "_agree": named_agree}
        for name, method in named.items():
            setattr(comm, name, method)

    def as_dicts(self) -> list[dict[str, Any]]:
        """All calls as plain values, in the order of their numbers."""
        return [asdict(call) for call in self.calls]

    def _begin(self, call: Call, act: Callable[[], Handle]) -> Handle:
        number = len(self.calls)
        handle = self._span(call, act)
        self._started[id(handle)] = (handle, number)  # the handle is held, or its id would be given to another
        return handle

    def _span(self, call: Call, act: Callable[[], T]) -> T:
        number = len(self.calls)
        self.calls.append(call)
        with record_function(f"{PREFIX}{number}"):
            result = act()
        sent = self._comm.counters[call.operation].bytes_sent
        call.bytes_sent += sent - self._told[call.operation]
        self._told[call.operation] = sent
        return result
