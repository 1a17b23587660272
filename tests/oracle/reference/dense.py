"""Compute dense float64 attention and its gradients from the definitions of the masks.

Beside each tensor stands its scale, the sum of the absolute terms that make up an element.

Shape letters: B batch, S sequence (Sq queries, Sk keys), H heads, K key/value heads, D head dim.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor


class AttentionReference(NamedTuple):
    """Attention in float64 with error scales; `growth` bounds how roundings are amplified."""

    out: Tensor  # (B, Sq, H, D)
    lse: Tensor  # (B, H, Sq)
    out_scale: Tensor  # sum p |v|
    lse_scale: Tensor  # 1
    growth: float


class GradientReference(NamedTuple):
    """Gradients of attention in float64 with error scales."""

    dq: Tensor  # (B, Sq, H, D)
    dk: Tensor  # (B, Sk, K, D)
    dv: Tensor  # (B, Sk, K, D)
    dq_scale: Tensor  # slope sum p (|do| |v| + delta_scale) |k|
    dk_scale: Tensor
    dv_scale: Tensor  # sum p |do|
    growth: float
    dsinks: Tensor  # (H,); 0 without sinks
    dsinks_scale: Tensor  # sum p_sink (1 + delta_scale)


class _Dense(NamedTuple):
    """What forward and backward share, with heads spread out: (B, H, S, D) and (B, H, Sq, Sk)."""

    q: Tensor
    k: Tensor
    v: Tensor
    logits: Tensor
    lse: Tensor
    p: Tensor
    p_scale: (
        Tensor  # p and the size below which a kernel's p has no relative precision, where visible
    )
    floor: float  # error of numbers that are too small for the dtype, over one round-off
    slope: Tensor  # derivative of the logits, softmax_scale where nothing bounds them
    slope_scale: Tensor
    p_sink: Tensor  # (B, H, Sq)
    growth: float


def visible(
    q_positions: Sequence[int] | Tensor,
    kv_positions: Sequence[int] | Tensor,
    *,
    causal: bool = False,
    window: int | None = None,
    documents: Sequence[int] | None = None,
    kv_documents: Sequence[int] | None = None,
) -> Tensor:
    """Who sees whom, bool (Sq, Sk), from the definition of each mask on global positions.

    Args:
        q_positions: Sq global positions.
        kv_positions: Sk global positions.
        causal: a key is visible when it is not after the query.
        window: a key is visible when fewer than this many positions away.
        documents: boundaries 0 = b0 <= ... <= bn; a key is visible when its document has the number
            of the query's.
        kv_documents: boundaries for the keys, where they differ.
    """
    q, k = (torch.as_tensor(p, dtype=torch.int64) for p in (q_positions, kv_positions))
    seen = torch.ones(len(q), len(k), dtype=torch.bool)
    if causal:
        seen = seen & (k[None, :] <= q[:, None])
    if window is not None:
        seen = seen & ((q[:, None] - k[None, :]).abs() < window)
    if documents is not None:
        q_document = sum(((q >= b).long() for b in documents), torch.zeros_like(q))
        k_document = sum(((k >= b).long() for b in kv_documents or documents), torch.zeros_like(k))
        seen = seen & (q_document[:, None] == k_document[None, :])
    return seen


def distances(q_positions: Sequence[int] | Tensor, kv_positions: Sequence[int] | Tensor) -> Tensor:
    """How many positions each key is away from each query, int64 (Sq, Sk)."""
    q, k = (torch.as_tensor(p, dtype=torch.int64) for p in (q_positions, kv_positions))
    return (q[:, None] - k[None, :]).abs()


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    q_positions: Sequence[int] | Tensor | None = None,
    kv_positions: Sequence[int] | Tensor | None = None,
    causal: bool = False,
    window: int | None = None,
    documents: Sequence[int] | None = None,
    kv_documents: Sequence[int] | None = None,
    **terms: Any,
) -> AttentionReference:
    """Dense attention; memory B H Sq Sk doubles, so for Sq and Sk up to some hundreds.

    Args:
        q: (B, Sq, H, D), any floating dtype.
        k: (B, Sk, K, D), query head h reads head h // (H / K).
        v: (B, Sk, K, D).
        q_positions: Sq global positions; 0 .. Sq - 1 when None.
        kv_positions: Sk global positions; 0 .. Sk - 1 when None.
        causal, window, documents, kv_documents: as in `visible`.
        terms: of the logits, as in `_dense`.

    Returns:
        out, lse and their scales in float64; 0 and -inf for queries that see nothing.
    """
    pairs = _pairs(q, k, q_positions, kv_positions, causal, window, documents, kv_documents)
    d = _dense(q, k, v, *pairs, **terms)
    return AttentionReference(
        out=(d.p @ d.v).transpose(1, 2),
        lse=d.lse,
        out_scale=(d.p_scale @ d.v.abs()).transpose(1, 2) + d.floor,
        lse_scale=torch.ones_like(d.lse),
        growth=d.growth,
    )


def attention_grads(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    grad_out: Tensor,
    *,
    grad_lse: Tensor | None = None,
    q_positions: Sequence[int] | Tensor | None = None,
    kv_positions: Sequence[int] | Tensor | None = None,
    causal: bool = False,
    window: int | None = None,
    documents: Sequence[int] | None = None,
    kv_documents: Sequence[int] | None = None,
    **terms: Any,
) -> GradientReference:
    """Gradients of `attention` by their formulas, not by autograd.

    With delta = sum_d do out - grad_lse, and t the derivative of the logits by q k^T: dv = p^T do,
    ds = t p (do v^T - delta), dq = ds k, dk = ds^T q. A sink is a key whose v is 0: dsink = - sum
    p_sink delta.

    Args:
        q, k, v: as in `attention`.
        grad_out: (B, Sq, H, D), gradient of out.
        grad_lse: (B, H, Sq), gradient of lse; zero when None. Must be finite, also where lse is
            -inf (it is not read there).
        q_positions, kv_positions, causal, window, documents, kv_documents, terms: as in
            `attention`.

    Returns:
        dq, dk, dv, dsinks and their scales in float64.
    """
    pairs = _pairs(q, k, q_positions, kv_positions, causal, window, documents, kv_documents)
    d = _dense(q, k, v, *pairs, **terms)
    do = grad_out.detach().double().transpose(1, 2)
    gl = (
        torch.zeros_like(d.lse).unsqueeze(-1)
        if grad_lse is None
        else grad_lse.detach().double().unsqueeze(-1)
    )
    delta = (do * (d.p @ d.v)).sum(-1, keepdim=True) - gl
    # Not |delta|: where out or delta cancel, their errors do not.
    delta_scale = (do.abs() * (d.p @ d.v.abs())).sum(-1, keepdim=True) + gl.abs()
    ds = d.p * (do @ d.v.mT - delta) * d.slope
    size = d.p_scale * (1 + do.abs() @ d.v.abs().mT + delta_scale) * d.slope_scale
    heads = k.shape[2]
    return GradientReference(
        dq=(ds @ d.k).transpose(1, 2),
        dk=_gathered(ds.mT @ d.q, heads),
        dv=_gathered(d.p.mT @ do, heads),
        dq_scale=(size @ d.k.abs()).transpose(1, 2) + d.floor,
        dk_scale=_gathered(size.mT @ d.q.abs(), heads) + d.floor,
        dv_scale=_gathered(d.p_scale.mT @ do.abs(), heads) + d.floor,
        growth=d.growth,
        dsinks=-(d.p_sink * delta[..., 0]).sum((0, 2)),
        dsinks_scale=((d.p_sink + d.floor) * (1 + delta_scale[..., 0])).sum((0, 2)) + d.floor,
    )


def _pairs(
    q: Tensor,
    k: Tensor,
    q_positions: Sequence[int] | Tensor | None,
    kv_positions: Sequence[int] | Tensor | None,
    causal: bool,
    window: int | None,
    documents: Sequence[int] | None,
    kv_documents: Sequence[int] | None,
) -> tuple[Tensor, Tensor]:
    """`visible`, and |query position - key position|; positions default to 0, 1, ..."""
    q_positions = range(q.shape[1]) if q_positions is None else q_positions
    kv_positions = range(k.shape[1]) if kv_positions is None else kv_positions
    seen = visible(
        q_positions,
        kv_positions,
        causal=causal,
        window=window,
        documents=documents,
        kv_documents=kv_documents,
    )
    return seen, distances(q_positions, kv_positions)


def _dense(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    seen: Tensor,
    apart: Tensor,
    *,
    softmax_scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    alibi: Sequence[float] | Tensor | None = None,
) -> _Dense:
    """Logits, lse, probabilities, and what errors of them are proportional to.

    Args:
        q, k, v: as in `attention`.
        seen: as from `visible`.
        apart: as from `distances`.
        softmax_scale: factor of q k^T; 1 / sqrt(D) when None.
        softcap: the logits are softcap tanh(s / softcap) of the scaled scores s; s when None.
        sinks: (H,), for each head the logit of one more key, which every query sees and whose v is
            0; none when None.
        alibi: (H,), for each head the slope by which a logit falls with the distance; none when
            None.
    """
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else float(softmax_scale)
    group = q.shape[2] // max(k.shape[2], 1)
    # Kernels flush below the smallest normal number to 0, an error of 1 and not of u; but float16
    # underflows gradually.
    limits = torch.finfo(q.dtype)
    floor = limits.tiny if q.dtype == torch.float16 else limits.tiny / limits.eps
    seen, apart = seen.to(q.device), apart.to(q.device)
    q, k, v = (t.detach().double().transpose(1, 2) for t in (q, k, v))
    k, v = (t.repeat_interleave(group, dim=1) for t in (k, v))
    logits = q @ k.mT * scale
    sizes = (q.abs() @ k.abs().mT * abs(scale)).masked_fill(~seen, 0.0)
    growth = _greatest(sizes) + max(_greatest(seen.sum(1)), group * _greatest(seen.sum(0)))
    logits, slope, slope_scale = _capped(
        logits, scale, softcap, sizes / (1 + growth), 1 / (1 + growth)
    )
    if alibi is not None:
        bias = torch.as_tensor(alibi, dtype=q.dtype, device=q.device)[:, None, None] * apart
        logits, growth = logits - bias, growth + _greatest(bias.abs() * seen)
    logits = logits.masked_fill(~seen, -math.inf)
    sink = q.new_full(q.shape[:3], -math.inf)
    if sinks is not None:
        sink = sinks.detach().double()[:, None].expand_as(sink)
        growth += _greatest(sink.abs()) + 1
    lse = torch.logaddexp(torch.logsumexp(logits, dim=-1), sink)
    shift = lse.masked_fill(lse == -math.inf, math.inf)
    p, p_sink = torch.exp(logits - shift.unsqueeze(-1)), torch.exp(sink - shift)
    p_scale = (p + floor) * seen
    return _Dense(q, k, v, logits, lse, p, p_scale, floor, slope, slope_scale, p_sink, growth)


def _capped(
    logits: Tensor, scale: float, softcap: float | None, moved: Tensor, rounded: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Bound scaled scores. Return the logits, their derivative by q k^T, and its error scale.

    Args:
        logits, scale, softcap: as in `_dense`.
        moved: how far roundings move the scores, in units of those that the bound allows for.
        rounded: one round-off in this unit.
    """
    slope = torch.full_like(logits, scale)
    if softcap is None:
        return logits, slope, slope.abs()
    x = logits / softcap
    slope = slope / x.cosh() ** 2
    # Kernels compute 1 - tanh(x)^2, which cancels: it has the round-off of 1, and moves by 2
    # tanh(x) of itself with x.
    slope_scale = slope.abs() * (1 + 2 * moved / softcap) + 2 * abs(scale) * rounded
    return softcap * x.tanh(), slope, slope_scale


def _gathered(x: Tensor, num_kv_heads: int) -> Tensor:
    """Sum (B, H, S, D) over the query heads of each key head and return (B, S, K, D)."""
    b, h, s, d = x.shape
    return x.reshape(b, num_kv_heads, h // max(num_kv_heads, 1), s, d).sum(2).transpose(1, 2)


def _greatest(x: Tensor) -> float:
    """The greatest element; 0 where there is none."""
    return float(x.max()) if x.numel() else 0.0
