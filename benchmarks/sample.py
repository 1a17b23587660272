"""Take samples of a step, as often as all ranks have agreed on, and let contestants take turns.

`benchmark(step)` of pytest-benchmark finds its number of rounds with each rank's own clock: ranks
disagree, and one of them waits for ever in a collective that the others do not enter. Here all
ranks run a few pilot steps. Rank 0 chooses the numbers from their times, and broadcasts them.
"""

import contextlib
import gc
import math
import random
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from benchmarks.worker import THREADS, Intracomm

OVERHEAD = 0.01  # share of a sample that device sync and barrier may cost
PILOT_STEPS, PILOT_BARRIERS = 3, 10
SKEW_LIMIT = 0.05
"""The largest skew, as a share of a sample's median makespan, at which a time is meaningful."""

NAP_SECONDS = 0.002
TRIES = 20
Span = tuple[float, float]
"""The start and the end of a sample on one rank, in seconds of rank 0's clock once gathered."""

ABSENT: Span = (math.inf, -math.inf)
"""The span of a rank that takes no part."""


@dataclass(frozen=True)
class Budget:
    """How long a case may take.

    Args:
        seconds: the time of all kept samples together.
        warmup_s: the time of the samples before them, which are not kept.
        fewest, most: the limits of the number of kept samples.
    """

    seconds: float = 0.25
    warmup_s: float = 0.03
    fewest: int = 7
    most: int = 30


QUICK = Budget(seconds=0.4, warmup_s=0.02, fewest=7, most=40)
"""The budget of the small selection of cases, each of which is timed for longer.

On two cores medians over 0.12 s scattered twice as much as over 0.4 s.
"""


@dataclass(frozen=True)
class Counts:
    """Hold numbers: `warmup` samples, then `samples` that are kept, each of `inner` steps."""

    warmup: int
    inner: int
    samples: int


def choose(step_s: float, meeting_s: float, budget: Budget) -> Counts:
    """Return the counts for steps of `step_s` seconds, if sync and barrier take `meeting_s`."""
    step_s = max(step_s, 1e-7)
    longest = int(budget.seconds / budget.fewest / step_s)
    enough = max(meeting_s / OVERHEAD, budget.seconds / budget.most)  # short steps fill the time
    inner = max(1, min(math.ceil(enough / step_s), longest))
    samples = min(max(int(budget.seconds / (inner * step_s)), budget.fewest), budget.most)
    warmup = min(max(math.ceil(budget.warmup_s / (inner * step_s)), 1), budget.fewest)
    return Counts(warmup, inner, samples)


def step_seconds(spans: Sequence[Sequence[Span]], inner: int) -> list[list[float]]:
    """Return the seconds of one step, `[rank][sample]`; a sample has `inner` steps."""
    return [[(end - start) / inner for start, end in rank] for rank in spans]


def timing(spans: Sequence[Sequence[Span]], inner: int) -> dict[str, Any]:
    """Return the timing of a record: seconds of one step, and how evenly the ranks started.

    Args:
        spans: starts and ends of each sample by one clock, `[rank][sample]`.
        inner: steps of a sample.
    """
    steps = [seconds / inner for seconds in makespans(spans)]
    by_rank = [statistics.median(seconds) for seconds in step_seconds(spans, inner)]
    starts = [[start for start, _ in ranks] for ranks in zip(*spans, strict=True)]
    skews = sorted(max(ranks) - min(ranks) for ranks in starts)
    p95 = skews[math.ceil(0.95 * len(skews)) - 1]
    return {
        "iterations": len(steps),
        "inner": inner,
        "samples_s": steps,
        "per_rank_median_s": by_rank,
        "median_s": statistics.median(steps),
        "imbalance": max(by_rank) / statistics.mean(by_rank),
        "barrier_skew_s": {"median": statistics.median(skews), "p95": p95, "max": skews[-1]},
        "skew_limited": p95 > SKEW_LIMIT * inner * statistics.median(steps),
    }


