"""The decision rule, on plain numbers: log-ratios of pairs in, verdict and exact interval out.

A pair is one launch of base and one of head, in an order that a fair coin chose; its number is d =
log(head / base). Where nothing has changed, d is as likely above zero as below, whatever the
machine drifts: the count of slower pairs is a count of coin throws.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from typing import Literal

from benchmarks.statistics import Interval, exact_interval

SCREEN_PAIRS, SCREEN_AGREE, SCREEN_SHARE = 10, 8, 0.8
CONFIRM_PAIRS, CONFIRM_AGREE = 20, 16
DELTAS: Mapping[str, float] = {
    "cuda": 0.05,
    "cpu": 0.10,
}  # the smallest change that counts: a node of our own, a shared runner
MAX_DELTA = 0.15
# probability that one end of an interval lies on the wrong side; 1.07 % for 10 pairs, 0.59 % for 20
MISS = 0.02
GATEABLE_SHARE = 0.8
MANY_PAIRS = 1000


ExitCode = Literal[0, 1, 3, 4]


class Verdict(StrEnum):
    """What is said about one case on one number of ranks; the most important first."""

    REGRESSED = "regressed"
    MISSING = "missing"
    MISMATCH = "mismatch"
    INCONCLUSIVE = "inconclusive"
    UNGATEABLE = "ungateable"
    IMPROVED = "improved"
    NEW = "new"
    OVERSUBSCRIBED = "oversubscribed"
    UNCHANGED = "no regression"


JUDGED = {Verdict.REGRESSED, Verdict.IMPROVED, Verdict.UNCHANGED, Verdict.INCONCLUSIVE}


@dataclass(frozen=True)
class Decision:
    """Return the verdict on one case.

    Args:
        verdict: the answer.
        stage: "screen" or "confirm": the pairs that decided.
        interval: of the log-ratios of those pairs.
        pairs_needed: where inconclusive, how many pairs would decide; None beyond `MANY_PAIRS`.
    """

    verdict: Verdict
    stage: str
    interval: Interval
    pairs_needed: int | None = None


def interval(logs: Sequence[float]) -> Interval:
    """Return the exact interval of the median; the widest one if there are too few for `MISS`."""
    return exact_interval(logs, MISS)


def half_width(seconds: Sequence[float]) -> float:
    """Return half the width of the interval of log-ratios of each launch to the one before it."""
    found = interval([math.log(after / before) for before, after in pairwise(seconds)])
    return (found.high - found.low) / 2


def raised_delta(floor: float, base_seconds: Sequence[float]) -> float:
    """Return the smallest change that counts for a case: twice the noise of base, at least `floor`.

    Head has no say in it, so that a commit cannot loosen its own gate.
    """
    return max(floor, math.expm1(2 * half_width(base_seconds)))


def suspicion(screen: Sequence[float], delta: float) -> int:
    """Return 1 if the screen looks slower, -1 if faster, else 0; fresh pairs then decide."""
    found = _direction(screen, SCREEN_PAIRS, SCREEN_AGREE, math.log1p(SCREEN_SHARE * delta))
    return found if delta <= MAX_DELTA else 0


def judge(screen: Sequence[float], confirm: Sequence[float], delta: float) -> Decision:
    """Return the verdict on one case.

    Args:
        screen: log-ratios of `SCREEN_PAIRS` pairs.
        confirm: log-ratios of `CONFIRM_PAIRS` later pairs; looked at only where the screen is
            suspicious.
        delta: the smallest change that counts, as a share; see `raised_delta`.

    Raises:
        ValueError: too few pairs, or too many.
    """
    suspected, found = suspicion(screen, delta), 0
    if suspected:
        found = _direction(confirm, CONFIRM_PAIRS, CONFIRM_AGREE, math.log1p(delta))
    stage, logs = ("confirm", confirm) if suspected else ("screen", screen)
    middle, limit = interval(logs), math.log1p(delta)
    if delta > MAX_DELTA:
        return Decision(Verdict.UNGATEABLE, stage, middle)
    if suspected and found == suspected:
        return Decision(Verdict.REGRESSED if found > 0 else Verdict.IMPROVED, stage, middle)
    if middle.high < limit:
        return Decision(Verdict.UNCHANGED, stage, middle)
    return Decision(Verdict.INCONCLUSIVE, stage, middle, _pairs_needed(middle, limit))


def exit_code(verdicts: Iterable[Verdict], *, strict: bool = False) -> ExitCode:
    """Return the exit code of a comparison.

    1 regressed; 3 missing, mismatch, or nothing judged; 4 inconclusive or too few gateable cases,
    if strict; else 0.
    """
    found = list(verdicts)
    if Verdict.REGRESSED in found:
        return 1
    if {Verdict.MISSING, Verdict.MISMATCH} & set(found) or not JUDGED & set(found):
        return 3
    doubtful = Verdict.INCONCLUSIVE in found or gateable_share(found) < GATEABLE_SHARE
    return 4 if strict and doubtful else 0


def gateable_share(verdicts: Iterable[Verdict]) -> float:
    """Return the share of the cases to be judged that is quiet enough; 0 if there is none."""
    counted = [verdict for verdict in verdicts if verdict in JUDGED | {Verdict.UNGATEABLE}]
    return sum(verdict in JUDGED for verdict in counted) / len(counted) if counted else 0.0


def _direction(logs: Sequence[float], pairs: int, agree: int, threshold: float) -> int:
    if len(logs) != pairs:
        raise ValueError(f"{len(logs)} pairs were measured; the rule is for {pairs}.")
    median = statistics.median(logs)
    if sum(d > 0 for d in logs) >= agree and median >= threshold:
        return 1
    return -1 if sum(d < 0 for d in logs) >= agree and median <= -threshold else 0


def _pairs_needed(found: Interval, limit: float) -> int | None:
    """Return how many pairs leave the limit outside of the interval, which shrinks as 1/sqrt(n).

    If the median is beyond the limit, they leave zero outside.
    """
    beyond = found.median >= limit
    room = found.median if beyond else limit - found.median
    reach = found.median - found.low if beyond else found.high - found.median
    if reach > room * math.sqrt(MANY_PAIRS / found.count):
        return None
    return max(found.count + 1, math.ceil(found.count * (reach / room) ** 2))
