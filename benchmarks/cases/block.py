"""Check a transformer block against a single device, then time it: the step of the experiment."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import msgspec
import torch
from torch import Tensor

import sp_core as sp
from benchmarks import corpus
from benchmarks.cases import bench_layers, single
from benchmarks.cases.bench_schemes import communicators, sharding_of
from benchmarks.cases.case import (
    Named,
    Phases,
    dtype_of,
    measure as measure_case,
    meshes,
    problem,
    wait_for,
)
from benchmarks.cases.setting import BlockSetting, Verdict
from benchmarks.machine import device as device_of, facts
from benchmarks.records import AXIS, Case
from benchmarks.sample import Counts, Sampler, makespans, meet_asleep, plain_loop
from benchmarks.worker import Intracomm, Rank

LEAST_GATHERS, FIRST_GATHERS = 10, 3


def measure(values: Any, rank: Rank) -> dict[str, Any]:
    """Carry out one launch.

    Returns:
        "parts" of the record; "check", the verdict on the output; and "all_gather", the gathering
        of K and V by itself.
    """
    setting, world = msgspec.convert(values, BlockSetting), rank.world
    case, device = setting.case, device_of(setting.device, world, share_gpu=setting.share_gpu)
    # one more than asked for: the first touches all memory
    counts = Counts(setting.warmup + 1, 1, setting.iterations)
    with meshes(case, world, device) as mesh:
        sync, comms = partial(wait_for, device), communicators(case, mesh)
        said, phases = facts(world, device, comms[0].transport.name), Phases(comms, sync)
        rank.tell("checking the output against a single device")
        made, x = block(setting, mesh, phases)
        verdict = check(setting, made, x, world)
        found: dict[str, Any] = {"check": asdict(verdict)}
        if not verdict.passed:
            return {"status": "wrong", **found}
        rank.tell("timing the AllGather")
        found["all_gather"] = time_gather(setting, mesh, sync, world)
        work = bench_layers.work_of(case, phases, made, x)
        parts = measure_case(work, world, device, counts, partial(plain_loop, tell=rank.tell))
    if (wrong := problem(parts)) is not None:
        raise RuntimeError(wrong)
    return {"parts": {**said, **parts}, **found}


def block(setting: BlockSetting, mesh: sp.Mesh, phases: Named) -> tuple[bench_layers.Made, Tensor]:
    """Return the block with its weights, and this rank's tokens (B, S/P, E)."""
    case = setting.case
    made = bench_layers.block(case, mesh, phases)
    corpus.fill(made[0], setting.seed)
    x = corpus.tokens(case, sharding_of(case).positions(mesh.rank), setting.seed)
    return made, x.to(mesh.device, dtype_of(case))


def check(setting: BlockSetting, made: bench_layers.Made, x: Tensor, world: Intracomm) -> Verdict:
    """Compare gathered results with a single device's; the verdict is the same on every rank.

    These are the output and, if the step has a backward, the gradient of the tokens; the verdict is
    on the first that is wrong, else on the output.
    """
    case, (layer, forward, _) = setting.case, made
    both, every = case.direction == "both", torch.arange(case.shape["seq"])
    seeds = (setting.seed, setting.seed + 1)
    verdict: Verdict | None = None
    with torch.set_grad_enabled(both):
        mine = [forward(x.requires_grad_(both))]
        if both:
            upstream = corpus.tokens(case, sharding_of(case).positions(world.rank), seeds[1]).to(x)
            mine += torch.autograd.grad(mine[0], x, upstream)
    shards = world.gather([part.detach().float().cpu().contiguous().numpy() for part in mine])
    if shards is not None:
        whole, upstream = (corpus.tokens(case, every, seed).to(x) for seed in seeds)
        tensors = (map(torch.from_numpy, parts) for parts in zip(*shards, strict=True))
        y, *grad = (sharding_of(case).unshard([*parts], 1).to(x) for parts in tensors)
        verdict = judged(y, grad, whole, upstream, layer.state_dict(), case)
    meet_asleep(world)
    agreed: Verdict = world.bcast(verdict)
    return agreed


def judged(
    y: Tensor,
    grad: Sequence[Tensor],
    whole: Tensor,
    upstream: Tensor,
    weights: single.Weights,
    case: Case,
) -> Verdict:
    """Judge the ranks' output y and the gradient of the tokens, which may not be there."""
    with torch.no_grad():
        alone, truth = single.block(whole, weights, case), single.exact(whole, weights, case)
    verdicts = [single.judge(y, alone, truth, case)]
    for found in grad:
        alone = single.gradient(whole, weights, case, upstream)
        exact = single.gradient(whole.double(), single.widened(weights), case, upstream)
        rows, positions = (torch.arange(n, device=whole.device) for n in whole.shape[:2])
        verdicts.append(single.judge(found, alone, (rows, positions, exact), case))
    return min(verdicts, key=lambda verdict: verdict.passed)


def time_gather(
    setting: BlockSetting, mesh: sp.Mesh, sync: Callable[[], None], world: Intracomm
) -> dict[str, Any] | None:
    """Time the AllGather of K and V by itself; None where nothing is gathered."""
    case = setting.case
    if case.ranks == 1 or case.scheme != "allgather_kv":
        return None
    comm = mesh[AXIS]
    sharding, shape = sharding_of(case), case.shape
    tokens = (2, shape["batch"], shape["kv_heads"], shape["head_dim"])
    mine = torch.ones(
        (sharding.local_len(comm.rank), *tokens), device=mesh.device, dtype=dtype_of(case)
    )
    gather = partial(sp.all_gather, mine, comm=comm, sizes=sharding.lengths)
    rounds = Counts(FIRST_GATHERS, 1, max(setting.iterations, LEAST_GATHERS))
    samples, _ = Sampler(gather, world, sync=sync).run(rounds)
    result = math.prod((shape["seq"], *tokens)) * mine.itemsize
    received = result * (case.ranks - 1) / case.ranks
    times = makespans(samples.spans)
    median = statistics.median(times)
    sizes = {"bytes_result": result, "bytes_received_per_rank": received}
    return {
        **sizes,
        "samples_s": times,
        "ms": median * 1e3,
        "gb_per_s": received / median / 1e9,
    }
