"""Compute attention of one block (some queries against some keys), forward and backward.

`block_attention` and its backward call torch's fused kernels, which also return the log-sum-exp, or
the plain kernel below, written in torch operations. `backend_for` chooses. Shapes as in
`sp_core.attention`.

Facts about the fused kernels of torch 2.13 that the rest of the package relies on:
- CPU flash: float64 down to float16; takes K < H; causal is top-left aligned, and NaN for a scale
  that is not positive. With no mask and few keys (FEW_KEYS), scores of NaN give 0. The additive
  mask must have q's dtype: a float32 mask for float64 is read wrongly, without an error. A tensor
  whose last dim is not contiguous is read wrongly, too. Zero queries, keys or heads end the process
  with SIGFPE. The backward sums dk and dv in their dtype.
- CUDA flash and efficient: rows at multiples of 16 bytes, which is not checked. bfloat16 needs
  compute capability 8.0.
- CUDA flash: half precision, head dim a multiple of 8 up to 256, causal only for Sq = Sk, takes
  K < H; compute capability 8.0; on 8.6 to 8.9 and 12.x no backward for head dims of 193 to 224.
- The backward of a CUDA kernel takes out and lse of any other: heads may be widened in between.
- CUDA cuDNN: as flash, head dim up to 128; its lse is (B, H, Sq, 1). On an H200 with bfloat16,
  8192 tokens and 32 heads of 64, it takes 0.6 times flash's time.
- CUDA efficient: K = H only, so keys are repeated for it; takes an additive mask of q's dtype. Its
  lse is padded to a multiple of 32 queries, as its backward needs it. The backward reads `out` as
  if it lay in memory as (B, S, H, D).
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from sp_core.attention import cuda
from sp_core.attention.logits import Logits
from sp_core.attention.merge import accumulation_dtype

HALF = (torch.bfloat16, torch.float16)
FLOATS = (torch.float64, torch.float32, *HALF)
FUSED = {"cuda"}
"""Kinds of device that have torch's CUDA kernels."""

Strip = tuple[slice, slice, Tensor | None]
"""(queries, keys, bool mask (queries, keys) of visible pairs). None: every pair is visible."""

FEW_KEYS = 16
"""With fewer keys and no mask, the CPU flash kernel gives 0 to a query whose scores are NaN."""
SCORES, CPU_SCORES = 1 << 26, 1 << 20
"""The most elements of q k^T that the plain kernel holds at a time: on a GPU, and on a CPU.
CPU_SCORES elements fit into a CPU's cache."""


def block_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    kind: str = "full",
    allowed: Tensor | None = None,
    all_seen: bool = False,
    logits: Logits,
) -> tuple[Tensor, Tensor]:
    """Compute attention of queries to one block of keys: softmax(logits) v, and its log-sum-exp.

    Values that no query of the block sees are not read. In a causal or partial block, a NaN or
    infinity that one query sees may spread to queries that do not see it. The kernels multiply
    hidden values by weight 0. Finite values never spread, unless their scores overflow.

    Args:
        q: (B, H, Sq, D), of any strides.
        k: (B, K, Sk, D).
        v: (B, K, Sk, D).
        kind: "full" (every pair is visible), "causal" (Sq = Sk, key j is visible to query i when
            j <= i) or "partial" (`allowed` says which pairs are visible).
        allowed: bool (Sq, Sk), True for visible pairs; for "partial" only. Do not change it later.
        all_seen: whether the caller knows that each query sees a key and each key is seen by a
            query. If False, `allowed` is searched for queries and keys without a visible pair.
        logits: how the logits follow from q k^T; with positions if it has ALiBi slopes. Sinks are
            not merged here.

    Returns:
        out (B, H, Sq, D) in q's dtype and lse (B, H, Sq) in float32 or wider; 0 and -inf for
        queries that see no key.

    Source: Dao, "FlashAttention-2", 2023, algorithm 1, for out and lse from blocks.
    """
    if _empty(q, k):
        return torch.zeros_like(q), q.new_full(
            q.shape[:3], -torch.inf, dtype=accumulation_dtype(q.dtype)
        )
    if all_seen or (seen := _seen(kind, allowed, logits, q.device)) is None:
        return forward(q, k, v, kind, allowed, logits)
    i, j, inside = seen
    part, part_lse = block_attention(q[:, :, i], k[:, :, j], v[:, :, j], **inside)
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
    all_seen: bool = False,
    logits: Logits,
) -> cuda.Triple:
    """Compute the gradients of one block: P = exp(s - lse), dS = P * (dO v^T - rowsum(dO * out)).

    s are the block's logits, dO is `grad_out`.

    Args:
        grad_out: (B, H, Sq, D), gradient of out.
        q: (B, H, Sq, D).
        k: (B, K, Sk, D).
        v: (B, K, Sk, D).
        out: (B, H, Sq, D), the attention of q over all its keys, of which k may be a part.
        lse: (B, H, Sq), the log-sum-exp over the same keys as out.
        kind, allowed, all_seen, logits: as in `block_attention`.

    Returns:
        dq (B, H, Sq, D), the summand of q's gradient that comes from these keys; dk and dv
        (B, K, Sk, D), the summands that come from these queries. The kernel decides the dtype: q's
        or wider.

    Source: Dao, "FlashAttention-2", 2023, algorithm 2.
    """
    if _empty(q, k):
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    grad_out, out = grad_out.to(q.dtype), out.to(q.dtype)
    if all_seen or (seen := _seen(kind, allowed, logits, q.device)) is None:
        return backward(grad_out, q, k, v, out, lse, kind, allowed, logits)
    i, j, inside = seen
    parts = block_attention_backward(
        *(grad_out[:, :, i], q[:, :, i], k[:, :, j], v[:, :, j], out[:, :, i], lse[:, :, i]),
        **inside,
    )
    dq, dk, dv = (
        torch.zeros_like(x, dtype=part.dtype).index_copy_(2, at, part)
        for x, at, part in zip((q, k, v), (i, j, j), parts, strict=True)
    )
    return dq, dk, dv


