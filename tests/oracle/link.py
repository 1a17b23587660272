"""Model slow links: messages arrive as late as if each rank had a wire of its own.

    sender    posted at t, its wire idle at o:  leaves   L = max(t, o) + n / rate
    receiver  its wire idle at i:               arrives  max(L - n / rate + latency, i) + n / rate

A message has n bytes. A wire carries one message after the other, in each direction. Every message
is preceded by a small one with L; the receiver holds back a message that has come too early. All
ranks must read one clock, so this is for processes or threads of one machine. A collective of the
MPI library is refused, because its messages cannot be seen here.
"""

import time
from collections.abc import Callable, Sequence
from typing import NoReturn

import torch
from torch import Tensor

from sp_core.errors import DeviceError
from sp_core.programs import Operation
from sp_core.transport.base import Bound, Handle, Messages, Transport
from sp_core.transport.host import TAG


class LinkModel:
    """Model the wire of a rank. Pass it as `transport=`; all communicators of a mesh share it.

    Args:
        latency: seconds from one rank to another, without the time that the bytes take.
        rate: bytes per second, in each direction.
        clock: returns the time in seconds, the same on all ranks.

    Raises:
        ValueError: a negative latency, or a rate that is not positive.
    """

    def __init__(
        self, latency: float, rate: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        if latency < 0 or not rate > 0:
            raise ValueError(
                f"latency={latency} s and rate={rate} bytes/s were given; "
                "pass a latency >= 0 and a rate > 0."
            )
        self.latency, self.rate, self.clock = latency, rate, clock
        self._out = self._into = 0.0

    def __repr__(self) -> str:
        # the ranks check that they agree on this text
        return f"LinkModel(latency={self.latency}, rate={self.rate})"

    def over(self, host: Transport) -> "LinkTransport":
        """Return a transport whose messages take this wire."""
        return LinkTransport(host, self)

    def leaves(self, nbytes: int) -> float:
        """Return when the last byte of a message posted now leaves; the wire is busy until then."""
        self._out = max(self._out, self.clock()) + nbytes / self.rate
        return self._out

    def arrives(self, left: float, nbytes: int) -> float:
        """Return when the last byte of a message arrives that leaves its sender at `left`."""
        takes = nbytes / self.rate
        self._into = max(left - takes + self.latency, self._into) + takes
        return self._into


class LinkTransport(Transport):
    """Send host messages, and hold each back until the wire would have brought it.

    Args:
        host: the transport that carries the messages.
        link: the model of this rank's wire.
    """

    name = "link"

    def __init__(self, host: Transport, link: LinkModel) -> None:
        self._host, self._link = host, link

    def start(self, operation: Operation, send: Tensor | None, recv: Tensor | None) -> NoReturn:
        """Refuse a collective of the MPI library."""
        raise DeviceError(
            f"{operation.op} by the MPI library was asked for over {self._link!r}, "
            "which carries messages only. Pass the algorithm of a schedule, to the call or "
            "to the mesh, such as algorithm='ring'."
        )

    prepare = start

    def exchange(self, sends: Messages, recvs: Messages) -> Handle:
        """Begin point-to-point messages."""
        self.announce(sends, recvs)
        return self.post(self.bind(sends), self.bind(recvs), TAG)

    def announce(self, sends: Messages, recvs: Messages) -> Handle:
        """Announce the messages that will be posted, and the small one before each of them."""
        return self._host.announce(_with_times(sends), _with_times(recvs))

    def bind(self, messages: Messages) -> Bound:
        """Bind each message together with a buffer for its time."""
        return [
            (peer, (x.nbytes, time_of, self._host.bind([(peer, time_of), (peer, x)])))
            for peer, time_of, x in _timed(messages)
        ]

    def post(self, sends: Bound, recvs: Bound, tag: int) -> Handle:
        """Begin messages that are announced and bound."""
        gone = 0.0
        for _, (nbytes, left, _) in sends:
            gone = self._link.leaves(nbytes)
            left.fill_(gone)
        handle = self._host.post(_parts(sends), _parts(recvs), tag)
        return _Late(handle, self._link, gone, [(left, nbytes) for _, (nbytes, left, _) in recvs])


class _Late:
    """Hold messages, which are complete when they have come and their time has passed."""

    def __init__(
        self, handle: Handle, link: LinkModel, gone: float, arriving: Sequence[tuple[Tensor, int]]
    ) -> None:
        self._handle, self._link, self._due, self._arriving = handle, link, gone, arriving
        self._here = False

    def test(self) -> bool:
        if not self._here:
            self._here = self._handle.test()
            if not self._here:
                return False
            self._due = max(
                [
                    self._due,
                    *(self._link.arrives(float(left), nbytes) for left, nbytes in self._arriving),
                ]
            )
        return self._link.clock() >= self._due


def _timed(messages: Messages) -> list[tuple[int, Tensor, Tensor]]:
    return [(peer, torch.zeros(1, dtype=torch.float64), x) for peer, x in messages]


def _with_times(messages: Messages) -> Messages:
    return [(peer, part) for peer, time_of, x in _timed(messages) for part in (time_of, x)]


def _parts(bound: Bound) -> Bound:
    return [part for _, (_, _, parts) in bound for part in parts]
