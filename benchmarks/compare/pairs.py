"""From records to numbers: which launches make a pair, whether they may be compared, and the row of the result for each case."""

from __future__ import annotations

import hashlib
import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from benchmarks.compare.rule import (
    CONFIRM_PAIRS,
    DELTAS,
    SCREEN_PAIRS,
    Decision,
    Verdict,
    half_width,
    interval,
    judge,
    raised_delta,
    suspicion,
)
from benchmarks.records import MEASURED, Record

Key = tuple[str, int]
Place = tuple[str, int, str]
"""Stage, index of the pair, side."""

SIDES = ("base", "head")
STAGES = {"screen": SCREEN_PAIRS, "confirm": CONFIRM_PAIRS}


@dataclass(frozen=True)
class Row:
    """What a comparison says about one case on one number of ranks.

    Args:
        case, ranks: what was measured.
        verdict: the answer, and `reason` why there is none.
        stage, pairs, slower: the pairs that decided, how many they are, and in how many head took
            longer.
        ratio, low, high: median of head / base, and its exact interval.
        delta, half_width: the smallest change that counts, and the noise of base against itself, as
            shares.
        base_s, head_s: median seconds of the pairs that decided.
        pairs_needed: where inconclusive: how many would decide; None where more than are worth it.
        flags: what to keep in mind.
        explanation: where the time went, for a case that changed.
    """

    case: str
    ranks: int
    verdict: Verdict
    reason: str | None = None
    stage: str | None = None
    pairs: int = 0
    slower: int = 0
    ratio: float | None = None
    low: float | None = None
    high: float | None = None
    delta: float | None = None
    half_width: float | None = None
    base_s: float | None = None
    head_s: float | None = None
    pairs_needed: int | None = None
    flags: tuple[str, ...] = ()
    explanation: str | None = None

    def as_dict(self) -> dict[str, Any]:
        """All fields as plain values."""
        return {**asdict(self), "verdict": str(self.verdict), "flags": list(self.flags)}


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

    def stage(self, stage: str) -> list[Record]:
        """The records of a stage that has to be complete, in the order of its pairs."""
        return [self.at[place] for place in places(stage) if place in self.at]

    def seconds(self, stage: str, side: str) -> list[float]:
        """The time of each launch."""
        return [self.at[(stage, index, side)].seconds for index in range(STAGES[stage])]

    def logs(self, stage: str) -> list[float]:
        """log(head / base) of each pair."""
        sides = (self.seconds(stage, side) for side in SIDES)
        return [math.log(head / base) for base, head in zip(*sides, strict=True)]


def coin(seed: int, stage: str, ranks: int, index: int) -> int:
    """The throw that orders a pair: 0 lets base go first."""
    return hashlib.sha256(f"{seed}/{stage}/{ranks}/{index}".encode()).digest()[0] & 1


def places(stage: str) -> Iterator[Place]:
    """Every place of a stage."""
    return ((stage, index, side) for index in range(STAGES[stage]) for side in SIDES)


def grouped(records: Iterable[Record]) -> dict[Key, Group]:
    """The records by what they measure."""
    found: dict[Key, list[Record]] = {}
    for record in records:
        found.setdefault(record.key, []).append(record)
    return {name: Group(some) for name, some in found.items()}


def suspects(records: Iterable[Record]) -> list[Key]:
    """What the second stage has to look at again."""
    groups = grouped(records)
    return sorted(
        name
        for name, group in groups.items()
        if _obstacle(group, "screen") is None and _suspicion(group)
    )


def assess(name: Key, group: Group, listed: Mapping[str, set[Key]]) -> Row:
    """The row of one case.

    Args:
        name: case and number of ranks.
        group: all its records.
        listed: the cases that each side has.
    """
    row = Row(*name, Verdict.MISSING)
    if name not in listed["head"]:
        return replace(row, reason="head has lost this case")
    if name not in listed["base"]:
        return replace(row, verdict=Verdict.NEW, reason="base has no such case")
    stage = "screen"
    obstacle = _obstacle(group, stage)
    if obstacle is None and _suspicion(group):
        stage = "confirm"
        obstacle = _obstacle(group, stage)
    if obstacle is not None and obstacle[0] is not Verdict.OVERSUBSCRIBED:
        return replace(row, verdict=obstacle[0], reason=obstacle[1])
    return _timed(row, group, stage, obstacle)


