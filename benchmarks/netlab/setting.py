"""What one launch measures. Plain numbers; the driver writes them, the ranks read them."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.netlab.plan import Link


@dataclass(frozen=True)
class Setting:
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
        """On all hosts together."""
        return self.hosts * self.per_host

    @property
    def wire(self) -> Link:
        """The link of each host."""
        return Link.parse(self.link)

    def save(self, folder: Path) -> None:
        """Write it for `load`."""
        (folder / "setting.json").write_text(json.dumps(asdict(self)))

    @classmethod
    def load(cls, folder: Path) -> Setting:
        """Read what `save` has written."""
        values = json.loads((folder / "setting.json").read_text())
        return cls(**{**values, "contestants": tuple(values["contestants"])})
