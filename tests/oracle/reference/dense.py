"""Compute dense float64 attention and its gradients from the definitions of the masks.

Beside each tensor stands its scale, the sum of the absolute terms that make up an element.

Shape letters: B batch, S sequence (Sq queries, Sk keys), H heads, K key/value heads, D head dim.
"""

import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Reference(NamedTuple):
    """Hold results in float64 and the scales of their errors, by name.

    Args:
        values, scales: tensors by names such as "out", "lse" and "dq", or the names of weights.
        growth: a bound of how much roundings are amplified.
    """

    values: dict[str, Tensor]
    scales: dict[str, Tensor]
    growth: float = 1.0


def visible(
    q_positions: Sequence[int] | Tensor,
    kv_positions: Sequence[int] | Tensor,
    *,
    causal: bool = False,
    window: int | None = None,
    documents: Sequence[int] | None = None,
    kv_documents: Sequence[int] | None = None,
) -> Tensor:
    """Return which query sees which key, bool (Sq, Sk), from the masks' definitions on positions.

    Args:
        q_positions: Sq global positions.
        kv_positions: Sk global positions.
        causal: a key is visible when it is not after the query.
        window: a key is visible when it is fewer than this many positions away.
        documents: boundaries 0 = b0 <= ... <= bn; a key is visible when its document has the same
            number as that of the query.
        kv_documents: boundaries for the keys, if they differ.
    """
    q, k = (torch.as_tensor(p, dtype=torch.int64) for p in (q_positions, kv_positions))
    seen = torch.ones(len(q), len(k), dtype=torch.bool)
    if causal:
        seen = seen & (k[None, :] <= q[:, None])
    if window is not None:
        seen = seen & ((q[:, None] - k[None, :]).abs() < min(window, 2**63 - 1))
    if documents is not None:
        q_document = sum(((q >= b).long() for b in documents), torch.zeros_like(q))
        k_document = sum(((k >= b).long() for b in kv_documents or documents), torch.zeros_like(k))
        seen = seen & (q_document[:, None] == k_document[None, :])
    return seen


def distances(q_positions: Sequence[int] | Tensor, kv_positions: Sequence[int] | Tensor) -> Tensor:
    """Return how many positions each key is away from each query, int64 (Sq, Sk)."""
    q, k = (torch.as_tensor(p, dtype=torch.int64) for p in (q_positions, kv_positions))
    return (q[:, None] - k[None, :]).abs()


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    grad_out: Tensor | None = None,
    grad_lse: Tensor | None = None,
    **options: Any,
) -> Reference:
    """Compute dense attention, and its gradients by their formulas, not by autograd.

    Let p be the probabilities, do = grad_out, delta = sum_d do out - grad_lse, and t the derivative
    of the logits by q k^T. Then dv = p^T do, ds = t p (do v^T - delta), dq = ds k, dk = ds^T q. A
    sink is a key whose v is 0: dsink = - sum p_sink delta. Memory is B H Sq Sk doubles, so this is
    for Sq and Sk up to some hundreds.

    Args:
        q: (B, Sq, H, D), any floating dtype.
        k: (B, Sk, K, D), query head h reads head h // (H / K).
        v: (B, Sk, K, D).
        grad_out: (B, Sq, H, D), gradient of out; without it there are no gradients.
        grad_lse: (B, H, Sq), gradient of lse; zero when None. It must be finite, even where lse
            is -inf and it has no effect.
        options: as in `_dense`.

    Returns:
        out (B, Sq, H, D) and lse (B, H, Sq), which are 0 and -inf for queries that see nothing;
        dq, dk, dv as q, k, v, and dsinks (H,), 0 without sinks.
    """
    d = _dense(q, k, v, **options)
    values = {"out": (d.p @ d.v).transpose(1, 2), "lse": d.lse}
    scales = {
        "out": (d.p_scale @ d.v.abs()).transpose(1, 2) + d.floor,
        "lse": torch.ones_like(d.lse),
    }
    if grad_out is None:
        return Reference(values, scales, d.growth)
    do, heads = grad_out.detach().double().transpose(1, 2), k.shape[2]
    gl = torch.zeros_like(d.lse) if grad_lse is None else grad_lse.detach().double()
    delta = (do * (d.p @ d.v)).sum(-1) - gl
    # Not |delta|: where out or delta cancel, their errors do not.
    delta_scale = (do.abs() * (d.p @ d.v.abs())).sum(-1) + gl.abs()
    ds = d.p * (do @ d.v.mT - delta[..., None]) * d.slope
    size = d.p_scale * (1 + do.abs() @ d.v.abs().mT + delta_scale[..., None]) * d.slope_scale
    values |= {
        "dq": (ds @ d.k).transpose(1, 2),
        "dk": _gathered(ds.mT @ d.q, heads),
        "dv": _gathered(d.p.mT @ do, heads),
        "dsinks": -(d.p_sink * delta).sum((0, 2)),
    }
    scales |= {
        "dq": (size @ d.k.abs()).transpose(1, 2) + d.floor,
        "dk": _gathered(size.mT @ d.q.abs(), heads) + d.floor,
        "dv": _gathered(d.p_scale.mT @ do.abs(), heads) + d.floor,
        "dsinks": ((d.p_sink + d.floor) * (1 + delta_scale)).sum((0, 2)) + d.floor,
    }
    return Reference(values, scales, d.growth)


