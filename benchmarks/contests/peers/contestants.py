"""Check and time this project's schemes, its peers and one process: who is right takes turns."""

from __future__ import annotations

import functools
import importlib
import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.cases.case import wait_for
from benchmarks.contests.peers.__main__ import (
    BALANCED,
    DUO,
    HEADS,
    LAYOUTS,
    PEERS,
    PLACE,
    SOLO,
    heat_name,
)
from benchmarks.launching import Record
from benchmarks.machine import device as device_of, facts
from benchmarks.sample import ABSENT, Span, makespans, meet_asleep, race
from benchmarks.worker import THREADS, Intracomm, Rank
from sp_core.mask import Mask
from sp_core.mesh import Mesh
from sp_core.schemes import SCHEMES
from sp_core.sharding import Sharding
from tests.conformance.adapters import deepspeed_ulysses, torch_ring
from tests.conformance.gloo import Gloo

HEAD_DIM = 64
LEAST, MOST = 3, 12  # samples of a contestant at 4096 tokens and more, and at few
NAMES = ("out", "dq", "dk", "dv")
LIMIT = 2e-5
"""Largest error over largest element that passes.

Correct float32 results differ by less than 3e-6, a mask off by one by 1e-1. Lower precisions may
add twice the error of one process, and the rounding of one partial result for each rank.
"""

MISSING = (ImportError, AttributeError, RuntimeError, OSError)
BROKEN = (RuntimeError, ValueError, TypeError, AttributeError, AssertionError, NotImplementedError)
TORCH_RING = "torch.distributed.tensor.experimental._context_parallel._attention"
GLOO_SECONDS = 1800.0
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
Around = Callable[[], AbstractContextManager[None]]


@dataclass(frozen=True)
class Contestant:
    """One way to compute the attention.

    Args:
        name: parts separated by "/".
        attend: from q, k and v of this rank to out; the reason if it is not installed.
        layout: which tokens a rank has.
        ranks: how many ranks take part; with 1, rank 0 computes all of it and the others sleep.
        heads_first: whether tensors lie in memory as (B, H, S, D), not (B, S, H, D).
        causal: whether tokens see only those before them.
        threads: of each rank.
        around: opened before forward and closed after backward; its time does not count.
    """

    name: str
    attend: Attend | str
    layout: str = "contiguous"
    ranks: int = 1
    heads_first: bool = False
    causal: bool = True
    threads: int = 1
    around: Around = nullcontext


@dataclass(frozen=True)
class Part:
    """The tokens of one contestant on one rank: q, k and v, and the upstream gradient."""

    qkv: tuple[Tensor, ...]
    grad: Tensor
    positions: Tensor

    def run(self, attend: Attend) -> tuple[Tensor, ...]:
        """Compute out, dq, dk and dv of these tokens."""
        out = attend(*self.qkv)
        return (out, *torch.autograd.grad(out, self.qkv, self.grad))


def draw(seq: int, seed: int, heads: int = HEADS, head_dim: int = HEAD_DIM) -> tuple[Tensor, ...]:
    """Draw q, k, v and the upstream gradient of the whole sequence, float32 (1, S, H, D) each."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + seq)
    return tuple(torch.randn(1, seq, heads, head_dim, generator=generator) for _ in NAMES)


def part(whole: Sequence[Tensor], positions: Tensor, *, heads_first: bool) -> Part:
    """Take some tokens, (1, S, H, D), which lie in memory so or, `heads_first`, as (1, H, S, D)."""
    mine = [x[:, positions].contiguous() for x in whole]
    if heads_first:
        mine = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in mine]
    *qkv, grad = mine
    return Part(tuple(x.requires_grad_() for x in qkv), grad, positions)


def undivided(whole: Sequence[Tensor]) -> Part:
    """Take all tokens, in the layout in which torch is fastest."""
    everywhere = torch.arange(whole[0].shape[1], device=whole[0].device)
    return part(whole, everywhere, heads_first=True)


def alone(whole: Sequence[Tensor], *, causal: bool) -> tuple[Tensor, ...]:
    """Compute out, dq, dk and dv in one process, (1, S, H, D) each."""
    return tuple(x.detach() for x in undivided(whole).run(functools.partial(plain, causal=causal)))


def plain(q: Tensor, k: Tensor, v: Tensor, *, causal: bool = True) -> Tensor:
    """Compute attention of tensors (B, S, H, D) with torch."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(1, 2)


def errors(results: Sequence[Tensor], mine: Part, expected: Sequence[Tensor]) -> list[float]:
    """Return the largest |result - expected| over the largest |expected|, of out, dq, dk and dv.

    Where a result is not finite, the error is infinite.
    """
    found = []
    for x, whole in zip(results, expected, strict=True):
        difference = float((x.detach() - whole[:, mine.positions]).abs().max() / whole.abs().max())
        found.append(difference if math.isfinite(difference) else math.inf)
    return found


