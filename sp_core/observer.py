"""Tell an observer of a communicator what its ranks do, if no call of MPI shows it.

An observer follows what the ranks of a communicator do. For example, the communicators of
`sp_core.testing` observe their own ranks, to find deadlocks. `observer_of(comm)` returns the
observer of a communicator. For one of mpi4py it is `Notices`, which only tells ranks that another
rank has left. The transports and agreements of this library call its methods.
"""

import functools
from collections.abc import Callable, Iterable
from typing import Any


class Observer:
    """Be told what a rank communicates, and supply objects that replace those of MPI.

    Each method says when the library calls it. Here each does nothing and returns None.
    Communicators of `sp_core.testing`, and those over torch.distributed, are their own observers.
    Those of mpi4py, and of any other class, have `Notices`, unless a function that returns another
    observer is registered for their class: `observer_of.register`.
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
        """Hear that this rank begins an operation without an MPI call; all ranks name it `what`."""

    def announce_early(self) -> None:
        """Hear that this rank may start its next collective long before other ranks do."""

    def watch(self, what: str) -> None:
        """Hear that this rank still waits for the operation `what`, which makes no MPI call."""

    def abandoned(self) -> None:
        """Hear that this rank stops using the communicator because of an error."""

    def first_left(self) -> int | None:
        """Return a rank that has called `abandoned`, or None if this rank knows of none.

        A long wait calls this again and again.
        """

    def alone(self) -> Any:
        """Return a communicator of this rank alone, or None to get a duplicate of MPI.COMM_SELF."""

    def make_counter(self) -> Any:
        """Return a counter that all ranks share, or None: the caller then makes an `MpiCounter`.

        Every rank calls this. The counter's `take` returns 0, 1, 2, ..., each number on one rank
        only; its `free` releases it.
        """

    def make_transport(self, name: str, poll: Callable[[], None]) -> Any:
        """Return a transport for tensors in host memory, or None to get one over mpi4py.

        Args:
            name: "host", or another name of `sp_core.transport.NAMES["cpu"]`.
            poll: called while the transport waits.
        """


LEFT_TAG = 32767
"""Tag of the messages of `abandoned`, the largest that the MPI standard guarantees."""
GRACE_SECONDS = 1.0
"""For how long a wait goes on after such a message: what the rank sent before may be under way."""


class Notices(Observer):
    """Tell the ranks of an mpi4py communicator by messages that a rank has left; hear nothing else.

    Nobody receives the messages. So the ranks must not free a communicator that one has left.
    """

    def __init__(self, comm: Any) -> None:
        self._comm = comm

    def abandoned(self) -> None:
        """Tell every other rank by an empty message that this rank has left; do not wait."""
        for rank in {*range(self._comm.size)} - {self._comm.rank}:
            self._comm.Isend(b"", rank, LEFT_TAG).Free()

    def first_left(self) -> int | None:
        """Return the lowest rank from which there is a message of `abandoned`, or None."""
        if not self._comm.Iprobe(tag=LEFT_TAG):
            return None
        return next(x for x in range(self._comm.size) if self._comm.Iprobe(x, LEFT_TAG))


@functools.singledispatch
def observer_of(comm: object) -> Observer:
    """Return the observer of a communicator, as registered for its class.

    A communicator of a class that nobody has registered is its own observer if it is an `Observer`;
    else its observer is a new `Notices`.
    """
    return comm if isinstance(comm, Observer) else Notices(comm)