def _dense(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    q_positions: Sequence[int] | Tensor | None = None,
    kv_positions: Sequence[int] | Tensor | None = None,
    softmax_scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    alibi: Sequence[float] | Tensor | None = None,
    **mask: Any,
) -> SimpleNamespace:
    """Return log-sum-exp and probabilities, and the sizes that their errors are proportional to.

    Key and value heads are repeated for their query heads: tensors are (B, H, S, D) and
    (B, H, Sq, Sk).

    Args:
        q, k, v: as in `attention`.
        q_positions: Sq global positions; 0 .. Sq - 1 when None.
        kv_positions: Sk global positions; 0 .. Sk - 1 when None.
        softmax_scale: factor of q k^T; 1 / sqrt(D) when None.
        softcap: the logits are softcap tanh(s / softcap) of the scaled scores s; s when None.
        sinks: (H,), for each head the logit of one more key, which every query sees and whose v is
            0; none when None.
        alibi: (H,), for each head the slope by which a logit falls with the distance; none when
            None.
        mask: causal, window, documents and kv_documents as in `visible`.

    Returns:
        A namespace. Its `floor` is the error of numbers that are too small for the dtype, over one
        round-off; below this size a kernel's p has no relative precision. `p_scale` is p + floor
        for visible pairs, else 0. `slope` is the derivative of the logits. Kernels flush numbers
        below the smallest normal one to 0: a relative error of 1, not of a round-off. float16
        underflows gradually.
    """
    at = range(q.shape[1]) if q_positions is None else q_positions
    kv_at = range(k.shape[1]) if kv_positions is None else kv_positions
    seen, apart = visible(at, kv_at, **mask).to(q.device), distances(at, kv_at).to(q.device)
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else float(softmax_scale)
    group = q.shape[2] // max(k.shape[2], 1)
    limits = torch.finfo(q.dtype)
    floor = limits.tiny if q.dtype == torch.float16 else limits.tiny / limits.eps
    q, k, v = (t.detach().double().transpose(1, 2) for t in (q, k, v))
    k, v = (t.repeat_interleave(group, dim=1) for t in (k, v))
    sizes = (q.abs() @ k.abs().mT * abs(scale)).masked_fill(~seen, 0.0)
    growth = _greatest(sizes) + max(_greatest(seen.sum(1)), group * _greatest(seen.sum(0)))
    logits, slope, slope_scale = _capped(q @ k.mT, scale, softcap, sizes, 1 / (1 + growth))
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
    tensors = {"q": q, "k": k, "v": v, "lse": lse, "p": p, "p_sink": p_sink}
    sizes = {"p_scale": p_scale, "floor": floor, "slope": slope, "slope_scale": slope_scale}
    return SimpleNamespace(**tensors, **sizes, growth=growth)


def _capped(
    scores: Tensor, scale: float, softcap: float | None, sizes: Tensor, rounded: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Scale and bound scores. Return the logits, their derivative, and its error scale.

    Args:
        scores: q k^T.
        scale, softcap: as in `_dense`.
        sizes: the sums of the absolute terms of the scaled scores.
        rounded: one round-off, in units of those that the bound allows for.
    """
    slope = torch.full_like(scores, scale)
    if softcap is None:
        return scores * scale, slope, slope.abs()
    x = scores * scale / softcap
    slope = slope / x.cosh() ** 2
    # Kernels compute 1 - tanh(x)^2, which cancels: it has the round-off of 1, and a change of x
    # changes it by 2 tanh(x) times as much, relative to itself.
    slope_scale = slope.abs() * (1 + 2 * sizes * rounded / softcap) + 2 * abs(scale) * rounded
    return softcap * x.tanh(), slope, slope_scale


def _gathered(x: Tensor, num_kv_heads: int) -> Tensor:
    """Sum (B, H, S, D) over the query heads of each key head and return (B, S, K, D)."""
    b, h, s, d = x.shape
    return x.reshape(b, num_kv_heads, h // max(num_kv_heads, 1), s, d).sum(2).transpose(1, 2)


def _greatest(x: Tensor) -> float:
    """Return the greatest element, or 0 if there is none."""
    return float(x.max()) if x.numel() else 0.0
