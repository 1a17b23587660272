"""Turn records into a result: check the pairs of launches, and judge each case."""

import hashlib
import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.compare.rule import (
    CONFIRM_PAIRS,
    DELTAS,
    ORDER,
    RECORDS,
    SCREEN_PAIRS,
    Key,
    Result,
    Row,
    Side,
    Verdict,
    exit_code,
    gateable_share,
    judge,
    pairs_needed,
    raised_delta,
    suspicion,
)
from benchmarks.records import MEASURED, Record, read
from benchmarks.reporting import derive
from benchmarks.statistics import exact_interval

SIDES = ("base", "head")
STAGES = {"screen": SCREEN_PAIRS, "confirm": CONFIRM_PAIRS}


class Group:
    """The records of one case on one number of ranks, by stage, pair and side."""

    def __init__(self, records: Iterable[Record]) -> None:
        placed = ((record, record.pair) for record in records)
        self.at: dict[tuple[str, int, str], Record] = {
            (pair.stage, pair.index, pair.side): record for record, pair in placed if pair
        }

    def of(self, stage: str, *sides: str) -> list[Record]:
        """Return the records of some sides of a complete stage, in the order of its pairs."""
        return [self.at[place] for place in places(stage, sides or SIDES)]

    def seconds(self, stage: str, side: str) -> list[float]:
        """Return the seconds of each launch of one side in a complete stage."""
        return [record.seconds for record in self.of(stage, side)]

    def logs(self, stage: str) -> list[float]:
        """Return log(head / base) of each pair."""
        sides = (self.seconds(stage, side) for side in SIDES)
        return [math.log(head / base) for base, head in zip(*sides, strict=True)]

    @property
    def delta(self) -> float:
        """Return the smallest change that counts, as a share; see `raised_delta`.

        The screen stage alone decides it, so the times of the confirm stage cannot change it.
        """
        device = self.of("screen")[0].device
        floor = DELTAS[device.kind if device else "cpu"]
        return raised_delta(floor, self.seconds("screen", "base"))

    @property
    def is_suspicious(self) -> bool:
        """Return whether the pairs of the stage "screen" can be judged and look changed."""
        return not obstacle(self, "screen") and bool(suspicion(self.logs("screen"), self.delta))


def coin(seed: int, stage: str, ranks: int, index: int) -> int:
    """Return 0 if base runs first in a pair, else 1; equal arguments give equal results."""
    return hashlib.sha256(f"{seed}/{stage}/{ranks}/{index}".encode()).digest()[0] & 1


def places(stage: str, sides: Sequence[str] = SIDES) -> Iterator[tuple[str, int, str]]:
    """Yield the keys of a stage's records: the stage, the index of a pair, a side."""
    return ((stage, index, side) for index in range(STAGES[stage]) for side in sides)


def grouped(records: Iterable[Record]) -> dict[Key, Group]:
    """Return the records by case and number of ranks."""
    return {name: Group(some) for name, some in derive.grouped(records, lambda one: one.key)}


def build(
    folder: Path, base: Side, head: Side, listed: Mapping[str, set[Key]], *, strict: bool
) -> Result:
    """Judge the records in a folder, and return the comparison's result.

    Args:
        folder: the folder with the records.
        base, head: the two commits.
        listed: the cases that each side has.
        strict: whether an inconclusive case changes the exit code.
    """
    reading = read(folder / RECORDS)
    groups = grouped(reading.records)
    names = listed["base"] | listed["head"]
    rows = sorted(
        (assess(name, groups.get(name, Group([])), listed) for name in names), key=importance
    )
    verdicts = [row.verdict for row in rows]
    share, code = gateable_share(verdicts), exit_code(verdicts, strict=strict)
    return Result(base, head, rows, share, code, reading.records, reading.problems)


def importance(row: Row) -> tuple[int, float, Key]:
    """Return a row's key for sorting: its verdict, then the size of its change."""
    change = row.change.median if row.change else 1.0
    return ORDER.index(row.verdict), -abs(math.log(change)), row.key


