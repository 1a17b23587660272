"""Run on ranks that torch.distributed has started, without MPI.

`communicator_of` and `over_ranks` return a `GroupComm`, which has the few methods of mpi4py's
communicators that this package calls. All messages go over gloo groups of this communicator. The
groups connect through the key-value store of the default process group. So the caller's process
groups carry nothing, and only the ranks of the mesh take part.
"""

from __future__ import annotations

import itertools
import os
import pickle
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from datetime import timedelta
from functools import partial
from threading import Thread
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch
from torch import distributed
from torch._C._distributed_c10d import HashStore, PrefixStore, ProcessGroupGloo

from sp_core.errors import LEFT, PeerFailed, RankError, short_text
from sp_core.launch.deaths import stat
from sp_core.machine import require_linux
from sp_core.observer import Observer
from sp_core.transport.base import Intracomm, Transfer, wait
from sp_core.transport.distributed import DistributedTransport, is_complete
from sp_core.transport.host import Array, HostTransport
from sp_core.transport.shared import this_machine

WATCH_SECONDS = 0.1
"""Shortest time between two looks for ranks that have left or died."""


class GroupComm(Observer):
    """Offer the methods of an mpi4py communicator to ranks that torch.distributed has started.

    All messages and exchanges go over gloo. A rank that dies closes its connections, so every
    transfer with it fails. A rank that waits also looks in the store for ranks that have left after
    an error, and for dead processes on its own machine.

    Args:
        store: a torch.distributed key-value store, through which the ranks connect.
        name: the communicator's name, the same on every rank. No other communicator of this store
            may have it.
        rank: the caller's rank in this communicator.
        size: the number of ranks.
        limit: longest time for one transfer; also an attribute.
        world_rank: the caller's rank in the default group of torch.distributed, which errors name;
            `rank` if None. Also an attribute.

    Raises:
        OSError: this system is not Linux.
        PeerFailed: the ranks cannot connect within the limit.
    """

    def __init__(
        self,
        store: Any,
        name: str,
        rank: int,
        size: int,
        limit: timedelta,
        world_rank: int | None = None,
    ) -> None:
        require_linux()
        self._store, self._name, self.limit = store, name, limit
        self.rank, self.size, self._children = rank, size, itertools.count()
        self.world_rank = rank if world_rank is None else world_rank
        self._spent = list[str]()  # names of freed counters
        self._next_look, self._asks, self._near = 0.0, True, dict[int, int]()
        try:
            self.group: Any = ProcessGroupGloo(PrefixStore(name, store), rank, size, limit)
        except RuntimeError as error:
            raise PeerFailed(
                f"rank {rank} of {size} cannot connect to the others over gloo: "
                f"{short_text(error)} See what the other ranks say."
            ) from error
        told = self.allgather((self.world_rank, this_machine(), os.getpid()))
        self._near = {  # the process of each other rank on this machine
            other: pid
            for other, machine, pid in told
            if other != self.world_rank and machine == this_machine()
        }

    def Iallgather(
        self, send: Array, recv: Array, after: Callable[[], object] | None = None
    ) -> Request:
        """Begin to gather flat arrays of one length from all ranks, as mpi4py's `Iallgather`.

        Each rank receives from every other rank directly. So if a rank dies, all others notice.

        Args:
            send: flat array of the same length on all ranks.
            recv: flat array of `size` times that length.
            after: called once the exchange is complete.
        """
        packed = torch.from_numpy(np.tile(send.view(np.uint8), self.size))
        into = torch.from_numpy(recv.view(np.uint8))
        work = self.group.alltoall_base(into, packed, [], [])
        return Request(
            [partial(is_complete, work, "an exchange", self.watch)], (into, packed), after
        )

    def Iallreduce(self, send: Array, recv: Array) -> Request:
        """Begin to sum flat arrays over the ranks, as mpi4py's `Iallreduce`.

        Each rank receives all arrays directly from their ranks, as in `Iallgather`, and adds them.
        """
        rows = np.empty((self.size, send.size), send.dtype)
        return self.Iallgather(send, rows.reshape(-1), partial(np.sum, rows, 0, out=recv))

    def allgather(self, sendobj: Any) -> list[Any]:
        """Return the list of all ranks' picklable objects, as mpi4py's `allgather`."""
        pickled = np.frombuffer(pickle.dumps(sendobj), np.uint8)
        lengths = np.empty(self.size, np.int64)
        self.Iallgather(np.array([pickled.size]), lengths).Wait()
        padded = np.zeros(lengths.max(), np.uint8)
        padded[: pickled.size] = pickled
        everyone = np.empty((self.size, padded.size), np.uint8)
        self.Iallgather(padded, everyone.reshape(-1)).Wait()
        return [pickle.loads(row.tobytes()) for row in everyone]  # loads ignores the padding

    def bcast(self, obj: Any, root: int = 0) -> Any:
        """Return the root's picklable object on every rank, as mpi4py's `bcast`."""
        return self.allgather(obj if self.rank == root else None)[root]

    def Barrier(self) -> None:
        """Wait until every rank has called this, as mpi4py's `Barrier`."""
        self.allgather(None)

    def Isend(self, buf: Array, dest: int, tag: int) -> Request:
        """Begin to send a flat array, as mpi4py's `Isend`."""
        return self._message(self.group.send, buf, dest, tag, f"a message to rank {dest}")

    def Irecv(self, buf: Array, source: int, tag: int) -> Request:
        """Begin to receive a flat array, as mpi4py's `Irecv`.

        The message must be exactly as long as the array.
        """
        return self._message(self.group.recv, buf, source, tag, f"a message from rank {source}")

    def Dup(self) -> GroupComm:
        """Return a new communicator of the same ranks, with connections of its own.

        Every rank calls this.
        """
        return self._made(f"{next(self._children)}", self.rank, self.size)

    def Split(self, color: int, key: int) -> GroupComm:
        """Return a communicator of the ranks with the same color, ordered by key.

        Every rank calls this.
        """
        told = sorted(
            (k, rank) for rank, (c, k) in enumerate(self.allgather((color, key))) if c == color
        )
        return self._made(
            f"{next(self._children)}[{color}]", told.index((key, self.rank)), len(told)
        )

    def Free(self) -> None:
        """Close the connections of this rank. No transfer may be unfinished.

        A store that nobody holds any more ends, and so releases its port.
        """
        self.group = self._store = None
        self._asks = False

    def alone(self) -> GroupComm:
        """Return a communicator of this rank alone."""
        return GroupComm(HashStore(), "alone", 0, 1, self.limit, self.world_rank)

    def abandoned(self) -> None:
        """Write in the store that this rank has left after an error.

        Ranks that wait for a transfer then raise `PeerFailed`. If several ranks leave, the store
        keeps the first one.
        """
        told = f"{self.world_rank} of torch.distributed"
        self._store.compare_set(f"{self._name}/left", "", told)  # keeps the first rank

    def watch(self, what: str) -> None:
        """Look for a rank that has left after an error or has died.

        This rank asks the store and looks at the processes of its machine, at most once in 0.1 s.
        Other calls return at once. A store that has ended, as it does with the process of torch's
        rank 0, is not asked again.

        Args:
            what: describes the transfer that this rank waits for, in the error.

        Raises:
            PeerFailed: a rank has left or died; with its number in torch.distributed.
        """
        if time.monotonic() < self._next_look:
            return
        self._next_look = time.monotonic() + WATCH_SECONDS
        left, key = b"", f"{self._name}/left"
        try:
            if self._asks and self._store.check([key]):
                left = self._store.get(key)
        except RuntimeError:  # the store has ended
            self._asks = False
        if left:
            raise PeerFailed(f"{what} cannot end: {LEFT.format(left.decode())}")
        dead = [rank for rank, pid in self._near.items() if stat(pid)[:1] in ([], ["Z"], ["X"])]
        if dead:
            raise PeerFailed(
                f"{what} cannot end: rank {dead[0]} of torch.distributed has died; read what it "
                "printed."
            )

    def make_counter(self) -> Any:
        """Return a counter in the store, whose `take` gives each number to one rank only.

        Every rank calls this, after an agreement. It deletes the counters that were freed before:
        from then on no rank may take a number of these. While a rank calls `take`, other ranks
        need not call anything.
        """
        name = f"{self._name}.{next(self._children)}"
        while self._spent:
            self._store.delete_key(self._spent.pop())
        # `free` deletes nothing, because other ranks may still call `take`
        return SimpleNamespace(
            take=lambda: int(self._store.add(name, 1)) - 1, free=partial(self._spent.append, name)
        )

    def make_transport(self, name: str, poll: Callable[[], None]) -> DistributedTransport:
        """Return a transport of host tensors that sends collectives and messages by gloo.

        Args:
            name: the transport's name.
            poll: called without arguments, again and again while a rank waits.
        """
        comm = cast("Intracomm", self)
        return DistributedTransport(
            comm, self.group, HostTransport(comm), torch.device("cpu"), poll, name
        )

    def _made(self, name: str, rank: int, size: int) -> GroupComm:
        """Return a new communicator, whose name in the store begins with this one's name."""
        told = self._store, f"{self._name}.{name}", rank, size, self.limit
        return GroupComm(*told, self.world_rank)

    def _message(
        self, post: Callable[..., Any], buf: Array, peer: int, tag: int, what: str
    ) -> Request:
        """Begin one message by `post`, gloo's send or receive; `what` names it in errors.

        For an empty buffer neither side posts anything, and the request is complete.
        """
        if not buf.size:  # both sides know the length
            return Request([])
        flat = torch.from_numpy(buf.view(np.uint8))
        work = Waited(partial(post, [flat], peer, tag))
        return Request([partial(is_complete, work, what, self.watch)], flat)


