"""Numbers that follow from records: speed-up, efficiency, bandwidth, shares. They are computed on reading and never stored."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from benchmarks.harness.derived import BUS, flags
from benchmarks.records import Record, key

MEASURED = ("ok", "skew_limited")
CAVEATS = ("oversubscribed", "shared GPU", "skew-limited")
"""Flags of rows whose time says nothing about scaling."""


@dataclass(frozen=True)
class Setting:
    """What must be the same for two times to belong into one table.

    Args:
        sha: of the commit, "unknown" where the record does not know it.
        dirty: whether files differed from the commit.
        side: "base" or "head" of a comparison; empty outside of one.
        fingerprint: of machine and software.
    """

    sha: str
    dirty: bool
    side: str
    fingerprint: str

    @property
    def commit(self) -> str:
        """The commit as people write it."""
        return self.sha[:10] + "+changes" * self.dirty


@dataclass(frozen=True)
class Row:
    """One case on one number of ranks: the median over its launches, and what follows from it.

    Args:
        case: as in the record.
        times: seconds of a step, the median of each launch.
        speedup: time on the fewest ranks of this case over this time.
        efficiency: speed-up over the growth in ranks.
        algbw, busbw: bytes per second; None for what is not one collective.
        share: part of the step that was communication, on the rank where it took longest.
        sent: bytes of one step over all ranks, without agreement.
        tokens_per_s, flops_per_s: None where the record does not count them.
        peak_bytes: of the rank that held most.
        imbalance: the slowest rank's median over the mean.
        flags: why to read the row with care.
    """

    case: dict[str, Any]
    times: tuple[float, ...]
    speedup: float
    efficiency: float
    algbw: float | None
    busbw: float | None
    share: float | None
    sent: int
    tokens_per_s: float | None
    flops_per_s: float | None
    peak_bytes: int | None
    imbalance: float
    flags: tuple[str, ...]
    phases: dict[str, float] = field(default_factory=dict)

    @property
    def id(self) -> str:
        """Of the case."""
        return str(self.case["id"])

    @property
    def ranks(self) -> int:
        """P."""
        return int(self.case["ranks"])

    @property
    def seconds(self) -> float:
        """The median over the launches."""
        return statistics.median(self.times)


def setting_of(record: Record) -> Setting:
    """Where a record belongs."""
    commit, pair, env = record["commit"], record["pair"] or {}, record["env"] or {}
    return Setting(commit["sha"] or "unknown", bool(commit["dirty"]), pair.get("side", ""), env.get("fingerprint", ""))


def by_setting(records: Iterable[Record]) -> dict[Setting, list[Record]]:
    """Records of each setting; the newest run comes last, and head after base."""
    found: dict[Setting, list[Record]] = {}
    for record in records:
        found.setdefault(setting_of(record), []).append(record)
    newest = {setting: max(record["run_id"] for record in group) for setting, group in found.items()}
    order = sorted(found, key=lambda s: (s.fingerprint != "", newest[s], s.side, s.sha, s.dirty, s.fingerprint))
    return {setting: found[setting] for setting in order}


def measured(record: Record) -> bool:
    """Whether a record holds a time that one can divide by."""
    return record["status"] in MEASURED and record["timing"]["median_s"] > 0


def rows(records: Iterable[Record]) -> list[Row]:
    """A row for each case and number of ranks that was measured, in the order of case and ranks."""
    launches: dict[tuple[str, int], list[Record]] = {}
    for record in filter(measured, records):
        launches.setdefault(key(record), []).append(record)
    fewest: dict[str, tuple[int, float]] = {}
    for (case, ranks), group in sorted(launches.items()):
        fewest.setdefault(case, (ranks, statistics.median(r["timing"]["median_s"] for r in group)))
    return [_row(group, *fewest[case]) for (case, _), group in sorted(launches.items())]


def _row(group: list[Record], fewest: int, slowest: float) -> Row:
    last, times = group[-1], tuple(r["timing"]["median_s"] for r in group)
    seconds, ranks = statistics.median(times), last["case"]["ranks"]
    algbw = _algbw(last, seconds)
    factor = BUS[last["case"]["scheme"]](ranks) if last["case"]["scheme"] in BUS else 1.0
    work = last["work"] or {}
    return Row(
        case=last["case"],
        times=times,
        speedup=slowest / seconds,
        efficiency=slowest / seconds * fewest / ranks,
        algbw=algbw,
        busbw=None if algbw is None else algbw * factor,
        share=_median(_share(r) for r in group),
        sent=sum(count["bytes_sent"] for count in _payload(last).values()),
        tokens_per_s=_rate(work.get("tokens"), seconds),
        flops_per_s=_rate(work.get("flops"), seconds),
        peak_bytes=last["memory"] and last["memory"]["peak_bytes"],
        imbalance=statistics.median(r["timing"]["imbalance"] for r in group),
        flags=tuple(flag for flag in FLAGS if any(FLAGS[flag](r) for r in group)),
        phases={name: _mean_seconds(group, name) for name in last["phases"]},
    )


def _mean_seconds(group: list[Record], phase: str) -> float:
    return float(statistics.median(r["phases"][phase]["mean_s"] for r in group if phase in r["phases"]))


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def _rate(count: int | None, seconds: float) -> float | None:
    return None if count is None else count / seconds


def _algbw(record: Record, seconds: float) -> float | None:
    """Bytes of the collective's largest buffer per second; None where nothing has to travel."""
    case = record["case"]
    results = [count.get("bytes_result") for count in _payload(record).values()]
    return _rate(next(iter(results), None), seconds) if case["layer"] == "collectives" and case["ranks"] > 1 else None


def _share(record: Record) -> float | None:
    phases = record["phases"]
    known = "communication" in phases and phases["total"]["max_s"] > 0
    return phases["communication"]["max_s"] / phases["total"]["max_s"] if known else None


def _payload(record: Record) -> dict[str, Any]:
    """What each operation sent, without the agreement of the ranks."""
    return {name: count for name, count in record["comm"].items() if name != "control"}


def _miscounted(record: Record) -> bool:
    formulas = [(c["bytes_sent"], c["bytes_formula"]) for c in _payload(record).values()]
    whole = (sum(sent for sent, _ in formulas), (record["work"] or {}).get("bytes_formula"))
    return any(formula is not None and sent != formula for sent, formula in [*formulas, whole])


def _warned(record: Record, name: str) -> bool:
    return name in flags(record)


FLAGS: dict[str, Callable[[Record], bool]] = {
    **{name: partial(_warned, name=name) for name in CAVEATS},
    "bytes differ from formula": _miscounted,
}
"""Why a row must be read with care, and how a record shows it."""


def doubtful(row: Row) -> bool:
    """Whether a plot must mark the row."""
    return bool(set(CAVEATS) & set(row.flags))
