"""What a step has sent, from the counters of its communicators and from the buffers that their transports were given."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from sp_core.communicator import Communicator
from sp_core.schedules import Operation
from sp_core.transport import Bound, Handle, Messages

CONTROL = "control"


def counts_of(comms: Sequence[Communicator]) -> dict[str, dict[str, int]]:
    """Calls, messages and bytes by operation, over several communicators."""
    found: dict[str, dict[str, int]] = {}
    for comm in comms:
        for name, count in comm.counters.snapshot().items():
            entry = found.setdefault(name, {"calls": 0, "messages": 0, "bytes_sent": 0})
            for field in entry:
                entry[field] += int(count[field])
    return found


class Watched:
    """A transport that notes the largest buffer it is given to send: one message, or a collective's input on this rank.

    Nothing that was started completes before it is waited for. When it would otherwise is chance, and buffers live until then: so
    the bytes alive are the most that they can be, and the same every time.

    Args:
        comm: whose transport it takes the place of.
    """

    def __init__(self, comm: Communicator) -> None:
        self.largest = 0
        self.name = comm.transport.name
        self._inner = comm.transport
        comm.transport = self
        object.__setattr__(comm, "poll", lambda: None)

    def run(self, operation: Operation, send: Tensor | None, recv: Tensor | None) -> None:
        """Carry out a collective."""
        self._note(send)
        self._inner.run(operation, send, recv)

    def start(self, operation: Operation, send: Tensor | None, recv: Tensor | None) -> Handle:
        """Begin a collective."""
        self._note(send)
        return self._inner.start(operation, send, recv)

    def prepare(self, operation: Operation, send: Tensor | None, recv: Tensor | None) -> Callable[[], object]:
        """A collective for many runs."""
        self._note(send)
        return self._inner.prepare(operation, send, recv)

    def exchange(self, sends: Messages, recvs: Messages) -> Handle:
        """Begin point-to-point messages."""
        self._note(*(x for _, x in sends))
        return self._inner.exchange(sends, recvs)

    def announce(self, sends: Messages, recvs: Messages) -> None:
        """Say which messages will be posted."""
        self._note(*(x for _, x in sends))
        self._inner.announce(sends, recvs)

    def bind(self, messages: Messages) -> Bound:
        """Bring messages into the form that `post` takes."""
        return self._inner.bind(messages)

    def post(self, sends: Bound, recvs: Bound, tag: int) -> Handle:
        """Begin announced messages."""
        return self._inner.post(sends, recvs, tag)

    def close(self, *, together: bool) -> None:
        """Give back what it holds."""
        self._inner.close(together=together)

    def _note(self, *sent: Tensor | None) -> None:
        self.largest = max(self.largest, *(0 if x is None else x.nbytes for x in sent), 0)
