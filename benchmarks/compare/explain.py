"""Where a change of time sits, in one sentence: at which P, in which phase or collective, and whether more bytes are sent."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from itertools import chain

from benchmarks.compare.pairs import Row
from benchmarks.compare.rule import JUDGED, Verdict
from benchmarks.records import Record

CHANGED = {Verdict.REGRESSED: "slower", Verdict.IMPROVED: "faster"}
MAIN_SHARE = 0.5  # of the change, for a phase to be named as its place
Times = dict[str, float]


def explain(row: Row, rows: Sequence[Row], base: Sequence[Record], head: Sequence[Record]) -> str | None:
    """The sentence on one row; None where nothing changed.

    Args:
        row: a case on one number of ranks.
        rows: all rows of the comparison.
        base, head: the records of the pairs that decided.
    """
    if row.verdict not in CHANGED:
        return None
    return ", ".join([f"{CHANGED[row.verdict]} {_where(row, rows)}", _phase(base, head), _traffic(base, head)])


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
    return _medians([{name: phase.max_s for name, phase in (record.phases or {}).items()} for record in records])


def _collectives(records: Sequence[Record]) -> Times:
    return _medians([{name: traffic.seconds for name, traffic in (record.comm or {}).items()} for record in records])


def _medians(times: Sequence[Times]) -> Times:
    return {name: statistics.median(one.get(name, 0.0) for one in times) for name in dict.fromkeys(chain(*times))}


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