def verdict(
    answers: list[tuple[str, list[float]]], names: Sequence[str] = NAMES, limit: float = LIMIT
) -> Record:
    """Return the check of one contestant from the error text and the errors of each rank."""
    broken = [f"rank {rank}: {text}" for rank, (text, _) in enumerate(answers) if text]
    if broken:
        return {"status": "failed", "reason": broken[0]}
    worst = [max(ranks) for ranks in zip(*(found for _, found in answers), strict=True)]
    told = [error if math.isfinite(error) else None for error in worst]  # JSON knows no infinity
    status = "ok" if max(worst) <= limit else "wrong"
    return {"status": status, "errors": dict(zip(names, told, strict=True)), "limit": limit}


class Heat:
    """All contestants at one sequence length and dtype, that of `whole`."""

    def __init__(self, world: Intracomm, whole: tuple[Tensor, ...]) -> None:
        self.world, self._whole = world, whole
        self._parts: dict[tuple[str, int, bool], Part] = {}
        exact, mine = [x.float() for x in whole], undivided(whole)
        self._expected = {causal: alone(exact, causal=causal) for causal in (True, False)}
        single = max(errors(mine.run(plain), mine, self._expected[True]))
        self._limit = LIMIT + 2 * single + world.size * torch.finfo(whole[0].dtype).eps / 2

    def check(self, contestant: Contestant) -> Record:
        """Compare a contestant's results with those of one process; this is its warm-up too."""
        if isinstance(contestant.attend, str):
            return {"status": "not installed", "reason": contestant.attend}
        broken, found = "", [0.0] * len(NAMES)
        with self._taking_part(contestant) as takes_part:
            if takes_part:
                mine = self._part(contestant)
                try:
                    results = mine.run(contestant.attend)
                    found = errors(results, mine, self._expected[contestant.causal])
                except BROKEN as error:
                    broken = f"{type(error).__name__}: {error}"
        return verdict(self.world.allgather((broken, found)), limit=self._limit)

    def sample(self, contestant: Contestant) -> Span:
        """Time one forward and backward on this rank."""
        with self._taking_part(contestant) as takes_part:
            if not takes_part or isinstance(contestant.attend, str):
                return ABSENT
            mine = self._part(contestant)
            device = mine.positions.device
            wait_for(device)
            if contestant.ranks > 1:
                self.world.Barrier()
            start = time.perf_counter()
            mine.run(contestant.attend)
            wait_for(device)
            return start, time.perf_counter()

    def _part(self, one: Contestant) -> Part:
        """Return this rank's tokens; made once, so that every sample has the same memory."""
        key = (one.layout, one.ranks, one.heads_first)
        if key not in self._parts:
            sharding: Sharding = getattr(Sharding, one.layout)(self._whole[0].shape[1], one.ranks)
            positions = sharding.positions(self.world.rank if one.ranks > 1 else 0)
            chosen = torch.as_tensor(list(positions), device=self._whole[0].device)
            self._parts[key] = part(self._whole, chosen, heads_first=one.heads_first)
        return self._parts[key]

    @contextmanager
    def _taking_part(self, contestant: Contestant) -> Iterator[bool]:
        """Give whether this rank computes; one that does not sleeps until the others are done."""
        torch.set_num_threads(contestant.threads)
        try:
            with contestant.around():
                yield contestant.ranks > 1 or self.world.rank == 0
        finally:
            torch.set_num_threads(THREADS)
        if contestant.ranks == 1:
            meet_asleep(self.world)


def measure(setting: Record, rank: Rank) -> Record:
    """Carry out one launch. One rank has no others to meet: only what one rank does is timed."""
    from mpi4py import MPI

    world, found = rank.world, dict[str, Any]()
    device = device_of(setting["device"], world, share_gpu=False)
    with ExitStack() as stack:
        meshes = {
            check: stack.enter_context(Mesh(world, device=device, check=check, sp=world.size))
            for check in (("off", "agree") if world.size > 1 else ())
        }
        single = stack.enter_context(Mesh(MPI.COMM_SELF, device=device, check="off", sp=1))
        backend = dist.Backend.default_device_backend_map.get(device.type, "gloo")
        Gloo(rank.folder, world, GLOO_SECONDS, backend)
        stack.callback(dist.destroy_process_group)
        others = [*(peers(world, device) if meshes else ()), *processes(device)]
        for seq, dtype in itertools.product(setting["seqs"], setting["dtypes"]):
            extras = seq <= max(PLACE, min(setting["seqs"]))
            contestants = [*ours(meshes, single, seq, extras=extras), *others]
            whole = draw(seq, setting["seed"], setting["heads"])
            heat = Heat(world, tuple(x.to(device, getattr(torch, dtype)) for x in whole))
            usual = min(max(math.ceil(LEAST * PLACE / seq), LEAST), MOST)
            count, seed = setting["samples"] or usual, setting["seed"] + seq
            found[heat_name(seq, dtype)] = held(heat, contestants, count, seed)
    return {**facts(world, device, "all"), "seqs": found}