Notes = list[list[dict[str, float]]]
"""Numbers by name for each rank and sample, `[rank][sample]`."""


def agree(
    step: Callable[[], object], world: Intracomm, budget: Budget, *, sync: Callable[[], None]
) -> Counts:
    """Run a few steps. Return the counts that rank 0 chooses from the slowest rank's time.

    Args:
        step: the step to time, which all ranks run together.
        world: all ranks.
        budget: how long all samples may take.
        sync: waits until the device is idle.

    Communication:
        `PILOT_STEPS + PILOT_BARRIERS` barriers, `offset`, two all-gathers, one broadcast.
    """
    step()  # the first step touches all memory
    spans, _ = take(step, world, Counts(0, 1, PILOT_STEPS), sync=sync)
    slowest = max(statistics.median(seconds) for seconds in step_seconds(spans, 1))
    start = time.perf_counter()
    for _ in range(PILOT_BARRIERS):
        sync()
        world.Barrier()
    meeting = max(world.allgather((time.perf_counter() - start) / PILOT_BARRIERS))
    return cast("Counts", world.bcast(choose(slowest, meeting, budget)))


def take(
    step: Callable[[], object],
    world: Intracomm,
    counts: Counts,
    *,
    sync: Callable[[], None],
    note: Callable[[], dict[str, float]] = dict,
    tell: Callable[[str, int, int], None] = lambda *_: None,
) -> tuple[list[list[Span]], Notes]:
    """Take all samples of a step.

    Args:
        step, world, sync: as in `agree`.
        counts: how many samples to take; the same on all ranks.
        note: returns numbers by name; called before and after each sample.
        tell: called after each sample with a text, the number of samples taken and their total.

    Returns:
        The spans, `[rank][sample]`, and how much each noted number grew per step, as `Notes`.

    Communication:
        One barrier per sample, and at the end `offset` and one all-gather.
    """
    spans, notes = list[Span](), list[dict[str, float]]()
    for number in range(1 - counts.warmup, 1 + counts.samples):
        before = note()
        sync()
        world.Barrier()
        start = time.perf_counter()
        for _ in range(counts.inner):
            step()
        sync()
        spans.append((start, time.perf_counter()))
        after = note()
        notes.append({name: (after[name] - before.get(name, 0.0)) / counts.inner for name in after})
        tell("timing the step", max(0, number), counts.samples)
    kept = slice(counts.warmup, None)
    mine = earlier(spans[kept], offset(world, time.perf_counter)), notes[kept]
    by_rank = world.allgather(mine)
    return [spans for spans, _ in by_rank], [notes for _, notes in by_rank]


def offset(world: Intracomm, clock: Callable[[], float]) -> float:
    """Return the seconds that this rank's clock is ahead of rank 0's.

    Communication:
        20 barriers and broadcasts. Rank 0 reads its clock between the two, thus between the times
        that every other rank reads before and after them.

    Source: Cristian 1989, Probabilistic clock synchronization, doi:10.1007/BF01784024.
    """
    trips = []
    for _ in range(TRIES):
        start = clock()
        world.Barrier()
        theirs: float = world.bcast(clock())
        trips.append((start, theirs, clock()))
    return difference(trips)


def difference(trips: Iterable[tuple[float, float, float]]) -> float:
    """Return the difference of two clocks in seconds, by the trip with the least uncertainty.

    Return 0 if the difference is at most its uncertainty, as for ranks of one node, which share a
    clock.

    Args:
        trips: this rank's time before the other's, the other's, and this rank's after it.
    """
    start, theirs, end = min(trips, key=lambda trip: trip[2] - trip[0], default=(0.0, 0.0, 0.0))
    found, doubt = (start + end) / 2 - theirs, (end - start) / 2
    return 0.0 if abs(found) <= doubt else found


