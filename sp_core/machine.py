"""What the machine offers, as plain numbers; needs nothing but the operating system."""

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
    """Processor cores that this process may use: its affinity, and the quota of its container."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(allowed, _quota(allowed)))


def cpu_model() -> str:
    """Name of the processor."""
    try:
        lines = _CPUINFO.read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def node_name() -> str:
    """What this machine calls itself."""
    return socket.gethostname()


def loaded_library(name: str) -> str | None:
    """Path of a shared library that this process has loaded, such as "libmpi"."""
    try:
        maps = Path("/proc/self/maps").read_text()
    except OSError:
        return None
    found = re.search(rf"(/\S*/{name}(-\w+)?\.so\S*)", maps)
    return found[1] if found else None


def node_number() -> int:
    """A number below 2^48 that processes of one node share and others do not: of its name and of when its kernel was started."""
    try:
        boot = _BOOT.read_text()
    except OSError:
        boot = ""
    return int.from_bytes(hashlib.blake2b(f"{node_name()} {boot}".encode(), digest_size=6).digest(), "little")


def busy_share(seconds: float = 0.3) -> float:
    """Part of all processor time that is in use, observed for a moment; 0 where the system does not say."""
    before = _processor_times()
    time.sleep(seconds)
    total, idle = (after - earlier for after, earlier in zip(_processor_times(), before, strict=True))
    return 1 - idle / total if total > 0 else 0.0


def _processor_times() -> tuple[int, int]:
    """All ticks since the start, and those in which nothing ran."""
    try:
        ticks = [int(word) for word in _STAT.read_text().split("\n", 1)[0].split()[1:9]]
    except (OSError, ValueError):
        return 0, 0
    return sum(ticks), ticks[3] + ticks[4]  # idle, and waiting for a disk


def _quota(otherwise: int) -> int:
    """Whole cores that the container's quota of processor time makes."""
    try:
        quota, period = _QUOTA.read_text().split()
    except (OSError, ValueError):
        return otherwise
    return otherwise if quota == "max" else max(1, int(quota) // int(period))
