"""What the machine offers, as plain numbers; needs nothing but the operating system."""

from __future__ import annotations

import os
import platform
from pathlib import Path

_QUOTA = Path("/sys/fs/cgroup/cpu.max")
_CPUINFO = Path("/proc/cpuinfo")


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


def _quota(otherwise: int) -> int:
    """Whole cores that the container's quota of processor time makes."""
    try:
        quota, period = _QUOTA.read_text().split()
    except (OSError, ValueError):
        return otherwise
    return otherwise if quota == "max" else max(1, int(quota) // int(period))
