"""Which records may be compared: those of the same case, on the same kind of machine with the same software."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from benchmarks.records.check import Record

STABLE_ENV = ("python", "torch", "platform", "cpu_model", "cores")
STABLE_DEVICE = ("kind", "name", "power_cap", "driver")
STABLE_TRANSPORT = ("mpi", "mode", "threads")
DIGITS = 16


def fingerprint(env: dict[str, Any], device: dict[str, Any], transport: dict[str, Any]) -> str:
    """A name for machine and software, the same in every run and for every number of ranks.

    Args:
        env, device, transport: these parts of a record; a fingerprint in `env` is not read. Temperature, clocks, the Slurm job and
            what follows from the number of ranks do not enter.

    Returns:
        Hexadecimal digits.
    """
    parts = ((env, STABLE_ENV), (device, STABLE_DEVICE), (transport, STABLE_TRANSPORT))
    stable = [[part.get(name) for name in names] for part, names in parts]
    return hashlib.sha256(json.dumps(stable, sort_keys=True).encode()).hexdigest()[:DIGITS]


def key(record: Record) -> tuple[str, int]:
    """What a record measures: (case id, ranks)."""
    return record["case"]["id"], record["case"]["ranks"]
