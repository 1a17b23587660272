"""Move the bytes of tensors between ranks.

Only this package touches MPI buffers or copies between device and host. A `Mesh` calls
`make_transport` and `make_window` once for each communicator. `base` says what a transport offers
(`Transport`, `Handle`), and each other module holds one kind. A transport moves flat, contiguous
tensors. A window (`Window`) is memory that all ranks of one machine map.
"""

from collections.abc import Callable

import torch

from sp_core.errors import DeviceError, short_text
from sp_core.machine import local_rank
from sp_core.observer import observer_of
from sp_core.transport.base import (
    Bound as Bound,
    Broken as Broken,
    Done as Done,
    Handle as Handle,
    HostWrapper as HostWrapper,
    Intracomm as Intracomm,
    Messages as Messages,
    Transfer as Transfer,
    Transport as Transport,
    on_stream as on_stream,
    ordered as ordered,
    wait as wait,
)
from sp_core.transport.host import HostTransport as HostTransport
from sp_core.transport.shared import (
    NotShared,
    Regions as Regions,
    Spec as Spec,
    Work as Work,
    this_machine,
)
from sp_core.transport.window import DEVICE_SLOT_BYTES, PINNED_SLOT_BYTES, Window as Window

NAMES = {
    "cpu": ("host", "window", "distributed"),
    "cuda": ("ipc", "pinned", "pipelined", "staged", "device", "distributed"),
}
"""Names of the transports for each `torch.device.type`. "auto" takes the first name."""

MESSAGES = {"cpu": ("host",), "cuda": ("pipelined", "staged")}
"""For each `torch.device.type`, the transports that send point-to-point messages and always work.

Except for "device", every other transport passes its messages on to one of these."""


MAY_BE_REFUSED = ("device", "distributed")
"""Transports that `make_transport` may refuse with a `DeviceError` although the device is there.

All others always work. Without shared memory, those that use a window work by messages alone."""


def make_transport(
    name: str | HostWrapper,
    comm: Intracomm,
    device: torch.device,
    poll: Callable[[], None] = lambda: None,
) -> Transport:
    """Return the transport called `name` for tensors on `device`. Every rank of `comm` calls this.

    Args:
        name: "auto", a name in `NAMES[device.type]`, or on a CPU a `HostWrapper`, which wraps the
            transport of host tensors.
        comm: an mpi4py communicator on which nothing else is sent. Or a `GroupComm` of ranks that
            torch.distributed has started: then "host", "window" and "distributed" send by gloo.
        device: where the tensors live.
        poll: called again and again while this rank waits, so that the other transfers of the rank
            make progress.

    Returns:
        A `Transport`, the same kind on every rank.

    Communication:
        None, except for "device" and "distributed". For these the ranks exchange a few bytes to
        learn whether all of them can use the transport.

    Raises:
        DeviceError: on every rank. This kind of device has no such transport, or it does not work
            here.
    """
    chosen, kind = choose(name, device), device.type
    of_group = observer_of(comm).make_transport(str(chosen), poll)
    host: Transport = of_group or HostTransport(comm, str(chosen))
    if isinstance(chosen, HostWrapper):
        return chosen.over(host)
    if kind == "cpu" and (of_group or chosen != "distributed"):
        return host
    if chosen == "device":
        return _device_transport(comm, device, "process groups do not use it" * bool(of_group))
    if chosen == "distributed":
        from sp_core.transport import distributed

        group = distributed.make_group(comm, device)  # first: it may be refused
        messages = host if kind == "cpu" else _staged("pipelined", host, device, comm.size, poll)
        return distributed.DistributedTransport(comm, group, messages, device, poll)
    return _staged(chosen, host, device, comm.size, poll)


