"""Check this project's schemes and other contestants, and time those that are right, in turns."""

import functools
import itertools
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.cases.case import wait_for
from benchmarks.contests.peers.others import (
    Attend,
    Contestant,
    masked_peers,
    masks,
    peers,
    plain,
    processes,
)
from benchmarks.contests.peers.table import (
    BALANCED,
    HEADS,
    LAYOUTS,
    MASKED,
    PLACE,
    heat_name,
)
from benchmarks.launching import Record
from benchmarks.machine import device as device_of, facts
from benchmarks.sample import Span, makespans, race, turn
from benchmarks.worker import Intracomm, Rank
from sp_core.mask import Mask
from sp_core.mesh import Mesh
from sp_core.schemes import SCHEMES
from sp_core.sharding import Sharding
from tests.conformance.gloo import Gloo
from tests.oracle.reference.dense import visible

HEAD_DIM = 64
LEAST, MOST = 3, 12  # samples of a contestant at 4096 tokens and more, and at few
NAMES = ("out", "dq", "dk", "dv")
LIMIT = 2e-5
"""Largest error over largest element that passes.

Correct float32 results differ by less than 3e-6, a mask off by one by 1e-1. Lower precisions may
add twice the error of one process, and the rounding of one partial result for each rank.
"""

BROKEN = (RuntimeError, ValueError, TypeError, AttributeError, AssertionError, NotImplementedError)
GLOO_SECONDS = 1800.0


@dataclass(frozen=True)
class Part:
    """The tokens of one contestant on one rank: q, k and v, and the upstream gradient."""

    qkv: tuple[Tensor, ...]
    grad: Tensor
    positions: Tensor

    def run(self, attend: Attend, *, backward: bool = True) -> tuple[Tensor, ...]:
        """Compute out, and with `backward` dq, dk and dv, of these tokens."""
        with torch.set_grad_enabled(backward):
            out = attend(*self.qkv)
        return (out, *torch.autograd.grad(out, self.qkv, self.grad)) if backward else (out,)


def draw(seq: int, seed: int, heads: int = HEADS, head_dim: int = HEAD_DIM) -> tuple[Tensor, ...]:
    """Draw q, k, v and the upstream gradient of the whole sequence, float32 (1, S, H, D) each."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + seq)
    return tuple(torch.randn(1, seq, heads, head_dim, generator=generator) for _ in NAMES)


def part(whole: Sequence[Tensor], positions: Tensor, *, heads_first: bool) -> Part:
    """Return the tokens at `positions` of each tensor, with shape (1, S, H, D).

    With `heads_first` they lie in memory in the order (1, H, S, D).
    """
    mine = [x[:, positions].contiguous() for x in whole]
    if heads_first:
        mine = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in mine]
    *qkv, grad = mine
    return Part(tuple(x.requires_grad_() for x in qkv), grad, positions)


def alone(whole: Sequence[Tensor], mask: Mapping[str, Any] | None) -> tuple[Tensor, ...]:
    """Compute out, dq, dk and dv in one process, (1, S, H, D) each.

    Args:
        whole: the tensors of `draw`.
        mask: the mask's arguments for the reference; None is causal, by torch's fastest kernel.
    """
    device, everywhere = whole[0].device, range(whole[0].shape[1])
    seen = None if mask is None else visible(everywhere, everywhere, **mask).to(device)
    mine = part(whole, torch.tensor(everywhere, device=device), heads_first=True)
    return tuple(x.detach() for x in mine.run(functools.partial(plain, seen=seen)))


def errors(results: Sequence[Tensor], positions: Tensor, expected: Sequence[Tensor]) -> list[float]:
    """Return the `distance` of out, dq, dk and dv at some positions from the expected ones."""
    pairs = zip(results, expected, strict=True)
    return [distance(x.detach(), y[:, positions]) for x, y in pairs]


def distance(x: Tensor, y: Tensor) -> float:
    """Return the largest |x - y| over the largest |y|; infinity if that is not finite."""
    found = float((x - y).abs().max() / y.abs().max())
    return found if math.isfinite(found) else math.inf


def attempt(
    world: Intracomm,
    act: Callable[[], object],
    found: list[float],
    names: Sequence[str] = NAMES,
    limit: float = LIMIT,
) -> Record:
    """Call `act`, which fills `found` with this rank's errors. Return the check of all ranks."""
    broken = ""
    try:
        act()
    except BROKEN as error:
        broken = f"{type(error).__name__}: {error}"
    return verdict(world.allgather((broken, found)), names, limit)


def verdict(
    answers: list[tuple[str, list[float]]], names: Sequence[str] = NAMES, limit: float = LIMIT
) -> Record:
    """Return the check of one contestant from the error text and the errors of each rank."""
    broken = [f"rank {rank}: {text}" for rank, (text, _) in enumerate(answers) if text]
    if broken:
        return {"status": "failed", "reason": broken[0]}
    worst = [max(ranks) for ranks in zip(*(found for _, found in answers), strict=True)]
    told = [error if math.isfinite(error) else None for error in worst]  # JSON knows no infinity
    found = {"errors": dict(zip(names, told, strict=True)), "limit": limit}
    return {"status": "ok" if max(worst) <= limit else "wrong", **found}