def held(heat: Heat, contestants: Sequence[Contestant], count: int, seed: int) -> Record:
    """Check all contestants, and time those that are right `count` times."""
    record = {one.name: heat.check(one) for one in contestants}
    right = {
        one.name: functools.partial(heat.sample, one)
        for one in contestants
        if record[one.name]["status"] == "ok"
    }
    for name, spans in race(heat.world, right, count, seed).items():
        times = makespans(spans)
        record[name] |= {"samples_s": times, "median_s": statistics.median(times)}
    return record


def ours(meshes: dict[str, Mesh], single: Mesh, seq: int, *, extras: bool) -> Iterator[Contestant]:
    """Yield our schemes at one length; with `extras` unmasked attention and single ranks too."""

    def one(name: str, mesh: Mesh, scheme: str, layout: str, *, causal: bool = True) -> Contestant:
        sharding: Sharding = getattr(Sharding, layout)(seq, mesh.size)
        mask = Mask(causal=causal)
        attend = functools.partial(SCHEMES[scheme], comm=mesh["sp"], sharding=sharding, mask=mask)
        return Contestant(name, cast("Attend", attend), layout, mesh.size, causal=causal)

    for check, mesh in meshes.items():
        for scheme, layouts in LAYOUTS.items():
            for layout in layouts:
                yield one(f"{scheme}/{layout}/{check}", mesh, scheme, layout)
    for scheme, layout in BALANCED.items() if extras else ():
        for mesh in [meshes["off"]] if meshes else ():
            yield one(f"{scheme}/{layout}/off/full", mesh, scheme, layout, causal=False)
        yield one(f"{scheme}/one rank", single, scheme, "contiguous")


def processes(device: torch.device) -> Iterator[Contestant]:
    """Yield plain torch. It is fastest with heads first; `strided` has the schemes' layout."""
    yield Contestant(SOLO, plain, heads_first=True)
    if device.type == "cpu":
        yield Contestant(DUO, plain, heads_first=True, threads=2)
    yield Contestant(f"{SOLO}/strided", plain)


def peers(world: Intracomm, device: torch.device) -> Iterator[Contestant]:
    """Yield the peers; one that some rank cannot import is not installed on any."""
    makers: tuple[Callable[[], tuple[Attend, Around]], ...] = (
        functools.partial(make_torch_ring, "ALL_GATHER", device),
        functools.partial(make_torch_ring, "ALL_TO_ALL", device),
        make_deepspeed_ulysses,
    )
    for name, make in zip(PEERS, makers, strict=True):
        attend: Attend | str
        around: Around = nullcontext
        try:
            attend, around = make()
        except (*MISSING, ValueError) as error:
            attend = f"{type(error).__name__}: {error}"
        meet_asleep(world)  # imports take seconds, and a rank that spins takes them from the other
        reasons: list[str] = world.allgather(attend if isinstance(attend, str) else "")
        ring = name.startswith("torch")
        layout = "zigzag" if ring else "contiguous"
        attend = next(filter(None, reasons), attend)
        yield Contestant(name, attend, layout, world.size, heads_first=ring, around=around)


def make_torch_ring(rotation: str, device: torch.device) -> tuple[Attend, Around]:
    """Make torch's ring with load balancing; it takes tokens of chunks r and 2P-1-r.

    A GPU has it by the public `context_parallel`, which has no kernel for a CPU.

    Args:
        rotation: "ALL_GATHER", torch's default, or "ALL_TO_ALL".
        device: of the tokens.

    Raises:
        ValueError: torch has no process group for tensors of such a device.
    """
    ring: Any = importlib.import_module(TORCH_RING)
    method = getattr(ring._RotateMethod, rotation)
    dist.get_default_backend_for_device(device)
    ranks = dist.get_world_size()
    mesh = None if device.type == "cpu" else init_device_mesh(device.type, (ranks,))

    @contextmanager
    def around() -> Iterator[None]:
        ring._cp_options.rotate_method = method
        with ExitStack() as stack:
            if mesh is not None:  # it wants a tensor to shard
                given = {"buffers": [torch.zeros(2 * ranks, device=device)], "buffer_seq_dims": [0]}
                stack.enter_context(ring.context_parallel(mesh, **given))
            yield

    how: Any = {"layout": "zigzag", "causal": True, "softmax_scale": None}
    return plain if mesh else functools.partial(torch_ring.attend, **how), around


def make_deepspeed_ulysses() -> tuple[Attend, Around]:
    """Make DeepSpeed's DistributedAttention around torch's attention.

    Raises:
        ImportError: DeepSpeed, or something that it imports, is not installed.
    """
    deepspeed_ulysses.prepare(None, "")
    layer: Any = importlib.import_module("deepspeed.sequence.layer")
    module = layer.DistributedAttention(plain, dist.group.WORLD, scatter_idx=2, gather_idx=1)
    return lambda q, k, v: cast("Tensor", module(q, k, v, 0)), nullcontext
