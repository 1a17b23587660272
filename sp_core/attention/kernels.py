"""The kernels: torch's fused ones, which return the lse, and a plain one for the rest.

Chosen by one plain function.

Facts about the fused kernels of torch 2.13 that the rest of the package relies on (each is fixed by
a test):
- CPU flash: float64 down to float16; K < H natively; causal is top-left aligned, and NaN for a
  scale that is not positive; the additive mask must have q's dtype (a float32 mask for float64 is
  read wrongly, without an error); a last dim that is not contiguous is read wrongly too; zero
  queries, keys or heads end the process with SIGFPE.
- CUDA flash and efficient: rows at multiples of 16 bytes, which is not checked.
- CUDA flash: half precision, head dim a multiple of 8 up to 256, causal only for Sq = Sk, K < H
natively.
- CUDA efficient: K = H only, so keys are repeated for it; its lse is padded to a multiple of 32
  queries, as its backward wants it; that reads `out` as if it lay in memory as (B, S, H, D).
- CUDA cuDNN: half precision; its lse has a trailing dim of 1.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sp_core.attention import cuda
from sp_core.attention.merge import accumulation_dtype

HALF = (torch.bfloat16, torch.float16)
FLOATS = (torch.float64, torch.float32, *HALF)

Triple = tuple[Tensor, Tensor, Tensor]


def backend_for(
    device_type: str,
    dtype: torch.dtype,
    head_dim: int,
    kind: str,
    scale: float = 1.0,
) -> str:
    """Name the kernel that a block of attention runs on.

    Args:
        device_type: "cpu", "cuda", ...
        dtype: of q, k and v.
        head_dim: of q, k and v.
        kind: "full", "causal" (square) or "partial".
        scale: softmax_scale. The CUDA kernels take a row's maximum before they scale, so they need
            a positive one.

    Returns:
        "flash_cpu", "flash_cuda", "efficient_cuda" or "plain" ("cudnn_cuda" only when asked for by
        name).
    """
    if device_type == "cpu":
        return "flash_cpu" if dtype in FLOATS else "plain"
    if device_type != "cuda" or kind == "partial" or scale <= 0:
        return "plain"
    if dtype in HALF and head_dim % 8 == 0 and head_dim <= 256:
        return "flash_cuda"
    aligned = head_dim % (8 if dtype in HALF else 4) == 0
    return "efficient_cuda" if dtype in (torch.float32, *HALF) and aligned else "plain"


def forward(
    backend: str, q: Tensor, k: Tensor, v: Tensor, kind: str, allowed: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """Run a kernel on a non-empty block in which every query sees a key.

    Return out (B, H, Sq, D) and lse (B, H, Sq).
    """
    if backend == "plain":
        return _plain(q, k, v, _visible(q, k, kind, allowed), scale)
    if backend == "flash_cpu":
        q, k, v = (_readable(t) for t in (q, k, v))
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, kind == "causal", attn_mask=_additive(allowed, q.dtype), scale=scale
        )
        return out, lse
    return cuda.forward(backend, q, k, v, kind == "causal", scale)


def backward(
    backend: str,
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    kind: str,
    allowed: Tensor | None,
    scale: float,
) -> Triple:
    """Run a kernel's backward. `out` and `lse` may cover more keys than k and v."""
    # a row that saw nothing: exp(s - lse) must be 0, not NaN
    lse = lse.masked_fill(lse == -torch.inf, torch.inf)
    if backend == "plain":
        return _plain_backward(grad_out, q, k, v, out, lse, _visible(q, k, kind, allowed), scale)
    if backend == "flash_cpu":
        grad_out, q, k, v, out = (_readable(t) for t in (grad_out, q, k, v, out))
        added = _additive(allowed, q.dtype)
        dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad_out, q, k, v, out, lse, 0.0, kind == "causal", attn_mask=added, scale=scale
        )
        return dq, dk, dv
    return cuda.backward(backend, grad_out, q, k, v, out, lse, kind == "causal", scale)


def _readable(x: Tensor) -> Tensor:
    """Return a tensor whose last dim is contiguous.

    The CPU kernel reads anything else wrongly, without an error.
    """
    return x if x.stride(-1) == 1 else x.contiguous()


def _additive(allowed: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Return the float mask that the CPU kernel adds to the scores."""
    if allowed is None:
        return None
    return torch.zeros(allowed.shape, dtype=dtype).masked_fill_(~allowed, -torch.inf)


def _visible(q: Tensor, k: Tensor, kind: str, allowed: Tensor | None) -> Tensor | None:
    """Return the bool mask (Sq, Sk) that the plain kernel applies, or None for a full block."""
    if kind == "causal":
        return torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril_()
    return None if allowed is None else allowed.to(q.device)


def _plain(
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


def _plain_backward(
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
    """View (B, H, Sq, D) as (B, K, H/K * Sq, D).

    The queries of a key head become rows, so no key is repeated.
    """
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
