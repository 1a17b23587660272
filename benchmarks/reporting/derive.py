"""Derive numbers from records that were read: speed-up, efficiency, bandwidth, shares."""

import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, groupby
from typing import Any, TypeVar

import msgspec

from benchmarks.records import Case, Record

T = TypeVar("T")
CAVEATS = ("oversubscribed", "shared GPU", "skew-limited")
"""Flags of rows whose time says nothing about scaling."""

BUS: dict[str, Callable[[int], float]] = {
    "all_reduce": lambda p: 2 * (p - 1) / p,
    "all_gather": lambda p: (p - 1) / p,
    "reduce_scatter": lambda p: (p - 1) / p,
    "all_to_all": lambda p: (p - 1) / p,
}
"""Bytes that must pass each rank's link, over bytes of the buffer; 1 for other operations.

Source: nccl-tests, https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md
"""


@dataclass(frozen=True, order=True)
class Setting:
    """The properties that the times of one table have in common.

    Args:
        sha: the commit's hash; "unknown" if the record has none.
        dirty: whether files differed from the commit.
        side: "base" or "head" of a comparison; empty outside of one.
        fingerprint: the fingerprint of machine and software.
        harness: the hash of the files that decide how something is measured.
    """

    sha: str
    dirty: bool
    side: str
    fingerprint: str
    harness: str

    @property
    def what(self) -> tuple[str, str, bool, str]:
        """Everything but the machine. A comparison's head comes after its base."""
        return self.side, self.sha, self.dirty, self.harness

    @property
    def commit(self) -> str:
        """The commit's short hash, with "+changes" if files differed from it."""
        return self.sha[:10] + "+changes" * self.dirty


@dataclass(frozen=True)
class Row:
    """One case on one number of ranks: the median over its launches, and what follows from it.

    Args:
        case: the case of the record.
        seconds: the time of a step, the median over the launches.
        speedup: time on the fewest ranks of this case over this time.
        efficiency: speed-up divided by the growth of the number of ranks.
        algbw, busbw: bytes per second; None unless the case is one collective on several ranks.
        share: share of the step that was communication, on the rank where it took longest.
        sent: bytes of one step over all ranks, without those of agreements.
        tokens_per_s, flops_per_s: None if the record does not count them.
        peak_bytes: the peak of the rank with the highest peak.
        imbalance: the slowest rank's median over the mean of the ranks' medians.
        flags: reasons to read the row with care.
        phases: seconds of each phase of a step, the mean over the ranks.
    """

    case: Case
    seconds: float
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
    phases: dict[str, float]

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return self.case.ranks


def setting_of(record: Record) -> Setting:
    """Return the setting of a record."""
    return Setting(
        record.commit.sha or "unknown",
        bool(record.commit.dirty),
        record.pair.side if record.pair else "",
        record.env.fingerprint if record.env else "",
        record.harness_sha,
    )


def comparable(records: Iterable[Record]) -> tuple[list[Record], list[str]]:
    """Return the records in the order of their runs, and a text for each name that lost some.

    Records of another problem or mesh than the newest ones of the same name are left out. A run's
    id begins with its time.
    """
    ordered = sorted(records, key=lambda record: record.run_id)
    newest: dict[object, object] = {}
    for record in ordered:
        newest |= {record.key: record.case.mesh, record.case.id: _problem(record.case)}
    kept = [
        record
        for record in ordered
        if newest[record.key] == record.case.mesh
        and newest[record.case.id] == _problem(record.case)
    ]
    lost = Counter(one.case.id for one in ordered) - Counter(one.case.id for one in kept)
    why = "of another problem than in the newest run are left out."
    return kept, [f"{name}: {number} records {why}" for name, number in lost.items()]


def _problem(case: Case) -> Case:
    """Return what a case has in common on all numbers of ranks."""
    return msgspec.structs.replace(case, ranks=1, mesh={})


