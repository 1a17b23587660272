"""Call torch's CUDA attention kernels: pack their arguments and convert the shapes of their lse."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn.functional import pad

from sp_core.attention.merge import accumulation_dtype

# queries; the memory-efficient kernel keeps its lse in rows of a multiple of this
LSE_ALIGNMENT = 32
# the kernels read and write tensors in pieces of this many bytes, at addresses that are multiples
# of it
LOAD_BYTES = 16

Triple = tuple[Tensor, Tensor, Tensor]
Lengths = tuple[tuple[int, ...], tuple[int, ...]]


def forward(
    backend: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    allowed: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Run a kernel by name. Return out (B, H, Sq, D) and lse (B, H, Sq)."""
    aten = torch.ops.aten
    q, k, v = (aligned(x) for x in (q, k, v))
    if backend == "flash_cuda":
        out, lse, *_ = aten._scaled_dot_product_flash_attention(
            q, k, v, 0.0, causal, False, scale=scale
        )
    else:
        k, v = (repeated(t, q.shape[1]) for t in (k, v))
        out, lse, *_ = aten._scaled_dot_product_efficient_attention(
            q, k, v, added(allowed, q), True, 0.0, causal, scale=scale
        )
    return out, lse[..., : q.shape[2]]


def backward(
    backend: str,
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    causal: bool,
    allowed: Tensor | None,
    scale: float,
) -> Triple:
    """Run a kernel's backward by name. Return dq, dk and dv in the dtype of q."""
    aten = torch.ops.aten
    grad_out, q, k, v, out = (aligned(x) for x in (grad_out, q, k, v, out))
    lengths = (q.shape[2], k.shape[2])
    if backend == "flash_cuda":
        given: tuple[object, ...] = (grad_out, q, k, v, out, lse.contiguous(), None, None, *lengths)
        dq, dk, dv = aten._scaled_dot_product_flash_attention_backward(
            *given, 0.0, causal, *_flash_state(q), scale=scale
        )
    else:
        seed, offset = (q.new_zeros((), dtype=torch.int64) for _ in range(2))
        heads, (k, v) = k.shape[1], (repeated(t, q.shape[1]) for t in (k, v))
        given = (grad_out, q, k, v, added(allowed, q), tokens_first(out), padded_lse(lse))
        dq, dk, dv, _ = aten._scaled_dot_product_efficient_attention_backward(
            *given, seed, offset, 0.0, [True, True, True, False], causal, scale=scale
        )
        dk, dv = (gathered(t, heads) for t in (dk, dv))
    return dq, dk, dv


def _flash_state(like: Tensor) -> Iterator[Tensor]:
    """Yield the state of dropout. Without dropout no kernel reads it."""
    return (like.new_zeros(shape, dtype=torch.int64).to(torch.uint64) for shape in ((2,), ()))


def sequences(
    q: Tensor, k: Tensor, v: Tensor, lengths: Lengths, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """Run the flash kernel on sequences that lie one after the other, (tokens, H, D).

    Args:
        q, k, v: contiguous.
        lengths: of the sequences of q, and of those of k and v, in one example of a batch.
        causal: whether a query sees no later key; then these lengths are equal.
        scale: of the scores.

    Returns:
        out (tokens, H, D) and lse (tokens, H).
    """
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        q, k, v, *_ends(lengths, q), 0.0, causal, False, scale=scale
    )
    return out, lse.T


def sequences_backward(
    tensors: Sequence[Tensor], lse: Tensor, lengths: Lengths, causal: bool, scale: float
) -> Triple:
    """Run the backward of `sequences` on grad_out, q, k, v and out. Return dq, dk and dv."""
    ends = _ends(lengths, lse)
    dq, dk, dv = torch.ops.aten._flash_attention_backward(
        *tensors, lse.T.contiguous(), *ends, 0.0, causal, *_flash_state(lse), scale=scale
    )
    return dq, dk, dv


def _ends(lengths: Lengths, like: Tensor) -> tuple[object, ...]:
    """Return where sequences end, from 0 on, and the greatest length: of queries and of keys.

    `like` has a row for each query of all examples of a batch.
    """
    batch = len(like) // sum(lengths[0])
    ends = (torch.tensor([0, *accumulate(each * batch)], dtype=torch.int32) for each in lengths)
    return *(end.to(like.device) for end in ends), *map(max, lengths)


def aligned(x: Tensor) -> Tensor:
    """Copy a tensor (B, H, S, D) unless the kernels can read it.

    With a dense last dim, and every row at a multiple of LOAD_BYTES.

    torch passes others on as they are (pytorch issue 183484). The kernel then fails, or ends all
    CUDA work of the process.
    """
    strides = [
        stride for length, stride in zip(x.shape[:-1], x.stride(), strict=False) if length > 1
    ]
    rows = (x.data_ptr(), *(stride * x.itemsize for stride in strides))
    if x.stride(-1) == 1 and not any(place % LOAD_BYTES for place in rows):
        return x
    return x.clone(memory_format=torch.contiguous_format)


def added(allowed: Tensor | None, q: Tensor) -> Tensor | None:
    """Return what the efficient kernel adds to the scores (B, H, Sq, Sk) of a bool mask (Sq, Sk).

    One row for all heads, each at a multiple of LOAD_BYTES. Keys of a row that are all hidden at
    first are no NaN in this kernel, as long as it sees one.
    """
    if allowed is None:
        return None
    room = q.new_full((len(allowed), -(-allowed.shape[1] // LOAD_BYTES) * LOAD_BYTES), -torch.inf)
    bias = room[:, : allowed.shape[1]].masked_fill_(allowed.to(q.device), 0.0)
    return bias.expand(*q.shape[:2], *bias.shape)


def tokens_first(x: Tensor) -> Tensor:
    """Lay (B, H, S, D) out as (B, S, H, D), the layout in which the efficient backward reads `out`.

    Source: `o_strideM` in torch's kernel_backward.h: the row stride is num_heads * head_dim,
    whatever the strides of `out` are.
    """
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def repeated(x: Tensor, num_heads: int) -> Tensor:
    """Repeat the key heads, (B, K, S, D) to (B, H, S, D), for a kernel without grouped heads."""
    return x if x.shape[1] == num_heads else x.repeat_interleave(num_heads // x.shape[1], dim=1)


def gathered(dx: Tensor, num_kv_heads: int) -> Tensor:
    """Sum gradients over the query heads of each key head, in float32 or wider.

    (B, H, S, D) becomes (B, K, S, D).
    """
    if dx.shape[1] == num_kv_heads:
        return dx
    b, h, s, d = dx.shape
    return dx.reshape(b, num_kv_heads, h // num_kv_heads, s, d).sum(
        2, dtype=accumulation_dtype(dx.dtype)
    )


def padded_lse(lse: Tensor) -> Tensor:
    """Pad (B, H, Sq) to a multiple of LSE_ALIGNMENT queries with +inf.

    A row with lse = +inf has all weights 0.
    """
    missing = -lse.shape[-1] % LSE_ALIGNMENT
    return pad(lse, (0, missing), value=torch.inf).contiguous()