def choose(name: str | HostWrapper, device: torch.device) -> str | HostWrapper:
    """Return the name of the transport that a caller's `name` means on `device`. No communication.

    Args:
        name: "auto" for the first name in `NAMES[device.type]`, one of these names, or a
            `HostWrapper`.
        device: the device of the tensors; only its type counts.

    Returns:
        A name, never "auto"; a `HostWrapper` is returned as it is.

    Raises:
        DeviceError: this kind of device has no transport of that name.
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
    """Return how many devices of type `kind`, such as "cuda", torch sees in this process.

    The count is 0 if torch has no accelerator or one of another type.
    """
    found = torch.accelerator.current_accelerator(check_available=True)
    return torch.accelerator.device_count() if found and found.type == kind else 0


def named_device(device: torch.device | str | int | None, rank: int) -> torch.device:
    """Return the device that a caller names, with its index.

    Args:
        device: a device, its name or number, or None for the CPU. Without an index it is the
            current device if that is not number 0, else the one with this rank's number on its
            node, modulo the number of devices.
        rank: this rank's number if the launcher does not say which one it has on its node.

    Raises:
        DeviceError: the device is not there.
    """
    try:
        found = torch.device("cpu" if device is None else device)
        if found.type == "cpu" and found.index:
            raise RuntimeError("there is only one CPU device, cpu:0.")
    except (RuntimeError, TypeError, ValueError) as error:  # the last: a number beyond int64
        text = short_text(error)
        raise DeviceError(f"device={device!r} was given: {text} Pass 'cpu' or 'cuda'.") from None
    if (kind := found.type) == "cpu" or kind not in NAMES:  # `choose` refuses the latter
        return torch.device(kind)
    count = count_devices(kind)
    if count == 0:
        raise DeviceError(
            f"device {kind!r} was asked for, but torch sees no {kind.upper()} device. Pass "
            f"device='cpu', or install torch with {kind.upper()}."
        )
    index = found.index
    if index is None:  # the current device is 0 until a program chooses another
        of_torch = torch.distributed.is_available() and torch.distributed.is_initialized()
        local = local_rank(rank, torch.distributed.get_world_size() if of_torch else 2)
        index = torch.accelerator.current_device_index() or local % count
    if index >= count:
        raise DeviceError(
            f"device {str(found)!r} was asked for; there are {count} {kind.upper()} devices, "
            f"{kind}:0 to {kind}:{count - 1}."
        )
    return torch.device(kind, index)


def _staged(
    name: str, host: Transport, device: torch.device, size: int, poll: Callable[[], None]
) -> Transport:
    """Return a transport that copies device tensors through host memory and sends them with `host`.

    Args:
        name: "staged" for `StagedTransport`; any other name for a `PipelinedTransport` of that
            name.
        host: sends the copies in host memory.
        device: a CUDA device.
        size: the number of ranks; not used if staged.
        poll: called while a rank waits; not used if staged.
    """
    from sp_core.transport import cuda, staged

    if name == "staged":
        return staged.StagedTransport(host, device)
    return staged.PipelinedTransport(host, cuda.CudaStreams(device), size, name=name, poll=poll)


def _device_transport(comm: Intracomm, device: torch.device, why_not: str) -> Transport:
    """Return a `DeviceTransport`, once all ranks know that their MPI library reads device memory.

    On each machine the lowest rank tries the library in a child process. The others wait for it.

    Args:
        comm: the communicator; all ranks of it call this.
        device: where the tensors live.
        why_not: a reason to refuse without a trial; empty if there is none.
    """
    from sp_core.transport import cuda_aware

    first = comm.allgather(here := this_machine()).index(here) == comm.rank  # one trial per machine
    cuda_aware.refuse_host_only(
        comm, lambda: why_not or (cuda_aware.no_device_memory(device.type) if first else "")
    )
    return cuda_aware.DeviceTransport(
        comm, settle=lambda: torch.accelerator.current_stream(device).synchronize()
    )


def make_window(
    transport: Transport, comm: Intracomm, device: torch.device
) -> tuple[Window | None, str]:
    """Make the window (memory that the ranks share), if this transport uses one.

    Every rank calls this.

    Args:
        transport: the transport of these ranks. Only "window", "ipc" and "pinned" use a window.
        comm: the communicator of the ranks.
        device: the device whose memory ("ipc") or pinned host memory ("pinned") is shared.

    Returns:
        (the window, ""); or (None, why the ranks cannot share memory); or (None, "") for a
        transport that uses none. The same of these three cases holds on every rank.
    """
    try:
        if transport.name == "window":
            return Window(comm), ""
        if transport.name in ("ipc", "pinned"):
            from sp_core.transport import cuda

            nbytes, kind = (
                (PINNED_SLOT_BYTES, cuda.PinnedMemory)
                if transport.name == "pinned"
                else (DEVICE_SLOT_BYTES, cuda.CudaMemory)
            )
            return Window(comm, nbytes, kind(device), transport.in_order), ""
    except NotShared as reason:
        return None, str(reason)
    return None, ""
