"""Decide from plain numbers whether a case became slower, and describe the result.

A pair is one launch of base and one of head, in an order that a fair coin chose. Its number is d =
log(head / base). If nothing has changed, d is as likely above zero as below, however the machine's
speed drifts. So the number of slower pairs is distributed like the heads of as many coin throws.
"""

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import pairwise
from pathlib import Path
from typing import Literal

from benchmarks.records import Record
from benchmarks.reporting.page import (
    COLOURS,
    GRID,
    INK,
    Axes,
    Picture,
    Section,
    case_rows,
    picture,
    short,
)
from benchmarks.reporting.plots import parts
from benchmarks.reporting.tables import DASH, Table, make, milliseconds, plain, ratio
from benchmarks.statistics import Interval, exact_interval

SCREEN_PAIRS, SCREEN_AGREE, SCREEN_SHARE = 10, 8, 0.8
CONFIRM_PAIRS, CONFIRM_AGREE = 20, 16
# the smallest change that counts, on a GPU node of our own and on a shared runner
DELTAS: Mapping[str, float] = {"cuda": 0.05, "cpu": 0.10}
MAX_DELTA = 0.15
GATEABLE_SHARE = 0.8
MANY_PAIRS = 1000


ExitCode = Literal[0, 1, 3, 4]


class Verdict(StrEnum):
    """The verdict on one case on one number of ranks; the most important verdict comes first."""

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


def raised_delta(floor: float, base_seconds: Sequence[float]) -> float:
    """Return the smallest change that counts for a case: twice the noise of base, at least `floor`.

    The noise is half the width of the interval of log-ratios of each launch to the one before it.
    Head's times are not used, so that a commit cannot loosen its own gate.
    """
    steps = [math.log(after / before) for before, after in pairwise(base_seconds)]
    found = exact_interval(steps)
    return max(floor, math.expm1(found.high - found.low))


def suspicion(screen: Sequence[float], delta: float) -> int:
    """Return 1 if head looks slower in the screen pairs, -1 if it looks faster, else 0."""
    return _direction(screen, SCREEN_PAIRS, SCREEN_AGREE, math.log1p(SCREEN_SHARE * delta))


def judge(screen: Sequence[float], confirm: Sequence[float], delta: float) -> Verdict:
    """Return the verdict on one case.

    Pairs cancel a drift that both launches share, but delta contains it. If delta is above
    `MAX_DELTA`, a change counts only if its whole interval lies beyond delta, not just its median.

    Args:
        screen: log-ratios of `SCREEN_PAIRS` pairs.
        confirm: log-ratios of `CONFIRM_PAIRS` later pairs; used only if the screen is suspicious.
        delta: the smallest change that counts, as a share; see `raised_delta`.

    Raises:
        ValueError: too few pairs, or too many.
    """
    suspected = suspicion(screen, delta)
    if suspected:
        found = _direction(confirm, CONFIRM_PAIRS, CONFIRM_AGREE, math.log1p(delta))
        beyond = exact_interval([suspected * d for d in confirm]).low > math.log1p(delta)
        if found == suspected and (beyond or delta <= MAX_DELTA):
            return Verdict.REGRESSED if found > 0 else Verdict.IMPROVED
    if delta > MAX_DELTA:
        return Verdict.UNGATEABLE
    is_below = exact_interval(confirm if suspected else screen).high < math.log1p(delta)
    return Verdict.UNCHANGED if is_below else Verdict.INCONCLUSIVE


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
    """Return the share of cases that are quiet or changed enough to be judged; 0 without any."""
    counted = [verdict for verdict in verdicts if verdict in JUDGED | {Verdict.UNGATEABLE}]
    return sum(verdict in JUDGED for verdict in counted) / len(counted) if counted else 0.0


def _direction(logs: Sequence[float], pairs: int, agree: int, threshold: float) -> int:
    if len(logs) != pairs:
        raise ValueError(f"{len(logs)} pairs were measured; the rule is for {pairs}.")
    median = statistics.median(logs)
    if sum(d > 0 for d in logs) >= agree and median >= threshold:
        return 1
    return -1 if sum(d < 0 for d in logs) >= agree and median <= -threshold else 0


def pairs_needed(logs: Sequence[float], delta: float) -> int | None:
    """Estimate how many pairs would decide an inconclusive case; None for over `MANY_PAIRS`.

    The interval of the log-ratios shrinks as 1/sqrt(n) with n pairs. With enough of them it
    excludes the limit, log(1 + delta). If the median is beyond the limit, it must exclude zero.
    """
    found, limit = exact_interval(logs), math.log1p(delta)
    beyond = found.median >= limit
    room = found.median if beyond else limit - found.median
    reach = found.median - found.low if beyond else found.high - found.median
    if reach > room * math.sqrt(MANY_PAIRS / found.count):
        return None
    return max(found.count + 1, math.ceil(found.count * (reach / room) ** 2))


RECORDS = "records.jsonl"
Key = tuple[str, int]
"""The case's id and the number of ranks."""

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
    "ungateable: base against itself varies too much, and the change is not beyond that. "
    "inconclusive is not red."
)
ORDER = list(Verdict)


