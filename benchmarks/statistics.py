"""Judge a median with its exact interval against a requirement, in all contests and comparisons.

The interval goes from the k-th smallest value to the k-th largest. It misses the true median as
often as that many throws of a coin give fewer than k heads, or fewer than k tails.
"""

import math
import operator
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

MISS = 0.02  # probability that one end of an interval may lie on the wrong side of the true median
FEWEST = 6  # values for which the whole range misses no more often
WITHIN = "Rounds of one launch are not independent: each interval holds within its launch only."


@dataclass(frozen=True)
class Interval:
    """The median of `count` values, and an interval around it from `low` to `high`.

    A number that was counted, not sampled, has a `count` of 0.
    """

    low: float
    median: float
    high: float
    count: int

    def __str__(self) -> str:
        return f"{self.median:.3f} [{self.low:.3f}, {self.high:.3f}]"


def exact_interval(values: Sequence[float]) -> Interval:
    """Return the median and its exact interval; the whole range if `MISS` needs more values."""
    ordered, n = sorted(values), len(values)
    # of all 2**n throws of n coins, how many show fewer than 1, 2, 3, ... heads
    fewer = accumulate(math.comb(n, heads) for heads in range(n // 2))
    k = max((k for k, ways in enumerate(fewer, 1) if ways / 2**n <= MISS), default=1)
    return Interval(ordered[k - 1], statistics.median(ordered), ordered[n - k], n)


def certain(value: float) -> Interval:
    """Return the interval of a number that was counted: every measurement would give it again."""
    return Interval(value, value, value, 0)


def ratio(above: Sequence[float], below: Sequence[float]) -> Interval:
    """Return the interval of `above` / `below`: two contestants' times, divided round by round."""
    return exact_interval([a / b for a, b in zip(above, below, strict=True)])


@dataclass(frozen=True)
class Requirement:
    """A line of a contest.

    Args:
        text: names the line.
        relation: ">=", "<=" or ">", the relation that `found` must have to `bound`.
        bound: None for a line that is shown and not judged.
        found: the measured interval; None if nothing was measured.
        least: number of values that a judgement needs.
        fails: whether the line fails for another reason than `found`.
    """

    text: str
    relation: str
    bound: float | None
    found: Interval | None
    least: int = 0
    fails: bool = False

    @property
    def mark(self) -> str:
        """Say whether the median reaches the bound.

        It is "open" if the interval crosses the bound, or is that of fewer than `FEWEST` values.
        """
        if self.found is None:
            return "not measured"
        if self.bound is None:
            return "-"
        if self.found.count < self.least:
            return f"not judged: {self.found.count} of {self.least} launches"
        lies = {"<=": operator.le, ">=": operator.ge, ">": operator.gt}[self.relation]
        holds = [
            not self.fails and lies(x, self.bound)
            for x in (self.found.median, self.found.low, self.found.high)
        ]
        few = 0 < self.found.count < FEWEST and not self.fails
        is_open = few or len(set(holds)) > 1
        return f"{'' if holds[0] else 'not '}reached{', open' * is_open}"

    def cells(self) -> tuple[str, ...]:
        """Return the texts of three columns: "must be", "median, interval" and the mark."""
        must = "-" if self.bound is None else f"{self.relation} {self.bound:g}"
        return must, str(self.found or "-"), self.mark
