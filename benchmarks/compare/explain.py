"""Where the time of a case that changed went: the ranks, the phase, and what was sent."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence

from benchmarks.compare.result import Row
from benchmarks.compare.rule import JUDGED, Verdict
from benchmarks.records import Record

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
    return f"{CHANGED[row.verdict]} {_where(row, rows)}, {_phase(base, head)}, {sent}"


def _where(row: Row, rows: Sequence[Row]) -> str:
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