class Request(Transfer):
    """Offer the methods `Test` and `Wait` of an mpi4py request on a transfer."""

    Test = Transfer.test

    def Wait(self) -> None:
        """Wait until the transfer is complete."""
        wait(self)


class Waited:
    """Make `is_completed` available for a gloo message, by a thread that waits for the message.

    gloo itself cannot say whether a message is complete. `wait` waits for the thread, and raises
    the RuntimeError of a message that failed.

    Args:
        post: begins the message and returns torch's handle. If it raises RuntimeError, as on a
            closed connection, the message has failed.
    """

    def __init__(self, post: Callable[[], Any]) -> None:
        self._ended: Future[Any] = Future()
        self.is_completed, self.wait = self._ended.done, self._ended.result
        try:
            Thread(target=self._run, args=(post(),), daemon=True).start()
        except RuntimeError as error:
            self._ended.set_exception(error)

    def _run(self, work: Any) -> None:
        """Wait for the message in the thread, and keep its result or error."""
        try:
            self._ended.set_result(work.wait())
        except RuntimeError as error:
            self._ended.set_exception(error)


def over_ranks(ranks: Sequence[int], limit: timedelta) -> GroupComm:
    """Return a communicator of some ranks of the default process group.

    Exactly these ranks call this.

    Args:
        ranks: global ranks of torch.distributed, in the order of the new communicator.
        limit: longest time for one transfer.

    Communication:
        The ranks connect through the default group's store. The store counts the calls of each
        rank, so that a later communicator of the same ranks has a different name. torchrun may keep
        its store over restarts. With one agent, each attempt of `--max-restarts` has its own.

    Raises:
        RankError: this rank is not in `ranks`.
        PeerFailed: the ranks cannot connect within the limit, or torch's store has ended.
    """
    is_one_agent = os.environ.get("GROUP_WORLD_SIZE") == "1"  # else restart counts may differ
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "") if is_one_agent else ""
    rank, name = distributed.get_rank(), f"sp_core{attempt}/{','.join(map(str, ranks))}"
    if rank not in ranks:
        raise RankError(
            f"rank {rank} is not one of the ranks {list(ranks)} of this mesh. Make the mesh on its "
            f"own ranks only."
        )
    store = distributed.distributed_c10d._get_default_store()
    try:
        name = f"{name}/{store.add(f'{name}/{rank}', 1)}"
    except RuntimeError as error:
        raise PeerFailed(
            f"rank {rank} cannot reach torch's store, which another process keeps: "
            f"{short_text(error)} See what the other ranks say."
        ) from error
    return GroupComm(store, name, ranks.index(rank), len(ranks), limit, rank)


def communicator_of(given: object) -> GroupComm | None:
    """Return a communicator of the ranks of a torch process group or DeviceMesh.

    Exactly these ranks call this. Return None if torch.distributed is not initialised, or if
    `given` is neither of these nor None, or a group that was destroyed.

    Args:
        given: a ProcessGroup; None for the default group; or a DeviceMesh, whose last dimension
            varies fastest.

    Communication:
        That of `over_ranks`.

    Raises:
        RankError, PeerFailed: as `over_ranks`.
    """
    from torch.distributed.device_mesh import DeviceMesh

    if not distributed.is_initialized():
        return None
    ranks = given.mesh.flatten().tolist() if isinstance(given, DeviceMesh) else None
    group = distributed.group.WORLD if given is None or ranks else given
    if not isinstance(group, distributed.ProcessGroup):
        return None
    try:
        ranks = ranks or distributed.get_process_group_ranks(group)
    except KeyError:  # it was destroyed
        return None
    try:
        limit = group._get_backend(group._device_types[0]).options._timeout
    except (AttributeError, RuntimeError):  # the backend has no options
        limit = distributed.default_pg_timeout
    return over_ranks(ranks, limit)
