"""Change points: where in a series of times the level moved.

The series of logarithms is split where the means before and after differ most, in units of the spread on both sides (the
statistic of the two-sample t test, with three values or more on each side). How large that maximum is by chance is found by
shuffling the series, so that nothing is assumed about its distribution. A split that chance matches in at most one of a hundred
shuffles, and that moves the median by 5 % or more, is a change; then each side is searched in the same way (binary segmentation).
A run counts once, however many launches it has: what was measured in one hour on one machine is not independent.

A change is seen once three runs stand behind it and some ten before it; with fewer, shuffling finds as much too often. Of a hundred
series in which nothing changed about one is marked: an alert to look at, never a gate.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

ALPHA = 0.01
LEAST = 1.05  # ratio of the medians; less is of no interest
SIDE = 3  # values on each side of a change; fewer may be outliers
SHUFFLES = 1999
MOST = 1000  # values of one series that are looked at, the newest

Values = NDArray[np.float64]


@dataclass(frozen=True)
class Change:
    """A move of the level.

    Args:
        at: index of the first value of the new level.
        ratio: median after over median before.
        p: share of shuffled series with as large a difference.
    """

    at: int
    ratio: float
    p: float


def changes(values: Sequence[float], *, seed: int = 0) -> list[Change]:
    """Where the level of a series moved.

    Args:
        values: positive numbers in the order in which they were measured.
        seed: of the shuffles.

    Returns:
        Changes in the order of the series; each is judged against the values between its neighbours.
    """
    start = max(0, len(values) - MOST)
    recent = values[start:]
    splits = sorted(_splits(np.log(recent), 0, len(recent), np.random.default_rng(seed)))
    edges = [0, *(at for at, _ in splits), len(recent)]
    medians = [statistics.median(recent[a:b]) for a, b in pairwise(edges) if a < b]
    ratios = [after / before for before, after in pairwise(medians)]
    return [Change(start + at, ratio, p) for (at, p), ratio in zip(splits, ratios, strict=True)]


def _splits(logs: Values, first: int, last: int, chance: np.random.Generator) -> Iterator[tuple[int, float]]:
    """(index, p) of every change in logs[first:last]."""
    found = _split(logs[first:last], chance) if last - first >= 2 * SIDE else None
    if found is not None:
        at, p = first + found[0], found[1]
        yield at, p
        yield from _splits(logs, first, at, chance)
        yield from _splits(logs, at, last, chance)


def _split(logs: Values, chance: np.random.Generator) -> tuple[int, float] | None:
    """The best split and its p, where it is a change."""
    scores = _scores(logs[None])[0]
    at = int(scores.argmax()) + SIDE
    if abs(np.median(logs[at:]) - np.median(logs[:at])) < math.log(LEAST):
        return None
    shuffled = chance.permuted(np.tile(logs, (SHUFFLES, 1)), axis=1)
    as_large = _scores(shuffled).max(1) >= scores.max() * (1 - 1e-9)
    p = float((1 + as_large.sum()) / (1 + SHUFFLES))
    return (at, p) if p <= ALPHA else None


def _scores(series: Values) -> Values:
    """The squared t statistic of each series (a row) at each split, as share of the spread that the split explains."""
    n = series.shape[1]
    centred = series - series.mean(1, keepdims=True)
    before = np.arange(1, n)[SIDE - 1 : n - SIDE]
    sums = np.cumsum(centred, 1)[:, SIDE - 1 : n - SIDE]
    scores: Values = sums**2 * n / (before * (n - before)) / np.maximum((centred**2).sum(1, keepdims=True), 1e-300)
    return scores
