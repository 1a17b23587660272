"""Compute the same transformer block on one device, in plain torch, and judge the ranks' output.

Nothing of sp_core computes here. Shapes: B batch, S sequence, Q queries, E model dim, H heads, K
key/value heads, D head dim.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.cases.bench_layers import flops
from benchmarks.cases.setting import Verdict
from benchmarks.records import Case

QUERY_CHUNK = 512  # keeps the score matrix of one chunk small: H * 512 * S elements
EXACT_FLOPS = {
    "cpu": 1e12,
    "cuda": 2e13,
}  # about half a minute of float64 on one core, and on a GPU
SAMPLED_TOKENS = 64
ROUND_OFFS = 2  # the output is rounded when attention and when the feed-forward are added

Weights = Mapping[str, Tensor]


def causal(case: Case) -> bool:
    """Return whether a token sees only itself and those before it."""
    return case.mask == "causal"


def block(x: Tensor, weights: Weights, case: Case, queries: Tensor | None = None) -> Tensor:
    """Compute a pre-norm transformer block.

    Args:
        x: (B, S, E), all tokens.
        weights: by the names that `TransformerBlock.state_dict()` has.
        case: heads and mask.
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
    """Return the gradient of all tokens x (B, S, E), in their dtype."""
    leaf = x.detach().requires_grad_()
    return torch.autograd.grad(block(leaf, weights, case), leaf, upstream.to(x))[0]


def exact(x: Tensor, weights: Weights, case: Case) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the block in float64, for all tokens or for a sample of the first sequence.

    Returns:
        Rows int64 (R,) and positions int64 (Q,) that were computed, and the output (R, Q, E).
    """
    whole = flops(case) <= EXACT_FLOPS.get(x.device.type, EXACT_FLOPS["cuda"])
    rows = torch.arange(case.shape["batch"] if whole else 1, device=x.device)
    count = case.shape["seq"] if whole else min(SAMPLED_TOKENS, case.shape["seq"])
    positions = (
        torch.linspace(0, case.shape["seq"] - 1, count, dtype=torch.float64, device=x.device)
        .round()
        .long()
    )
    wide = widened(weights)
    outputs = [
        torch.cat(
            [
                block(x[row : row + 1].double(), wide, case, chunk)
                for chunk in positions.split(QUERY_CHUNK)
            ],
            1,
        )
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

    The ranks may be twice as far from the float64 result as the single device is, and a few
    roundings more. Tokens without a float64 result must be as near to the single device as these
    distances together allow. All that means nothing where the single device is far off itself, as
    with TF32: rounding makes a sum of n terms wrong by about sqrt(n) u, and it may not be further
    off.

    Args:
        ranks: (B, S, E), gathered.
        single: (B, S, E), in the same dtype.
        truth: what `exact` returned.
        case: its sizes give the longest sum: a linear layer's, or that over the keys.
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
    """Return the largest difference, None where one is not finite.

    It goes row by row, because a float64 copy of all may not fit.
    """
    largest = max(
        float((a.double() - b.double()).abs().max()) for a, b in zip(y, wanted, strict=True)
    )
    finite = all(bool((a - b).isfinite().all()) for a, b in zip(y, wanted, strict=True))
    return largest if finite else None


def _attention(q: Tensor, k: Tensor, v: Tensor, case: Case, queries: Tensor | None) -> Tensor:
    """(B, H, Q, D) from heads-first q, and k and v with K heads."""
    k, v = (x.repeat_interleave(case.shape["heads"] // case.shape["kv_heads"], 1) for x in (k, v))
    if queries is None or not causal(case):
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal(case))
    seen: Tensor = queries[:, None] >= torch.arange(case.shape["seq"], device=q.device)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=seen)


def _heads(x: Tensor, case: Case) -> Tensor:
    heads: Tensor = x.unflatten(2, (-1, case.shape["head_dim"]))
    return heads.transpose(1, 2)


def _norm(x: Tensor, weights: Weights, name: str) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], weights[f"{name}.weight"], weights[f"{name}.bias"])


def _linear(x: Tensor, weights: Weights, name: str) -> Tensor:
    return F.linear(x, weights[f"{name}.weight"], weights[f"{name}.bias"])
