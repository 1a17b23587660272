"""Who takes part: this project's schemes, its peers, and one process."""

from __future__ import annotations

import functools
import importlib
import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from benchmarks.contests.peers.setting import BALANCED, LAYOUTS, Setting
from benchmarks.sample import meet_asleep
from benchmarks.worker import Intracomm
from sp_core.communicator import Check
from sp_core.mask import Mask
from sp_core.mesh import Mesh
from sp_core.schemes import SCHEMES
from sp_core.sharding import Sharding

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
    attend: Attend | None
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
        self._gloo = start_gloo(folder, world.rank, world.size)
        self._peers = dict(self._find_peers())

    def contestants(self, seq: int, *, extras: bool) -> Iterator[Contestant]:
        """Yield all contestants at one length; with `extras` unmasked attention and single ranks too."""
        for check, mesh in self.meshes.items():
            for scheme, layouts in LAYOUTS.items():
                yield from (
                    _ours(f"{scheme}/{layout}/{check}", mesh, scheme, layout, seq)
                    for layout in layouts
                )
        for name, (attend, missing) in self._peers.items():
            ring = name.startswith("torch")
            layout = "zigzag" if ring else "contiguous"
            yield Contestant(
                name, attend, layout, self.world.size, heads_first=ring, missing=missing
            )
        yield from _processes()
        for scheme, layout in BALANCED.items() if extras else ():
            yield _ours(
                f"{scheme}/{layout}/off/full", self.meshes["off"], scheme, layout, seq, causal=False
            )
            yield _ours(f"{scheme}/one rank", self.single, scheme, "contiguous", seq)

    def free(self) -> None:
        """End all communicators."""
        import torch.distributed as dist

        for mesh in (*self.meshes.values(), self.single):
            mesh.free()
        dist.destroy_process_group()

    def _find_peers(self) -> Iterator[tuple[str, tuple[Attend | None, str]]]:
        for rotation in ROTATIONS:
            yield (
                f"torch ring/{rotation}",
                self._find(functools.partial(torch_ring, self._gloo, rotation)),
            )
        yield "deepspeed ulysses", self._find(functools.partial(deepspeed_ulysses, self._gloo))

    def _find(self, make: Callable[[], Attend]) -> tuple[Attend | None, str]:
        """A peer, or why it cannot take part on some rank: all ranks must come to the same answer."""
        attend, missing = None, ""
        try:
            attend = make()
        except MISSING as error:
            missing = f"{type(error).__name__}: {error}"
        meet_asleep(
            self.world
        )  # imports take seconds, and a rank that spins takes them from the other
        reasons: list[str] = self.world.allgather(missing)
        return (None, next(filter(None, reasons))) if any(reasons) else (attend, "")


def _ours(
    name: str, mesh: Mesh, scheme: str, layout: str, seq: int, *, causal: bool = True
) -> Contestant:
    function: Callable[..., Any] = SCHEMES[scheme]
    sharding: Sharding = getattr(Sharding, layout)(seq, mesh.size)
    attend = functools.partial(
        function, comm=mesh["sp"], sharding=sharding, mask=Mask(causal=causal)
    )
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


NAMES = ("out", "dq", "dk", "dv")
LIMIT = 2e-5
"""Largest error over largest element that passes; correct float32 results differ by less than 3e-6, a mask off by one by 1e-1."""


@dataclass(frozen=True)
class Part:
    """The tokens of one contestant on one rank: q, k, v and the upstream gradient, and where they are in the sequence."""

    q: Tensor
    k: Tensor
    v: Tensor
    grad: Tensor
    positions: Tensor
    heads_first: bool


def draw(setting: Setting, seq: int) -> tuple[Tensor, ...]:
    """q, k, v and the upstream gradient of the whole sequence, float32 (1, S, H, D) each, normally distributed."""
    generator = torch.Generator().manual_seed(setting.seed * 1_000_003 + seq)
    return tuple(
        torch.randn(1, seq, setting.heads, setting.head_dim, generator=generator) for _ in NAMES
    )


def part(whole: Sequence[Tensor], positions: Tensor, *, heads_first: bool) -> Part:
    """Some tokens of the whole, contiguous as (1, S, H, D) or, `heads_first`, as (1, H, S, D)."""
    mine = [x[:, positions] for x in whole]
    q, k, v, grad = ((x.transpose(1, 2) if heads_first else x).contiguous() for x in mine)
    return Part(
        q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), grad, positions, heads_first
    )


