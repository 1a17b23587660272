"""How often a step is taken, agreed by all ranks, and the samples that come of it.

`benchmark(step)` of pytest-benchmark finds its number of rounds with each rank's own clock: ranks disagree, and one of them waits
for ever in a collective that the others do not enter. Here rank 0 chooses, from a pilot that all ranks take, and tells the others.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from benchmarks.measure import Samples

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

OVERHEAD = 0.01  # what sync and barrier may cost, as a share of a sample
PILOT_STEPS = 3
PILOT_BARRIERS = 10


@dataclass(frozen=True)
class Budget:
    """How long a case may take.

    Args:
        seconds: of all samples together.
        warmup_s: of the samples before them that are not kept.
        fewest, most: samples.
    """

    seconds: float = 0.25
    warmup_s: float = 0.03
    fewest: int = 7
    most: int = 30


QUICK = Budget(seconds=0.4, warmup_s=0.02, fewest=7, most=40)
"""For comparisons: few cases, each for longer. On two cores medians over 0.12 s scattered twice as much as over 0.4 s."""


@dataclass(frozen=True)
class Counts:
    """What all ranks do: `warmup` samples that are not kept, then `samples` that are, of `inner` steps each."""

    warmup: int
    inner: int
    samples: int


class Loop(Protocol):
    """Calls `target` a number of times, `setup` before each: pytest-benchmark's `pedantic`, or `plain_loop`."""

    def __call__(self, target: Callable[[], object], *, setup: Callable[[], None], rounds: int, warmup_rounds: int) -> object: ...


def plain_loop(target: Callable[[], object], *, setup: Callable[[], None], rounds: int, warmup_rounds: int) -> None:
    """A `Loop` without pytest."""
    for _ in range(warmup_rounds + rounds):
        setup()
        target()


def choose(step_s: float, meeting_s: float, budget: Budget) -> Counts:
    """The counts for a step of `step_s` seconds, where sync and barrier take `meeting_s`."""
    step_s = max(step_s, 1e-7)
    longest = max(1, int(budget.seconds / budget.fewest / step_s))
    enough = max(meeting_s / OVERHEAD, budget.seconds / budget.most)  # a sample; short steps fill the time too
    inner = max(1, min(math.ceil(enough / step_s), longest))
    samples = min(max(int(budget.seconds / (inner * step_s)), budget.fewest), budget.most)
    return Counts(min(max(math.ceil(budget.warmup_s / (inner * step_s)), 1), budget.fewest), inner, samples)


class Sampler:
    """One rank's part in timing a step.

    Args:
        step: what is timed.
        world: the ranks.
        sync: waits until the device has done everything.
        note: read before the first step of a sample and after the last one; plain values by name.
    """

    def __init__(
        self, step: Callable[[], object], world: Intracomm, *, sync: Callable[[], None], note: Callable[[], dict[str, float]] = dict
    ) -> None:
        self._step, self._world, self._sync, self._note = step, world, sync, note
        self._taken: list[tuple[float, float, dict[str, float]]] = []
        self._before: dict[str, float] = {}
        self._inner = 1

    def agree(self, budget: Budget) -> Counts:
        """Take a few steps, and let rank 0 choose by the slowest rank's time.

        Communication:
            As many barriers as steps and `PILOT_BARRIERS` more, one gathering, one broadcast.
        """
        self._step()  # the first touches all memory
        steps = [self._pilot_step() for _ in range(PILOT_STEPS)]
        start = time.perf_counter()
        for _ in range(PILOT_BARRIERS):
            self._meet()
        meeting = (time.perf_counter() - start) / PILOT_BARRIERS
        found = self._world.gather((statistics.median(steps), meeting))
        counts = None if found is None else choose(max(step for step, _ in found), max(meeting for _, meeting in found), budget)
        agreed: Counts = self._world.bcast(counts)
        return agreed

    def run(self, counts: Counts, loop: Loop = plain_loop) -> tuple[Samples, list[list[dict[str, float]]]]:
        """Take all samples.

        Returns:
            Starts and ends of every rank, and what its notes grew by in one step of each sample, `[rank][sample]`.

        Communication:
            One barrier per sample, and one gathering at the end.
        """
        self._inner = counts.inner
        loop(self._take, setup=self._meet, rounds=counts.samples, warmup_rounds=counts.warmup)
        if len(self._taken) != counts.warmup + counts.samples:
            raise RuntimeError(
                f"{len(self._taken)} samples were taken, {counts.warmup + counts.samples} were agreed on. "
                "Leave --benchmark-disable and the other options that change how often pytest-benchmark calls out."
            )
        kept = self._taken[counts.warmup :]
        by_rank: list[list[tuple[float, float, dict[str, float]]]] = self._world.allgather(kept)
        starts = [[start for start, _, _ in rank] for rank in by_rank]
        ends = [[end for _, end, _ in rank] for rank in by_rank]
        return Samples(starts, ends, [], counts.inner), [[note for _, _, note in rank] for rank in by_rank]

    def _meet(self) -> None:
        self._before = self._note()
        self._sync()
        self._world.Barrier()

    def _take(self) -> None:
        start = time.perf_counter()
        for _ in range(self._inner):
            self._step()
        self._sync()
        end = time.perf_counter()
        grown = {name: (value - self._before.get(name, 0.0)) / self._inner for name, value in self._note().items()}
        self._taken.append((start, end, grown))

    def _pilot_step(self) -> float:
        self._meet()
        start = time.perf_counter()
        self._step()
        self._sync()
        return time.perf_counter() - start


def highest_and_mean(notes: list[list[dict[str, float]]], name: str) -> dict[str, Any]:
    """Medians over samples of the largest and the mean note of that name over the ranks; `[rank][sample]`."""
    by_sample = [[rank.get(name, 0.0) for rank in sample] for sample in zip(*notes, strict=True)]
    return {"max_s": statistics.median(map(max, by_sample)), "mean_s": statistics.median(map(statistics.mean, by_sample))}