def _empty(q: Tensor, k: Tensor) -> bool:
    """Return whether q or k has no element. The fused kernels crash on such input."""
    return q.numel() == 0 or k.numel() == 0


def _seen(
    kind: str, allowed: Tensor | None, logits: Logits, device: torch.device
) -> tuple[Tensor, Tensor, dict[str, Any]] | None:
    """Find the queries that see a key, and the keys that a query sees.

    Returns:
        Indices of these queries and of these keys, on the device, and the keyword arguments of
        `block_attention` for the block of only these. None if no query or key can be left out.
    """
    if allowed is None:
        return None
    kept = vars(allowed)
    if "seen" not in kept:  # a GPU has to be asked
        rows, columns = allowed.any(1), allowed.any(0)
        queries, keys = rows.nonzero()[:, 0], columns.nonzero()[:, 0]
        is_whole = (len(queries), len(keys)) == allowed.shape
        kept["seen"] = None if is_whole else (queries, keys, allowed[queries][:, keys])
    if kept["seen"] is None:
        return None
    queries, keys, part = kept["seen"]
    i, j = cuda.on_device(queries, device), cuda.on_device(keys, device)
    return i, j, {"kind": kind, "allowed": part, "all_seen": True, "logits": logits.at(i, j)}


def backend_for(q: Tensor, kind: str, logits: Logits) -> str:
    """Return the name of the family of kernels that computes a block of attention.

    Args:
        q: the block's queries; k and v have the same device, dtype and head dim.
        kind: "full", "causal" (square) or "partial".
        logits: how the logits follow from q k^T. Only the plain kernel knows softcap and ALiBi. The
            CUDA kernels take a row's maximum before they scale, so they need a positive scale.

    Returns:
        "flash_cpu", "flash_cuda" (cuDNN's kernel may run for it), "efficient_cuda" or "plain".
    """
    device_type, dtype, head_dim = q.device.type, q.dtype, q.shape[-1]
    if logits.needs_plain_kernel:
        return "plain"
    if device_type == "cpu":
        return "flash_cpu" if dtype in FLOATS else "plain"
    if device_type not in FUSED or logits.softmax_scale <= 0:
        return "plain"
    capability = cuda.capability(q.device)
    if dtype == torch.bfloat16 and capability < (8, 0):
        return "plain"
    is_small = (8, 6) <= capability < (9, 0) or capability[0] == 12
    fits = head_dim % 8 == 0 and head_dim <= 256 and not (is_small and 192 < head_dim <= 224)
    if dtype in HALF and fits and kind != "partial" and capability >= (8, 0):
        return "flash_cuda"
    aligned = head_dim % (8 if dtype in HALF else 4) == 0
    return "efficient_cuda" if dtype in (torch.float32, *HALF) and aligned else "plain"


