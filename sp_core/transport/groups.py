"""A communicator over a process group of torch.distributed: no MPI is needed.

It has the few methods of mpi4py's communicators that this package calls, over gloo groups of its
own. They connect through the store of the default process group, so the caller's groups carry
nothing, and only the ranks of the mesh take part in making it.
"""

from __future__ import annotations

import itertools
import os
import pickle
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from datetime import timedelta
from functools import cached_property, partial
from threading import Thread
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import distributed
from torch._C._distributed_c10d import HashStore, PrefixStore, ProcessGroupGloo

from sp_core.errors import PeerFailed, RankError
from sp_core.launch.deaths import stat
from sp_core.observer import Observer, observer_of
from sp_core.transport.base import Transfer, wait
from sp_core.transport.distributed import DistributedTransport, is_complete
from sp_core.transport.host import Array, HostTransport
from sp_core.transport.shared import this_machine

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

CPU = torch.device("cpu")
WATCH_SECONDS = 0.1
"""Time between two looks for ranks that have left or died."""


class GroupComm(Observer):
    """Ranks that torch.distributed has started, with the methods of an mpi4py communicator.

    Messages and exchanges are gloo's. No transfer takes longer than `limit`. A rank that dies
    closes its connections, so every transfer with it fails. Whoever waits also looks into the store
    for ranks that have left because of an error, and for dead processes of its own machine.

    Args:
        store: of torch.distributed, through which the ranks connect.
        name: the same on every rank, and no other communicator's in this store.
        rank, size: of the caller, and how many.
        limit: of every transfer.

    Raises:
        PeerFailed: the ranks cannot connect within the limit.
    """

    def __init__(self, store: Any, name: str, rank: int, size: int, limit: timedelta) -> None:
        self._store, self._name, self._limit = store, name, limit
        self.rank, self.size, self._children = rank, size, itertools.count()
        self._next_look = 0.0
        store.set(f"{name}/{rank}", pickle.dumps((this_machine(), os.getpid())))
        try:
            self.group: Any = ProcessGroupGloo(PrefixStore(name, store), rank, size, limit)
        except RuntimeError as error:
            raise PeerFailed(
                f"rank {rank} of {size} cannot connect to the others over gloo: "
                f"{str(error).splitlines()[0]} See what the other ranks say."
            ) from error

    def Iallgather(self, send: Array, recv: Array) -> Request:
        """Begin to gather flat arrays of one length, as mpi4py's `Iallgather`.

        Each rank hears from every other one directly, so that it hears of each one's death.
        """
        return self._exchange(send, recv)

    def Iallreduce(self, send: Array, recv: Array) -> Request:
        """Begin to add up flat arrays, as mpi4py's `Iallreduce`.

        Each rank hears from every other one directly, as in `Iallgather`.
        """
        rows = np.empty((self.size, send.size), send.dtype)
        return self._exchange(send, rows.reshape(-1), partial(np.sum, rows, 0, out=recv))

    def allgather(self, sendobj: Any) -> list[Any]:
        """Return the picklable objects of all ranks, as mpi4py's `allgather`."""
        pickled = np.frombuffer(pickle.dumps(sendobj), np.uint8)
        lengths = np.empty(self.size, np.int64)
        self.Iallgather(np.array([pickled.size]), lengths).Wait()
        padded = np.zeros(lengths.max(), np.uint8)
        padded[: pickled.size] = pickled
        everyone = np.empty((self.size, padded.size), np.uint8)
        self.Iallgather(padded, everyone.reshape(-1)).Wait()
        return [pickle.loads(row.tobytes()) for row in everyone]  # longer than the pickle: ignored

    def bcast(self, obj: Any, root: int = 0) -> Any:
        """Return the root's picklable object on every rank, as mpi4py's `bcast`."""
        return self.allgather(obj if self.rank == root else None)[root]

    def Barrier(self) -> None:
        """Wait until every rank has called this, as mpi4py's `Barrier`."""
        self.allgather(None)

    def Isend(self, buf: Array, dest: int, tag: int = 0) -> Request:
        """Begin to send a flat array, as mpi4py's `Isend`."""
        return self._message(self.group.send, buf, dest, tag, f"a message to rank {dest}")

    def Irecv(self, buf: Array, source: int, tag: int = 0) -> Request:
        """Begin to receive a flat array of just this length, as mpi4py's `Irecv`."""
        return self._message(self.group.recv, buf, source, tag, f"a message from rank {source}")

    def Dup(self) -> GroupComm:
        """Make a communicator of the same ranks with messages of their own."""
        return self._made(f"{next(self._children)}", self.rank, self.size)

    def Split(self, color: int = 0, key: int = 0) -> GroupComm:
        """Make a communicator of the ranks of one color, in the order of their keys."""
        told = sorted(
            (k, rank) for rank, (c, k) in enumerate(self.allgather((color, key))) if c == color
        )
        return self._made(
            f"{next(self._children)}[{color}]", told.index((key, self.rank)), len(told)
        )

    def Free(self) -> None:
        """Close the connections, once nothing is under way."""
        self.group = None

    def alone(self) -> GroupComm:
        """Return a communicator of this rank alone."""
        return GroupComm(HashStore(), "alone", 0, 1, self._limit)

    def abandoned(self) -> None:
        """Tell the ranks that wait for this one."""
        self._store.compare_set(f"{self._name}/left", "", str(self.rank))  # the first one stays

    def watch(self, what: str) -> None:
        """Notice, ten times a second, that a rank has left because of an error or has died.

        Raises:
            PeerFailed: it has.
        """
        if time.monotonic() < self._next_look:
            return
        self._next_look = time.monotonic() + WATCH_SECONDS
        if self._store.check([f"{self._name}/left"]):
            rank = self._store.get(f"{self._name}/left").decode()
            raise PeerFailed(
                f"{what} cannot end: rank {rank} has left because of an error; read the error that it printed."
            )
        dead = [rank for rank, pid in self._near.items() if stat(pid)[:1] in ([], ["Z"], ["X"])]
        if dead:
            raise PeerFailed(f"{what} cannot end: rank {dead[0]} has died; read what it printed.")

    @cached_property
    def _near(self) -> dict[int, int]:
        """The processes of the other ranks on this machine."""
        others = [rank for rank in range(self.size) if rank != self.rank]
        told = {rank: pickle.loads(self._store.get(f"{self._name}/{rank}")) for rank in others}
        return {rank: pid for rank, (place, pid) in told.items() if place == this_machine()}

    def make_counter(self) -> StoreCounter:
        """Return a counter in the store."""
        return StoreCounter(self._store, f"{self._name}.{next(self._children)}")

    def make_transport(self, name: str, poll: Callable[[], None]) -> DistributedTransport:
        """Return a transport of host tensors: collectives and messages are gloo's."""
        comm = cast("Intracomm", self)
        return DistributedTransport(comm, self.group, HostTransport(comm), CPU, poll, name)

    def _made(self, name: str, rank: int, size: int) -> GroupComm:
        return GroupComm(self._store, f"{self._name}.{name}", rank, size, self._limit)

    def _exchange(
        self, send: Array, recv: Array, after: Callable[[], object] | None = None
    ) -> Request:
        packed = torch.from_numpy(np.tile(send.view(np.uint8), self.size))
        into = torch.from_numpy(recv.view(np.uint8))
        work = self.group.alltoall_base(into, packed, [], [])
        return self._request(work, "an exchange", (into, packed), after)

    def _request(
        self, work: Any, what: str, keep: object, after: Callable[[], object] | None = None
    ) -> Request:
        return Request([partial(is_complete, work, what, self.watch)], keep, after)

    def _message(
        self, post: Callable[..., Any], buf: Array, peer: int, tag: int, what: str
    ) -> Request:
        if not buf.size:  # both sides know
            return Request([])
        flat = torch.from_numpy(buf.view(np.uint8))
        return self._request(Waited(partial(post, [flat], peer, tag)), what, flat)


