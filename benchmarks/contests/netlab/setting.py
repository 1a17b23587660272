"""The launches over the emulated network, as data."""

from __future__ import annotations

import msgspec

from benchmarks.contests.netlab.plan import Link


class Setting(msgspec.Struct, frozen=True):
    """One launch.

    Args:
        name: of the launch; rows find their samples by it.
        kind: "check" (results of every algorithm), "all_reduce" or "overlap" (times).
        hosts, per_host: how many hosts, and ranks on each.
        link: of each host, as `Link.parse` takes it.
        nbytes: of the vector, float32.
        contestants: algorithms of an all-reduce; "library" is the MPI library's own, "by axes" a hierarchy made by hand.
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
    Setting("1 KiB, 1 ms, P = 4", "all_reduce", 4, link="1gbit,1ms", nbytes=1 << 10, contestants=(DOUBLING, LIBRARY), rounds=25),
    Setting("64 KiB, 1 ms, P = 4", "all_reduce", 4, link="1gbit,1ms", nbytes=1 << 16, contestants=(DOUBLING, LIBRARY), rounds=25),
    Setting("16 MiB, 2 x 2", "all_reduce", hosts=2, per_host=2, contestants=(HIERARCHY, BY_AXES, RING, LIBRARY), rounds=11),
    Setting("ring attention, P = 2", "overlap", hosts=2, rounds=25),
)
"""All launches."""
