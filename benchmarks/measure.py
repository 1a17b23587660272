"""How a step that several ranks take together is timed, and how much memory it holds.

All ranks of one node read the same monotonic clock, so the time of a step is the last rank's end minus the first rank's start: rank
0's own time would miss work that another rank does after the last message. The number of iterations is given, never chosen by a
local clock.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

SKEW_LIMIT = 0.05  # share of the step; beyond it, when the ranks started decides as much as what they did


@dataclass(frozen=True)
class Samples:
    """Start and end of each iteration on every rank, and what each rank noted in it.

    Args:
        starts, ends: seconds, `[rank][iteration]`.
        notes: what `note` returned, `[rank][iteration]`.
        inner: steps in one iteration.
    """

    starts: list[list[float]]
    ends: list[list[float]]
    notes: list[list[float]]
    inner: int = 1

    @property
    def makespans(self) -> list[float]:
        """Seconds from the first rank's start to the last rank's end, of each iteration."""
        return [
            max(ends) - min(starts)
            for starts, ends in zip(zip(*self.starts, strict=True), zip(*self.ends, strict=True), strict=True)
        ]

    @property
    def max_local(self) -> list[float]:
        """Seconds of the rank that took longest, of each iteration."""
        by_rank = [[end - start for start, end in zip(*pair, strict=True)] for pair in zip(self.starts, self.ends, strict=True)]
        return [max(durations) for durations in zip(*by_rank, strict=True)]

    @property
    def max_notes(self) -> list[float]:
        """The largest note of each iteration."""
        return [max(values) for values in zip(*self.notes, strict=True)]

    @property
    def skews(self) -> list[float]:
        """Seconds between the first and the last rank that left the barrier, of each iteration."""
        return [max(starts) - min(starts) for starts in zip(*self.starts, strict=True)]

    def as_dict(self) -> dict[str, Any]:
        """The record of the timing: seconds of one step in every iteration, their median, and how evenly the ranks started."""
        steps = [seconds / self.inner for seconds in self.makespans]
        by_rank = [
            statistics.median((end - start) / self.inner for start, end in zip(*pair, strict=True))
            for pair in zip(self.starts, self.ends, strict=True)
        ]
        skew = sorted(self.skews)[math.ceil(0.95 * len(self.skews)) - 1]
        return {
            "iterations": len(steps),
            "inner": self.inner,
            "samples_s": steps,
            "max_local_s": [seconds / self.inner for seconds in self.max_local],
            "per_rank_median_s": by_rank,
            "median_s": statistics.median(steps),
            "imbalance": max(by_rank) / statistics.mean(by_rank),
            "barrier_skew_s": {"median": statistics.median(self.skews), "p95": skew, "max": max(self.skews)},
            "skew_limited": skew > SKEW_LIMIT * statistics.median(self.makespans),
        }


def timed(
    step: Callable[[], object],
    world: Intracomm,
    iterations: int,
    *,
    sync: Callable[[], None],
    note: Callable[[], float] = lambda: 0.0,
    progress: Callable[[int], None] = lambda done: None,
) -> Samples:
    """Take a step a number of times, all ranks starting each one together.

    Args:
        step: what is timed.
        world: the ranks.
        iterations: how often, the same on all ranks.
        sync: waits until the device has done everything.
        note: read after each iteration.
        progress: told how many iterations are done.

    Communication:
        One barrier per iteration, and one gathering of all times at the end.
    """
    starts, ends, notes = [], [], []
    for done in range(1, iterations + 1):
        sync()
        world.Barrier()
        starts.append(time.perf_counter())
        step()
        sync()
        ends.append(time.perf_counter())
        notes.append(note())
        progress(done)
    by_rank: list[tuple[list[float], list[float], list[float]]] = world.allgather((starts, ends, notes))
    return Samples([r[0] for r in by_rank], [r[1] for r in by_rank], [r[2] for r in by_rank])


def peak_memory(step: Callable[[], object], held: Iterable[Tensor], device: torch.device) -> tuple[int, str]:
    """Take one step and say how many bytes of tensors were alive at most, and how that was measured."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        step()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device), "torch.cuda.max_memory_allocated"
    from tests.oracle.live_bytes import LiveBytes  # brings hypothesis and torch._dynamo: seconds in every rank of a launch

    with LiveBytes(held) as live:
        step()
    return live.peak, "bytes of live tensors, counted after each operation"
