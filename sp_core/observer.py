"""Tell an observer of a communicator what its ranks do, where no call of MPI shows it.

An observer follows what the ranks of a communicator do, such as the communicators of
`sp_core.testing`, which find deadlocks. `observer_of(comm)` returns the observer of a communicator,
or one that ignores everything. The transports and agreements of this library call its methods.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any


class Observer:
    """Base of observers: objects that hear what a rank is about to communicate.

    The library calls these methods before its own communication. Here each does nothing and
    returns None. Communicators of `sp_core.testing`, and those over torch.distributed, are their
    own observers. For communicators of another class, register a function that returns the
    observer: `observer_of.register`.
    """

    def announce_exchange(
        self,
        sends: Iterable[tuple[int, int]] = (),
        recvs: Iterable[tuple[int, int]] = (),
        *,
        later: bool = False,
    ) -> None:
        """Hear which messages this rank will post. Every rank calls this for its own messages.

        Args:
            sends: (destination, bytes) of each message that this rank will `Isend`.
            recvs: (source, bytes) of each message that this rank will `Irecv`.
            later: whether other calls may come before these messages are posted.
        """

    def announce_call(self, what: str) -> None:
        """Hear that this rank begins `what`, which is no call of MPI and the same on every rank."""

    def announce_early(self) -> None:
        """Hear that this rank may start its next collective long before other ranks do."""

    def watch(self, what: str) -> None:
        """Hear that this rank still waits for `what`, which is no call of MPI."""

    def abandoned(self) -> None:
        """Hear that this rank stops using the communicator because of an error."""

    def alone(self) -> Any:
        """Return a communicator of this rank alone; None for a duplicate of MPI.COMM_SELF."""

    def make_counter(self) -> Any:
        """Return a counter with `take` and `free`; None for an `MpiCounter`.

        Every rank calls this. `take` gives 0, 1, 2, ..., each to one rank only.
        """

    def make_transport(self, name: str, poll: Callable[[], None]) -> Any:
        """Return a transport for tensors in host memory; None for that of mpi4py.

        Args:
            name: "host", or another name of `sp_core.transport.NAMES["cpu"]`.
            poll: called while the transport waits.
        """


_NOBODY = Observer()


@functools.singledispatch
def observer_of(comm: object) -> Observer:
    """Return the observer registered for a communicator's class, else one that ignores all."""
    return _NOBODY
