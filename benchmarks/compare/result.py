"""The result of a comparison: a row for each case, what was compared, and where the records are; as `result.json` beside them."""

from __future__ import annotations

import hashlib
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

from benchmarks.compare import rule
from benchmarks.compare.pairs import SIDES, Group, Key, Row, assess, grouped
from benchmarks.compare.rule import JUDGED, Verdict
from benchmarks.files import write_json
from benchmarks.records import Record, read

FORMAT = 1
RECORDS, RESULT = "records.jsonl", "result.json"
RULE = {
    "screen": {
        "pairs": rule.SCREEN_PAIRS,
        "agree": rule.SCREEN_AGREE,
        "share_of_delta": rule.SCREEN_SHARE,
    },
    "confirm": {"pairs": rule.CONFIRM_PAIRS, "agree": rule.CONFIRM_AGREE, "share_of_delta": 1.0},
    "delta": dict(rule.DELTAS),
    "max_delta": rule.MAX_DELTA,
    "miss": rule.MISS,
}
ORDER = list(Verdict)


@dataclass(frozen=True)
class Compared:
    """What was compared.

    Args:
        base, head: "ref" as it was asked for, "sha" that was measured, and "environment" it ran in.
        seed: of the coins.
        ranks: the numbers of ranks.
        listed: the cases that each side has.
    """

    base: dict[str, Any]
    head: dict[str, Any]
    seed: int
    ranks: list[int]
    listed: Mapping[str, set[Key]]


def rows(records: list[Record], listed: Mapping[str, set[Key]]) -> list[Row]:
    """A row for each case that either side has, the most important first."""
    groups = grouped(records)
    names = sorted(listed["base"] | listed["head"])
    found = [assess(name, groups.get(name, Group([])), listed) for name in names]
    told = [replace(row, explanation=_explained(row, found, groups)) for row in found]
    return sorted(told, key=lambda row: (ORDER.index(row.verdict), row.case, row.ranks))


def build(folder: Path, compared: Compared, *, strict: bool) -> dict[str, Any]:
    """The result of the records in a folder, as plain values; it is written beside them too."""
    path = folder / RECORDS
    reading = read(path)
    found = rows(reading.records, compared.listed)
    verdicts = [row.verdict for row in found]
    result = {
        "format": FORMAT,
        "base": compared.base,
        "head": compared.head,
        "same_commit": compared.base["sha"] == compared.head["sha"],
        "seed": compared.seed,
        "ranks": compared.ranks,
        "cases": {side: [list(name) for name in sorted(compared.listed[side])] for side in SIDES},
        "rule": RULE,
        "records": RECORDS,
        "records_sha256": hashlib.sha256(path.read_bytes()).hexdigest() if path.exists() else None,
        "problems": reading.problems,
        "rows": [row.as_dict() for row in found],
        "counts": dict(Counter(str(verdict) for verdict in verdicts)),
        "gateable_share": rule.gateable_share(verdicts),
        "strict": strict,
        "exit_code": rule.exit_code(verdicts, strict=strict),
    }
    write_json(folder / RESULT, result)
    return result


def _explained(row: Row, found: list[Row], groups: dict[Key, Group]) -> str | None:
    if row.stage is None:
        return None
    records = groups[(row.case, row.ranks)].stage(row.stage)
    sides = (
        [record for record in records if record.pair and record.pair.side == side] for side in SIDES
    )
    return explain(row, found, *sides)


CHANGED = {Verdict.REGRESSED: "slower", Verdict.IMPROVED: "faster"}
MAIN_SHARE = 0.5  # of the change, for a phase to be named as its place
Times = dict[str, float]


def explain(
    row: Row, rows: Sequence[Row], base: Sequence[Record], head: Sequence[Record]
) -> str | None:
    """The sentence on one row; None where nothing changed.

    Args:
        row: a case on one number of ranks.
        rows: all rows of the comparison.
        base, head: the records of the pairs that decided.
    """
    if row.verdict not in CHANGED:
        return None
    return ", ".join(
        [f"{CHANGED[row.verdict]} {_where(row, rows)}", _phase(base, head), _traffic(base, head)]
    )


def _where(row: Row, rows: Sequence[Row]) -> str:
    judged = [other for other in rows if other.case == row.case and other.verdict in JUDGED]
    alike = [other.ranks for other in judged if other.verdict is row.verdict]
    numbers = ", ".join(str(ranks) for ranks in sorted(alike))
    if len(alike) == len(judged):
        return f"at P={numbers}" if len(judged) == 1 else f"at every P ({numbers})"
    return f"only at P={numbers}"


def _phase(base: Sequence[Record], head: Sequence[Record]) -> str:
    """The phase that holds most of the change; of communication, the collective that does."""
    growth = _growth(_phases(base), _phases(head))
    total = growth.pop("total")
    name, most = _largest(growth, total)
    if name == "communication":
        name, most = _largest(_growth(_collectives(base), _collectives(head)), total)
    if name is None or most / total < MAIN_SHARE:
        return "in no single phase"
    return f"in {name} ({most * 1e3:+.3f} of {total * 1e3:+.3f} ms)"


def _largest(growth: Times, total: float) -> tuple[str | None, float]:
    """What changed most in the direction of the total."""
    name = max(growth, key=lambda name: growth[name] / total, default=None) if total else None
    return name, growth[name] if name is not None else 0.0


def _growth(base: Times, head: Times) -> Times:
    return {name: head.get(name, 0.0) - base.get(name, 0.0) for name in {**base, **head}}


def _phases(records: Sequence[Record]) -> Times:
    """Median seconds by phase, of the rank that took longest."""
    return _medians(
        [{name: phase.max_s for name, phase in (record.phases or {}).items()} for record in records]
    )


def _collectives(records: Sequence[Record]) -> Times:
    return _medians(
        [
            {name: traffic.seconds for name, traffic in (record.comm or {}).items()}
            for record in records
        ]
    )


def _medians(times: Sequence[Times]) -> Times:
    return {
        name: statistics.median(one.get(name, 0.0) for one in times)
        for name in dict.fromkeys(chain(*times))
    }


def _traffic(base: Sequence[Record], head: Sequence[Record]) -> str:
    """What differs in calls, messages and bytes, which do not vary between launches."""
    changes = list(_changes(base[0], head[0]))
    return "; ".join(changes) if changes else "bytes unchanged"


def _changes(base: Record, head: Record) -> Iterator[str]:
    sides = [record.comm or {} for record in (base, head)]
    for name in dict.fromkeys(chain(*sides)):
        for what, field in (("calls", "calls"), ("messages", "messages"), ("bytes", "bytes_sent")):
            before, after = (getattr(side.get(name), field, 0) for side in sides)
            if before != after:
                yield f"{what} of {name} {before:,} -> {after:,}"
