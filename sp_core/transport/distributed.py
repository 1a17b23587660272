"""Collectives by torch.distributed, over a process group of its own: gloo on a CPU, NCCL on CUDA.

The group takes even pieces, and the types that it can add. So what only moves goes as bytes; an
all-gather of uneven pieces is an all-to-all in which everybody gets the same; a reduce-scatter is
an all-to-all whose pieces are added in the order of the ranks. Messages that all ranks post
together are one all-to-all, too. The messages of a schedule, which each rank posts when it is
ready, go over MPI: NCCL would match them by their order alone, and gloo's cannot be asked whether
they are complete.
"""

from __future__ import annotations

import platform
import socket
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sp_core.errors import DeviceError, PeerFailed
from sp_core.observer import observer_of
from sp_core.schedules import Op, Operation
from sp_core.transport.base import Bound, Done, Handle, Messages, Transport, wait
from sp_core.transport.host import WIDER, widened
from sp_core.transport.shared import this_machine

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

_WIDER = {**WIDER, torch.int16: torch.int32}
"""What gloo or NCCL cannot add, or would round after each addition, and what it is added in."""


Begun = tuple[Any, tuple[object, ...], Callable[[], object] | None]
"""What the group returned, the buffers to keep, and what is done afterwards."""


class DistributedTransport(Transport):
    """Moves tensors by torch.distributed.

    Args:
        comm: an mpi4py communicator that nobody else sends on.
        group: a backend of torch.distributed over the same ranks; `close` gives it up.
        messages: carries the messages of schedules.
        device: where the tensors live.
        poll: called while waiting.
    """

    name = "distributed"

    def __init__(
        self,
        comm: Intracomm,
        group: Any,
        messages: Transport,
        device: torch.device,
        poll: Callable[[], None] = lambda: None,
    ) -> None:
        self._comm, self._group, self._messages, self._poll = comm, group, messages, poll
        self._nothing = torch.empty(0, dtype=torch.uint8, device=device)
        self._say, self._watch = observer_of(comm).announce_call, observer_of(comm).watch

    def run(self, operation: Operation, send: Tensor | None, recv: Tensor | None) -> None:
        """Carry out a collective."""
        wait(self.start(operation, send, recv), self._poll)

    def start(self, operation: Operation, send: Tensor | None, recv: Tensor | None) -> Handle:
        """Begin a collective."""
        what = f"{operation.op} by torch.distributed"
        self._say(what)
        if operation.longest == 0:
            return Done()
        work, keep, after = self._begin(operation, send, recv)
        return _Work(work, keep, what, after, self._watch)

    def exchange(self, sends: Messages, recvs: Messages) -> Handle:
        """Begin point-to-point messages, as one all-to-all; a single message is not copied."""
        what = "messages by torch.distributed"
        self._say(what)
        outgoing, incoming = (
            [_bytes(x) for _, x in sorted(messages, key=itemgetter(0))]
            for messages in (sends, recvs)
        )
        room = (
            incoming[0]
            if len(incoming) == 1
            else self._nothing.new_empty(sum(part.numel() for part in incoming))
        )
        packed = outgoing[0] if len(outgoing) == 1 else torch.cat([self._nothing, *outgoing])
        received, sent = (
            [
                sum(x.nbytes for peer, x in messages if peer == rank)
                for rank in range(self._comm.size)
            ]
            for messages in (recvs, sends)
        )
        work = self._group.alltoall_base(room, packed, received, sent)
        return _Work(work, (room, packed), what, partial(_unpack, room, incoming), self._watch)

    def announce(self, sends: Messages, recvs: Messages) -> None:
        """Say which messages will be posted over MPI."""
        self._messages.announce(sends, recvs)

    def bind(self, messages: Messages) -> Bound:
        """Bring messages into MPI's form."""
        return self._messages.bind(messages)

    def post(self, sends: Bound, recvs: Bound, tag: int) -> Handle:
        """Begin announced messages over MPI."""
        return self._messages.post(sends, recvs, tag)

    def close(self, *, together: bool) -> None:
        """Give the group up."""
        self._messages.close(together=together)
        held, self._group = [self._group], None
        if (
            not together
        ):  # its end waits for what is under way, until the others have gone or its time is up
            threading.Thread(target=held.clear, daemon=True).start()

    def _begin(self, operation: Operation, send: Tensor | None, recv: Tensor | None) -> Begun:
        from torch.distributed import AllreduceOptions, BroadcastOptions, ReduceOp, ReduceOptions

        given = send if recv is None else recv
        assert given is not None
        if operation.op is Op.BROADCAST:
            options: Any = BroadcastOptions()
            options.rootRank = operation.root
            return self._group.broadcast([_bytes(given)], options), (given,), None
        if operation.op not in (Op.ALL_REDUCE, Op.REDUCE):
            assert send is not None
            return self._pieces(operation, send, given)
        wide, total, after = widened(send, recv, _WIDER)
        assert wide is not None
        total = (
            wide.clone() if total is None else total
        )  # on every rank memory that may be overwritten
        total.copy_(wide)
        options = ReduceOptions() if operation.op is Op.REDUCE else AllreduceOptions()
        options.reduceOp = {"sum": ReduceOp.SUM, "max": ReduceOp.MAX, "min": ReduceOp.MIN}[
            operation.reduction
        ]
        if operation.op is Op.ALL_REDUCE:
            return self._group.allreduce([total], options), (total, recv), after
        options.rootRank = operation.root
        return self._group.reduce([total], options), (total, recv), after

    def _pieces(self, operation: Operation, send: Tensor, recv: Tensor) -> Begun:
        """Begin what goes from every rank to every rank."""
        size, gathers = self._comm.size, operation.op is Op.ALL_GATHER
        if gathers and len(set(operation.recv)) == 1:
            return (
                self._group.allgather([list(_bytes(recv).chunk(size))], [_bytes(send)]),
                (send, recv),
                None,
            )
        packed, room, after = (
            _bytes(send).repeat(size) if gathers else _bytes(send),
            _bytes(recv),
            None,
        )
        sent = (
            [send.nbytes] * size if gathers else [count * send.itemsize for count in operation.send]
        )
        received = [count * recv.itemsize for count in operation.recv]
        if operation.op is Op.REDUCE_SCATTER:
            parts = recv.new_empty((size, recv.numel()))
            room, received, after = (
                _bytes(parts.view(-1)),
                [recv.nbytes] * size,
                partial(_add, recv, parts),
            )
        return self._group.alltoall_base(room, packed, received, sent), (room, packed), after


