"""Make up records like those that a run of the benchmarks writes."""

import hashlib
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.cases.setting import NOTHING as NOTHING
from benchmarks.compare.rule import Result, Row, Side, Verdict
from benchmarks.machine import fingerprint
from benchmarks.records import Record
from benchmarks.statistics import Interval

Values = dict[str, Any]
SIZES = (1 << 10, 1 << 14, 1 << 18, 1 << 22)
COLLECTIVES = ("all_gather", "all_reduce", "all_to_all", "shift")
VARIANTS = ("contiguous/full", "zigzag/causal", "striped/causal")
DEVICE: Values = {
    "kind": "cpu",
    "name": "A Processor <v2>",
    "count": 2,
    "clocks": None,
    "temperature": None,
    "power_cap": None,
    "driver": None,
}
ENV: Values = {
    "python": "3.11.7",
    "torch": "2.13.0",
    "platform": "Linux-6.1-x86_64",
    "cpu_model": "A Processor <v2>",
    "cores": 2,
    "slurm_job": None,
}


def dicts(record: Record) -> Values:
    """Return a record as plain values."""
    found: Values = msgspec.to_builtins(record)
    return found


def again(record: Record, **changes: Any) -> Record:
    """Return a copy of a record with some values changed."""
    made = dicts(record)
    for name, value in changes.items():
        parts = isinstance(value, dict) and isinstance(made[name], dict)
        made[name] = {**made[name], **value} if parts else value
    return msgspec.convert(made, Record)


def case(layer: str, scheme: str, variant: str, ranks: int, **changes: Any) -> Values:
    """Return the part of a record that says what was measured."""
    made: Values = {
        "id": f"{layer}/{scheme}/{variant}",
        "layer": layer,
        "scheme": scheme,
        "direction": "forward",
        "ranks": ranks,
        "mesh": {"sp": ranks},
        "shape": {"batch": 1, "seq": 2048},
        "dtype": "float32",
        "layout": "zigzag",
        "mask": "causal",
        "algorithm": None,
        "transport": "host",
    }
    return {**made, **changes}


def timing(ranks: int, seconds: float) -> Values:
    """Return the part of a record with the times of three samples."""
    return {
        "iterations": 3,
        "inner": 1,
        "samples_s": [seconds * 0.9, seconds, seconds * 1.2],
        "per_rank_median_s": [seconds] * ranks,
        "median_s": seconds,
        "imbalance": 1.0,
        "barrier_skew_s": {"median": 1e-6, "p95": 2e-6, "max": 3e-6},
        "skew_limited": False,
    }


def record(what: Values, seconds: float, *, bytes_result: int = 1 << 20, **changes: Any) -> Record:
    """Return a valid record of one launch."""
    ranks, shared = what["ranks"], 0.1 * (what["ranks"] - 1)
    operation = what["scheme"] if what["layer"] == "collectives" else "all_gather"
    transport = {
        "mpi": {"vendor": "Open MPI", "version": "5.0.11", "library": "Open MPI v5.0.11"},
        "mode": "host",
        "threads": 1,
        "oversubscribed": ranks > 2,
        "shared_gpu": False,
    }
    sent, waited = bytes_result * (ranks - 1), seconds * shared
    phases = {"total": seconds, "communication": waited, "attention": seconds * 0.4}
    made: Values = {
        "schema": 1,
        "run_id": "20261120T131500Z-1a2b3c",
        "launch": 0,
        "pair": None,
        "commit": {"sha": "a" * 40, "dirty": False},
        "harness_sha": hashlib.sha256(b"harness").hexdigest(),
        "case": what,
        "device": dict(DEVICE),
        "transport": transport,
        "env": {"fingerprint": fingerprint(ENV, DEVICE, transport), **ENV},
        "timing": timing(ranks, seconds),
        "phases": {name: {"max_s": value, "mean_s": value * 0.9} for name, value in phases.items()},
        "comm": {
            operation: {"bytes_sent": sent, "seconds": waited, "bytes_result": bytes_result},
            "control": {"bytes_sent": 64 * ranks, "seconds": 1e-5},
        },
        "memory": {"peak_bytes": 3 << 20, "method": "counted"},
        "work": {"flops": 10**9, "tokens": 2048},
        "status": "ok",
        "reason": None,
    }
    return msgspec.convert({**made, **changes}, Record)


def save(path: Path, *records: Any) -> Path:
    """Write records, or plain values, to a file; return its path."""
    path.write_bytes(b"".join(msgspec.json.encode(record) + b"\n" for record in records))
    return path


def failed(what: Values, status: str, reason: str) -> Record:
    """Return a valid record, without times, of a launch with this status and this reason for it.

    `what` says what was to be measured, as `case` returns it.
    """
    return record(what, 1.0, status=status, reason=reason, **NOTHING)


def exchanges(
    ranks: int, chance: random.Random, schemes: Sequence[str]
) -> Iterator[tuple[Values, float]]:
    """Yield cases of collectives by two algorithms, of all sizes, each with its seconds."""
    for scheme in schemes:
        for algorithm, speed in (("mpi", 3e9), ("ring", 2e9)):
            for size in SIZES:
                variant = f"{algorithm}/host/{size}"
                more = {"algorithm": algorithm, "shape": {"elements": size}}
                seconds = (2e-5 + size * 4 / speed) * chance.lognormvariate(0, 0.05)
                yield case("collectives", scheme, variant, ranks, **more), seconds


def run(number: int = 0, *, speed: float = 1.0, few: bool = False) -> list[Record]:
    """Return one run of all cases on 1, 2 and 4 ranks; `speed` divides the times."""
    chance = random.Random(number)
    about: Values = {
        "run_id": f"202611{number + 1:02d}T131500Z-1a2b3c",
        "commit": {
            "sha": hashlib.sha1(str(number).encode(), usedforsecurity=False).hexdigest(),
            "dirty": False,
        },
    }
    found = []
    for ranks in (1, 2, 4):
        for scheme in ("ring",) if few else ("allgather_kv", "ring", "ulysses"):
            for place, variant in enumerate(VARIANTS):
                seconds = (
                    0.2 * (1 + place / 2) / ranks**0.8 / speed * chance.lognormvariate(0, 0.02)
                )
                found.append(
                    record(case("schemes", scheme, f"{variant}/forward", ranks), seconds, **about)
                )
        found += [
            record(case("layers", layer, "causal/both", ranks), 0.3 / ranks**0.7, **about)
            for layer in (() if few else ("block", "feed_forward"))
        ]
        found += [
            record(what, seconds, bytes_result=4 * what["shape"]["elements"], **about)
            for what, seconds in exchanges(ranks, chance, ("all_reduce",) if few else COLLECTIVES)
        ]
    return found


def verdict(name: str, ratio: float | None = 1.1, **changes: Any) -> Row:
    """Return a row of a comparison's result."""
    change = None if ratio is None else Interval(ratio * 0.97, ratio, ratio * 1.02, 10)
    case = f"schemes/{name.replace(' ', '_')}"
    return replace(Row(case, 2, Verdict(name), change=change, slower=8, delta=0.1), **changes)


def result(*rows: Row, **changes: Any) -> Result:
    """Return the result of a comparison with these rows."""
    base, head = Side("base", Path(), "main", "b" * 40), Side("head", Path(), "topic", "c" * 40)
    return replace(Result(base, head, list(rows), 0.9, 1), **changes)