def earlier(spans: Iterable[Span], seconds: float) -> list[Span]:
    """Return spans whose times are less by some seconds."""
    return [(start - seconds, end - seconds) for start, end in spans]


def highest_and_mean(values: Sequence[Sequence[float]]) -> dict[str, Any]:
    """Return "max_s" and "mean_s": the largest and the mean value over the ranks.

    Both are medians over the samples.

    Args:
        values: seconds, `[rank][sample]`.
    """
    by_sample = list(zip(*values, strict=True))
    return {
        "max_s": statistics.median(map(max, by_sample)),
        "mean_s": statistics.median(map(statistics.mean, by_sample)),
    }


def race(
    world: Intracomm, runners: Mapping[str, Callable[[], Span]], rounds: int, seed: int
) -> dict[str, list[list[Span]]]:
    """Time contestants in turns, in a new random order in each round.

    Returns:
        The spans of each contestant by its name, `[rank][round]`, from the first start on.

    Communication:
        That of the contestants, then `offset` and one all-gather.
    """
    order = random.Random(seed)
    mine: dict[str, list[Span]] = {name: [] for name in runners}
    with undisturbed():
        for _ in range(rounds):
            gc.collect()
            for name in order.sample(list(runners), len(runners)):
                mine[name].append(runners[name]())
    ahead = offset(world, time.perf_counter)
    every = world.allgather({name: earlier(spans, ahead) for name, spans in mine.items()})
    starts = [start for rank in every for spans in rank.values() for start, _ in spans]
    first = min(starts, default=0.0)
    return {name: [earlier(rank[name], first) for rank in every] for name in runners}


def makespans(by_rank: Sequence[Sequence[Span]]) -> list[float]:
    """Return the seconds of each round, from the first rank's start to the last rank's end."""
    return [
        max(end for _, end in spans) - min(start for start, _ in spans)
        for spans in zip(*by_rank, strict=True)
    ]


def turn(
    world: Intracomm,
    act: Callable[[], object],
    *,
    alone: bool = False,
    threads: int = THREADS,
    sync: Callable[[], None] = lambda: None,
) -> Span:
    """Time `act` on all ranks after a barrier, or `alone` on rank 0 while the others sleep.

    Args:
        world: all ranks.
        act: the call to time.
        alone: whether only rank 0 acts; the span of the others is `ABSENT`.
        threads: the number of torch threads of a rank that acts.
        sync: waits until the device is idle.
    """
    if alone and world.rank:
        meet_asleep(world)
        return ABSENT
    torch.set_num_threads(threads)
    try:
        sync()
        if not alone:
            world.Barrier()
        start = time.perf_counter()
        act()
        sync()
        return start, time.perf_counter()
    finally:
        torch.set_num_threads(THREADS)
        if alone:
            meet_asleep(world)


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Turn off Python's garbage collection in a `with` block that is timed."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def meet_asleep(world: Intracomm) -> None:
    """Wait for all ranks while asleep, so that other ranks can use this rank's core."""
    request = world.Ibarrier()
    while not request.Test():
        time.sleep(NAP_SECONDS)


def peak_memory(
    step: Callable[[], object], held: Iterable[Tensor], device: torch.device
) -> tuple[int, str]:
    """Run one step. Return the peak bytes of live tensors, and a text on how it was measured.

    `held` are the tensors that are alive before the step. They count towards the peak. On a GPU
    torch's allocator counts all tensors, and `held` is not read.
    """
    if device.type != "cpu":
        of_kind: Any = torch.get_device_module(device)
        of_kind.reset_peak_memory_stats(device)
        step()
        torch.accelerator.synchronize(device)
        return of_kind.max_memory_allocated(device), f"torch.{device.type}.max_memory_allocated"
    from sp_core.testing import LiveBytes

    with LiveBytes(held) as live:
        step()
    return live.peak, "bytes of live tensors, counted after each operation"
