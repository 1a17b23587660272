"""How the bytes of one tensor reach another rank: the only code that touches an MPI buffer or copies between device and host."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from sp_core.errors import DeviceError
from sp_core.transport.base import Bound, Done, Handle, Messages, Transport, wait
from sp_core.transport.device import CudaStreams
from sp_core.transport.host import HostTransport
from sp_core.transport.link import LinkModel
from sp_core.transport.staged import PipelinedTransport, StagedTransport
from sp_core.transport.transfer import Op, Transfer
from sp_core.transport.window import Operation, Window, WindowTransport, make_window

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

__all__ = [
    "MESSAGES",
    "NAMES",
    "Bound",
    "Done",
    "Handle",
    "HostTransport",
    "LinkModel",
    "Messages",
    "Op",
    "Operation",
    "Transfer",
    "Transport",
    "Window",
    "make_transport",
    "make_window",
    "wait",
]

NAMES = {"cpu": ("host", "window"), "cuda": ("pipelined", "staged")}
"""Transports by kind of device, the one that "auto" takes first."""

MESSAGES = {"cpu": ("host",), "cuda": ("pipelined", "staged")}
"""Those that carry messages; "window" leaves these to "host"."""


def make_transport(
    name: str | LinkModel, comm: Intracomm, device: torch.device, poll: Callable[[], None] = lambda: None
) -> Transport:
    """The transport of that name for tensors on a device.

    Args:
        name: "auto", one of `NAMES[device.type]`, or on a CPU a model of a link.
        comm: an mpi4py communicator that nobody else sends on.
        device: where the tensors live.
        poll: called while waiting.

    Raises:
        DeviceError: no such transport for that kind of device.
    """
    if isinstance(name, LinkModel) and device.type == "cpu":
        return name.over(HostTransport(comm))
    offered = NAMES.get(device.type, ())
    chosen = offered[0] if name == "auto" and offered else name
    if chosen not in offered:
        raise DeviceError(
            f"transport {name!r} was asked for on device {str(device)!r}, which offers {offered or 'none'}. "
            f"Pass one of these, or transport='auto'; supported kinds of device are {tuple(NAMES)}."
        )
    if chosen == "window":
        return WindowTransport(comm)
    host = HostTransport(comm)
    if chosen == "host":
        return host
    if chosen == "staged":
        return StagedTransport(host)
    return PipelinedTransport(host, CudaStreams(device), comm.size, poll=poll)
