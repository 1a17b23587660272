"""Turn records into a result: check the pairs of launches, and judge each case."""

from __future__ import annotations

import hashlib
import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.compare.rule import (
    CONFIRM_PAIRS,
    DELTAS,
    RECORDS,
    RESULT,
    SCREEN_PAIRS,
    Decision,
    Key,
    Result,
    Row,
    Verdict,
    judge,
    raised_delta,
    suspicion,
)
from benchmarks.files import write_json
from benchmarks.records import MEASURED, Record, read
from benchmarks.reporting.derive import grouped
from benchmarks.statistics import exact_interval

Place = tuple[str, int, str]
"""Stage, index of the pair, side."""

SIDES = ("base", "head")
STAGES = {"screen": SCREEN_PAIRS, "confirm": CONFIRM_PAIRS}
Listed = Mapping[str, set[Key]]
"""The cases that each side has."""


class Group:
    """The records of one case on one number of ranks, by place."""

    def __init__(self, records: Iterable[Record]) -> None:
        paired = ((record.pair, record) for record in records)
        self.at: dict[Place, Record] = {
            (pair.stage, pair.index, pair.side): one for pair, one in paired if pair
        }

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


def groups_of(records: Iterable[Record]) -> dict[Key, Group]:
    """Return the records by what they measure."""
    return {name: Group(some) for name, some in grouped(records, lambda record: record.key)}


def build(folder: Path, *, listed: Listed, **facts: Any) -> Result:
    """Judge the records in a folder, and write the result beside them.

    Args:
        folder: has the records.
        listed: the cases that each side has.
        facts: the fields of a `Result` that only the caller knows.
    """
    reading = read(folder / RECORDS)
    groups = groups_of(reading.records)
    names = sorted(listed["base"] | listed["head"])
    rows = [assess(name, groups.get(name, Group([])), listed) for name in names]
    for row in rows:
        if row.verdict in CHANGED:
            sides = (groups[row.key].of(str(row.stage), side) for side in SIDES)
            row.explanation = f"{CHANGED[row.verdict]} {_phase(*sides)}"
    rows.sort(key=lambda row: row.importance)
    result = Result(**facts, problems=reading.problems, rows=rows)
    write_json(folder / RESULT, msgspec.to_builtins(result, order="deterministic"))
    return result


def assess(name: Key, group: Group, listed: Listed) -> Row:
    """Return the row of one case.

    Args:
        name: case and number of ranks.
        group: all its records.
        listed: the cases that each side has.
    """
    if name not in listed["head"]:
        return Row(*name, Verdict.MISSING, "head has lost this case")
    if name not in listed["base"]:
        return Row(*name, Verdict.NEW, "base has no such case")
    stage = "confirm" if group.is_suspicious else "screen"
    found = obstacle(group, stage)
    if found is not None and found[0] is not Verdict.OVERSUBSCRIBED:
        return Row(*name, *found)
    logs, delta = group.logs(stage), group.delta
    if found is not None:
        decision = Decision(found[0], stage, exact_interval(logs))
    else:
        decision = judge(group.logs("screen"), logs if stage == "confirm" else (), delta)
    base, head = (statistics.median(group.seconds(stage, side)) for side in SIDES)
    return Row(
        *name,
        verdict=decision.verdict,
        reason=found[1] if found else _reason(decision, delta),
        stage=stage,
        pairs=len(logs),
        slower=sum(d > 0 for d in logs),
        ratio=math.exp(decision.interval.median),
        low=math.exp(decision.interval.low),
        high=math.exp(decision.interval.high),
        delta=delta,
        base_s=base,
        head_s=head,
        flags=_flags(group.of(stage)),
    )


def _reason(decision: Decision, delta: float) -> str | None:
    if decision.verdict is Verdict.UNGATEABLE:
        return f"base against itself varies so much that only {delta:.0%} and more would count"
    if decision.verdict is not Verdict.INCONCLUSIVE:
        return None
    needed = decision.pairs_needed
    return f"{f'about {needed} pairs' if needed else 'more pairs than are worth it'} would decide"


def obstacle(group: Group, stage: str) -> tuple[Verdict, str] | None:
    """Return why the times of a stage cannot be judged: a verdict that needs no times, a reason."""
    told = ((place, _complaint(group.at.get(place))) for place in places(stage))
    if bad := [
        f"{side} in pair {n} of the {on} stage: {text}" for (on, n, side), text in told if text
    ]:
        return Verdict.MISSING, f"{len(bad)} of {2 * STAGES[stage]} launches; {bad[0]}"
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


def _flags(records: Sequence[Record]) -> list[str]:
    limited = sum(bool(record.timing and record.timing.skew_limited) for record in records)
    return [f"skew-limited in {limited} of {len(records)} launches"] if limited else []


CHANGED = {Verdict.REGRESSED: "slower", Verdict.IMPROVED: "faster"}
MAIN_SHARE = 0.5  # of the change, for a phase to be named as its place
Records = Sequence[Record]


def _phase(base: Records, head: Records) -> str:
    """Name the phase that holds most of the change; of communication, the collective that does."""
    growth = _growth(base, head, "phases", "max_s")
    total = growth.pop("total")
    if max(growth, key=lambda name: growth[name] * total, default="") == "communication":
        growth = _growth(base, head, "comm", "seconds")
    name = max(growth, key=lambda name: growth[name] * total, default="")
    most = growth.get(name, 0.0)
    if not total or most / total < MAIN_SHARE:
        return "in no single phase"
    return f"in {name} ({most * 1e3:+.3f} of {total * 1e3:+.3f} ms)"


def _growth(base: Records, head: Records, part: str, field: str) -> dict[str, float]:
    """Return how many seconds longer head takes in the median, by the names of a part."""

    def typical(records: Records, name: str) -> float:
        found = [(getattr(record, part) or {}).get(name) for record in records]
        return statistics.median(getattr(one, field, 0.0) for one in found)

    names = sorted({name for record in (*base, *head) for name in getattr(record, part) or {}})
    return {name: typical(head, name) - typical(base, name) for name in names}
