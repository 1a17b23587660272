"""Describe the machine, its devices and its MPI, so that records can be compared."""

import hashlib
import json
import os
import platform
import shutil
import subprocess
import time
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.worker import Intracomm
from sp_core.machine import cores, cpu_model, node_cores

if TYPE_CHECKING:
    import torch

ASKED = {
    "driver": "driver_version",
    "clocks": "clocks.sm",
    "temperature": "temperature.gpu",
    "power_cap": "power.limit",
}
"""The names that nvidia-smi has for the readings of a record, in MHz, degrees Celsius and W."""
_STAT = Path("/proc/stat")


def environment() -> dict[str, Any]:
    """Return versions and processor."""
    return {
        "python": platform.python_version(),
        "torch": version("torch"),
        "platform": platform.platform(),
        "cpu_model": cpu_model(),
        "cores": cores(),
        "slurm_job": os.environ.get("SLURM_JOB_ID"),
    }


def device(kind: str, world: Intracomm, *, share_gpu: bool) -> "torch.device":
    """Return the CPU, or the GPU whose number is this rank's index among the ranks of its node.

    Raises:
        SystemExit: on every rank of a node with more ranks than GPUs, unless they may be shared.
    """
    import torch
    from mpi4py import MPI

    from sp_core.transport.cuda import uuid_of

    if kind == "cpu":
        return torch.device("cpu")
    of_kind = torch.get_device_module(kind)
    local, count = world.Split_type(MPI.COMM_TYPE_SHARED), of_kind.device_count()
    chosen = torch.device(kind, local.rank % max(count, 1))
    gpus = {gpu for gpu in local.allgather(uuid_of(chosen) if count else None) if gpu}
    if local.size > len(gpus) and not (share_gpu and gpus):
        raise SystemExit(
            f"{local.size} ranks on a node with {len(gpus)} GPUs. "
            "Pass --share-gpu to let several ranks use one."
        )
    local.Free()
    of_kind.set_device(chosen)
    return chosen


def facts(world: Intracomm, device: "torch.device", mode: str) -> dict[str, Any]:
    """Return the parts "device", "transport" and "env" of a record.

    Args:
        world: all ranks, which gather the names of their devices.
        device: this rank's device.
        mode: name of the transport.
    """
    import torch
    from mpi4py import MPI

    from sp_core.transport.cuda import uuid_of

    is_gpu = device.type != "cpu"
    devices = set(world.allgather(uuid_of(device) if is_gpu else str(device)))
    of_kind: Any = torch.get_device_module(device)
    vendor, numbers = MPI.get_vendor()
    threads = torch.get_num_threads()
    said: dict[str, Any] = {
        "device": {
            "kind": device.type,
            "name": of_kind.get_device_name(device) if is_gpu else cpu_model(),
            "count": len(devices) if is_gpu else cores(),
            **dict.fromkeys(ASKED),
            **(_gpu_readings(device) if is_gpu and world.rank == 0 else {}),
        },
        "transport": {
            "mpi": {
                "vendor": vendor,
                "version": ".".join(map(str, numbers)),
                "library": " ".join(MPI.Get_library_version().split("\n")[0].strip("\0").split()),
            },
            "mode": mode,
            "threads": threads,
            "oversubscribed": is_crowded(world, threads),
            "shared_gpu": is_gpu and world.size > len(devices),
        },
        "env": environment(),
    }
    said["env"]["fingerprint"] = fingerprint(said["env"], said["device"], said["transport"])
    return said


def is_crowded(world: Intracomm, threads: int) -> bool:
    """Return whether the ranks of a node have more threads together than cores that they may use.

    Ranks may be bound to different cores. Every rank calls this, with its number of threads.
    """
    from mpi4py import MPI

    node = world.Split_type(MPI.COMM_TYPE_SHARED)
    told = node.allgather((threads, os.sched_getaffinity(0)))
    node.Free()
    usable = min(len(set().union(*(bound for _, bound in told))), node_cores())
    crowded = sum(count for count, _ in told) > usable
    return bool(world.allreduce(crowded, op=MPI.LOR))


def fingerprint(env: dict[str, Any], device: dict[str, Any], transport: dict[str, Any]) -> str:
    """Return a name for machine and software, the same in every run and for every number of ranks.

    Args:
        env, device, transport: these parts of a record; a fingerprint in `env` is not read.
            Temperature, clocks, the Slurm job and the consequences of the number of ranks are left
            out.
    """
    parts = (
        (env, ("python", "torch", "platform", "cpu_model", "cores")),
        (device, ("kind", "name", "power_cap", "driver")),
        (transport, ("mpi", "mode", "threads")),
    )
    stable = [[part.get(name) for name in names] for part, names in parts]
    return hashlib.sha256(json.dumps(stable, sort_keys=True).encode()).hexdigest()[:16]


def _gpu_readings(device: "torch.device") -> dict[str, Any]:
    """Return nvidia-smi's readings of a GPU; an empty dict if it does not answer."""
    from sp_core.transport.cuda import uuid_of

    # its index counts only the GPUs that this process may use
    answer = _nvidia_smi([*ASKED.values()], "-i", f"GPU-{uuid_of(device)}")
    driver, *numbers = (part.strip() for part in answer.partition("\n")[0].split(","))
    if len(numbers) != len(ASKED) - 1:  # as in "No devices were found"
        return {}
    known = [float(x) if x.replace(".", "", 1).isdigit() else None for x in numbers]  # "[N/A]"
    return dict(zip(ASKED, (driver, *known), strict=True))


def gpus() -> str:
    """Return names, drivers and power limits of this node's GPUs; "" if nvidia-smi is silent."""
    return _nvidia_smi(["name", "driver_version", "power.limit"])


def _nvidia_smi(wanted: list[str], *options: str) -> str:
    """Return what nvidia-smi says of each GPU, as lines of CSV; "" if it does not answer."""
    program = shutil.which("nvidia-smi") or "nvidia-smi"
    query = [program, f"--query-gpu={','.join(wanted)}", "--format=csv,noheader,nounits", *options]
    try:
        return subprocess.run(
            query, capture_output=True, text=True, timeout=20, check=True
        ).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def busy_share() -> float:
    """Measure for 0.3 s the share of the machine's processor time that is in use, from 0 to 1.

    Return 0 on a system without /proc/stat.
    """
    before = _processor_times()
    time.sleep(0.3)
    total, idle = (
        after - earlier for after, earlier in zip(_processor_times(), before, strict=True)
    )
    return 1 - idle / total if total > 0 else 0.0


def _processor_times() -> tuple[int, int]:
    """Return the clock ticks of all cores since boot, and the idle ones among them."""
    text = _STAT.read_text() if _STAT.exists() else ""
    ticks = [int(word) for word in text.partition("\n")[0].split()[1:9]]
    return (sum(ticks), ticks[3] + ticks[4]) if ticks else (0, 0)  # idle, waiting for disk