def forward(
    q: Tensor, k: Tensor, v: Tensor, kind: str, allowed: Tensor | None, logits: Logits
) -> tuple[Tensor, Tensor]:
    """Run a kernel of the family that `backend_for` names. Arguments as in `block_attention`.

    The block must not be empty, and every query must see a key. Return out (B, H, Sq, D) and lse
    (B, H, Sq).
    """
    backend = backend_for(q, kind, logits)
    if backend == "plain":
        return _plain(q, k, v, _strips(q, k, kind, allowed), logits)
    scale = logits.softmax_scale
    if backend == "flash_cpu":
        q, k, v = (_readable(t) for t in (q, k, v))
        # the kernel hides keys before it scales the scores, but its backward after that
        if kind == "causal" and scale <= 0:  # q * 0.0 keeps NaN
            q, scale = (-q, -scale) if scale else (q * 0.0, 1.0)
        mask = _additive(allowed, q.dtype)
        if mask is None and k.shape[2] < FEW_KEYS:
            mask = q.new_zeros(k.shape[2]).expand(q.shape[2], -1)
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        out, lse = kernel(q, k, v, 0.0, kind == "causal", attn_mask=mask, scale=scale)
        return out, lse
    return cuda.forward(backend, q, k, v, kind == "causal", allowed, scale)


def backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    kind: str,
    allowed: Tensor | None,
    logits: Logits,
) -> cuda.Triple:
    """Run a kernel's backward on a non-empty block. Return dq, dk and dv.

    Arguments as in `block_attention_backward`: out and lse may cover more keys than k and v.
    """
    backend = backend_for(q, kind, logits)
    # for a query that saw no key exp(s - lse) must be 0, not NaN
    lse = lse.masked_fill(lse == -torch.inf, torch.inf)
    if backend == "plain":
        return _plain_backward(grad_out, q, k, v, out, lse, _strips(q, k, kind, allowed), logits)
    scale = logits.softmax_scale
    if backend == "flash_cpu":
        dtype = accumulation_dtype(q.dtype)  # the kernel sums over heads and queries in its dtype
        given = (_readable(t.to(dtype)) for t in (grad_out, q, k, v, out))
        dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *(*given, lse, 0.0, kind == "causal"), attn_mask=_additive(allowed, dtype), scale=scale
        )
        return dq, dk, dv
    return cuda.backward(backend, grad_out, q, k, v, out, lse, kind == "causal", allowed, scale)


def _readable(x: Tensor) -> Tensor:
    """Return x, or a copy if its last dim is not contiguous.

    The CPU kernel reads such a tensor wrongly, without an error.
    """
    return x if x.stride(-1) == 1 else x.contiguous()


