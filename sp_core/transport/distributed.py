"""Move tensors by the collectives of torch.distributed: gloo on a CPU, NCCL on CUDA.

`make_group` connects the ranks of an MPI communicator, and `DistributedTransport` uses the
connection. torch's collectives need pieces of equal size and dtypes that they can add. So:

- data that is only moved goes as bytes;
- an all-gather of uneven pieces is an all-to-all in which each rank sends the same to all ranks;
- a reduce-scatter is an all-to-all whose pieces are added in rank order;
- messages that all ranks begin together (`exchange`) are one all-to-all.

Messages that each rank posts when it is ready (`post`) go through another transport. NCCL would
match them by their order alone, and gloo cannot say whether a message is complete.
"""

import platform
import socket
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from operator import itemgetter
from typing import Any, TypeVar

import torch
from torch import Tensor

from sp_core.errors import DeviceError, PeerFailed, short_text
from sp_core.observer import observer_of
from sp_core.programs import Operation
from sp_core.transport.base import (
    Bound,
    Done,
    Handle,
    Intracomm,
    Messages,
    Transfer,
    Transport,
    ordered,
    wait,
)
from sp_core.transport.cuda import uuid_of
from sp_core.transport.host import WIDER, Calls, OverHost, in_turn, widened
from sp_core.transport.shared import this_machine

_WIDER = {**WIDER, torch.int16: torch.int32}
"""For each dtype that gloo or NCCL cannot add, or would round after each addition, the dtype of the
sum."""


Begun = tuple[Any, tuple[object, ...], Calls]
"""(torch's handle, buffers to keep alive, calls to make when the transfer is complete)."""


class DistributedTransport(OverHost):
    """Move tensors by a process group of torch.distributed.

    Messages of `post`, which each rank begins when it is ready, go through another transport.

    Args:
        comm: an mpi4py communicator on which only this transport and `messages` send.
        group: a torch.distributed backend object over the ranks of `comm`; `close` shuts it down.
        messages: the transport for messages of `post`.
        device: where the tensors live.
        poll: called while a prepared collective waits, so that other transfers make progress.
        name: the transport's name. A `GroupComm`, which sends host tensors by gloo, passes the name
            of the transport that its caller asked for.
    """

    def __init__(
        self,
        comm: Intracomm,
        group: Any,
        messages: Transport,
        device: torch.device,
        poll: Callable[[], None] = lambda: None,
        name: str = "distributed",
    ) -> None:
        self._comm, self._group, self._host, self._poll = comm, group, messages, poll
        self.name = name
        self._nothing = torch.empty(0, dtype=torch.uint8, device=device)
        self._say, self._watch = observer_of(comm).announce_call, observer_of(comm).watch

    def prepare(
        self, operation: Operation, send: Tensor | None, recv: Tensor | None
    ) -> Callable[[], object]:
        """Return a function that begins the collective and waits for its end."""
        return lambda: wait(self.start(operation, send, recv), self._poll)

    def start(self, operation: Operation, send: Tensor | None, recv: Tensor | None) -> Handle:
        """Begin a collective on these buffers and return its handle, without waiting."""
        what = f"{operation.op} by torch.distributed"
        self._say(what)
        if operation.longest == 0:
            return Done()
        return self._transfer(what, *self._begin(operation, send, recv))

    def exchange(self, sends: Messages, recvs: Messages) -> Handle:
        """Begin the messages of all ranks as one all-to-all of bytes, and return its handle.

        Every rank calls this. Several messages are packed into one buffer. A single message is not
        copied.
        """
        what = "messages by torch.distributed"
        self._say(what)
        outgoing, incoming = (
            [_bytes(x) for _, x in sorted(messages, key=itemgetter(0))]
            for messages in (sends, recvs)
        )
        (packed,) = outgoing if len(outgoing) == 1 else [torch.cat([self._nothing, *outgoing])]
        lengths = [part.numel() for part in incoming]
        (room,) = incoming if len(incoming) == 1 else [self._nothing.new_empty(sum(lengths))]
        received, sent = ([0] * self._comm.size for _ in range(2))
        for messages, counts in ((recvs, received), (sends, sent)):
            for peer, x in messages:
                counts[peer] += x.nbytes
        work = self._group.alltoall_base(room, packed, received, sent)
        after = [
            partial(x.copy_, part)
            for x, part in zip(incoming, room.split(lengths), strict=True)
            if x is not room
        ]
        return self._transfer(what, work, (room, packed), after)

    def bind(self, messages: Messages) -> Bound:
        """Convert messages to the form that `post` takes."""
        return self._host.bind(messages)

    def post(self, sends: Bound, recvs: Bound, tag: int) -> Handle:
        """Begin messages on the transport that the constructor got as `messages`."""
        return self._host.post(sends, recvs, tag)

    def close(self, *, together: bool) -> None:
        """Release the process group, and close the transport of the messages beside it.

        Args:
            together: True if all ranks call this and no transfer is unfinished; they wait for each
                other and shut the group down. If False, the call returns at once, and a thread
                releases the group when its transfers have ended.
        """
        super().close(together=together)
        held, self._group = [self._group], None
        if together:  # without a shutdown NCCL aborts transfers of other ranks
            self._comm.Barrier()
            held.pop().shutdown()
        else:  # the end of a group waits for its transfers, or for their time limit
            threading.Thread(target=held.clear, daemon=True).start()

    def _transfer(self, what: str, work: Any, keep: object, after: Calls) -> Handle:
        """Return the handle of a transfer that the group has begun.

        Args:
            what: describes the transfer in errors.
            work: torch's handle.
            keep: buffers to keep alive until the end.
            after: calls to make when the transfer is complete.
        """
        tests = [partial(is_complete, work, what, self._watch)]
        return ordered(Transfer(tests, keep, partial(in_turn, *after)), self._nothing.device)

    def _begin(self, operation: Operation, send: Tensor | None, recv: Tensor | None) -> Begun:
        """Begin a collective by the matching call of the process group."""
        from torch.distributed import ReduceOp

        given = send if recv is None else recv
        assert given is not None
        if operation.op == "broadcast":
            return self._group.broadcast(_bytes(given), operation.root), (given,), ()
        assert send is not None
        if operation.op not in ("all_reduce", "reduce"):
            return self._pieces(operation, send, given)
        _, total, _, after = widened(send, recv, _WIDER)
        if total is None:  # the group overwrites its input on every rank
            total = torch.empty_like(send, dtype=_WIDER.get(send.dtype, send.dtype))
        total.copy_(send)
        op = getattr(ReduceOp, operation.reduction.upper())
        if operation.op == "all_reduce":
            return self._group.allreduce(total, op), (total, recv), after
        return self._group.reduce(total, operation.root, op), (total, recv), after

    def _pieces(self, operation: Operation, send: Tensor, recv: Tensor) -> Begun:
        """Begin an all-gather, a reduce-scatter or an all-to-all, by allgather or alltoall_base."""
        size, packed, room = self._comm.size, _bytes(send), _bytes(recv)
        sent = [count * send.itemsize for count in operation.send]
        received = [count * recv.itemsize for count in operation.recv]
        after: Calls = ()
        if operation.op == "all_gather":
            if len(set(received)) == 1:
                work = self._group.allgather([list(room.chunk(size))], [packed])
                return work, (room, packed), ()
            packed, sent = packed.repeat(size), [send.nbytes] * size
        if operation.op == "reduce_scatter":
            parts = recv.new_empty((size, recv.numel()))
            room, received = _bytes(parts.view(-1)), [recv.nbytes] * size
            after = [partial(_add, recv, parts)]
        return self._group.alltoall_base(room, packed, received, sent), (room, packed), after