def _timed(row: Row, group: Group, stage: str, obstacle: tuple[Verdict, str] | None) -> Row:
    """The row of a case whose launches all came out well."""
    delta, noise = _delta(group), half_width(group.seconds("screen", "base"))
    if obstacle is not None:
        logs = group.logs(stage)
        decision = Decision(obstacle[0], stage, interval(logs), sum(d > 0 for d in logs))
        reason: str | None = obstacle[1]
    else:
        decision = judge(
            group.logs("screen"), group.logs("confirm") if stage == "confirm" else (), delta
        )
        reason = _reason(decision, delta)
    found = decision.interval
    base, head = (statistics.median(group.seconds(stage, side)) for side in SIDES)
    return replace(
        row,
        verdict=decision.verdict,
        reason=reason,
        stage=decision.stage,
        pairs=found.count,
        slower=decision.slower,
        ratio=math.exp(found.median),
        low=math.exp(found.low),
        high=math.exp(found.high),
        delta=delta,
        half_width=math.expm1(noise),
        base_s=base,
        head_s=head,
        pairs_needed=decision.pairs_needed,
        flags=tuple(_flags(group, stage)),
    )


def _reason(decision: Decision, delta: float) -> str | None:
    if decision.verdict is Verdict.UNGATEABLE:
        return f"base against itself varies so much that only {delta:.0%} and more would count"
    if decision.verdict is Verdict.INCONCLUSIVE:
        needed = decision.pairs_needed
        return (
            f"about {needed} pairs would decide"
            if needed
            else "more pairs than are worth it would be needed"
        )
    return None


def _obstacle(group: Group, stage: str) -> tuple[Verdict, str] | None:
    """Why the times of a stage cannot be judged."""
    failure = _failure(group, stage)
    if failure is not None:
        return Verdict.MISSING, failure
    difference = _difference(
        group.stage("screen") + (group.stage("confirm") if stage == "confirm" else [])
    )
    if difference is not None:
        return Verdict.MISMATCH, difference
    transport = group.stage(stage)[0].transport
    if transport and (transport.oversubscribed or transport.shared_gpu):
        return Verdict.OVERSUBSCRIBED, "more ranks than " + (
            "GPUs" if transport.shared_gpu else "cores"
        )
    return None


def _failure(group: Group, stage: str) -> str | None:
    """The first launch that left no time, and how many did not."""
    if group.twice:
        return f"{_where(group.twice[0])} is recorded twice"
    bad = [(place, _complaint(group.at.get(place))) for place in places(stage)]
    bad = [(place, text) for place, text in bad if text]
    return (
        f"{len(bad)} of {2 * STAGES[stage]} launches; {_where(bad[0][0])}: {bad[0][1]}"
        if bad
        else None
    )


def _complaint(record: Record | None) -> str | None:
    if record is None:
        return "no record"
    if (
        record.status not in MEASURED
    ):  # ranks that start unevenly are noise, which the half-width of base includes
        return f"{record.status}: {record.reason}"
    return None if record.seconds else "a time of 0 s"


def _where(place: Place) -> str:
    return f"{place[2]} in pair {place[1]} of the {place[0]} stage"


def _difference(records: Sequence[Record]) -> str | None:
    """What differs between launches that must not."""
    checks: tuple[tuple[str, list[Any]], ...] = (
        ("fingerprint", [record.env and record.env.fingerprint for record in records]),
        ("harness", [record.harness_sha for record in records]),
        ("case", [record.case for record in records]),
        *(
            (f"commit of {side}", [r.commit for r in records if r.pair and r.pair.side == side])
            for side in SIDES
        ),
    )
    for what, values in checks:
        other = next((value for value in values if value != values[0]), None)
        if other is not None:
            return f"the {what} is not the same in all launches: {values[0]} and {other}"
    return None


def _delta(group: Group) -> float:
    """The smallest change that counts, from the screen, so that the second stage cannot move it."""
    return raised_delta(floor(group), group.seconds("screen", "base"))


def floor(group: Group) -> float:
    """Return the smallest change that ever counts on the device of a group."""
    device = group.stage("screen")[0].device
    return DELTAS[device.kind if device else "cpu"]


def _suspicion(group: Group) -> int:
    return suspicion(group.logs("screen"), _delta(group))


def _flags(group: Group, stage: str) -> Iterator[str]:
    records = group.stage(stage)
    limited = sum(bool(record.timing and record.timing.skew_limited) for record in records)
    if limited:
        yield f"skew-limited in {limited} of {len(records)} launches"
