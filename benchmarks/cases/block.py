"""Check a transformer block against a single device, then time it, for the scaling experiment.

The single device computes in plain torch, with nothing of sp_core. Shapes: B batch, S sequence, Q
queries, E model dim, H heads, K key/value heads, D head dim.
"""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any, cast

import msgspec
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import sp_core as sp
from benchmarks.cases import bench_layers
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
from benchmarks.corpus import source_bytes
from benchmarks.machine import device as device_of, facts
from benchmarks.records import AXIS, Case
from benchmarks.sample import Counts, makespans, meet_asleep, take
from benchmarks.worker import Intracomm, Rank

LEAST_GATHERS, FIRST_GATHERS = 10, 3
LOGIT_GAIN = 1.5
BIAS_WIDTH = 0.1
WAVELENGTH = 10_000.0
QUERY_CHUNK = 512  # keeps the score matrix of one chunk small: H * 512 * S elements
# about half a minute of float64 on one core, and on a GPU
EXACT_FLOPS = {"cpu": 1e12, "cuda": 2e13}
SAMPLED_TOKENS = 64
ROUND_OFFS = 2  # the output is rounded when attention and when the feed-forward are added

Weights = Mapping[str, Tensor]


def measure(values: Any, rank: Rank) -> dict[str, Any]:
    """Run one launch of the scaling experiment.

    Returns:
        "parts" of the record; "check", the verdict on the output; and "all_gather", the gathering
        of K and V by itself. If the output is wrong, only "status" and "check".
    """
    setting, world = msgspec.convert(values, BlockSetting), rank.world
    case, device = setting.case, device_of(setting.device, world, share_gpu=setting.share_gpu)
    # one warm-up step more than asked for: the first touches all memory
    counts = Counts(setting.warmup + 1, 1, setting.iterations)
    with meshes(case, world, device) as mesh:
        sync, comms = partial(wait_for, device), communicators(case, mesh)
        said, phases = facts(world, device, comms[0].transport.name), Phases(comms, sync)
        rank.tell("checking the output against a single device")
        made, x = block(setting, mesh, phases)
        verdict = check(setting, made, x, world)
        if not verdict.passed:
            return {"status": "wrong", "check": asdict(verdict)}
        rank.tell("timing the AllGather")
        gathered = time_gather(setting, mesh, sync, world)
        work = bench_layers.work_of(case, phases, made, x)
        parts = measure_case(work, world, device, counts, tell=rank.tell)
    if (wrong := problem(parts)) is not None:
        raise RuntimeError(wrong)
    return {"parts": {**said, **parts}, "check": asdict(verdict), "all_gather": gathered}


def block(setting: BlockSetting, mesh: sp.Mesh, phases: Named) -> tuple[bench_layers.Made, Tensor]:
    """Return the block with its weights, and this rank's embedded tokens (B, S/P, E)."""
    case = setting.case
    made = bench_layers.block(case, mesh, phases)
    fill(made[0], setting.seed)
    x = tokens(case, sharding_of(case).positions(mesh.rank), setting.seed)
    return made, x.to(mesh.device, dtype_of(case))


def check(setting: BlockSetting, made: bench_layers.Made, x: Tensor, world: Intracomm) -> Verdict:
    """Compare gathered results with a single device's; the verdict is the same on every rank.

    The results are the output and, if the step has a backward, the gradient of the tokens. The
    verdict is on the first wrong result, or on the output if none is wrong.
    """
    case, (layer, forward, _) = setting.case, made
    both, every = case.direction == "both", torch.arange(case.shape["seq"])
    verdict, seeds = None, (setting.seed, setting.seed + 1)
    with torch.set_grad_enabled(both):
        mine = [forward(x.requires_grad_(both))]
        if both:
            upstream = tokens(case, sharding_of(case).positions(world.rank), seeds[1]).to(x)
            mine += torch.autograd.grad(mine[0], x, upstream)
    shards = world.gather([part.detach().float().cpu().contiguous().numpy() for part in mine])
    if shards is not None:
        whole, upstream = (tokens(case, every, seed).to(x) for seed in seeds)
        tensors = (map(torch.from_numpy, parts) for parts in zip(*shards, strict=True))
        y, *grad = (sharding_of(case).unshard([*parts], 1).to(x) for parts in tensors)
        verdict = judged(y, grad, whole, upstream, layer.state_dict(), case)
    meet_asleep(world)
    return cast("Verdict", world.bcast(verdict))


