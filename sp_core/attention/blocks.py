"""Attention of one block, forward and backward, including the inputs that the kernels cannot handle."""

from __future__ import annotations

import torch
from torch import Tensor

from sp_core.attention import kernels
from sp_core.attention.merge import accumulation_dtype
from sp_core.errors import ShapeError

Triple = tuple[Tensor, Tensor, Tensor]


def block_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    kind: str = "full",
    allowed: Tensor | None = None,
    scale: float,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute attention of queries to one block of keys: out = softmax(scale q k^T) v and its log-sum-exp.

    Values that nobody in the block sees are not read. A NaN or infinity that some query of a causal
    or partial block sees may spread to other queries of that block, because the kernels multiply
    hidden values by weight 0; finite values never do.

    Args:
        q: (B, H, Sq, D), strided as it comes.
        k: (B, K, Sk, D).
        v: (B, K, Sk, D).
        kind: "full", "causal" (Sq = Sk, key j visible to query i when j <= i) or "partial".
        allowed: bool (Sq, Sk), for "partial" only.
        scale: softmax_scale.
        backend: a kernel by name, as from `backend_for`; None chooses.

    Returns:
        out (B, H, Sq, D) in q's dtype and lse (B, H, Sq) in float32 or wider; 0 and -inf for
        queries that see nothing.

    Raises:
        ShapeError: a causal block that is not square, or a partial one without its mask.

    Source: Dao, "FlashAttention-2", 2023, algorithm 1, for out and lse from blocks.
    """
    _check_kind(q, k, kind, allowed)
    if _empty(q, k):
        return torch.zeros_like(q), q.new_full(
            q.shape[:3], -torch.inf, dtype=accumulation_dtype(q.dtype)
        )
    kind, allowed = _signed(kind, allowed, q.shape[2], scale)
    backend = backend or _backend(q, kind, scale)
    if allowed is not None and (seen := _seen(allowed)) is not None:
        return _seen_attention(q, k, v, allowed, *seen, scale, backend)
    return kernels.forward(backend, q, k, v, kind, allowed, scale)


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
    scale: float,
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
        scale: softmax_scale.
        backend: as in `block_attention`.

    Returns:
        dq (B, H, Sq, D), dk and dv (B, K, Sk, D), this block's summands, as the kernel rounds them:
        in q's dtype or wider.

    Raises:
        ShapeError: a causal block that is not square, or a partial one without its mask.

    Source: Dao, "FlashAttention-2", 2023, algorithm 2.
    """
    _check_kind(q, k, kind, allowed)
    if _empty(q, k):
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    kind, allowed = _signed(kind, allowed, q.shape[2], scale)
    backend = backend or _backend(q, kind, scale)
    grad_out, out = grad_out.to(q.dtype), out.to(q.dtype)
    if allowed is not None and (seen := _seen(allowed)) is not None:
        return _seen_backward(grad_out, q, k, v, out, lse, allowed, *seen, scale, backend)
    return kernels.backward(backend, grad_out, q, k, v, out, lse, kind, allowed, scale)


def _check_kind(q: Tensor, k: Tensor, kind: str, allowed: Tensor | None) -> None:
    """Refuse an unknown kind, and a mask that does not fit it. Kernels disagree on causal blocks with Sq != Sk."""
    if kind not in ("full", "causal", "partial"):
        raise ValueError(f"kind is {kind!r}, needed 'full', 'causal' or 'partial'")
    if kind == "causal" and q.shape[2] != k.shape[2]:
        raise ShapeError(
            f"causal block of {q.shape[2]} queries and {k.shape[2]} keys, needed as many; cut off a full block"
        )
    given = None if allowed is None else tuple(allowed.shape)
    needed = (q.shape[2], k.shape[2]) if kind == "partial" else None
    if given != needed:
        raise ShapeError(
            f"allowed has shape {given} for a {kind} block, needed {needed} (queries, keys); only partial takes one"
        )


def _empty(q: Tensor, k: Tensor) -> bool:
    """Return whether there is nothing to compute. The fused kernels crash on such input."""
    return q.numel() == 0 or k.numel() == 0


def _signed(
    kind: str, allowed: Tensor | None, size: int, scale: float
) -> tuple[str, Tensor | None]:
    """Turn a causal block into a partial one if its scale is not positive. The fused kernels mask with -inf before they scale."""
    if kind != "causal" or scale > 0:
        return kind, allowed
    return "partial", torch.ones(size, size, dtype=torch.bool).tril_()


def _backend(q: Tensor, kind: str, scale: float) -> str:
    """Return the default kernel. The CUDA kernels take a row's maximum before they scale, so they need a positive scale."""
    if q.device.type == "cuda" and scale <= 0:
        return "plain"
    return kernels.backend_for(q.device.type, q.dtype, q.shape[-1], kind)


def _seen(allowed: Tensor) -> tuple[Tensor, Tensor] | None:
    """Return the indices of queries that see a key, and of keys that a query sees. Return None if these are all."""
    rows, columns = allowed.any(1), allowed.any(0)
    return (
        None
        if bool(rows.all()) and bool(columns.all())
        else (rows.nonzero()[:, 0], columns.nonzero()[:, 0])
    )


def _seen_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    allowed: Tensor,
    rows: Tensor,
    columns: Tensor,
    scale: float,
    backend: str,
) -> tuple[Tensor, Tensor]:
    """Compute a partial block without the queries that see nothing and the keys that no query sees."""
    i, j = rows.to(q.device), columns.to(q.device)
    inner = allowed[rows][:, columns]
    part_out, part_lse = block_attention(
        q[:, :, i],
        k[:, :, j],
        v[:, :, j],
        kind="partial",
        allowed=inner,
        scale=scale,
        backend=backend,
    )
    out, lse = torch.zeros_like(q), q.new_full(q.shape[:3], -torch.inf, dtype=part_lse.dtype)
    return out.index_copy_(2, i, part_out), lse.index_copy_(2, i, part_lse)


def _seen_backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    allowed: Tensor,
    rows: Tensor,
    columns: Tensor,
    scale: float,
    backend: str,
) -> Triple:
    """Compute the backward of `_seen_attention`. What was left out has zero gradient."""
    i, j = rows.to(q.device), columns.to(q.device)
    part = block_attention_backward(
        *(grad_out[:, :, i], q[:, :, i], k[:, :, j], v[:, :, j], out[:, :, i], lse[:, :, i]),
        kind="partial",
        allowed=allowed[rows][:, columns],
        scale=scale,
        backend=backend,
    )
    whole = (torch.zeros_like(x, dtype=dx.dtype) for x, dx in zip((q, k, v), part, strict=True))
    dq, dk, dv = (
        x.index_copy_(2, at, dx) for x, at, dx in zip(whole, (i, j, j), part, strict=True)
    )
    return dq, dk, dv
