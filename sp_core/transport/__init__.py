"""How the bytes of one tensor reach another rank: the only code that touches an MPI buffer or copies between device and host."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import torch

from sp_core.errors import DeviceError
from sp_core.transport.base import Bound, Done, Handle, HostWrapper, Messages, Transport, wait
from sp_core.transport.host import HostTransport
from sp_core.transport.shared import HOST, NotShared, this_machine
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
    "make_transport",
    "make_window",
    "wait",
]

NAMES = {
    "cpu": ("host", "window", "distributed"),
    "cuda": ("ipc", "pinned", "pipelined", "staged", "device", "distributed"),
}
"""Transports by kind of device, the one that "auto" takes first."""

MESSAGES = {"cpu": ("host",), "cuda": ("pipelined", "staged")}
"""Those that carry messages and are always there; the others leave messages to these, but for "device"."""


MAY_BE_REFUSED = ("device", "distributed")
"""Those that may not be there although their kind of device is; all others are, or do without what they lack."""


def make_transport(
    name: str | HostWrapper,
    comm: Intracomm,
    device: torch.device,
    poll: Callable[[], None] = lambda: None,
) -> Transport:
    """Make the transport of that name for tensors on a device; every rank calls this.

    Args:
        name: "auto", one of `NAMES[device.type]`, or on a CPU a wrapper of the transport of host
            tensors.
        comm: an mpi4py communicator that nobody else sends on.
        device: where the tensors live.
        poll: called while waiting.

    Communication:
        None but for "device" and "distributed", where the ranks find out together whether they can
        have it.

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
        case "device":
            return _device_transport(comm, device)
        case "distributed":
            from sp_core.transport.distributed import DistributedTransport, make_group

            group = make_group(comm, device)  # before buffers are made for nothing
            messages = (
                host
                if device.type == "cpu"
                else _over_host("pipelined", host, device, comm.size, poll)
            )
            return DistributedTransport(comm, group, messages, device, poll)
    return _over_host(chosen, host, device, comm.size, poll)


def _over_host(
    name: str | HostWrapper,
    host: HostTransport,
    device: torch.device,
    size: int,
    poll: Callable[[], None],
) -> Transport:
    from sp_core.transport import cuda, staged

    if name == "staged":
        return staged.StagedTransport(host)
    kinds = {"ipc": staged.IpcTransport, "pinned": staged.PinnedTransport}
    return kinds.get(str(name), staged.PipelinedTransport)(
        host, cuda.CudaStreams(device), size, poll=poll
    )


def _device_transport(comm: Intracomm, device: torch.device) -> Transport:
    from sp_core.transport import cuda_aware

    first = comm.allgather(here := this_machine()).index(here) == comm.rank  # a child per machine
    cuda_aware.refuse_host_only(
        comm, lambda: cuda_aware.no_device_memory(device.type) if first else ""
    )
    return cuda_aware.DeviceTransport(comm, partial(cuda_aware.settle, device))


def make_window(transport: str, comm: Intracomm, device: torch.device) -> tuple[Window | None, str]:
    """Make the memory that the ranks share, if the transport has one. Return it, or None and the reason, on every rank alike."""
    try:
        if transport == "window":
            return Window(comm), ""
        if transport in ("ipc", "pinned"):
            from sp_core.transport.cuda import CudaMemory, PinnedMemory

            pinned = transport == "pinned"
            memory = PinnedMemory(device) if pinned else CudaMemory(device)
            return Window(comm, PINNED_SLOT_BYTES if pinned else DEVICE_SLOT_BYTES, memory), ""
    except NotShared as reason:
        return None, str(reason)
    return None, ""