def judged(
    y: Tensor,
    grad: Sequence[Tensor],
    whole: Tensor,
    upstream: Tensor,
    weights: Weights,
    case: Case,
) -> Verdict:
    """Judge the ranks' output y, and the gradient of the tokens if `grad` has it."""
    with torch.no_grad():
        single, truth = alone(whole, weights, case), exact(whole, weights, case)
    verdicts = [judge(y, single, truth, case)]
    for found in grad:
        single = gradient(whole, weights, case, upstream)
        wanted = gradient(whole.double(), widened(weights), case, upstream)
        rows, positions = (torch.arange(n, device=whole.device) for n in whole.shape[:2])
        verdicts.append(judge(found, single, (rows, positions, wanted), case))
    return min(verdicts, key=lambda verdict: verdict.passed)


def time_gather(
    setting: BlockSetting, mesh: sp.Mesh, sync: Callable[[], None], world: Intracomm
) -> dict[str, Any] | None:
    """Time the AllGather of K and V by itself. Return None if the case gathers nothing."""
    case = setting.case
    if case.ranks == 1 or case.scheme != "allgather_kv":
        return None
    comm = mesh[AXIS]
    sharding, shape = sharding_of(case), case.shape
    token = (2, shape["batch"], shape["kv_heads"], shape["head_dim"])
    mine = torch.ones(
        (sharding.local_len(comm.rank), *token), device=mesh.device, dtype=dtype_of(case)
    )
    gather = partial(sp.all_gather, mine, comm=comm, sizes=sharding.lengths)
    rounds = Counts(FIRST_GATHERS, 1, max(setting.iterations, LEAST_GATHERS))
    times = makespans(take(gather, world, rounds, sync=sync)[0])
    median, result = statistics.median(times), shape["seq"] * math.prod(token) * mine.itemsize
    received = result * (case.ranks - 1) / case.ranks
    return {
        "bytes_result": result,
        "bytes_received_per_rank": received,
        "samples_s": times,
        "ms": median * 1e3,
        "gb_per_s": received / median / 1e9,
    }


def tokens(case: Case, positions: Tensor, seed: int = 0) -> Tensor:
    """Embed the text at the given positions.

    Args:
        case: gives batch B, sequence length and model dim E.
        positions: int64 (N,), positions in the sequence.
        seed: the seed of the embedding.

    Returns:
        float32 (B, N, E).

    Source: the waves added for positions are those of Vaswani et al. 2017, Attention Is All You
    Need, arXiv:1706.03762, section 3.5.
    """
    batch, seq, hidden = (case.shape[name] for name in ("batch", "seq", "hidden"))
    text = torch.tensor(list(source_bytes(batch * seq))).view(batch, seq)
    table = torch.randn(256, hidden, generator=torch.Generator().manual_seed(seed))
    angles = positions[:, None] * WAVELENGTH ** -(torch.arange(0, hidden, 2) / hidden)
    waves = torch.stack((angles.sin(), angles.cos()), -1).flatten(1)[:, :hidden]
    return table[text[:, positions].long()] + waves


def fill(block: nn.Module, seed: int) -> None:
    """Draw all weights from one seed, except those of norms, which stay 1.

    They are normal. The standard deviation is 1/sqrt(fan in) for matrices, LOGIT_GAIN times that
    for queries and keys, and BIAS_WIDTH for biases.
    """
    for number, (name, parameter) in enumerate(block.named_parameters()):
        if parameter.ndim == 1 and name.endswith("weight"):
            continue  # a norm's weight stays 1
        gain = LOGIT_GAIN if "q_proj" in name or "k_proj" in name else 1.0
        width = gain / parameter.shape[1] ** 0.5 if parameter.ndim == 2 else BIAS_WIDTH
        generator = torch.Generator(parameter.device).manual_seed(seed + number)
        with torch.no_grad():
            parameter.normal_(0.0, width, generator=generator)


def alone(x: Tensor, weights: Weights, case: Case, queries: Tensor | None = None) -> Tensor:
    """Compute a pre-norm transformer block on one device.

    Args:
        x: (B, S, E), all tokens.
        weights: the weights by their names in `TransformerBlock.state_dict()`.
        case: gives the heads and the mask.
        queries: int64 (Q,), the positions whose output is wanted; all if not given.

    Returns:
        (B, Q, E), or (B, S, E).
    """
    chosen = x if queries is None else x[:, queries]
    q = _heads(_linear(_norm(chosen, weights, "norm1"), weights, "attention.q_proj"), case)
    normed = _norm(x, weights, "norm1")
    k, v = (
        _heads(_linear(normed, weights, f"attention.{name}"), case) for name in ("k_proj", "v_proj")
    )
    out = _attention(q, k, v, case, queries)
    y = chosen + _linear(out.transpose(1, 2).flatten(2), weights, "attention.o_proj")
    inner = F.gelu(_linear(_norm(y, weights, "norm2"), weights, "feed_forward.up"))
    return y + _linear(inner, weights, "feed_forward.down")


