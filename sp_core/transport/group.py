"""A process group of torch.distributed over the ranks of an MPI communicator; a default group of the program's is left alone."""

from __future__ import annotations

import os
import platform
import socket
from collections import defaultdict
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch

from sp_core.errors import DeviceError
from sp_core.transport.shared import together

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

CONNECT_SECONDS = 60
LIMIT_SECONDS = 300
"""Of every wait inside the group; then the transfer fails, on this rank."""

LOOPBACK = "127.0.0.1"
Offer = tuple[str, int, str]
"""Where the store is, a path where there is no port, and what went wrong with it."""
NOTHING: Offer = ("", 0, "")


def make_group(comm: Intracomm, device: torch.device, seconds: float = LIMIT_SECONDS) -> Any:
    """A process group: gloo for a CPU, NCCL for CUDA. Every rank calls this.

    Args:
        comm: an mpi4py communicator.
        device: where the tensors of this rank live.
        seconds: limit of every transfer.

    Returns:
        The backend itself, as torch.distributed keeps it inside its groups.

    Communication:
        Three exchanges of a few bytes; then the ranks connect through a store: gloo on one machine through a file without a name,
        as `transport.shared` makes them; else through one of rank 0's that listens, whose address travels over MPI.

    Raises:
        DeviceError: on every rank: two ranks have one GPU, this torch has no such backend, or the ranks cannot connect.
    """
    if device.type == "cuda":
        refuse_shared_gpus(comm.allgather(f"GPU {torch.cuda.get_device_properties(device).uuid} of {platform.node()}"))
    near = together(comm)
    quiet = near and device.type == "cpu" and hasattr(os, "memfd_create")
    file = os.memfd_create("sp_core") if quiet and comm.rank == 0 else -1
    group, limit = None, timedelta(seconds=seconds)
    try:
        store, offer = (None, NOTHING) if comm.rank else _offered(near, file)
        host, port, problem = comm.bcast(offer)
        if not problem:
            try:
                group = _connected(store or _store(host, port, comm.size), comm, device, near, limit)
            except (RuntimeError, ImportError, OSError) as error:
                problem = str(error).splitlines()[0]
        told = comm.allgather(problem)  # from here on nobody needs the store any more
    finally:
        if file >= 0:
            os.close(file)
    problems = {rank: text for rank, text in enumerate(told) if text}
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
    shared = [f"ranks {', '.join(map(str, found))}: {gpu}" for gpu, found in ranks.items() if len(found) > 1]
    if shared:
        raise DeviceError(
            f"transport 'distributed' uses NCCL, which needs a GPU for each rank; {len(gpus)} ranks have {len(ranks)} "
            f"({'; '.join(shared)}). Start fewer ranks, or pass transport='ipc' or 'pipelined', which let ranks share one."
        )


def _offered(near: bool, file: int) -> tuple[Any, Offer]:
    """A store, and where it is: in a file without a name, if there is one, else at an address.

    A store that listens looks up the names of whoever connects, and waits for seconds where nobody knows names of this machine.
    """
    if file >= 0:
        return None, (f"/proc/{os.getpid()}/fd/{file}", 0, "")
    try:
        listener = socket.create_server((LOOPBACK if near else "", 0))
        host, port = LOOPBACK if near else platform.node(), listener.getsockname()[1]
        return _store(host, port, 0, listener.detach()), (host, port, "")
    except (RuntimeError, ImportError, OSError) as error:
        return None, ("", 0, str(error).splitlines()[0])


def _store(host: str, port: int, size: int, listening: int | None = None) -> Any:
    """The store in a file, where there is no port, or at an address; the one that is there, or one that listens on a socket."""
    from torch._C._distributed_c10d import FileStore, TCPStore

    if not port:
        return FileStore(host, size)
    limit = timedelta(seconds=CONNECT_SECONDS)
    return TCPStore(host, port, None, listening is not None, limit, wait_for_workers=False, master_listen_fd=listening)


def _connected(store: Any, comm: Intracomm, device: torch.device, near: bool, limit: timedelta) -> Any:
    from torch._C import _distributed_c10d

    backends: Any = _distributed_c10d  # its stubs do not know that options can be passed
    if device.type == "cuda":
        options = backends.ProcessGroupNCCL.Options()
        options._timeout = limit
        return backends.ProcessGroupNCCL(store, comm.rank, comm.size, options)
    gloo = backends.ProcessGroupGloo
    options = gloo._Options()
    options._timeout = limit
    options._devices = [gloo.create_device(hostname=LOOPBACK) if near else gloo.create_default_device()]
    return gloo(store, comm.rank, comm.size, options)
