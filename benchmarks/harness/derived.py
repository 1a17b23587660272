"""What follows from the records of one run and is never stored: ratios between numbers of ranks, bandwidths, shares.

Source: algbw and busbw as nccl-tests defines them, https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.records import Record

BUS = {
    "all_reduce": lambda p: 2 * (p - 1) / p,
    "all_gather": lambda p: (p - 1) / p,
    "reduce_scatter": lambda p: (p - 1) / p,
    "all_to_all": lambda p: (p - 1) / p,
}
"""Bytes that must pass each rank's link, over bytes of the buffer; 1 for other operations."""


@dataclass(frozen=True)
class Derived:
    """Numbers of one record that came out well.

    Args:
        seconds: median of a step.
        speedup: time on one rank over this time; None without a time on one rank, and for collectives, which do other work there.
        efficiency: speed-up over ranks.
        algbw, busbw: bytes/s; None where no collective is timed, and on one rank.
        share: of the step that was communication, of the rank that waited longest.
        bytes_sent: in a step by all ranks, without control.
        flags: why to read the record with care.
    """

    seconds: float
    speedup: float | None
    efficiency: float | None
    algbw: float | None
    busbw: float | None
    share: float
    bytes_sent: int
    flags: tuple[str, ...]


def derive(record: Record, alone: float | None) -> Derived:
    """The derived numbers of a record with timing.

    Args:
        record: of any P.
        alone: median seconds of the same case on one rank.
    """
    case, seconds = record["case"], record["timing"]["median_s"]
    entries = {name: entry for name, entry in record["comm"].items() if name != "control"}
    collective = case["layer"] == "collectives"
    speedup = None if alone is None or collective else alone / seconds
    result = next((entry.get("bytes_result") for entry in entries.values()), None) if case["ranks"] > 1 else None
    algbw = None if result is None else result / seconds
    return Derived(
        seconds,
        speedup,
        None if speedup is None else speedup / case["ranks"],
        algbw,
        None if algbw is None else algbw * (BUS[case["scheme"]](case["ranks"]) if case["scheme"] in BUS else 1),
        record["phases"].get("communication", {"max_s": 0.0})["max_s"] / record["phases"]["total"]["max_s"],
        sum(entry["bytes_sent"] for entry in entries.values()),
        flags(record),
    )


def flags(record: Record) -> tuple[str, ...]:
    """Why to read a record with care."""
    transport = record["transport"]
    signs = (
        ("oversubscribed", transport["oversubscribed"]),
        ("shared GPU", transport["shared_gpu"]),
        ("skew-limited", record["timing"]["skew_limited"]),
    )
    return tuple(name for name, shown in signs if shown)


def alone(found: Sequence[Record]) -> dict[str, float]:
    """Median seconds on one rank, by case id."""
    return {r["case"]["id"]: r["timing"]["median_s"] for r in found if r["timing"] is not None and r["case"]["ranks"] == 1}
