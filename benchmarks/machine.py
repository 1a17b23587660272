"""What a record says about the machine, so that two records can be compared, or refused."""

from __future__ import annotations

import os
import platform
from importlib.metadata import version
from typing import Any

from sp_core.machine import cores, cpu_model


def environment() -> dict[str, Any]:
    """Versions and processor."""
    return {
        "python": platform.python_version(),
        "torch": version("torch"),
        "platform": platform.platform(),
        "cpu_model": cpu_model(),
        "cores": cores(),
        "slurm_job": os.environ.get("SLURM_JOB_ID"),
    }