def alone(whole: Sequence[Tensor], *, causal: bool) -> tuple[Tensor, ...]:
    """Out, dq, dk and dv of one process, (1, S, H, D) each."""
    mine = part(whole, torch.arange(whole[0].shape[1]), heads_first=True)
    out = F.scaled_dot_product_attention(mine.q, mine.k, mine.v, is_causal=causal)
    gradients = torch.autograd.grad(out, (mine.q, mine.k, mine.v), mine.grad)
    return tuple(x.detach().transpose(1, 2) for x in (out, *gradients))


def errors(results: Sequence[Tensor], mine: Part, expected: Sequence[Tensor]) -> list[float]:
    """Largest |result - expected| over largest |expected|, of out, dq, dk and dv; infinite where a result is not finite."""
    found = []
    for x, whole in zip(results, expected, strict=True):
        x = x.detach().transpose(1, 2) if mine.heads_first else x.detach()
        difference = float((x - whole[:, mine.positions]).abs().max() / whole.abs().max())
        found.append(difference if math.isfinite(difference) else math.inf)
    return found


Attend = Callable[[Tensor, Tensor, Tensor], Tensor]

TORCH_RING = "torch.distributed.tensor.experimental._context_parallel._attention"
SEQ_DIM = 2  # of (B, H, S, D)
ROTATIONS = {"all-gather": "ALL_GATHER", "all-to-all": "ALL_TO_ALL"}


def start_gloo(folder: Path, rank: int, size: int) -> Any:
    """A process group over the loopback device; ranks find each other through a file."""
    if Path("/sys/class/net/lo").exists():
        os.environ.setdefault(
            "GLOO_SOCKET_IFNAME", "lo"
        )  # else gloo looks the host name up, which containers may not know
    dist.init_process_group(
        "gloo", init_method=f"file://{folder / 'gloo'}", rank=rank, world_size=size
    )
    return dist.group.WORLD


def torch_ring(group: Any, rotation: str) -> Attend:
    """Torch's ring with head-tail load balancing; takes and returns (B, H, S/P, D) of chunks r and 2P-1-r.

    Args:
        group: a process group.
        rotation: "all-gather", torch's default, or "all-to-all".

    Source: torch 2.13, `_scaled_dot_product_ring_flash_attention` and its backward, with the CPU's
    kernel for CUDA's.
    """
    ring: Any = importlib.import_module(TORCH_RING)
    method = getattr(ring._RotateMethod, ROTATIONS[rotation])
    aten = torch.ops.aten
    options = {"is_causal": True, "dropout_p": 0.0}

    class Ring(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            ring._cp_options.enable_load_balance = True
            ring._cp_options.rotate_method = method
            op = aten._scaled_dot_product_flash_attention_for_cpu
            results: tuple[Tensor, ...] = ring._templated_ring_attention(
                group, SEQ_DIM, op, q, k, v, **options
            )
            ctx.save_for_backward(q, k, v, *results)
            return results[0]

        @staticmethod
        def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor, ...]:
            op = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
            q, k, v, out, lse = ctx.saved_tensors
            gradients = ring._templated_ring_attention_backward(
                group, SEQ_DIM, op, grad_out, "grad_out", q, k, v, out, lse, **options
            )
            return tuple(gradients[:3])

    return cast("Attend", Ring.apply)


def deepspeed_ulysses(group: Any) -> Attend:
    """DeepSpeed's DistributedAttention around torch's attention; takes and returns (B, S/P, H, D), tokens in order.

    Raises:
        ImportError: DeepSpeed, or something that it imports, is not installed.
    """
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    comm: Any = importlib.import_module("deepspeed.comm")
    layer: Any = importlib.import_module("deepspeed.sequence.layer")
    kernels: Any = importlib.import_module("deepspeed.ops")
    # Else its all-reduce through shared memory, not used here, is compiled now, which never ends
    # after an interrupted build.
    kernels.__compatible_ops__["deepspeed_shm_comm"] = False
    comm.init_distributed(
        dist_backend="gloo", auto_mpi_discovery=False, verbose=False, dist_init_required=False
    )

    def local(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)

    module = layer.DistributedAttention(local, group, scatter_idx=2, gather_idx=1)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = module(q, k, v, 0)
        return out

    return attend
