"""What is required of communication over a link, and whether it is reached. Pure arithmetic on the samples of launches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks.netlab.contests import BY_AXES, LIBRARY, STREAM_BYTES
from benchmarks.netlab.setting import Setting
from benchmarks.netlab.worker import STREAM
from benchmarks.peers.ratios import Ratio, summarized

RING, DOUBLING, HIERARCHY = "segmented_ring", "recursive_doubling", "hierarchical"
BOTH, COMPUTE, COMMUNICATION = "both", "compute", "communication"
Seconds = Mapping[str, list[float]]

SETTINGS = (
    Setting("check, 3 hosts", "check", hosts=3),
    Setting("check, 2 x 2", "check", hosts=2, per_host=2),
    Setting("16 MiB, P = 2", "all_reduce", hosts=2, contestants=(RING, LIBRARY), rounds=15),
    Setting("16 MiB, P = 3", "all_reduce", hosts=3, contestants=(RING, LIBRARY), rounds=11),
    Setting("1 KiB, 1 ms, P = 4", "all_reduce", 4, link="1gbit,1ms", nbytes=1 << 10, contestants=(DOUBLING, LIBRARY), rounds=25),
    Setting("64 KiB, 1 ms, P = 4", "all_reduce", 4, link="1gbit,1ms", nbytes=1 << 16, contestants=(DOUBLING, LIBRARY), rounds=25),
    Setting("16 MiB, 2 x 2", "all_reduce", hosts=2, per_host=2, contestants=(HIERARCHY, BY_AXES, RING, LIBRARY), rounds=11),
    Setting("ring attention, P = 2", "overlap", hosts=2, rounds=25),
)
"""All launches."""


@dataclass(frozen=True)
class Row:
    """One requirement: the median over the rounds must be at least, or at most, the target; None where it was not measured."""

    text: str
    relation: str
    target: float
    found: Ratio | None

    @property
    def mark(self) -> str:
        """Reached or not, by the median; "open" where the interval crosses the target."""
        if self.found is None:
            return "not measured"
        holds = [self._holds(x) for x in (self.found.median, self.found.low, self.found.high)]
        return ("reached" if holds[0] else "not reached") + ("" if len(set(holds)) == 1 else ", open")

    def _holds(self, value: float) -> bool:
        return value >= self.target if self.relation == ">=" else value <= self.target


def rows(launches: Mapping[str, dict[str, Any]]) -> Iterator[Row]:
    """Every requirement, from the launches by name."""
    seconds = {name: launch.get("seconds", {}) for name, launch in launches.items()}
    by_name = {setting.name: setting for setting in SETTINGS}
    for ranks in (2, 3):
        name = f"16 MiB, P = {ranks}"
        over = _over_bound(by_name[name], RING)
        yield Row(f"all_reduce {name}: time / (2(P-1)/P n/B)", "<=", 1.05, _each(seconds.get(name), over))
    against = (("16 MiB, P = 3", RING, 2.4), ("1 KiB, 1 ms, P = 4", DOUBLING, 2.0), ("64 KiB, 1 ms, P = 4", DOUBLING, 2.0))
    for name, ours, target in against:
        yield Row(f"all_reduce {name}: library / {ours}", ">=", target, _each(seconds.get(name), _times_faster(ours)))
    nodes = "16 MiB, 2 x 2"
    best = HIERARCHY if HIERARCHY in seconds.get(nodes, {}) else BY_AXES
    over = _over_bound(by_name[nodes], best)
    yield Row(f"all_reduce {nodes}: (n/B) / {best}", ">=", 0.9, _each(seconds.get(nodes), lambda s: 1 / over(s)))
    hidden = _each(seconds.get("ring attention, P = 2"), _hidden)
    yield Row("ring attention: share of the communication that is hidden", ">=", 0.85, hidden)


Of = Callable[[str], float]
"""Seconds of a contestant in one round."""


def _over_bound(setting: Setting, name: str) -> Callable[[Of], float]:
    """Time over the least that an all-reduce between the hosts takes, by what the stream of the same round has carried."""
    factor = 2 * (setting.hosts - 1) / setting.hosts * setting.nbytes / STREAM_BYTES
    return lambda seconds: seconds(name) / (factor * seconds(STREAM))


def _times_faster(ours: str) -> Callable[[Of], float]:
    return lambda seconds: seconds(LIBRARY) / seconds(ours)


def _hidden(seconds: Of) -> float:
    return 1 - (seconds(BOTH) - seconds(COMPUTE)) / seconds(COMMUNICATION)


def _each(seconds: Seconds | None, value: Callable[[Of], float]) -> Ratio | None:
    """A value of every round, as median and interval; None where something for it was not measured."""
    if not seconds:
        return None
    rounds = [dict(zip(seconds, times, strict=True)) for times in zip(*seconds.values(), strict=True)]
    try:
        return summarized([value(times.__getitem__) for times in rounds])
    except KeyError:
        return None
