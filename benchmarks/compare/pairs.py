"""Turn records into a result: check the pairs of launches, and judge each case."""

from __future__ import annotations

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

Place = tuple[str, int, str]
"""Stage, index of the pair, side."""

SIDES = ("base", "head")
STAGES = {"screen": SCREEN_PAIRS, "confirm": CONFIRM_PAIRS}


class Group:
    """The records of one case on one number of ranks, by place."""

    def __init__(self, records: Iterable[Record]) -> None:
        self.at: dict[Place, Record] = {}
        for record in records:
            if (pair := record.pair) is not None:
                self.at[pair.stage, pair.index, pair.side] = record

    def of(self, stage: str, *sides: str) -> list[Record]:
        """Return the records of some sides of a complete stage, in the order of its pairs."""
        return [self.at[place] for place in places(stage, sides or SIDES)]

    def seconds(self, stage: str, side: str) -> list[float]:
        """Return the time of each launch."""
        return [record.seconds for record in self.of(stage, side)]

    def logs(self, stage: str) -> list[float]:
        """Return log(head / base) of each pair."""
        sides = (self.seconds(stage, side) for side in SIDES)
        return [math.log(head / base) for base, head in zip(*sides, strict=True)]

    @property
    def delta(self) -> float:
        """The smallest change that counts, of the screen: the second stage cannot move it."""
        device = self.of("screen")[0].device
        floor = DELTAS[device.kind if device else "cpu"]
        return raised_delta(floor, self.seconds("screen", "base"))

    @property
    def is_suspicious(self) -> bool:
        """Whether the screen can be judged and looks changed."""
        return not obstacle(self, "screen") and bool(suspicion(self.logs("screen"), self.delta))


def coin(seed: int, stage: str, ranks: int, index: int) -> int:
    """Throw the coin that orders a pair: 0 lets base go first."""
    return hashlib.sha256(f"{seed}/{stage}/{ranks}/{index}".encode()).digest()[0] & 1


def places(stage: str, sides: Sequence[str] = SIDES) -> Iterator[Place]:
    """Yield the places of a stage."""
    return ((stage, index, side) for index in range(STAGES[stage]) for side in sides)


def grouped(records: Iterable[Record]) -> dict[Key, Group]:
    """Return the records by what they measure."""
    return {name: Group(some) for name, some in derive.grouped(records, lambda one: one.key)}


def build(
    folder: Path, base: Side, head: Side, listed: Mapping[str, set[Key]], *, strict: bool
) -> Result:
    """Judge the records in a folder.

    Args:
        folder: has the records.
        base, head: the sides.
        listed: the cases that each side has.
        strict: whether doubt is an error.
    """
    reading = read(folder / RECORDS)
    groups = grouped(reading.records)
    rows = [
        assess(name, groups.get(name, Group([])), listed)
        for name in sorted(listed["base"] | listed["head"])
    ]
    verdicts = [row.verdict for row in rows]
    return Result(
        base,
        head,
        sorted(rows, key=importance),
        gateable_share(verdicts),
        exit_code(verdicts, strict=strict),
        reading.records,
        reading.problems,
    )


def importance(row: Row) -> tuple[int, float, Key]:
    """Return what sorts rows: the verdict, then how large the change is."""
    return (
        ORDER.index(row.verdict),
        -abs(math.log(row.change.median if row.change else 1.0)),
        row.key,
    )


def assess(name: Key, group: Group, listed: Mapping[str, set[Key]]) -> Row:
    """Return the row of one case.

    Args:
        name: case and number of ranks.
        group: all its records.
        listed: the cases that each side has.
    """
    if name not in listed["head"]:
        return Row(*name, Verdict.MISSING, ("head has lost this case",))
    if name not in listed["base"]:
        return Row(*name, Verdict.NEW, ("base has no such case",))
    stage = "confirm" if group.is_suspicious else "screen"
    found = obstacle(group, stage)
    if found is not None and found[0] is not Verdict.OVERSUBSCRIBED:
        return Row(*name, found[0], found[1:])
    logs, delta = group.logs(stage), group.delta
    base, head = (group.of(stage, side) for side in SIDES)
    if found is not None:
        verdict, reason = found
    else:
        verdict = judge(group.logs("screen"), logs if stage == "confirm" else (), delta)
        reason = _reason(verdict, logs, delta)
    remarks = (reason, explain(verdict, base, head), _flag(group.of(stage)))
    return Row(
        *name,
        verdict,
        tuple(filter(None, remarks)),
        exact_interval([math.exp(d) for d in logs]),
        sum(d > 0 for d in logs),
        delta,
        *(statistics.median(record.seconds for record in side) for side in (base, head)),
    )


def _reason(verdict: Verdict, logs: Sequence[float], delta: float) -> str:
    if verdict is Verdict.UNGATEABLE:
        return f"base against itself varies so much that only {delta:.0%} and more would count"
    if verdict is not Verdict.INCONCLUSIVE:
        return ""
    needed = pairs_needed(logs, delta)
    return f"{f'about {needed} pairs' if needed else 'more pairs than are worth it'} would decide"


def obstacle(group: Group, stage: str) -> tuple[Verdict, str] | None:
    """Return a verdict that needs no times of a stage and its reason, if there is one."""
    told = ((place, _complaint(group.at.get(place))) for place in places(stage))
    if bad := [(place, text) for place, text in told if text]:
        (in_stage, index, side), text = bad[0]
        first = f"{side} in pair {index} of the {in_stage} stage: {text}"
        return Verdict.MISSING, f"{len(bad)} of {2 * STAGES[stage]} launches; {first}"
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
    if record.status not in MEASURED:  # an uneven start is noise, which the half-width includes
        return f"{record.status}: {record.reason}"
    return None if record.seconds else "a time of 0 s"


def _difference(records: Sequence[Record]) -> str | None:
    """Say what differs between launches that must not."""
    checks: dict[str, list[Any]] = {
        "fingerprint": [record.env and record.env.fingerprint for record in records],
        "harness": [record.harness_sha for record in records],
        "case": [record.case for record in records],
    }
    for side in SIDES:
        mine = [record.commit for record in records if record.pair and record.pair.side == side]
        checks[f"commit of {side}"] = mine
    for what, values in checks.items():
        for other in values:
            if other != values[0]:
                return f"the {what} is not the same in all launches: {values[0]} and {other}"
    return None


def _flag(records: Sequence[Record]) -> str:
    limited = sum(bool(record.timing and record.timing.skew_limited) for record in records)
    return f"skew-limited in {limited} of {len(records)} launches" if limited else ""


CHANGED = {Verdict.REGRESSED: "slower", Verdict.IMPROVED: "faster"}
MAIN_SHARE = 0.5  # of the change, for a phase to be named as its place
Records = Sequence[Record]


def explain(verdict: Verdict, base: Records, head: Records) -> str | None:
    """Name the phase that holds most of the change; of communication, the collective that does.

    Args:
        verdict: None is returned if it says that nothing changed.
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


def _growth(base: Records, head: Records, part: str, field: str) -> dict[str, float]:
    """Return how many seconds longer head takes in the median, by the names of a part."""

    def typical(records: Records, name: str) -> float:
        found = [(getattr(record, part) or {}).get(name) for record in records]
        return statistics.median(getattr(one, field, 0.0) for one in found)

    names = sorted({name for record in (*base, *head) for name in getattr(record, part) or {}})
    return {name: typical(head, name) - typical(base, name) for name in names}