def assess(name: Key, group: Group, listed: Mapping[str, set[Key]]) -> Row:
    """Return the row of one case.

    Args:
        name: case and number of ranks.
        group: all records of this case on this number of ranks.
        listed: the cases that each side has.
    """
    if name not in listed["head"]:
        return Row(*name, Verdict.MISSING, ("head has lost this case",))
    if name not in listed["base"]:
        return Row(*name, Verdict.NEW, ("base has no such case",))
    stage = "confirm" if group.is_suspicious else "screen"
    if found := obstacle(group, stage):
        verdict, remark = found
        if verdict is not Verdict.OVERSUBSCRIBED:
            return Row(*name, verdict, (remark,))
    logs, delta = group.logs(stage), group.delta
    base, head = (group.of(stage, side) for side in SIDES)
    if not found:
        verdict = judge(group.logs("screen"), logs if stage == "confirm" else (), delta)
        remark = _reason(verdict, logs, delta)
    limited = sum(bool(one.timing and one.timing.skew_limited) for one in (*base, *head))
    flag = f"skew-limited in {limited} of {2 * len(base)} launches" if limited else ""
    remarks = tuple(filter(None, (remark, explain(verdict, base, head), flag)))
    change = exact_interval([math.exp(d) for d in logs])
    medians = (statistics.median(record.seconds for record in side) for side in (base, head))
    return Row(*name, verdict, remarks, change, sum(d > 0 for d in logs), delta, *medians)


def _reason(verdict: Verdict, logs: Sequence[float], delta: float) -> str:
    if verdict is Verdict.UNGATEABLE:
        return f"base against itself varies so much that only {delta:.0%} and more would count"
    if verdict is not Verdict.INCONCLUSIVE:
        return ""
    needed = pairs_needed(logs, delta)
    return f"{f'about {needed} pairs' if needed else 'more pairs than are worth it'} would decide"


def obstacle(group: Group, stage: str) -> tuple[Verdict, str] | None:
    """Return a verdict and its reason if a stage's times cannot be judged, else None."""
    told = [(place, _complaint(group.at.get(place))) for place in places(stage)]
    for (_, index, side), text in told:
        if text:
            count = f"{sum(bool(other) for _, other in told)} of {len(told)} launches"
            first = f"{side} in pair {index} of the {stage} stage: {text}"
            return Verdict.MISSING, f"{count if index else 'not launched again'}; {first}"
    stages = ("screen",) if stage == "screen" else STAGES
    if difference := _difference([record for one in stages for record in group.of(one)]):
        return Verdict.MISMATCH, difference
    transport = group.of(stage)[0].transport
    if transport and (transport.oversubscribed or transport.shared_gpu):
        what = "GPUs" if transport.shared_gpu else "cores"
        return Verdict.OVERSUBSCRIBED, f"more ranks than {what}"
    return None


def _complaint(record: Record | None) -> str | None:
    if record is None:
        return "no record"
    if record.status not in MEASURED:  # an uneven start is noise; the interval's width includes it
        return f"{record.status}: {record.reason}"
    return None if record.seconds else "a time of 0 s"


def _difference(records: Sequence[Record]) -> str | None:
    """Return a text on a property that should not differ between launches but does, else None."""
    checks: dict[str, list[Any]] = {
        "fingerprint": [record.env and record.env.fingerprint for record in records],
        "harness": [record.harness_sha for record in records],
        "case": [record.case for record in records],
    }
    for side in SIDES:
        mine = [record.commit for record in records if record.pair and record.pair.side == side]
        checks[f"commit of {side}"] = mine
    for what, (first, *others) in checks.items():
        for other in others:
            if other != first:
                return f"the {what} is not the same in all launches: {first} and {other}"
    return None


CHANGED = {Verdict.REGRESSED: "slower", Verdict.IMPROVED: "faster"}
MAIN_SHARE = 0.5  # share of the change that a phase must hold to be named


def explain(verdict: Verdict, base: Sequence[Record], head: Sequence[Record]) -> str | None:
    """Name the phase that holds most of a change; if it is communication, name the collective.

    Args:
        verdict: the case's verdict; None is returned unless it is regressed or improved.
        base, head: the records that decided.
    """
    if verdict not in CHANGED:
        return None
    growth = _growth(base, head, "phases", "max_s")
    total = growth.pop("total")
    name = max(growth, key=lambda name: growth[name] * total, default="")
    if name == "communication":
        growth = _growth(base, head, "comm", "seconds")
        name = max(growth, key=lambda name: growth[name] * total, default="")
    most = growth.get(name, 0.0)
    if not total or most / total < MAIN_SHARE:
        return f"{CHANGED[verdict]} in no single phase"
    return f"{CHANGED[verdict]} in {name} ({most * 1e3:+.3f} of {total * 1e3:+.3f} ms)"


def _growth(
    base: Sequence[Record], head: Sequence[Record], part: str, field: str
) -> dict[str, float]:
    """Return by phase or operation how many seconds longer head takes in the median."""

    def typical(records: Sequence[Record], name: str) -> float:
        found = [(getattr(record, part) or {}).get(name) for record in records]
        return statistics.median(getattr(one, field, 0.0) for one in found)

    names = sorted({name for record in (*base, *head) for name in getattr(record, part) or {}})
    return {name: typical(head, name) - typical(base, name) for name in names}