class Heat:
    """Checks and times contestants, at the sequence length and dtype of `whole`."""

    def __init__(self, world: Intracomm, whole: tuple[Tensor, ...]) -> None:
        self.world, self._whole = world, whole
        exact, by_name = [x.float() for x in whole], masks(whole[0].shape[1])
        self._expected = functools.cache(lambda mask: alone(exact, by_name[mask]))
        self._part = functools.cache(self._take)  # every sample has the same memory
        single = max(map(distance, alone(whole, None), self._expected("causal")))
        self._limit = LIMIT + 2 * single + world.size * torch.finfo(whole[0].dtype).eps / 2

    def check(self, contestant: Contestant) -> Record:
        """Compare a contestant's results with those of one process, which also warms it up."""
        if isinstance(contestant.attend, str):
            return {"status": "not installed", "reason": contestant.attend}
        names = NAMES if contestant.backward else NAMES[:1]
        found = [0.0] * len(names)

        def compare(mine: Part, results: Sequence[Tensor]) -> None:
            wanted = self._expected(contestant.mask)[: len(names)]
            found[:] = errors(results, mine.positions, wanted)

        act = functools.partial(self.sample, contestant, compare)
        return attempt(self.world, act, found, names, self._limit)

    def sample(
        self, contestant: Contestant, use: Callable[[Part, Any], None] = lambda *_: None
    ) -> Span:
        """Time one forward and backward on this rank; `use` gets the tokens and the results."""
        attend: Any = contestant.attend

        def act() -> None:
            mine = self._part(contestant.layout, contestant.ranks, contestant.heads_first)
            use(mine, mine.run(attend, backward=contestant.backward))

        how: Any = {"alone": contestant.ranks == 1, "threads": contestant.threads}
        sync = functools.partial(wait_for, self._whole[0].device)
        with contestant.around():
            return turn(self.world, act, **how, sync=sync)

    def _take(self, layout: str, ranks: int, heads_first: bool) -> Part:
        """Return this rank's tokens."""
        sharding: Sharding = getattr(Sharding, layout)(self._whole[0].shape[1], ranks)
        positions = sharding.positions(self.world.rank if ranks > 1 else 0)
        chosen = torch.as_tensor(positions, device=self._whole[0].device)
        return part(self._whole, chosen, heads_first=heads_first)


def measure(setting: Record, rank: Rank) -> Record:
    """Run one launch. If it has one rank, only the contestants of one rank are timed."""
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
            masked = masked_peers(world, seq) if meshes and extras and device.type == "cpu" else ()
            contestants = [*ours(meshes, single, seq, extras=extras), *masked, *others]
            whole = draw(seq, setting["seed"], setting["heads"])
            heat = Heat(world, tuple(x.to(device, getattr(torch, dtype)) for x in whole))
            usual = min(max(math.ceil(LEAST * PLACE / seq), LEAST), MOST)
            count, seed = setting["samples"] or usual, setting["seed"] + seq
            checked = {
                one.name: (heat.check(one), functools.partial(heat.sample, one))
                for one in contestants
            }
            found[heat_name(seq, dtype)] = timed(world, checked, count, seed)
    return {**facts(world, device, "all"), "seqs": found}


def timed(
    world: Intracomm,
    contestants: Mapping[str, tuple[Record, Callable[[], Span]]],
    count: int,
    seed: int,
) -> Record:
    """Return the checks of contestants, and the times of those that are right, `count` of each."""
    record = {name: check for name, (check, _) in contestants.items()}
    right = {name: one for name, (_, one) in contestants.items() if record[name]["status"] == "ok"}
    for name, spans in race(world, right, count, seed).items():
        times = makespans(spans)
        record[name] |= {"samples_s": times, "median_s": statistics.median(times)}
    return record


def ours(meshes: dict[str, Mesh], single: Mesh, seq: int, *, extras: bool) -> Iterator[Contestant]:
    """Yield our schemes at one length; with `extras` also other masks and one rank alone."""

    def one(
        name: str, mesh: Mesh, scheme: str, layout: str, mask: str = "causal", **how: Any
    ) -> Contestant:
        given = {"sharding": getattr(Sharding, layout)(seq, mesh.size), "comm": mesh["sp"]}
        attend: Any = functools.partial(SCHEMES[scheme], mask=Mask(**masks(seq)[mask]), **given)
        return Contestant(name, attend, layout, mesh.size, mask=mask, **how)

    forms = {"full": ("", "full", True), **MASKED}
    for check, mesh in meshes.items():
        for scheme, layouts in LAYOUTS.items():
            for layout in layouts:
                yield one(f"{scheme}/{layout}/{check}", mesh, scheme, layout)
    for scheme, layout in BALANCED.items() if extras else ():
        for form, (_, mask, backward) in forms.items() if meshes else ():
            name = f"{scheme}/{layout}/off/{form}"
            yield one(name, meshes["off"], scheme, layout, mask, backward=backward)
        yield one(f"{scheme}/one rank", single, scheme, "contiguous")