class _Work:
    """A transfer of the group, and what is done after it."""

    def __init__(
        self,
        work: Any,
        keep: tuple[object, ...],
        what: str,
        after: Callable[[], object] | None,
        watch: Callable[[str], object],
    ) -> None:
        self._work, self._keep, self._what, self._after, self._watch = (
            work,
            keep,
            what,
            after,
            watch,
        )

    def test(self) -> bool:
        if self._work is None:
            return True
        if not self._work.is_completed():
            self._watch(self._what)
            return False
        try:
            # complete; what went wrong is said here, and on CUDA the current stream waits
            self._work.wait()
        except RuntimeError as error:
            raise PeerFailed(
                f"{self._what} failed: {str(error).splitlines()[0]} See what the other ranks say."
            ) from error
        if self._after is not None:
            self._after()
        self._work, self._keep, self._after = None, (), None
        return True


def _bytes(x: Tensor) -> Tensor:
    flat = x.detach().as_strided((x.numel(),), (1,))  # a vector of one element may have any stride
    return flat.view(torch.uint8)


def _unpack(room: Tensor, parts: Sequence[Tensor]) -> None:
    if len(parts) > 1:
        for x, part in zip(parts, room.split([part.numel() for part in parts]), strict=True):
            x.copy_(part)


def _add(into: Tensor, parts: Tensor) -> None:
    """Add all rows in their order; half types in float32, rounded once."""
    total = parts[0].to(WIDER.get(into.dtype, into.dtype))
    for part in parts[1:]:
        total = total + part
    into.copy_(total)


CONNECT_SECONDS = 60
LIMIT_SECONDS = 300
"""Of every wait inside the group; then the transfer fails, on this rank."""

