"""The launches over the emulated network, as data."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import msgspec

from benchmarks.contests.netlab.hosts import Link
from benchmarks.launching import Record
from benchmarks.statistics import Interval, Requirement, exact_interval


class Setting(msgspec.Struct, frozen=True):
    """One launch.

    Args:
        name: of the launch; rows find their samples by it.
        kind: "check" (results of every algorithm), "all_reduce" or "overlap" (times).
        hosts, per_host: how many hosts, and ranks on each.
        link: of each host, as `Link.parse` takes it.
        nbytes: of the vector, float32.
        contestants: algorithms of an all-reduce; "library" is the MPI library's own, "by axes" a
            hierarchy made by hand.
        rounds: samples of each contestant.
        modelled: whether the link is a model inside the transport, on one machine.
    """

    name: str
    kind: str
    hosts: int
    per_host: int = 1
    link: str = "1gbit"
    nbytes: int = 1 << 24
    contestants: tuple[str, ...] = ()
    rounds: int = 9
    modelled: bool = False

    @property
    def ranks(self) -> int:
        """Number of ranks on all hosts together."""
        return self.hosts * self.per_host

    @property
    def wire(self) -> Link:
        """The link of each host."""
        return Link.parse(self.link)


LIBRARY, BY_AXES, STREAM = "library", "by axes", "stream"
RING, DOUBLING, HIERARCHY = "segmented_ring", "recursive_doubling", "hierarchical"
STREAM_BYTES = 1 << 24
SETTINGS = (
    Setting("check, 3 hosts", "check", hosts=3),
    Setting("check, 2 x 2", "check", hosts=2, per_host=2),
    Setting("16 MiB, P = 2", "all_reduce", hosts=2, contestants=(RING, LIBRARY), rounds=15),
    Setting("16 MiB, P = 3", "all_reduce", hosts=3, contestants=(RING, LIBRARY), rounds=11),
    Setting(
        "1 KiB, 1 ms, P = 4",
        "all_reduce",
        4,
        link="1gbit,1ms",
        nbytes=1 << 10,
        contestants=(DOUBLING, LIBRARY),
        rounds=25,
    ),
    Setting(
        "64 KiB, 1 ms, P = 4",
        "all_reduce",
        4,
        link="1gbit,1ms",
        nbytes=1 << 16,
        contestants=(DOUBLING, LIBRARY),
        rounds=25,
    ),
    Setting(
        "16 MiB, 2 x 2",
        "all_reduce",
        hosts=2,
        per_host=2,
        contestants=(HIERARCHY, BY_AXES, RING, LIBRARY),
        rounds=11,
    ),
    Setting("ring attention, P = 2", "overlap", hosts=2, rounds=25),
)
"""All launches."""


Seconds = Mapping[str, list[float]]
Of = Callable[[str], float]
"""Seconds of a contestant in one round."""


def rows(launches: Mapping[str, Record]) -> Iterator[Requirement]:
    """Yield every requirement, from the launches by name."""
    seconds: dict[str, Seconds] = {
        name: launch.get("seconds", {}) for name, launch in launches.items()
    }

    def row(
        text: str, relation: str, bound: float, name: str, value: Callable[[Of], float]
    ) -> Requirement:
        return Requirement(text, relation, bound, _each(seconds.get(name, {}), value))

    for name in ("16 MiB, P = 2", "16 MiB, P = 3"):
        yield row(
            f"all_reduce {name}: time / (2(P-1)/P n/B)", "<=", 1.05, name, _over_bound(name, RING)
        )
    for name, ours, bound in (
        ("16 MiB, P = 3", RING, 2.4),
        ("1 KiB, 1 ms, P = 4", DOUBLING, 2.0),
        ("64 KiB, 1 ms, P = 4", DOUBLING, 2.0),
    ):
        yield row(f"all_reduce {name}: library / {ours}", ">=", bound, name, _times_faster(ours))
    nodes = "16 MiB, 2 x 2"
    best = HIERARCHY if HIERARCHY in seconds.get(nodes, {}) else BY_AXES
    over = _over_bound(nodes, best)
    yield row(f"all_reduce {nodes}: (n/B) / {best}", ">=", 0.9, nodes, lambda of: 1 / over(of))
    text = "ring attention: share of the communication that is hidden"
    hidden = "ring attention, P = 2"
    yield row(
        text, ">=", 0.85, hidden, lambda of: 1 - (of("both") - of("compute")) / of("communication")
    )


def _over_bound(launch: str, name: str) -> Callable[[Of], float]:
    """Time over the least that an all-reduce between the hosts takes, by the rate of the stream of the same round."""
    setting = next(setting for setting in SETTINGS if setting.name == launch)
    factor = 2 * (setting.hosts - 1) / setting.hosts * setting.nbytes / STREAM_BYTES
    return lambda of: of(name) / (factor * of(STREAM))


def _times_faster(ours: str) -> Callable[[Of], float]:
    return lambda of: of(LIBRARY) / of(ours)


def _each(seconds: Seconds, value: Callable[[Of], float]) -> Interval | None:
    """A value of every round, as median and interval; None if something for it was not measured."""
    rounds = [
        dict(zip(seconds, times, strict=True)) for times in zip(*seconds.values(), strict=True)
    ]
    try:
        return exact_interval([value(times.__getitem__) for times in rounds]) if rounds else None
    except KeyError:
        return None
