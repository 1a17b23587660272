"""The decision rule, on plain numbers, and the form of a result in `result.json`.

A pair is one launch of base and one of head, in an order that a fair coin chose; its number is d =
log(head / base). Where nothing has changed, d is as likely above zero as below, whatever the
machine drifts: the count of slower pairs is a count of coin throws.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct, field

from benchmarks.files import read_json
from benchmarks.records import Count, Size
from benchmarks.reporting.tables import DASH, Table, make, milliseconds, plain, ratio
from benchmarks.statistics import MISS, Interval, exact_interval

SCREEN_PAIRS, SCREEN_AGREE, SCREEN_SHARE = 10, 8, 0.8
CONFIRM_PAIRS, CONFIRM_AGREE = 20, 16
DELTAS: Mapping[str, float] = {
    "cuda": 0.05,
    "cpu": 0.10,
}  # the smallest change that counts: a node of our own, a shared runner
MAX_DELTA = 0.15
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
        interval: of the log-ratios of the pairs that decided.
        pairs_needed: where inconclusive, how many pairs would decide; None beyond `MANY_PAIRS`.
    """

    verdict: Verdict
    interval: Interval
    pairs_needed: int | None = None


def half_width(seconds: Sequence[float]) -> float:
    """Return half the width of the interval of log-ratios of each launch to the one before it."""
    found = exact_interval([math.log(after / before) for before, after in pairwise(seconds)])
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
    middle, limit = exact_interval(confirm if suspected else screen), math.log1p(delta)
    if delta > MAX_DELTA:
        return Decision(Verdict.UNGATEABLE, middle)
    if suspected and found == suspected:
        return Decision(Verdict.REGRESSED if found > 0 else Verdict.IMPROVED, middle)
    if middle.high < limit:
        return Decision(Verdict.UNCHANGED, middle)
    return Decision(Verdict.INCONCLUSIVE, middle, _pairs_needed(middle, limit))


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


RECORDS, RESULT = "records.jsonl", "result.json"
Key = tuple[str, int]
"""Case and number of ranks."""

Text = Annotated[str, Meta(max_length=10_000)]
Ratio = Annotated[float, Meta(gt=1e-9, le=1e9)]
Share = Annotated[float, Meta(ge=0, le=1e9)]
RULE = {
    "screen": {
        "pairs": SCREEN_PAIRS,
        "agree": SCREEN_AGREE,
        "share_of_delta": SCREEN_SHARE,
    },
    "confirm": {"pairs": CONFIRM_PAIRS, "agree": CONFIRM_AGREE, "share_of_delta": 1.0},
    "delta": dict(DELTAS),
    "max_delta": MAX_DELTA,
    "miss": MISS,
}
COLUMNS = (
    "case",
    "P",
    "verdict",
    "change",
    "interval",
    "counts from",
    "slower pairs",
    "base (ms)",
    "head (ms)",
    "remarks",
)
CODES = {
    0: "nothing regressed",
    1: "something regressed",
    3: "not everything could be measured or compared",
    4: "not everything could be decided",
}
NOTE = (
    "change: median of head / base over pairs of launches, and its exact interval. "
    "counts from: the smallest change judged. regressed: confirmed by fresh pairs. "
    "ungateable: base against itself varies too much. inconclusive is not red."
)
ORDER = list(Verdict)