def is_complete(work: Any, what: str, watch: Callable[[str], object]) -> bool:
    """Return whether a transfer of the group is complete; do not wait.

    If it is complete, the current CUDA stream waits for it. If not, call `watch(what)`, which looks
    for lost ranks.

    Args:
        work: torch's handle of the transfer.
        what: describes the transfer in errors.
        watch: raises `PeerFailed` if it knows that a rank is lost; usually it does nothing.

    Raises:
        PeerFailed: the transfer has failed, or `watch` knows of a lost rank and the transfer is
            still incomplete then.
    """
    if not work.is_completed():
        try:
            watch(what)
        except PeerFailed:
            if not work.is_completed():  # else that rank ended after its part
                raise
        else:
            return False
    try:
        work.wait()
    except RuntimeError as error:
        raise PeerFailed(
            f"{what} failed: {short_text(error)} See what the other ranks say."
        ) from error
    return True


def _bytes(x: Tensor) -> Tensor:
    """Return the memory of a contiguous tensor as a flat uint8 vector."""
    # one element may have any stride
    return x.detach().as_strided((x.numel(),), (1,)).view(torch.uint8)


def _add(into: Tensor, parts: Tensor) -> None:
    """Write the sum of all rows of `parts`, added in order, into `into`.

    Half types are added in float32 and rounded once.
    """
    total = parts[0].to(WIDER.get(into.dtype, into.dtype))
    for part in parts[1:]:
        total = total + part
    into.copy_(total)


CONNECT_SECONDS = 60
"""Time limit for connecting to the store."""
LIMIT = timedelta(seconds=300)
"""Time limit of a transfer of ranks of MPI. After it the transfer fails on this rank."""

LOOPBACK = "127.0.0.1"
"""Address of the store if all ranks are on one machine."""
T = TypeVar("T")