LOOPBACK = "127.0.0.1"
Offer = tuple[str, int, str]
"""Where the store is, and what went wrong with it."""


def make_group(comm: Intracomm, device: torch.device, seconds: float = LIMIT_SECONDS) -> Any:
    """Make a process group: gloo for a CPU, NCCL for CUDA. Every rank calls this.

    Args:
        comm: an mpi4py communicator.
        device: where the tensors of this rank live.
        seconds: limit of every transfer.

    Returns:
        The backend itself, as torch.distributed keeps it inside its groups.

    Communication:
        Three exchanges of a few bytes; then the ranks connect through a store on rank 0, whose
        address travels over MPI.

    Raises:
        DeviceError: on every rank: two ranks have one GPU, this torch has no such backend, or the
            ranks cannot connect.
    """
    if device.type == "cuda":
        refuse_shared_gpus(
            comm.allgather(
                f"GPU {torch.cuda.get_device_properties(device).uuid} of {platform.node()}"
            )
        )
    near = len(set(comm.allgather(this_machine()))) == 1
    store, offer = _offered(near) if comm.rank == 0 else (None, ("", 0, ""))
    host, port, problem = comm.bcast(offer)
    group = None
    if not problem:
        try:
            store = store or _store(host, port)
            group = _connected(store, comm, device, near, timedelta(seconds=seconds))
        except (RuntimeError, ImportError, OSError) as error:
            problem = str(error).splitlines()[0]
    problems = {rank: text for rank, text in enumerate(comm.allgather(problem)) if text}
    if problems:
        rank, text = next(iter(problems.items()))
        raise DeviceError(
            f"transport 'distributed' needs a process group of torch.distributed over {comm.size} ranks on {device.type}; "
            f"rank {rank} has none: {text}. Pass another transport, or see to it that the ranks reach each other over TCP."
        )
    return group


def refuse_shared_gpus(gpus: Sequence[str]) -> None:
    """Raise `DeviceError` where two ranks have one GPU; `gpus` names that of each rank."""
    ranks: dict[str, list[int]] = defaultdict(list)
    for rank, gpu in enumerate(gpus):
        ranks[gpu].append(rank)
    shared = [
        f"ranks {', '.join(map(str, found))}: {gpu}"
        for gpu, found in ranks.items()
        if len(found) > 1
    ]
    if shared:
        raise DeviceError(
            f"transport 'distributed' uses NCCL, which needs a GPU for each rank; {len(gpus)} ranks have {len(ranks)} "
            f"({'; '.join(shared)}). Start fewer ranks, or pass transport='ipc' or 'pipelined', which let ranks share one."
        )


def _offered(near: bool) -> tuple[Any, Offer]:
    """Make a store, which listens to this machine only if all ranks are on it. Return it and its address."""
    try:
        listener = socket.create_server((LOOPBACK if near else "", 0))
        host, port = LOOPBACK if near else platform.node(), listener.getsockname()[1]
        return _store(host, port, listener.detach()), (host, port, "")
    except (RuntimeError, ImportError, OSError) as error:
        return None, ("", 0, str(error).splitlines()[0])


def _store(host: str, port: int, listening: int | None = None) -> Any:
    """Connect to the store at an address, or make one that listens on a socket."""
    from torch._C._distributed_c10d import TCPStore

    limit = timedelta(seconds=CONNECT_SECONDS)
    return TCPStore(
        host,
        port,
        None,
        listening is not None,
        limit,
        wait_for_workers=False,
        master_listen_fd=listening,
    )


def _connected(
    store: Any, comm: Intracomm, device: torch.device, near: bool, limit: timedelta
) -> Any:
    from torch._C import _distributed_c10d

    backends: Any = _distributed_c10d  # its stubs do not know that options can be passed
    if device.type == "cuda":
        options = backends.ProcessGroupNCCL.Options()
        options._timeout = limit
        return backends.ProcessGroupNCCL(store, comm.rank, comm.size, options)
    gloo = backends.ProcessGroupGloo
    options = gloo._Options()
    options._timeout = limit
    options._devices = [
        gloo.create_device(hostname=LOOPBACK) if near else gloo.create_default_device()
    ]
    return gloo(store, comm.rank, comm.size, options)
