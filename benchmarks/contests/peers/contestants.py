"""Who takes part: this project's schemes, its peers, and one process."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.contests.peers import rivals
from benchmarks.contests.peers.problem import Part
from benchmarks.contests.peers.setting import BALANCED, LAYOUTS
from benchmarks.sample import meet_asleep
from sp_core.communicator import Check
from sp_core.mask import Mask
from sp_core.mesh import Mesh
from sp_core.schemes import SCHEMES
from sp_core.sharding import Sharding

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

CHECKS: tuple[Check, ...] = ("off", "agree")
MISSING = (ImportError, AttributeError, RuntimeError, OSError)


@dataclass(frozen=True)
class Contestant:
    """One way to compute the attention.

    Args:
        name: parts separated by "/".
        attend: from q, k and v of this rank to out; None where it is not installed.
        layout: which tokens a rank has.
        ranks: how many ranks take part; with 1, rank 0 computes all of it and the others sleep.
        heads_first: whether tensors are (B, H, S, D), not (B, S, H, D).
        causal: whether tokens see only those before them.
        threads: of each rank.
        missing: why `attend` is None.
    """

    name: str
    attend: rivals.Attend | None
    layout: str = "contiguous"
    ranks: int = 1
    heads_first: bool = False
    causal: bool = True
    threads: int = 1
    missing: str = ""

    def run(self, mine: Part) -> tuple[Tensor, ...]:
        """Forward and backward: out, dq, dk and dv of this rank's tokens."""
        assert self.attend is not None, self.name
        out = self.attend(mine.q, mine.k, mine.v)
        return (out, *torch.autograd.grad(out, (mine.q, mine.k, mine.v), mine.grad))

    def sharding(self, seq: int) -> Sharding:
        """Who has which tokens."""
        made: Sharding = getattr(Sharding, self.layout)(seq, self.ranks)
        return made


class Field:
    """Everybody's communicators, made once for a launch.

    Args:
        world: all ranks.
        folder: where gloo's ranks find each other.
    """

    def __init__(self, world: Intracomm, folder: Path) -> None:
        from mpi4py import MPI

        self.world = world
        self.meshes = {check: Mesh(world, check=check, sp=world.size) for check in CHECKS}
        self.single = Mesh(MPI.COMM_SELF, check="off", sp=1)
        self._gloo = rivals.start_gloo(folder, world.rank, world.size)
        self._peers = dict(self._find_peers())

    def contestants(self, seq: int, *, extras: bool) -> list[Contestant]:
        """All of them at one length; with `extras` unmasked attention and single ranks too."""
        found = [*self._ours(seq), *self._rivals(), *_processes()]
        return [*found, *self._unmasked(seq), *self._one_rank(seq)] if extras else found

    def free(self) -> None:
        """End all communicators."""
        import torch.distributed as dist

        for mesh in (*self.meshes.values(), self.single):
            mesh.free()
        dist.destroy_process_group()

    def _ours(self, seq: int) -> Iterator[Contestant]:
        for check, mesh in self.meshes.items():
            for scheme, layouts in LAYOUTS.items():
                yield from (_ours(f"{scheme}/{layout}/{check}", mesh, scheme, layout, seq) for layout in layouts)

    def _unmasked(self, seq: int) -> Iterator[Contestant]:
        for scheme, layout in BALANCED.items():
            yield _ours(f"{scheme}/{layout}/off/full", self.meshes["off"], scheme, layout, seq, causal=False)

    def _one_rank(self, seq: int) -> Iterator[Contestant]:
        yield from (_ours(f"{scheme}/one rank", self.single, scheme, "contiguous", seq) for scheme in SCHEMES)

    def _rivals(self) -> Iterator[Contestant]:
        for name, (attend, missing) in self._peers.items():
            ring = name.startswith("torch")
            layout = "zigzag" if ring else "contiguous"
            yield Contestant(name, attend, layout, self.world.size, heads_first=ring, missing=missing)

    def _find_peers(self) -> Iterator[tuple[str, tuple[rivals.Attend | None, str]]]:
        for rotation in rivals.ROTATIONS:
            yield f"torch ring/{rotation}", self._find(functools.partial(rivals.torch_ring, self._gloo, rotation))
        yield "deepspeed ulysses", self._find(functools.partial(rivals.deepspeed_ulysses, self._gloo))

    def _find(self, make: Callable[[], rivals.Attend]) -> tuple[rivals.Attend | None, str]:
        """A peer, or why it cannot take part on some rank: all ranks must come to the same answer."""
        attend, missing = None, ""
        try:
            attend = make()
        except MISSING as error:
            missing = f"{type(error).__name__}: {error}"
        meet_asleep(self.world)  # imports take seconds, and a rank that spins takes them from the other
        reasons: list[str] = self.world.allgather(missing)
        return (None, next(filter(None, reasons))) if any(reasons) else (attend, "")


def _ours(name: str, mesh: Mesh, scheme: str, layout: str, seq: int, *, causal: bool = True) -> Contestant:
    function: Callable[..., Any] = SCHEMES[scheme]
    sharding: Sharding = getattr(Sharding, layout)(seq, mesh.size)
    attend = functools.partial(function, comm=mesh["sp"], sharding=sharding, mask=Mask(causal=causal))
    return Contestant(name, attend, layout, mesh.size, causal=causal)


def _processes() -> list[Contestant]:
    """Plain torch. It is fastest with heads first; `strided` has the layout of the schemes."""

    def strided(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)

    plain = functools.partial(F.scaled_dot_product_attention, is_causal=True)
    return [
        Contestant("sdpa/1 thread", plain, heads_first=True),
        Contestant("sdpa/2 threads", plain, heads_first=True, threads=2),
        Contestant("sdpa/1 thread/strided", strided),
    ]