def _additive(allowed: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Return the mask (Sq, Sk) that the CPU kernel adds: 0 for visible and -inf for hidden pairs.

    The result is cached as an attribute of `allowed`, which equal tiles of a sliding window share.
    """
    if allowed is None:
        return None
    return cuda.kept(
        allowed,
        dtype,
        lambda: allowed.new_zeros(allowed.shape, dtype=dtype).masked_fill_(~allowed, -torch.inf),
    )


def _strips(q: Tensor, k: Tensor, kind: str, allowed: Tensor | None) -> Iterator[Strip]:
    """Cut a block into strips of consecutive queries for the plain kernel.

    `kind` is "full", "causal" or "partial"; `allowed` (Sq, Sk) says which query of a partial block
    sees which key. Yield slices of queries and keys, and the bool mask of these pairs (None: all).
    Each strip has at most SCORES (on a CPU: CPU_SCORES) elements of q k^T, but at least one query.
    In a causal block, where query i sees keys 0 to i, a strip's keys end with the last one seen.
    """
    most = CPU_SCORES if q.device.type == "cpu" else SCORES
    step = max(1, most // (q.shape[0] * q.shape[1] * k.shape[2]))
    if allowed is not None and allowed.numel() <= most:
        allowed = cuda.on_device(allowed, q.device)
    for start in range(0, q.shape[2], step):
        stop = min(start + step, q.shape[2])
        rows, keys = slice(start, stop), slice(stop if kind == "causal" else None)
        visible = None if allowed is None else allowed[rows].to(q.device)
        if kind == "causal":
            visible = torch.ones(stop - start, stop, dtype=torch.bool, device=q.device).tril_(start)
        yield rows, keys, visible


def _plain(
    q: Tensor, k: Tensor, v: Tensor, strips: Iterator[Strip], logits: Logits
) -> tuple[Tensor, Tensor]:
    """Compute attention and its log-sum-exp in float32 or wider, one strip after the other.

    Args:
        q: (B, H, Sq, D).
        k: (B, K, Sk, D).
        v: (B, K, Sk, D).
        strips: the block cut by `_strips`.
        logits: how the logits follow from q k^T.

    Returns:
        out (B, H, Sq, D) in q's dtype and lse (B, H, Sq) in float32 or wider.
    """
    dtype = accumulation_dtype(q.dtype)
    out, lse = torch.empty_like(q), q.new_empty(q.shape[:3], dtype=dtype)
    # not for each strip, for which torch.matmul would copy other layouts again
    k, v = (x.to(dtype, memory_format=torch.contiguous_format) for x in (k, v))
    for rows, keys, visible in strips:
        part, k_, v_ = q[:, :, rows].to(dtype), k[:, :, keys], v[:, :, keys]
        scores = _scores(_grouped(part, k.shape[1]), k_, logits)
        scores = _masked(scores, visible, logits.at(rows, keys))
        # Not exp(scores - logsumexp): such weights add up to 1 only within the round-off of the
        # greatest score, which the difference dO v^T - rowsum(dO * out) in the backward exposes.
        # A row of -inf, as steep ALiBi slopes make, would be NaN without the bound.
        peak = scores.amax(-1, keepdim=True).clamp_min_(torch.finfo(dtype).min)
        e = scores.sub_(peak).exp_()
        total = e.sum(-1, keepdim=True)
        lse[:, :, rows] = total.log().add_(peak).view(part.shape[:3])
        # (B, K, H/K * rows, D) becomes (B, H, rows, D)
        out[:, :, rows] = (e @ v_).div_(total.clamp_min_(1.0)).view_as(part)
    return out, lse


def _plain_backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    strips: Iterator[Strip],
    logits: Logits,
) -> cuda.Triple:
    """Compute dq, dk and dv in float32 or wider, one strip after the other.

    Arguments as in `backward`. A query that sees no key has lse = +inf here.
    """
    dtype = accumulation_dtype(q.dtype)
    dq, dk, dv = (torch.zeros_like(x, dtype=dtype) for x in (q, k, v))
    k, v = (x.to(dtype, memory_format=torch.contiguous_format) for x in (k, v))
    for rows, keys, visible in strips:
        # q_, do, o: (B, K, H/K * rows, D)
        q_, do, o = (_grouped(t[:, :, rows].to(dtype), k.shape[1]) for t in (q, grad_out, out))
        k_, v_ = k[:, :, keys], v[:, :, keys]
        scores = _scores(q_, k_, logits)
        ds = (do @ v_.mT).sub_((do * o).sum(-1, keepdim=True)).mul_(logits.softmax_scale)
        if logits.softcap is not None:
            ds.mul_(1 - (scores / logits.softcap).square_())  # the derivative of tanh
        p = _masked(scores, visible, logits.at(rows, keys))
        p.sub_(lse[:, :, rows].to(dtype).reshape(*q_.shape[:3], 1))
        dv[:, :, keys] += p.exp_().mT @ do
        ds.mul_(p)
        dq[:, :, rows] = (ds @ k_).view_as(q[:, :, rows])
        dk[:, :, keys] += ds.mT @ q_
    return dq, dk, dv


def _grouped(x: Tensor, num_kv_heads: int) -> Tensor:
    """View (B, H, Sq, D) as (B, K, H/K * Sq, D), K being `num_kv_heads`.

    All queries that read one key/value head become its rows, so keys need not be repeated.
    """
    return x.reshape(x.shape[0], num_kv_heads, -1, x.shape[-1])


def _scores(q: Tensor, k: Tensor, logits: Logits) -> Tensor:
    """Return q k^T, scaled, and bounded by the softcap if there is one.

    The shape is (B, K, H/K * Sq, Sk): beside each key/value head the queries of its H/K heads.
    """
    scores = torch.matmul(q, k.mT).mul_(logits.softmax_scale)
    cap = logits.softcap
    return scores if cap is None else scores.div_(cap).tanh_().mul_(cap)


def _masked(scores: Tensor, visible: Tensor | None, logits: Logits) -> Tensor:
    """Add the ALiBi bias to scores (B, K, H/K * Sq, Sk), and set those of hidden pairs to -inf.

    `visible` is bool (Sq, Sk), or None if all pairs are visible. Return `scores`, changed in place.
    """
    logits.add_bias(scores)
    if visible is not None:
        scores.view(*scores.shape[:2], -1, *visible.shape).masked_fill_(~visible, -torch.inf)
    return scores
