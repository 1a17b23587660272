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
    """The verdict on one case.

    Args:
        verdict: one of `JUDGED`, or `Verdict.UNGATEABLE`.
        stage: "screen" or "confirm": the pairs that decided.
        interval: of the log-ratios of those pairs.
        slower: how many of them were slower.
        pairs_needed: where inconclusive, how many pairs would decide; None beyond `MANY_PAIRS`.
    """

    verdict: Verdict
    stage: str
    interval: Interval
    slower: int
    pairs_needed: int | None = None


def interval(logs: Sequence[float]) -> Interval:
    """Return the exact interval of the median: k-th smallest to k-th largest, or the widest if there are too few for `MISS`."""
    return exact_interval(logs, MISS)


def half_width(seconds: Sequence[float]) -> float:
    """Half the width of the interval between launches of the same commit: each against the one before it, as a log-ratio."""
    found = interval([math.log(after / before) for before, after in pairwise(seconds)])
    return (found.high - found.low) / 2


def raised_delta(floor: float, base_seconds: Sequence[float]) -> float:
    """The smallest change that counts for a case: twice the half-width of base against itself, at least `floor`.

    Head has no say in it, so that a commit cannot loosen its own gate.
    """
    return max(floor, math.expm1(2 * half_width(base_seconds)))


def suspicion(screen: Sequence[float], delta: float) -> int:
    """1 where the screen looks slower, -1 where it looks faster, else 0; `CONFIRM_PAIRS` fresh pairs then decide."""
    _require(
        len(screen) == SCREEN_PAIRS, f"{len(screen)} screen pairs; the rule is for {SCREEN_PAIRS}."
    )
    return (
        0
        if delta > MAX_DELTA
        else _direction(screen, SCREEN_AGREE, math.log1p(SCREEN_SHARE * delta))
    )


def judge(screen: Sequence[float], confirm: Sequence[float], delta: float) -> Decision:
    """The verdict on one case.

    Args:
        screen: log-ratios of `SCREEN_PAIRS` pairs.
        confirm: log-ratios of `CONFIRM_PAIRS` later pairs; looked at only where the screen is
            suspicious.
        delta: the smallest change that counts, as a share; see `raised_delta`.

    Raises:
        ValueError: too few pairs, or too many.
    """
    suspected = suspicion(screen, delta)
    if not suspected:
        return _decision("screen", screen, 0, delta)
    _require(
        len(confirm) == CONFIRM_PAIRS,
        f"{len(confirm)} pairs to confirm a suspicion; the rule is for {CONFIRM_PAIRS}.",
    )
    found = _direction(confirm, CONFIRM_AGREE, math.log1p(delta))
    return _decision("confirm", confirm, found if found == suspected else 0, delta)


def exit_code(verdicts: Iterable[Verdict], *, strict: bool = False) -> int:
    """1 regressed; 3 missing, mismatch, or nothing judged; 4 inconclusive or too few gateable cases, where strict; else 0."""
    found = list(verdicts)
    if Verdict.REGRESSED in found:
        return 1
    if {Verdict.MISSING, Verdict.MISMATCH} & set(found) or not JUDGED & set(found):
        return 3
    doubtful = Verdict.INCONCLUSIVE in found or gateable_share(found) < GATEABLE_SHARE
    return 4 if strict and doubtful else 0


def gateable_share(verdicts: Iterable[Verdict]) -> float:
    """Of the cases that could be judged, the share that is quiet enough for it; 0 where there is none."""
    counted = [verdict for verdict in verdicts if verdict in JUDGED | {Verdict.UNGATEABLE}]
    return sum(verdict in JUDGED for verdict in counted) / len(counted) if counted else 0.0


def _direction(logs: Sequence[float], agree: int, threshold: float) -> int:
    median = statistics.median(logs)
    if sum(d > 0 for d in logs) >= agree and median >= threshold:
        return 1
    return -1 if sum(d < 0 for d in logs) >= agree and median <= -threshold else 0


def _decision(stage: str, logs: Sequence[float], found: int, delta: float) -> Decision:
    middle = interval(logs)
    slower = sum(d > 0 for d in logs)
    if delta > MAX_DELTA:
        return Decision(Verdict.UNGATEABLE, stage, middle, slower)
    if found:
        return Decision(Verdict.REGRESSED if found > 0 else Verdict.IMPROVED, stage, middle, slower)
    if middle.high < math.log1p(delta):
        return Decision(Verdict.UNCHANGED, stage, middle, slower)
    return Decision(
        Verdict.INCONCLUSIVE, stage, middle, slower, _pairs_needed(middle, math.log1p(delta))
    )


def _pairs_needed(found: Interval, limit: float) -> int | None:
    """How many leave the limit outside of the interval, or zero where the median is beyond the limit; it shrinks as 1/sqrt(n)."""
    beyond = found.median >= limit
    room = found.median if beyond else limit - found.median
    reach = found.median - found.low if beyond else found.high - found.median
    if reach > room * math.sqrt(MANY_PAIRS / found.count):
        return None
    return max(found.count + 1, math.ceil(found.count * (reach / room) ** 2))


def _require(holds: bool, text: str) -> None:
    if not holds:
        raise ValueError(text)
