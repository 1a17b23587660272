"""Transports that carry the messages of one collective, some on purpose late or in parts."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from oracle.fake_device import DelayedStreams
from oracle.link import LinkModel

import sp_core as sp
from sp_core.observer import observer_of
from sp_core.transport import Handle, Transport, make_transport
from sp_core.transport.host import TAG, HostTransport
from sp_core.transport.staged import PipelinedTransport, StagedTransport

ANY = (2, 0, 5, 1, 0, 3, 0)
"""How often events of a device answer "not yet", in turn: a later one may be seen first.

Each rank begins at another place."""


class LateSends(HostTransport):
    """Read the memory of announced sends late: in the third call of their handle's `test`.

    The messages of `exchange` all have one tag, so they must be posted in the order of the calls.
    """

    def post(self, sends: Any, recvs: Any, tag: int) -> Any:
        if tag == TAG or not sends:
            return super().post(sends, recvs, tag)
        return LateSend(super().post((), recvs, tag), partial(super().post, sends, (), tag))


class LateSend:
    """A handle of receives under way, and of sends that begin in the third call of `test`."""

    def __init__(self, received: Handle, begin: Callable[[], Handle]) -> None:
        self._received, self._begin = received, begin
        self._asked = 0
        self._sent: Handle | None = None

    def test(self) -> bool:
        self._asked += 1
        if self._asked == 3:
            self._sent = self._begin()
        received = self._received.test()
        return received and self._sent is not None and self._sent.test()


class Passing:
    """Pass calls on to a communicator. Those that it makes by Dup or Split are passed on, too.

    Args:
        comm: the other communicator.
        before: is called before each call, with the method's name and the arguments.
    """

    def __init__(self, comm: Any, before: Callable[[str, tuple[Any, ...]], object]) -> None:
        self._comm, self._before = comm, before

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._comm, name)
        return partial(self._call, name, found) if callable(found) else found

    def _call(self, name: str, method: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        self._before(name, arguments)
        found = method(*arguments, **named)
        return Passing(found, self._before) if name in ("Dup", "Split") else found


observer_of.register(Passing, lambda passing: observer_of(passing._comm))


def check_sizes(most: int, name: str, arguments: tuple[Any, ...]) -> None:
    """Raise an error for more than `most` elements, as MPI does for 2^31 elements or more."""
    for argument in arguments:
        buffer = argument[0] if isinstance(argument, list | tuple) and argument else argument
        if isinstance(buffer, np.ndarray) and buffer.size > most:
            raise OverflowError(
                f"{buffer.size} elements were given to {name}; {most} can be counted"
            )


def narrow_transport(raw: Any, most: int) -> HostTransport:
    """Return a transport that cuts messages into parts of at most `most` elements.

    Its communicator refuses longer buffers, but takes at least one element for each rank.
    """
    narrow: Any = Passing(raw, partial(check_sizes, max(most, raw.size)))
    return HostTransport(narrow, max_count=most)


def host_transport(comm: sp.Communicator) -> Transport:
    """Return a transport of tensors in host memory, over mpi4py or over gloo."""
    return make_transport("host", comm._comm, torch.device("cpu"), comm.poll)


def carriers(part: int = 3) -> dict[str, Callable[[sp.Communicator], Any]]:
    """Return the transports by name; some cut messages into parts of about `part` elements."""
    return {
        "host": host_transport,
        "host in parts": lambda comm: narrow_transport(comm._comm, part),
        "staged": lambda comm: StagedTransport(host_transport(comm), comm.device),
        "late sends": lambda comm: LateSends(comm._comm),
        "link": lambda comm: LinkModel(2e-5, 1e8).over(host_transport(comm)),
        "pipelined": lambda comm: PipelinedTransport(
            host_transport(comm),
            DelayedStreams(*ANY[comm.rank % len(ANY) :]),
            comm.size,
            chunk_bytes=part * 21 + 1,
        ),
    }


CARRIERS = carriers()
OVER_GLOO = ("host", "staged", "pipelined")
"""Carriers that work over gloo, too. The others need the collectives of MPI."""