def make_group(comm: Intracomm, device: torch.device) -> Any:
    """Connect the ranks by a torch.distributed backend: gloo for a CPU, NCCL for CUDA.

    Every rank calls this and waits for the others. The default process group of torch.distributed
    is neither needed nor changed.

    Args:
        comm: an mpi4py communicator; or a `GroupComm`, whose limit then holds for every later
            transfer. Connecting has its own limit, 60 s.
        device: where the tensors of this rank live.

    Returns:
        A `ProcessGroupGloo` or `ProcessGroupNCCL`. Such a backend is what a torch process group
        holds inside; it cannot be passed to torch.distributed as `group`.

    Communication:
        Three all-gathers (two on a CPU) and a broadcast of a few bytes. Then the ranks connect
        through a TCP store on rank 0.

    Raises:
        DeviceError: on every rank: two ranks use the same GPU, this torch has no such backend, or
            the ranks cannot connect.
    """
    if device.type == "cuda":
        refuse_shared_gpus(comm.allgather(f"GPU {uuid_of(device)} of {platform.node()}"))
    near = len(set(comm.allgather(this_machine()))) == 1
    served, problem = _tried(partial(_served, near)) if comm.rank == 0 else (None, "")
    address, problem = comm.bcast((served and served[0], problem))
    group, limit = None, getattr(comm, "limit", LIMIT)
    if not problem:
        group, problem = _tried(
            lambda: _connected(served[1] if served else _store(*address), comm, device, near, limit)
        )
    problems = {rank: text for rank, text in enumerate(comm.allgather(problem)) if text}
    if problems:
        rank, text = next(iter(problems.items()))
        raise DeviceError(
            f"transport 'distributed' needs a process group of torch.distributed over {comm.size} "
            f"ranks on {device.type}; "
            f"rank {rank} has none: {text}. Pass another transport, or see to it that the ranks "
            f"reach each other over TCP."
        )
    return group


def refuse_shared_gpus(gpus: Sequence[str]) -> None:
    """Raise `DeviceError` if two ranks use the same GPU.

    Args:
        gpus: for each rank, a text that names its GPU.
    """
    gpu, count = max(Counter(gpus).items(), key=itemgetter(1))
    if count > 1:
        ranks = ", ".join(str(rank) for rank, other in enumerate(gpus) if other == gpu)
        raise DeviceError(
            f"transport 'distributed' uses NCCL, which needs a GPU for each rank; {len(gpus)} "
            f"ranks have {len(set(gpus))} "
            f"(ranks {ranks}: {gpu}). Start fewer ranks, or pass transport='ipc' or 'pipelined', "
            f"which let ranks share one."
        )


def _tried(make: Callable[[], T]) -> tuple[T | None, str]:
    """Return (result of `make`, ""), or (None, first line of the error) if `make` fails.

    A failure is a RuntimeError, ImportError, OSError, or ValueError (no network interface).
    """
    try:
        return make(), ""
    except (RuntimeError, ImportError, OSError, ValueError) as error:
        return None, short_text(error)


def _served(near: bool) -> tuple[tuple[str, int], Any]:
    """Return ((host, port), store) of a TCP store whose server runs in this process.

    Args:
        near: whether all ranks are on this machine; then other machines cannot connect.
    """
    listening = socket.create_server((LOOPBACK if near else "", 0))
    address = LOOPBACK if near else platform.node(), listening.getsockname()[1]
    return address, _store(*address, listening.detach())


def _store(host: str, port: int, listening: int | None = None) -> Any:
    """Return a TCP store (torch's key-value server) at an address.

    Args:
        host, port: the address of the store.
        listening: file descriptor of a listening socket, to run the server; None to connect to it.
    """
    from torch._C._distributed_c10d import TCPStore

    return TCPStore(
        host,
        port,
        None,
        listening is not None,
        timedelta(seconds=CONNECT_SECONDS),
        wait_for_workers=False,
        master_listen_fd=listening,
    )


def _connected(
    store: Any, comm: Intracomm, device: torch.device, near: bool, limit: timedelta
) -> Any:
    """Return this rank's gloo or NCCL backend, once the ranks have found each other.

    Args:
        store: torch's key-value store, through which the ranks tell each other their addresses.
        comm: gives this rank's number and the number of ranks.
        device: where the tensors live. Its type decides: NCCL for "cuda", else gloo.
        near: whether all ranks are on one machine; then gloo uses the loopback interface. Else
            torch takes those that GLOO_SOCKET_IFNAME names, as for its own groups.
        limit: the longest time for one transfer. A transfer that takes longer fails.
    """
    from torch._C import _distributed_c10d

    backends: Any = _distributed_c10d  # torch's stubs lack the options
    if device.type == "cuda":
        options = backends.ProcessGroupNCCL.Options()
        options._timeout = limit
        return backends.ProcessGroupNCCL(store, comm.rank, comm.size, options)
    gloo = backends.ProcessGroupGloo
    if not near:
        return gloo(store, comm.rank, comm.size, limit)
    options = gloo._Options()
    options._timeout, options._devices = limit, [gloo.create_device(hostname=LOOPBACK)]
    return gloo(store, comm.rank, comm.size, options)