class Row(Struct):
    """The comparison of one case on one number of ranks.

    Args:
        case, ranks: what was measured.
        verdict: the answer, and `reason` why there is none.
        stage, pairs, slower: the pairs that decided, how many they are, and in how many head took
            longer.
        ratio, low, high: median of head / base, and its exact interval.
        delta, half_width: the smallest change that counts, and the noise of base against itself, as
            shares.
        base_s, head_s: median seconds of the pairs that decided.
        pairs_needed: if inconclusive, how many would decide; None if more than are worth it.
        flags: reasons to read the row with care.
        explanation: where the time went, for a case that changed.
    """

    case: Text
    ranks: Size
    verdict: Verdict
    reason: Text | None = None
    stage: Text | None = None
    pairs: Count = 0
    slower: Count = 0
    ratio: Ratio | None = None
    low: Ratio | None = None
    high: Ratio | None = None
    delta: Share | None = None
    half_width: Share | None = None
    base_s: Share | None = None
    head_s: Share | None = None
    pairs_needed: Count | None = None
    flags: Annotated[list[Text], Meta(max_length=20)] = []
    explanation: Text | None = None

    @property
    def key(self) -> Key:
        """Case and number of ranks."""
        return self.case, self.ranks

    @property
    def change(self) -> tuple[float, float, float] | None:
        """Low, middle and high of head / base, if they were measured."""
        if self.low is None or self.ratio is None or self.high is None:
            return None
        return self.low, self.ratio, self.high


class Told(Struct):
    """One side of a comparison: the name that was asked for, its commit, and its environment."""

    ref: Text
    sha: Text | None
    environment: Text = ""


class Result(Struct, kw_only=True):
    """A whole comparison.

    Args:
        base, head: the sides.
        seed: of the coins.
        ranks: the numbers of ranks.
        cases: the cases that each side has.
        records, records_sha256: the file of the records, and its hash.
        problems: what is wrong with the records.
        rows: a row for each case and number of ranks that either side has.
        counts: how often each verdict was given.
        gateable_share: the share of the cases that was quiet enough to be judged.
    """

    format: Literal[1] = 1
    base: Told
    head: Told
    same_commit: bool = False
    seed: int = 0
    ranks: list[int] = []
    cases: dict[str, set[Key]] = {}
    rule: dict[str, Any] = field(default_factory=lambda: dict(RULE))
    records: Text = RECORDS
    records_sha256: Text | None = None
    problems: Annotated[list[Text], Meta(max_length=10_000)] = []
    rows: Annotated[list[Row], Meta(max_length=10_000)]
    counts: dict[str, int] = {}
    gateable_share: Annotated[float, Meta(ge=0, le=1)]
    strict: bool = False
    exit_code: ExitCode


def load(path: Path) -> Result:
    """Read a result.

    Raises:
        ForeignError: the file holds none.
    """
    return read_json(path, Result)


def table(result: Result) -> Table:
    """Return a line for each row of a result."""
    names = [
        f"{name} {plain(side.ref, 60)} ({plain(side.sha or 'changed')[:10]})"
        for name, side in (("base", result.base), ("head", result.head))
    ]
    title = " against ".join(names) + (": the same commit" if result.same_commit else "")
    return make(title, COLUMNS, map(cells, result.rows), NOTE)


def cells(row: Row) -> tuple[str, ...]:
    """Return the texts of one line."""
    change, times = row.change, (row.base_s, row.head_s)
    remarks = [text for text in (row.reason, row.explanation, *row.flags) if text]
    return (
        plain(row.case),
        str(row.ranks),
        row.verdict,
        DASH if change is None else ratio(change[1]),
        DASH if change is None else f"{ratio(change[0])} to {ratio(change[2])}",
        DASH if row.delta is None else f"{row.delta:.1%}",
        f"{row.slower} of {row.pairs}" if row.pairs else DASH,
        *(DASH if time is None else milliseconds(time) for time in times),
        plain("; ".join(remarks), 400),
    )


def summary(result: Result) -> Iterator[str]:
    """Sum up a result in a few lines."""
    counts = Counter(row.verdict for row in result.rows)
    shown = ", ".join(f"{counts[verdict]} {verdict}" for verdict in ORDER if counts[verdict])
    yield f"{shown or 'no case'}. Exit code {result.exit_code}: {CODES[result.exit_code]}."
    if 0 < result.gateable_share < GATEABLE_SHARE:
        yield (
            f"Only {result.gateable_share:.0%} of the cases are quiet enough to be judged, "
            f"{GATEABLE_SHARE:.0%} should be: is something else running on this machine?"
        )
    if result.same_commit:
        yield "Base and head are the same commit, so this measures the comparison itself."
