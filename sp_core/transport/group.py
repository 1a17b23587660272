"""A process group of torch.distributed over the ranks of an MPI communicator; a default group of the program's is left alone."""

from __future__ import annotations

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
"""Where the store is, and what went wrong with it."""


def make_group(comm: Intracomm, device: torch.device, seconds: float = LIMIT_SECONDS) -> Any:
    """A process group: gloo for a CPU, NCCL for CUDA. Every rank calls this.

    Args:
        comm: an mpi4py communicator.
        device: where the tensors of this rank live.
        seconds: limit of every transfer.

    Returns:
        The backend itself, as torch.distributed keeps it inside its groups.

    Communication:
        Three exchanges of a few bytes; then the ranks connect through a store on rank 0, whose address travels over MPI.

    Raises:
        DeviceError: on every rank: two ranks have one GPU, this torch has no such backend, or the ranks cannot connect.
    """
    if device.type == "cuda":
        refuse_shared_gpus(comm.allgather(f"GPU {torch.cuda.get_device_properties(device).uuid} of {platform.node()}"))
    near = together(comm)
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
    shared = [f"ranks {', '.join(map(str, found))}: {gpu}" for gpu, found in ranks.items() if len(found) > 1]
    if shared:
        raise DeviceError(
            f"transport 'distributed' uses NCCL, which needs a GPU for each rank; {len(gpus)} ranks have {len(ranks)} "
            f"({'; '.join(shared)}). Start fewer ranks, or pass transport='ipc' or 'pipelined', which let ranks share one."
        )


def _offered(near: bool) -> tuple[Any, Offer]:
    """A store, which listens to this machine only if all ranks are on it; and where it is."""
    try:
        listener = socket.create_server((LOOPBACK if near else "", 0))
        host, port = LOOPBACK if near else platform.node(), listener.getsockname()[1]
        return _store(host, port, listener.detach()), (host, port, "")
    except (RuntimeError, ImportError, OSError) as error:
        return None, ("", 0, str(error).splitlines()[0])


def _store(host: str, port: int, listening: int | None = None) -> Any:
    """The store at an address; the one that is there, or one that listens on a socket."""
    from torch._C._distributed_c10d import TCPStore

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
