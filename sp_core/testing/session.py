"""Keep what all tests of a session share: the tier, the device, and the counts printed at its end."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from sp_core.testing.remarks import Tally

if TYPE_CHECKING:
    import torch

    from sp_core.testing.mpi import MpiCarrier
    from sp_core.testing.plan import Example, Result, Spec

_LOCAL_RANKS = ("OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID")


@dataclass
class Session:
    """Set up by the pytest plugin. The defaults are those of a run without it.

    Attributes:
        control: between the ranks of this process's launch.
        ranks: of the launches that `attempt` starts, if an engine outside of them does.
        attempt: tries an example, if ranks are neither threads nor this launch's.
    """

    control: MpiCarrier | None = None
    ranks: int = 0
    attempt: Callable[[Spec, Example], Result] | None = None
    device: str = "cpu"
    share_gpu: bool = False
    raw_replay: bool = True
    seed: int | None = None
    command: str = "python -m pytest {test}"
    node_id: str = ""
    tally: Tally = field(default_factory=Tally)

    def begin(self) -> None:
        """Make this the session of the process."""
        global current
        current = self

    @property
    def world_size(self) -> int:
        """Ranks of the launch, or of those that another process starts; 0 if ranks are threads."""
        return self.ranks if self.control is None else self.control.size

    def test_id(self, fallback: str) -> str:
        """Return the id of the running test, as the command line takes it."""
        return self.node_id or os.environ.get("PYTEST_CURRENT_TEST", fallback).rsplit(" (", 1)[0]

    def summary(self) -> str:
        """Return one line of counts, and one more if examples have named their scheme."""
        tally, schemes = self.tally, self.tally.schemes()
        raw = f" (+ {tally.raw} raw)" if tally.raw else ""
        line = f"{tier()}: {tally.tests} tests, {tally.examples} examples{raw}; examples by ranks {_listed(tally.sizes)}"
        return (
            f"{line}\nexamples by scheme {_listed(schemes)}; {len(tally.pairs)} pairs of features"
            if schemes
            else line
        )


def _listed(counts: Mapping[Any, int]) -> str:
    return "{" + ", ".join(f"{name}: {count}" for name, count in sorted(counts.items())) + "}"


current = Session()


def tier() -> Literal["threads", "mpi"]:
    """Return what ranks are in this session."""
    return "threads" if current.control is None else "mpi"


def device() -> torch.device:
    """Return the device that the tests of this rank use, as `--sp-device` says.

    For CUDA it is the local rank's own GPU. With `--sp-share-gpu` ranks share the GPUs in turn.

    Raises:
        DeviceError: there are fewer GPUs than ranks on this machine, and sharing was not asked for.
    """
    import torch

    if current.device != "cuda":
        return torch.device(current.device)
    from sp_core.errors import DeviceError

    local = next((int(os.environ[name]) for name in _LOCAL_RANKS if name in os.environ), 0)
    count = torch.cuda.device_count()
    if local >= count and not (current.share_gpu and count):
        raise DeviceError(
            f"local rank {local} has no GPU of its own: this machine offers {count}. Pass --sp-share-gpu or start fewer ranks."
        )
    return torch.device("cuda", local % count)
