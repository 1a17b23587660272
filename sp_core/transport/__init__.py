"""Move the bytes of tensors between ranks.

Only this package touches an MPI buffer or copies between device and host.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from sp_core.errors import DeviceError
from sp_core.observer import observer_of
from sp_core.transport.base import (
    Bound,
    Done,
    Handle,
    HostWrapper,
    Messages,
    Transfer,
    Transport,
    on_stream,
    wait,
)
from sp_core.transport.host import HostTransport
from sp_core.transport.shared import NotShared, this_machine
from sp_core.transport.window import DEVICE_SLOT_BYTES, PINNED_SLOT_BYTES, Window

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
    "Transfer",
    "Transport",
    "Window",
    "choose",
    "count_devices",
    "make_transport",
    "make_window",
    "on_stream",
    "wait",
]

NAMES = {
    "cpu": ("host", "window", "distributed"),
    "cuda": ("ipc", "pinned", "pipelined", "staged", "device", "distributed"),
}
"""Transports by kind of device, the one that "auto" takes first."""

MESSAGES = {"cpu": ("host",), "cuda": ("pipelined", "staged")}
"""Those that carry messages and are always there; the others leave messages to these, but for
"device"."""


MAY_BE_REFUSED = ("device", "distributed")
"""Those that may not be there although their kind of device is; all others are, or do without what
they lack."""


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
        comm: a communicator that nobody else sends on: mpi4py's, or a `GroupComm`, whose "host"
            and "distributed" are gloo.
        device: where the tensors live.
        poll: called while waiting.

    Communication:
        None but for "device" and "distributed", where the ranks find out together whether they can
        have it.

    Raises:
        DeviceError: no such transport for that kind of device, or not here; on every rank.
    """
    chosen, kind = choose(name, device), device.type
    called = str(chosen) if chosen in NAMES["cpu"] else "host"
    of_group = observer_of(comm).make_transport(called, poll)
    host = of_group or HostTransport(comm, called)
    if isinstance(chosen, HostWrapper):
        return chosen.over(host)
    if kind == "cpu" and (of_group or chosen != "distributed"):
        return host
    if chosen == "device":
        return _device_transport(comm, device, "process groups do not use it" * bool(of_group))
    if chosen == "distributed":
        from sp_core.transport import distributed

        group = distributed.make_group(comm, device)  # before buffers are made for nothing
        messages = host if kind == "cpu" else _staged("pipelined", host, device, comm.size, poll)
        return distributed.DistributedTransport(comm, group, messages, device, poll)
    return _staged(chosen, host, device, comm.size, poll)


def choose(name: str | HostWrapper, device: torch.device) -> str | HostWrapper:
    """Return the transport of that name for a kind of device; "auto" is the first.

    Raises:
        DeviceError: there is none.
    """
    offered = NAMES.get(device.type, ())
    if name == "auto" and offered:
        return offered[0]
    if name in offered or (isinstance(name, HostWrapper) and device.type == "cpu"):
        return name
    raise DeviceError(
        f"transport {name!r} was asked for on device {str(device)!r}; kinds of device and their "
        f"transports are {NAMES}. "
        "Pass one of these, or transport='auto'."
    )


def count_devices(kind: str) -> int:
    """Return how many devices of a kind torch sees; 0 if its accelerator is of another kind."""
    found = torch.accelerator.current_accelerator(check_available=True)
    return torch.accelerator.device_count() if found and found.type == kind else 0


def _staged(
    name: str, host: HostTransport, device: torch.device, size: int, poll: Callable[[], None]
) -> Transport:
    from sp_core.transport import cuda, staged

    if name == "staged":
        return staged.StagedTransport(host)
    return staged.PipelinedTransport(host, cuda.CudaStreams(device), size, name=name, poll=poll)


def _device_transport(comm: Intracomm, device: torch.device, why_not: str) -> Transport:
    from sp_core.transport import cuda_aware

    first = comm.allgather(here := this_machine()).index(here) == comm.rank  # a child per machine
    cuda_aware.refuse_host_only(
        comm, lambda: why_not or (cuda_aware.no_device_memory(device.type) if first else "")
    )
    return cuda_aware.DeviceTransport(
        comm, lambda: torch.accelerator.current_stream(device).synchronize()
    )


def make_window(transport: str, comm: Intracomm, device: torch.device) -> tuple[Window | None, str]:
    """Make the memory that the ranks share, if the transport has one.

    Return it, or None and the reason, on every rank alike.
    """
    try:
        if transport == "window":
            return Window(comm), ""
        if transport in ("ipc", "pinned"):
            from sp_core.transport import cuda

            if transport == "pinned":
                return Window(comm, PINNED_SLOT_BYTES, cuda.PinnedMemory(device)), ""
            return Window(comm, DEVICE_SLOT_BYTES, cuda.CudaMemory(device)), ""
    except NotShared as reason:
        return None, str(reason)
    return None, ""
