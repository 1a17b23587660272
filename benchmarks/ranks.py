"""What the ranks of a measurement run on: their devices, their MPI, and what a record says about these."""

from __future__ import annotations

import shutil
import subprocess
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.machine import environment
from sp_core.machine import cores, cpu_model

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

THREADS = 1  # per rank: strong scaling adds ranks, and a P = 1 that used every core would leave them nothing to gain
ASKED = ("driver_version", "clocks.sm", "temperature.gpu", "power.limit")  # of nvidia-smi; MHz, degrees Celsius, W


def device(kind: str, world: Intracomm, *, share_gpu: bool) -> torch.device:
    """The CPU, or the GPU whose number is this rank's place on its node.

    Raises:
        SystemExit: on every rank of a node with more ranks than GPUs, unless they may be shared.
    """
    from mpi4py import MPI

    if kind == "cpu":
        return torch.device("cpu")
    local = world.Split_type(MPI.COMM_TYPE_SHARED)
    count = torch.cuda.device_count()
    if local.size > count and not (share_gpu and count):
        raise SystemExit(f"{local.size} ranks on a node with {count} GPUs. Pass --share-gpu to let several ranks use one.")
    chosen = torch.device("cuda", local.rank % count)
    local.Free()
    torch.cuda.set_device(chosen)
    return chosen


def facts(world: Intracomm, device: torch.device, mode: str) -> dict[str, Any]:
    """Device, transport and environment of a record; asks all ranks which device they have.

    Args:
        world: all ranks.
        device: this rank's.
        mode: name of the transport.
    """
    from mpi4py import MPI

    cuda = device.type == "cuda"
    devices = set(world.allgather(str(device)))
    vendor, numbers = MPI.get_vendor()
    readings: dict[str, Any] = dict.fromkeys(("clocks", "temperature", "power_cap", "driver"))
    return {
        "device": {
            "kind": device.type,
            "name": torch.cuda.get_device_name(device) if cuda else cpu_model(),
            "count": len(devices) if cuda else cores(),
            **(_gpu_readings(device) if cuda and world.rank == 0 else readings),
        },
        "transport": {
            "mpi": {
                "vendor": vendor,
                "version": ".".join(map(str, numbers)),
                "library": MPI.Get_library_version().split("\n")[0].strip("\0 "),
            },
            "mode": mode,
            "threads": torch.get_num_threads(),
            "oversubscribed": world.size * THREADS > cores(),
            "shared_gpu": cuda and world.size > len(devices),
        },
        "env": environment(),
    }


def _gpu_readings(device: torch.device) -> dict[str, Any]:
    """What nvidia-smi says of a GPU; None where it says nothing."""
    program = shutil.which("nvidia-smi")
    unknown: dict[str, Any] = dict.fromkeys(("driver", "clocks", "temperature", "power_cap"))
    if program is None:
        return unknown
    query = [program, f"--query-gpu={','.join(ASKED)}", "--format=csv,noheader,nounits", "-i", str(device.index or 0)]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout
        driver, *numbers = (part.strip() for part in answer.splitlines()[0].split(","))
        return {"driver": driver, **dict(zip(("clocks", "temperature", "power_cap"), map(_number, numbers), strict=True))}
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return unknown


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:  # "[N/A]"
        return None
