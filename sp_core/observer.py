"""Tell the observer of a communicator what no call of MPI shows.

Without an observer nothing happens.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any


class Observer:
    """Hears what the ranks of a communicator do beside calls of MPI. This one ignores it.

    The testing kit's communicators are observers. Another observer is made known by
    `observer_of.register`.
    """

    def announce_exchange(
        self,
        sends: Iterable[tuple[int, int]] = (),
        recvs: Iterable[tuple[int, int]] = (),
        *,
        later: bool = False,
    ) -> None:
        """Hear which messages this rank will post; every rank announces its own.

        Args:
            sends: (destination, bytes) of each message that this rank will `Isend`.
            recvs: (source, bytes) of each message that this rank will `Irecv`.
            later: other calls may come before these messages are posted.
        """

    def announce_call(self, what: str) -> None:
        """Hear that this rank begins something that is no call of MPI, the same on every rank."""

    def announce_early(self) -> None:
        """Hear that this rank may start its next collective long before the others."""

    def watch(self, what: str) -> None:
        """Hear that this rank still waits for something that is no call of MPI."""

    def abandoned(self) -> None:
        """Hear that this rank stops using the communicator because of an error."""

    def alone(self) -> Any:
        """Return a communicator of this rank alone, or None for a duplicate of MPI.COMM_SELF."""

    def make_counter(self) -> Any:
        """Return a counter of these ranks, or None for one in a window of MPI.

        Every rank calls this.
        """

    def make_transport(self, name: str, poll: Callable[[], None]) -> Any:
        """Return a transport of host tensors, or None for that of the MPI library."""


_NOBODY = Observer()


@functools.singledispatch
def observer_of(comm: object) -> Observer:
    """Return the observer of a communicator, by its class."""
    return _NOBODY
