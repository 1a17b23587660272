"""Attention of one block, forward and backward, for every input the kernels cannot take too."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sp_core.attention import kernels
from sp_core.attention.logits import Logits
from sp_core.attention.merge import accumulation_dtype

Triple = tuple[Tensor, Tensor, Tensor]


def block_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    kind: str = "full",
    allowed: Tensor | None = None,
    logits: Logits,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute attention of queries to one block of keys.

    Out = softmax(logits) v and its log-sum-exp.

    Values that nobody in the block sees are not read. A NaN or infinity that some query of a causal
    or partial block sees may spread to other queries of that block, because the kernels multiply
    hidden values by weight 0; finite values never do.

    Args:
        q: (B, H, Sq, D), strided as it comes.
        k: (B, K, Sk, D).
        v: (B, K, Sk, D).
        kind: "full", "causal" (Sq = Sk, key j visible to query i when j <= i) or "partial".
        allowed: bool (Sq, Sk), for "partial" only.
        logits: how they follow from q k^T, with positions if they depend on them.
        backend: a kernel by name, as from `backend_for`; None chooses. Logits that only the plain
            kernel computes run on it all the same.

    Returns:
        out (B, H, Sq, D) in q's dtype and lse (B, H, Sq) in float32 or wider; 0 and -inf for
        queries that see nothing.

    Source: Dao, "FlashAttention-2", 2023, algorithm 1, for out and lse from blocks.
    """
    if _empty(q, k):
        return torch.zeros_like(q), q.new_full(
            q.shape[:3], -torch.inf, dtype=accumulation_dtype(q.dtype)
        )
    kind, allowed = _signed(kind, allowed, q.shape[2], logits)
    if logits.is_plain or backend is None:
        backend = kernels.backend_for(q.device.type, q.dtype, q.shape[-1], kind, logits)
    if allowed is None or (seen := _seen(allowed)) is None:
        return kernels.forward(backend, q, k, v, kind, allowed, logits)
    i, j = (x.to(q.device) for x in seen)
    inside: Any = {"kind": kind, "allowed": allowed[seen[0]][:, seen[1]], "logits": logits.at(i, j)}
    part, part_lse = block_attention(q[:, :, i], k[:, :, j], v[:, :, j], backend=backend, **inside)
    out, lse = torch.zeros_like(q), q.new_full(q.shape[:3], -torch.inf, dtype=part_lse.dtype)
    return out.index_copy_(2, i, part), lse.index_copy_(2, i, part_lse)


def block_attention_backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    kind: str = "full",
    allowed: Tensor | None = None,
    logits: Logits,
    backend: str | None = None,
) -> Triple:
    """Compute the gradients of one block: P = exp(s - lse), dS = P * (dO v^T - rowsum(dO * out)).

    Args:
        grad_out: (B, H, Sq, D), of out.
        q: (B, H, Sq, D).
        k: (B, K, Sk, D).
        v: (B, K, Sk, D).
        out: (B, H, Sq, D), the attention over all keys of which k is a part (or over k alone).
        lse: (B, H, Sq), likewise.
        kind: as in `block_attention`.
        allowed: as in `block_attention`.
        logits: as in `block_attention`.
        backend: as in `block_attention`.

    Returns:
        dq (B, H, Sq, D), dk and dv (B, K, Sk, D), this block's summands, as the kernel rounds them:
        in q's dtype or wider.

    Source: Dao, "FlashAttention-2", 2023, algorithm 2.
    """
    if _empty(q, k):
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    kind, allowed = _signed(kind, allowed, q.shape[2], logits)
    if logits.is_plain or backend is None:
        backend = kernels.backend_for(q.device.type, q.dtype, q.shape[-1], kind, logits)
    grad_out, out = grad_out.to(q.dtype), out.to(q.dtype)
    if allowed is None or (seen := _seen(allowed)) is None:
        return kernels.backward(backend, grad_out, q, k, v, out, lse, kind, allowed, logits)
    i, j = (x.to(q.device) for x in seen)
    inside: Any = {"kind": kind, "allowed": allowed[seen[0]][:, seen[1]], "logits": logits.at(i, j)}
    tensors = (grad_out[:, :, i], q[:, :, i], k[:, :, j], v[:, :, j], out[:, :, i], lse[:, :, i])
    parts = block_attention_backward(*tensors, backend=backend, **inside)
    dq, dk, dv = (
        torch.zeros_like(x, dtype=part.dtype).index_copy_(2, at, part)
        for x, at, part in zip((q, k, v), (i, j, j), parts, strict=True)
    )
    return dq, dk, dv


def _empty(q: Tensor, k: Tensor) -> bool:
    """Return whether there is nothing to compute. The fused kernels crash on such input."""
    return q.numel() == 0 or k.numel() == 0


def _signed(
    kind: str, allowed: Tensor | None, size: int, logits: Logits
) -> tuple[str, Tensor | None]:
    """Turn a causal block into a partial one if its scale is not positive.

    The fused kernels mask with -inf before they scale.
    """
    if kind != "causal" or logits.softmax_scale > 0:
        return kind, allowed
    return "partial", torch.ones(size, size, dtype=torch.bool).tril_()


def _seen(allowed: Tensor) -> tuple[Tensor, Tensor] | None:
    """Return the indices of queries that see a key, and of keys that a query sees.

    Return None if these are all.
    """
    rows, columns = allowed.any(1), allowed.any(0)
    return (
        None
        if bool(rows.all()) and bool(columns.all())
        else (rows.nonzero()[:, 0], columns.nonzero()[:, 0])
    )