@dataclass(frozen=True)
class Row:
    """The comparison of one case on one number of ranks.

    Args:
        case, ranks: the case's id and the number of ranks.
        verdict: what the comparison has found.
        remarks: why the case was not judged, the phase that changed, and reasons for care.
        change: median of head / base over the pairs that decided, and its exact interval.
        slower: the number of these pairs in which head took longer.
        delta: the smallest change that counts, as a share.
        base_s, head_s: median seconds of each side over these pairs.
    """

    case: str
    ranks: int
    verdict: Verdict
    remarks: tuple[str, ...] = ()
    change: Interval | None = None
    slower: int = 0
    delta: float | None = None
    base_s: float | None = None
    head_s: float | None = None

    @property
    def key(self) -> Key:
        """Return the case's id and the number of ranks."""
        return self.case, self.ranks


@dataclass(frozen=True)
class Side:
    """One of the two commits that are compared.

    Args:
        name: "base" or "head".
        root: folder with the library.
        ref: the caller's name of the commit.
        sha: the commit's hash; None if files differ from it.
    """

    name: str
    root: Path
    ref: str
    sha: str | None


@dataclass(frozen=True)
class Result:
    """A whole comparison.

    Args:
        base, head: the two commits.
        rows: a row for each case and number of ranks that either side has.
        gateable_share: the share of the cases that was quiet enough to be judged.
        exit_code: the program's exit code.
        records: the records of all launches.
        problems: a text for each problem with the records.
    """

    base: Side
    head: Side
    rows: list[Row]
    gateable_share: float
    exit_code: ExitCode
    records: list[Record] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    @property
    def same_commit(self) -> bool:
        """Return whether base and head are the same commit."""
        return self.base.sha == self.head.sha


def table(result: Result) -> Table:
    """Return a line for each row of a result."""
    names = [
        f"{name} {plain(side.ref, 60)} ({plain(side.sha or 'changed')[:10]})"
        for name, side in (("base", result.base), ("head", result.head))
    ]
    title = " against ".join(names) + (": the same commit" if result.same_commit else "")
    return make(title, COLUMNS, map(cells, result.rows), NOTE)


def cells(row: Row) -> tuple[str, ...]:
    """Return the cells of one line, in the order of COLUMNS."""
    change, times = row.change, (row.base_s, row.head_s)
    return (
        plain(row.case),
        str(row.ranks),
        row.verdict,
        DASH if change is None else ratio(change.median),
        DASH if change is None else f"{ratio(change.low)} to {ratio(change.high)}",
        DASH if row.delta is None else f"{row.delta:.1%}",
        DASH if change is None else f"{row.slower} of {change.count}",
        *(DASH if time is None else milliseconds(time) for time in times),
        plain("; ".join(row.remarks), 400),
    )


def summary(result: Result) -> Iterator[str]:
    """Yield a few lines that sum up a result."""
    counts = Counter(row.verdict for row in result.rows)
    shown = ", ".join(f"{counts[verdict]} {verdict}" for verdict in ORDER if counts[verdict])
    told, total = CODES[result.exit_code], len(result.rows)
    good = counts[Verdict.UNCHANGED] + counts[Verdict.IMPROVED]
    if result.exit_code == 0 and good < total:
        told = f"{good} of {total} cases have not regressed; the others could not be judged"
    yield f"{shown or 'no case'}. Exit code {result.exit_code}: {told}."
    if 0 < result.gateable_share < GATEABLE_SHARE:
        yield (
            f"Only {result.gateable_share:.0%} of the cases are quiet enough to be judged, "
            f"{GATEABLE_SHARE:.0%} should be: is something else running on this machine?"
        )
    if result.same_commit:
        yield "Base and head are the same commit, so this measures the comparison itself."


LOOKS = {
    "regressed": ("#d55e00", "s"),
    "improved": ("#009e73", "^"),
    "no regression": ("#0072b2", "o"),
}
OTHER = (GRID, "D")
BARS = 24  # in one plot


def section(result: Result) -> Section:
    """Return the report's section on a comparison: summary, table of cases, and plots."""
    shown = tuple(pictures(result.rows))
    return Section("Comparison", " ".join(summary(result)), (table(result),), shown)


def pictures(rows: Sequence[Row]) -> Iterator[Picture]:
    """Yield plots of the rows' intervals, in the order of the rows."""
    timed = [row for row in rows if row.change is not None]
    title = "Change of time from base to head, with exact intervals"
    for name, part in parts(title, timed, BARS):
        yield picture(name, draw_intervals, part, size=(7.5, 1.7 + 0.24 * len(part)), columns=3)


def draw_intervals(axes: Axes, rows: Sequence[Row]) -> None:
    """Draw an interval for each case, and a bar at the smallest change that counts."""
    axes.axvline(0, color=INK, linewidth=1)
    for place, row in enumerate(rows):
        found = (row.change.low, row.change.median, row.change.high) if row.change else ()
        low, middle, high = (100 * (value - 1) for value in found)
        colour, marker = LOOKS.get(row.verdict, OTHER)
        label = row.verdict if row.verdict in LOOKS else "other verdict"
        axes.plot([low, high], [place, place], color=colour, linewidth=2)
        axes.plot(middle, place, color=colour, marker=marker, linestyle="none", label=label)
    deltas = [math.nan if row.delta is None else 100 * row.delta for row in rows]
    label = "counts from here"
    axes.plot(deltas, range(len(rows)), "|", color=COLOURS[3], markersize=11, label=label)
    case_rows(axes, [f"{short(row.case)}, P = {row.ranks}" for row in rows], "case (name)")
    axes.set_xlabel("change of time, head against base (%)")