def by_setting(records: Iterable[Record]) -> dict[Setting, list[Record]]:
    """Return the records of each setting; a setting of the newest commit is last.

    The newest commit is that of the newest run, or its head. Its last setting is one with times, if
    there is any.
    """
    found = dict(grouped(records, setting_of))
    newest = {setting: max(record.run_id for record in group) for setting, group in found.items()}
    last = {s.what: newest[s] for s in sorted(found, key=newest.__getitem__)}
    order = sorted(found, key=lambda s: (last[s.what], s.what, s.fingerprint != "", newest[s], s))
    return {setting: found[setting] for setting in order}


def latest(groups: dict[Setting, list[Record]]) -> list[Record]:
    """Return the records of the last setting, and those that its newest run has of other settings.

    One run has a setting for each transport, and one for records without times. If a later run of
    the same commit has no times at all, its records are returned, too.

    Args:
        groups: as `by_setting` returns them; not empty.
    """
    *_, (setting, records) = groups.items()
    same = {s: group for s, group in groups.items() if s.what == setting.what}
    runs = {max(r.run_id for r in records), max(r.run_id for r in chain(*same.values()))}
    others = (r for s, group in same.items() if s != setting for r in group)
    return records + [r for r in others if r.run_id in runs]


def rows(records: Iterable[Record]) -> list[Row]:
    """Return a row for each measured case and number of ranks, sorted by these."""
    measured = [record for record in records if record.seconds]
    launches = [group for _, group in grouped(measured, lambda record: record.key)]
    fewest: dict[str, tuple[int, float]] = {}
    for group in launches:
        case, ranks = group[0].key
        fewest.setdefault(case, (ranks, statistics.median(r.seconds for r in group)))
    return [_row(group, *fewest[group[0].case.id]) for group in launches]


def grouped(things: Iterable[T], name: Callable[[T], Any]) -> Iterator[tuple[Any, list[T]]]:
    """Yield each result of `name` with the list of items that give it, sorted by the results."""
    for key, group in groupby(sorted(things, key=name), key=name):
        yield key, list(group)


def _row(group: list[Record], fewest: int, slowest: float) -> Row:
    last, seconds = group[-1], statistics.median(r.seconds for r in group)
    case, work, phases = last.case, last.work, [record.phases or {} for record in group]
    traffic = [count for name, count in (last.comm or {}).items() if name != "control"]
    moves = case.layer == "collectives" and case.ranks > 1 and traffic  # not only agreement
    algbw = _rate(traffic[0].bytes_result, seconds) if moves else None
    busy = BUS[case.scheme](case.ranks) if case.scheme in BUS else 1.0
    shares = [
        found["communication"].max_s / found["total"].max_s
        for found in phases
        if "communication" in found and found["total"].max_s > 0
    ]
    return Row(
        case=case,
        seconds=seconds,
        speedup=slowest / seconds,
        efficiency=slowest / seconds * fewest / case.ranks,
        algbw=algbw,
        busbw=None if algbw is None else algbw * busy,
        share=statistics.median(shares) if shares else None,
        sent=sum(count.bytes_sent for count in traffic),
        tokens_per_s=_rate(work.tokens if work else None, seconds),
        flops_per_s=_rate(work.flops if work else None, seconds),
        peak_bytes=last.memory.peak_bytes if last.memory else None,
        imbalance=statistics.median(r.timing.imbalance for r in group if r.timing),
        flags=tuple(dict.fromkeys(flag for r in group for flag in flags(r))),
        phases={
            name: statistics.median(found[name].mean_s for found in phases if name in found)
            for name in phases[-1]
        },
    )


def _rate(count: int | None, seconds: float) -> float | None:
    return None if count is None else count / seconds


def flags(record: Record) -> list[str]:
    """Return the caveats that hold for a record."""
    transport, timing = record.transport, record.timing
    holds = (
        transport and transport.oversubscribed,
        transport and transport.shared_gpu,
        timing and timing.skew_limited,
    )
    return [name for name, shown in zip(CAVEATS, holds, strict=True) if shown]
