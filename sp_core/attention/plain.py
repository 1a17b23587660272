"""Attention in plain torch operations, for devices, dtypes and masks that no fused kernel takes."""

from __future__ import annotations

import torch
from torch import Tensor

from sp_core.attention.merge import accumulation_dtype


def forward(
    q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """Compute attention and its lse, in float32 or wider.

    Args:
        q: (B, H, Sq, D).
        k: (B, K, Sk, D).
        v: (B, K, Sk, D).
        visible: bool (Sq, Sk), or None when every pair is visible.
        scale: softmax_scale.

    Returns:
        out (B, H, Sq, D) in q's dtype and lse (B, H, Sq) in the accumulation dtype.
    """
    dtype = accumulation_dtype(q.dtype)
    scores = _scores(_grouped(q.to(dtype), k.shape[1]), k.to(dtype), visible, scale)
    lse = torch.logsumexp(scores, dim=-1)
    # A row that saw nothing has -inf - -inf here; +inf makes its weights 0.
    p = scores.sub_(lse.masked_fill(lse == -torch.inf, torch.inf).unsqueeze(-1)).exp_()
    return _ungrouped(p @ v.to(dtype), q).to(q.dtype), lse.reshape(q.shape[:3])


def backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    visible: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute dq, dk and dv in the accumulation dtype. A row that sees nothing has lse = +inf."""
    dtype = accumulation_dtype(q.dtype)
    q_, do, o = (
        _grouped(t.to(dtype), k.shape[1]) for t in (q, grad_out, out)
    )  # (B, K, H/K * Sq, D)
    k_, v_ = k.to(dtype), v.to(dtype)
    lse_ = lse.to(dtype).reshape(*q_.shape[:3], 1)
    p = _scores(q_, k_, visible, scale).sub_(lse_).exp_()
    dv = p.mT @ do
    ds = (do @ v_.mT).sub_((do * o).sum(-1, keepdim=True)).mul_(p).mul_(scale)
    return _ungrouped(ds @ k_, q), ds.mT @ q_, dv


def _grouped(x: Tensor, num_kv_heads: int) -> Tensor:
    """View (B, H, Sq, D) as (B, K, H/K * Sq, D): the queries of a key head become rows, so no key is repeated."""
    return x.reshape(x.shape[0], num_kv_heads, -1, x.shape[-1])


def _ungrouped(x: Tensor, like: Tensor) -> Tensor:
    """View (B, K, H/K * Sq, D) as (B, H, Sq, D)."""
    return x.reshape(*like.shape[:3], x.shape[-1])


def _scores(q: Tensor, k: Tensor, visible: Tensor | None, scale: float) -> Tensor:
    """Return scaled scores (B, K, H/K * Sq, Sk), with -inf for hidden keys."""
    scores = torch.matmul(q, k.mT).mul_(scale)
    if visible is not None:
        by_query = scores.view(*scores.shape[:2], -1, *visible.shape)
        by_query.masked_fill_(~visible, -torch.inf)
    return scores
