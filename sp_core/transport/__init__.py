"""How the bytes of one tensor reach another rank: the only code that touches an MPI buffer or copies between device and host."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import torch

from sp_core.errors import DeviceError
from sp_core.transport import cuda_aware
from sp_core.transport.base import Bound, Done, Handle, HostWrapper, Messages, Transport, wait
from sp_core.transport.cuda import CudaMemory, CudaStreams, PinnedMemory
from sp_core.transport.distributed import DistributedTransport, make_group
from sp_core.transport.host import HostTransport
from sp_core.transport.shared import NotShared, first_of_its_machine
from sp_core.transport.staged import IpcTransport, PinnedTransport, PipelinedTransport, StagedTransport
from sp_core.transport.window import DEVICE_SLOT_BYTES, PINNED_SLOT_BYTES, Window, WindowTransport

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

__all__ = [
    "MAY_BE_REFUSED",
    "MESSAGES",
    "NAMES",
    "Bound",
    "Done",
    "Handle",
    "HostTransport",
    "HostWrapper",
    "Messages",
    "Transport",
    "Window",
    "WindowRun",
    "make_transport",
    "make_window",
    "wait",
]

NAMES = {"cpu": ("host", "window", "distributed"), "cuda": ("ipc", "pinned", "pipelined", "staged", "device", "distributed")}
"""Transports by kind of device, the one that "auto" takes first."""

MESSAGES = {"cpu": ("host",), "cuda": ("pipelined", "staged")}
"""Those that carry messages and are always there; the others leave messages to these, but for "device"."""


MAY_BE_REFUSED = ("device", "distributed")
"""Those that may not be there although their kind of device is; all others are, or do without what they lack."""


def make_transport(
    name: str | HostWrapper, comm: Intracomm, device: torch.device, poll: Callable[[], None] = lambda: None
) -> Transport:
    """The transport of that name for tensors on a device; every rank calls this.

    Args:
        name: "auto", one of `NAMES[device.type]`, or on a CPU a wrapper of the transport of host tensors.
        comm: an mpi4py communicator that nobody else sends on.
        device: where the tensors live.
        poll: called while waiting.

    Communication:
        None but for "device" and "distributed", where the ranks find out together whether they can have it.

    Raises:
        DeviceError: no such transport for that kind of device, or not here; on every rank.
    """
    if isinstance(name, HostWrapper) and device.type == "cpu":
        return name.over(HostTransport(comm))
    offered = NAMES.get(device.type, ())
    chosen = offered[0] if name == "auto" and offered else name
    if chosen not in offered:
        raise DeviceError(
            f"transport {name!r} was asked for on device {str(device)!r}, which offers {offered or 'none'}. "
            f"Pass one of these, or transport='auto'; supported kinds of device are {tuple(NAMES)}."
        )
    host = HostTransport(comm)
    match chosen:
        case "host":
            return host
        case "window":
            return WindowTransport(comm)
        case "staged":
            return StagedTransport(host)
        case "device":
            return _device_transport(comm, device)
        case "distributed":
            group = make_group(comm, device)  # before buffers are made for nothing
            messages = host if device.type == "cpu" else PipelinedTransport(host, CudaStreams(device), comm.size, poll=poll)
            return DistributedTransport(comm, group, messages, device, poll)
    kinds = {"ipc": IpcTransport, "pinned": PinnedTransport}
    return kinds.get(chosen, PipelinedTransport)(host, CudaStreams(device), comm.size, poll=poll)


def _device_transport(comm: Intracomm, device: torch.device) -> Transport:
    first = first_of_its_machine(comm)  # one child per machine
    cuda_aware.refuse_host_only(comm, lambda: cuda_aware.no_device_memory(device.type) if first else "")
    return cuda_aware.DeviceTransport(comm, partial(cuda_aware.settle, device))


def make_window(transport: str, comm: Intracomm, device: torch.device) -> tuple[Window | None, str]:
    """The memory that the ranks share, for a transport that is made for it, or why there is none; the same on every rank."""
    try:
        match transport:
            case "window":
                return Window(comm), ""
            case "ipc":
                return Window(comm, DEVICE_SLOT_BYTES, CudaMemory(device)), ""
            case "pinned":
                return Window(comm, PINNED_SLOT_BYTES, PinnedMemory(device)), ""
    except NotShared as reason:
        return None, str(reason)
    return None, ""