def gradient(x: Tensor, weights: Weights, case: Case, upstream: Tensor) -> Tensor:
    """Return the gradient of all tokens x (B, S, E), in their dtype, on one device."""
    leaf = x.detach().requires_grad_()
    return torch.autograd.grad(alone(leaf, weights, case), leaf, upstream.to(x))[0]


def exact(x: Tensor, weights: Weights, case: Case) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the block in float64, for all tokens or for a sample of the first sequence.

    Returns:
        Rows int64 (R,) and positions int64 (Q,) that were computed, and the output (R, Q, E).
    """
    whole = bench_layers.flops(case) <= EXACT_FLOPS.get(x.device.type, EXACT_FLOPS["cuda"])
    rows = torch.arange(case.shape["batch"] if whole else 1, device=x.device)
    count = case.shape["seq"] if whole else min(SAMPLED_TOKENS, case.shape["seq"])
    spread = torch.linspace(0, case.shape["seq"] - 1, count, dtype=torch.float64, device=x.device)
    positions, wide = spread.round().long(), widened(weights)
    chunks = positions.split(QUERY_CHUNK)
    outputs = [
        torch.cat([alone(x[row].double()[None], wide, case, chunk) for chunk in chunks], 1)
        for row in rows.tolist()
    ]
    return rows, positions, torch.cat(outputs)


def widened(weights: Weights) -> Weights:
    """Return the weights in float64."""
    return {name: weight.double() for name, weight in weights.items()}


def judge(
    ranks: Tensor, single: Tensor, truth: tuple[Tensor, Tensor, Tensor], case: Case
) -> Verdict:
    """Compare the output of the ranks with that of a single device.

    The ranks' error, measured against float64, may be twice that of the single device, plus
    ROUND_OFFS roundings. The distance between ranks and single device, over all tokens, may be this
    bound plus twice the single device's error. The single device must be right itself, which it is
    not with TF32. So its error may be at most sqrt(n) u times the largest value, because rounding
    makes a sum of n terms wrong by about sqrt(n) u.

    Args:
        ranks: (B, S, E), gathered from the ranks.
        single: (B, S, E), in the same dtype.
        truth: the result of `exact`.
        case: its sizes give n, the terms of the longest sum: a linear layer's, or over the keys.
    """
    rows, positions, wanted = truth
    scale, unit = float(wanted.abs().max()), torch.finfo(single.dtype).eps / 2
    single_error, ranks_error = (_distance(y[rows][:, positions], wanted) for y in (single, ranks))
    error, tokens = _distance(ranks, single), wanted.shape[0] * wanted.shape[1]
    terms = max(case.shape[name] for name in ("hidden", "ffn", "seq"))
    single_bound = math.sqrt(terms) * unit * scale
    if error is None or single_error is None or ranks_error is None:
        return Verdict(
            error, single_error, ranks_error, 0.0, single_bound, scale, tokens, passed=False
        )
    bound = 2 * single_error + ROUND_OFFS * unit * scale
    passed = (
        single_error <= single_bound and ranks_error <= bound and error <= bound + 2 * single_error
    )
    return Verdict(error, single_error, ranks_error, bound, single_bound, scale, tokens, passed)


def _distance(y: Tensor, wanted: Tensor) -> float | None:
    """Return the largest difference; None if one is not finite.

    Rows are compared one by one, because a float64 copy of all may not fit into memory.
    """
    largest = max(
        float((a.double() - b.double()).abs().max()) for a, b in zip(y, wanted, strict=True)
    )
    finite = all(bool((a - b).isfinite().all()) for a, b in zip(y, wanted, strict=True))
    return largest if finite else None


def _attention(q: Tensor, k: Tensor, v: Tensor, case: Case, queries: Tensor | None) -> Tensor:
    """Return attention (B, H, Q, D) of heads-first q, k and v; k and v have K heads."""
    k, v = (x.repeat_interleave(case.shape["heads"] // case.shape["kv_heads"], 1) for x in (k, v))
    causal, seen = case.mask == "causal", None
    if causal and queries is not None:
        causal, seen = False, queries[:, None] >= torch.arange(k.shape[2], device=q.device)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=seen, is_causal=causal)


def _heads(x: Tensor, case: Case) -> Tensor:
    return cast("Tensor", x.unflatten(2, (-1, case.shape["head_dim"]))).transpose(1, 2)


def _norm(x: Tensor, weights: Weights, name: str) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], weights[f"{name}.weight"], weights[f"{name}.bias"])


def _linear(x: Tensor, weights: Weights, name: str) -> Tensor:
    return F.linear(x, weights[f"{name}.weight"], weights[f"{name}.bias"])