class Request(Transfer):
    """A transfer under way, with the methods of an mpi4py request."""

    Test = Transfer.test

    def Wait(self) -> None:
        """Wait until the transfer is complete."""
        wait(self)


class Waited:
    """Let a thread wait for a message of gloo, which cannot be asked whether it is complete.

    Args:
        post: begins the message; a closed connection is an error of the message, too.
    """

    def __init__(self, post: Callable[[], Any]) -> None:
        self._ended: Future[Any] = Future()
        self.is_completed, self.wait = self._ended.done, self._ended.result
        try:
            Thread(target=self._run, args=(post(),), daemon=True).start()
        except RuntimeError as error:
            self._ended.set_exception(error)

    def _run(self, work: Any) -> None:
        try:
            self._ended.set_result(work.wait())
        except RuntimeError as error:
            self._ended.set_exception(error)


class StoreCounter:
    """Give 0, 1, 2, ... to whichever rank asks next: the store adds.

    Args:
        store: of torch.distributed.
        name: of the number in the store.
    """

    def __init__(self, store: Any, name: str) -> None:
        self._store, self._name = store, name

    def take(self) -> int:
        """Return the next number, which no other rank gets."""
        return int(self._store.add(self._name, 1)) - 1

    def free(self) -> None:
        """Do nothing: other ranks may still ask."""


observer_of.register(GroupComm, lambda comm: comm)


def over_ranks(ranks: Sequence[int], limit: timedelta) -> GroupComm:
    """Make a communicator of some ranks of the default process group; just these call this.

    Communication:
        The ranks connect through the default group's store, which knows how often each has done so.

    Raises:
        RankError: this rank is not among them.
    """
    rank, name = distributed.get_rank(), f"sp_core/{','.join(map(str, ranks))}"
    if rank not in ranks:
        raise RankError(
            f"rank {rank} is not one of the ranks {list(ranks)} of this mesh. Make the mesh on its "
            f"own ranks only."
        )
    store = distributed.distributed_c10d._get_default_store()
    number = store.add(f"{name}/{rank}", 1)
    return GroupComm(store, f"{name}/{number}", ranks.index(rank), len(ranks), limit)


def communicator_of(given: object) -> GroupComm | None:
    """Return a communicator of the ranks of a process group or DeviceMesh, or None otherwise.

    Args:
        given: a ProcessGroup, None for that of all ranks, or a DeviceMesh, whose last dimension
            varies fastest.

    Raises:
        RankError: as `over_ranks`.
    """
    from torch.distributed.device_mesh import DeviceMesh

    if not distributed.is_initialized():
        return None
    if isinstance(given, DeviceMesh):
        return over_ranks(given.mesh.flatten().tolist(), distributed.default_pg_timeout)
    group = distributed.group.WORLD if given is None else given
    if not isinstance(group, distributed.ProcessGroup):
        return None
    backend = group._get_backend(group._device_types[0])
    return over_ranks(distributed.get_process_group_ranks(group), backend.options._timeout)
