"""Facts about the machine from the operating system alone."""

from __future__ import annotations

import hashlib
import os
import platform
import re
import socket
import time
from pathlib import Path

_QUOTA = Path("/sys/fs/cgroup/cpu.max")
_CPUINFO = Path("/proc/cpuinfo")
_STAT = Path("/proc/stat")
_BOOT = Path("/proc/sys/kernel/random/boot_id")


def cores() -> int:
    """Return the number of processor cores that this process may use, by its affinity and its container's quota."""
    allowed = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    return _within_quota(allowed)


def node_cores() -> int:
    """Return the number of cores of the machine within its container's quota. Binding of this process does not change it."""
    return _within_quota(os.cpu_count() or 1)


def cpu_model() -> str:
    """Return the name of the processor."""
    try:
        lines = _CPUINFO.read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def node_name() -> str:
    """Return the host name."""
    return socket.gethostname()


def loaded_library(name: str) -> str | None:
    """Return the path of a shared library that this process has loaded, such as "libmpi"."""
    try:
        maps = Path("/proc/self/maps").read_text()
    except OSError:
        return None
    found = re.search(rf"(/\S*/{name}(-\w+)?\.so\S*)", maps)
    return found[1] if found else None


def node_number() -> int:
    """Return a number below 2^48 that identifies the node, made of its host name and its boot id."""
    try:
        boot = _BOOT.read_text()
    except OSError:
        boot = ""
    return int.from_bytes(
        hashlib.blake2b(f"{node_name()} {boot}".encode(), digest_size=6).digest(), "little"
    )


def busy_share(seconds: float = 0.3) -> float:
    """Return the share of all processor time that is in use, measured for a moment. Return 0 if the system does not tell."""
    before = _processor_times()
    time.sleep(seconds)
    total, idle = (
        after - earlier for after, earlier in zip(_processor_times(), before, strict=True)
    )
    return 1 - idle / total if total > 0 else 0.0


def _processor_times() -> tuple[int, int]:
    """Return all ticks since boot, and those in which nothing ran."""
    try:
        ticks = [int(word) for word in _STAT.read_text().split("\n", 1)[0].split()[1:9]]
    except (OSError, ValueError):
        return 0, 0
    return sum(ticks), ticks[3] + ticks[4]  # idle, and waiting for a disk


def _within_quota(cores: int) -> int:
    """Return the smaller of a number of cores and the container's quota of processor time in whole cores, 1 or more."""
    try:
        quota, period = _QUOTA.read_text().split()
    except (OSError, ValueError):
        return cores
    return cores if quota == "max" else min(cores, max(1, int(quota) // int(period)))
