"""Turn records into a result: check the pairs of launches, and judge each case."""

from __future__ import annotations

import hashlib
import math
import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.compare.rule import (
    CONFIRM_PAIRS,
    DELTAS,
    JUDGED,
    ORDER,
    RECORDS,
    RESULT,
    SCREEN_PAIRS,
    Decision,
    Key,
    Result,
    Row,
    Verdict,
    exit_code,
    gateable_share,
    half_width,
    judge,
    raised_delta,
    suspicion,
)
from benchmarks.files import write_json
from benchmarks.records import MEASURED, Record, read
from benchmarks.statistics import exact_interval

Place = tuple[str, int, str]
"""Stage, index of the pair, side."""

SIDES = ("base", "head")
STAGES = {"screen": SCREEN_PAIRS, "confirm": CONFIRM_PAIRS}
Obstacle = tuple[Verdict, str]
"""A verdict that needs no times, and its reason."""


class Group:
    """The records of one case on one number of ranks, by place."""

    def __init__(self, records: Iterable[Record]) -> None:
        self.at: dict[Place, Record] = {}
        self.twice: list[Place] = []
        for record in records:
            pair = record.pair
            place = (pair.stage, pair.index, pair.side) if pair else ("none", 0, "none")
            self.twice += [place] * (place in self.at)
            self.at[place] = record

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
    def floor(self) -> float:
        """The smallest change that ever counts on the device."""
        device = self.of("screen")[0].device
        return DELTAS[device.kind if device else "cpu"]

    @property
    def delta(self) -> float:
        """The smallest change that counts, of the screen: the second stage cannot move it."""
        return raised_delta(self.floor, self.seconds("screen", "base"))

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
    found: dict[Key, list[Record]] = {}
    for record in records:
        found.setdefault(record.key, []).append(record)
    return {name: Group(some) for name, some in found.items()}


def build(folder: Path, *, strict: bool, listed: Mapping[str, set[Key]], **facts: Any) -> Result:
    """Judge the records in a folder, and write the result beside them.

    Args:
        folder: has the records.
        strict: whether doubt is an error.
        listed: the cases that each side has.
        facts: the fields of a `Result` that only the caller knows.
    """
    path = folder / RECORDS
    reading = read(path)
    groups = grouped(reading.records)
    rows = [
        assess(name, groups.get(name, Group([])), listed)
        for name in sorted(listed["base"] | listed["head"])
    ]
    for row in rows:
        if row.stage is not None:
            sides = (groups[row.key].of(row.stage, side) for side in SIDES)
            row.explanation = explain(row, rows, *sides)
    verdicts = [row.verdict for row in rows]
    result = Result(
        **facts,
        cases=dict(listed),
        records_sha256=hashlib.sha256(path.read_bytes()).hexdigest() if path.exists() else None,
        problems=reading.problems,
        rows=sorted(rows, key=importance),
        counts=dict(Counter(map(str, verdicts))),
        gateable_share=gateable_share(verdicts),
        strict=strict,
        exit_code=exit_code(verdicts, strict=strict),
    )
    result.same_commit = result.base.sha == result.head.sha
    write_json(folder / RESULT, msgspec.to_builtins(result, order="deterministic"))
    return result


def importance(row: Row) -> tuple[int, float, Key]:
    """Return what sorts rows: the verdict, then how large the change is."""
    return ORDER.index(row.verdict), -abs(math.log(row.ratio or 1.0)), row.key


def assess(name: Key, group: Group, listed: Mapping[str, set[Key]]) -> Row:
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
        decision = Decision(found[0], exact_interval(logs))
    else:
        decision = judge(group.logs("screen"), logs if stage == "confirm" else (), delta)
    base, head = (statistics.median(group.seconds(stage, side)) for side in SIDES)
    low, middle, high = (
        math.exp(getattr(decision.interval, end)) for end in ("low", "median", "high")
    )
    return Row(
        *name,
        verdict=decision.verdict,
        reason=found[1] if found else _reason(decision, delta),
        stage=stage,
        pairs=len(logs),
        slower=sum(d > 0 for d in logs),
        ratio=middle,
        low=low,
        high=high,
        delta=delta,
        half_width=math.expm1(half_width(group.seconds("screen", "base"))),
        base_s=base,
        head_s=head,
        pairs_needed=decision.pairs_needed,
        flags=_flags(group.of(stage)),
    )


def _reason(decision: Decision, delta: float) -> str | None:
    if decision.verdict is Verdict.UNGATEABLE:
        return f"base against itself varies so much that only {delta:.0%} and more would count"
    if decision.verdict is not Verdict.INCONCLUSIVE:
        return None
    needed = decision.pairs_needed
    return f"{f'about {needed} pairs' if needed else 'more pairs than are worth it'} would decide"


def obstacle(group: Group, stage: str) -> Obstacle | None:
    """Return why the times of a stage cannot be judged."""
    if group.twice:
        return Verdict.MISSING, f"{_where(group.twice[0])} is recorded twice"
    told = ((place, _complaint(group.at.get(place))) for place in places(stage))
    if bad := [(place, text) for place, text in told if text]:
        return (
            Verdict.MISSING,
            f"{len(bad)} of {2 * STAGES[stage]} launches; {_where(bad[0][0])}: {bad[0][1]}",
        )
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


def _where(place: Place) -> str:
    return f"{place[2]} in pair {place[1]} of the {place[0]} stage"


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
TRAFFIC = {"calls": "calls", "messages": "messages", "bytes": "bytes_sent"}
Records = Sequence[Record]


def explain(row: Row, rows: Sequence[Row], base: Records, head: Records) -> str | None:
    """Return the sentence on one row; None if nothing changed.

    Args:
        row: a case on one number of ranks.
        rows: all rows of the comparison.
        base, head: the records of the pairs that decided.
    """
    if row.verdict not in CHANGED:
        return None
    sent = "; ".join(_traffic(base[0], head[0])) or "bytes unchanged"
    return f"{CHANGED[row.verdict]} {_numbers(row, rows)}, {_phase(base, head)}, {sent}"


def _numbers(row: Row, rows: Sequence[Row]) -> str:
    judged = [other for other in rows if other.case == row.case and other.verdict in JUDGED]
    alike = sorted(other.ranks for other in judged if other.verdict is row.verdict)
    numbers = ", ".join(map(str, alike))
    if len(alike) < len(judged):
        return f"only at P={numbers}"
    return f"at P={numbers}" if len(judged) == 1 else f"at every P ({numbers})"


def _phase(base: Records, head: Records) -> str:
    """Name the phase that holds most of the change; of communication, the collective that does."""
    growth = _growth(base, head, "phases", "max_s")
    total = growth.pop("total")
    name = max(growth, key=lambda name: growth[name] * total, default="")
    if name == "communication":
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


def _traffic(base: Record, head: Record) -> Iterator[str]:
    """Say what differs in calls, messages and bytes, which do not vary between launches."""
    sides = [record.comm or {} for record in (base, head)]
    for name in dict.fromkeys(name for side in sides for name in side):
        for what, field in TRAFFIC.items():
            before, after = (getattr(side.get(name), field, 0) for side in sides)
            if before != after:
                yield f"{what} of {name} {before:,} -> {after:,}"
