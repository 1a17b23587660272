"""Replace the functions of flash-attn that ring-flash-attn, yunchang and transformers call.

Results are exact: torch computes them in float64 and rounds once, to the dtype of the input. The
signatures are those of flash-attn 2.7. Masks are aligned at the bottom right, as in flash-attn
since 2.1. A row that sees nothing has output 0 and log-sum-exp +inf, as with its kernels. Dropout,
softcap and ALiBi are refused. This file is also pasted into scripts, so it imports torch alone.

Shape letters: B batch, S sequence, H heads, K key/value heads, D head dim.

Source: github.com/Dao-AILab/flash-attention, README.md ("2.1: Change behavior of causal flag"),
flash_attn/flash_attn_interface.py.
"""

from __future__ import annotations

import math
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

VERSION = "2.7.4"


def visible(queries: int, keys: int, causal: bool, left: int, right: int) -> Tensor:
    """Return a bool mask (queries, keys), True where visible; -1 for left or right is no bound."""
    place = torch.arange(queries)[:, None] + keys - queries
    key = torch.arange(keys)[None, :]
    seen = torch.ones(queries, keys, dtype=torch.bool)
    if causal:
        right = 0
    if left >= 0:
        seen = seen & (key >= place - left)
    if right >= 0:
        seen = seen & (key <= place + right)
    return seen


def _forward(q: Tensor, k: Tensor, v: Tensor, scale: float, seen: Tensor) -> tuple[Tensor, Tensor]:
    """Return the output (B, S, H, D) and the log-sum-exp (B, H, S), in float64."""
    logits = _logits(q, k, scale, seen)
    lse = (
        torch.logsumexp(logits, -1) if k.shape[1] else logits.new_full(logits.shape[:-1], -math.inf)
    )
    p = torch.exp(logits - torch.where(lse.isinf(), 0.0, lse)[..., None])
    out = torch.einsum("bhqk,bkhd->bqhd", p, _spread(v, q.shape[2]))
    return out, torch.where(lse.isinf(), math.inf, lse)


def _backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    scale: float,
    seen: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v in float64, from the log-sum-exp (B, H, S) given."""
    heads, group = q.shape[2], q.shape[2] // k.shape[2]
    p = torch.exp(_logits(q, k, scale, seen) - lse.double()[..., None])
    d, o = dout.double(), out.double()
    delta = (d * o).sum(-1).transpose(1, 2)[..., None]
    ds = p * (torch.einsum("bqhd,bkhd->bhqk", d, _spread(v, heads)) - delta) * scale
    dq = torch.einsum("bhqk,bkhd->bqhd", ds, _spread(k, heads))
    dk, dv = torch.einsum("bhqk,bqhd->bkhd", ds, q.double()), torch.einsum("bhqk,bqhd->bkhd", p, d)
    return dq, dk.unflatten(2, (-1, group)).sum(3), dv.unflatten(2, (-1, group)).sum(3)


def _spread(x: Tensor, heads: int) -> Tensor:
    """Repeat each key/value head for every query head that reads it: (B, S, H, D) in float64."""
    return x.double().repeat_interleave(heads // x.shape[2], dim=2)


def _logits(q: Tensor, k: Tensor, scale: float, seen: Tensor) -> Tensor:
    logits = torch.einsum("bqhd,bkhd->bhqk", q.double(), _spread(k, q.shape[2])) * scale
    return logits.masked_fill(~seen, -math.inf)


def _refuse(dropout_p: float, softcap: float, alibi_slopes: Tensor | None) -> None:
    if dropout_p or softcap or alibi_slopes is not None:
        raise NotImplementedError(
            "the stand-in for flash-attn has no dropout, no softcap and no ALiBi"
        )


def _scale(q: Tensor, softmax_scale: float | None) -> float:
    return q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale


def _flash_attn_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    return_softmax: bool,
) -> tuple[Tensor, Tensor, None, None]:
    """Return output (B, S, H, D) in q's dtype, float32 log-sum-exp (B, H, S), and twice None."""
    _refuse(dropout_p, softcap, alibi_slopes)
    seen = visible(q.shape[1], k.shape[1], causal, window_size_left, window_size_right)
    out, lse = _forward(q, k, v, _scale(q, softmax_scale), seen)
    return out.to(q.dtype), lse.float(), None, None


def _flash_attn_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    deterministic: bool,
    rng_state: Tensor | None = None,
) -> Tensor:
    """Write the gradients into dq, dk and dv; return the row sums of dout * out (B, H, S)."""
    _refuse(dropout_p, softcap, alibi_slopes)
    seen = visible(q.shape[1], k.shape[1], causal, window_size_left, window_size_right)
    found = _backward(dout, q, k, v, out, softmax_lse, _scale(q, softmax_scale), seen)
    for place, value in zip((dq, dk, dv), found, strict=True):
        place.copy_(value)
    return (dout.double() * out.double()).sum(-1).transpose(1, 2).float()


def _documents(cu_seqlens_q: Tensor, cu_seqlens_k: Tensor) -> list[tuple[slice, slice]]:
    """Return the slices of query rows and of keys of each document."""
    q, k = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    if len(q) != len(k):
        raise ValueError(f"{len(q)} boundaries of queries, {len(k)} of keys")
    return [(slice(q[i], q[i + 1]), slice(k[i], k[i + 1])) for i in range(len(q) - 1)]


def _flash_attn_varlen_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    return_softmax: bool = False,
    block_table: Tensor | None = None,
    leftpad_k: Tensor | None = None,
    seqused_k: Tensor | None = None,
    zero_tensors: bool = False,
) -> tuple[Tensor, Tensor, None, None]:
    """Return the output (S, H, D) and log-sum-exp (H, S) of packed documents, and twice None."""
    out, lse = (
        torch.zeros_like(q),
        q.new_full((q.shape[1], q.shape[0]), math.inf, dtype=torch.float32),
    )
    for rows, keys in _documents(cu_seqlens_q, cu_seqlens_k):
        part = (q[None, rows], k[None, keys], v[None, keys])
        window = (window_size_left, window_size_right)
        o, part_lse, _, _ = _flash_attn_forward(
            *part, dropout_p, softmax_scale, causal, *window, softcap, alibi_slopes, False
        )
        out[rows], lse[:, rows] = o[0], part_lse[0]
    return out, lse, None, None


def _flash_attn_varlen_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    deterministic: bool,
    rng_state: Tensor | None = None,
    zero_tensors: bool = False,
) -> Tensor:
    """Write the gradients of packed documents into dq, dk and dv; return the row sums (H, S)."""
    delta = torch.zeros_like(softmax_lse)
    for rows, keys in _documents(cu_seqlens_q, cu_seqlens_k):
        part = (
            dout[None, rows],
            q[None, rows],
            k[None, keys],
            v[None, keys],
            out[None, rows],
            softmax_lse[None, :, rows],
        )
        into = (dq[None, rows], dk[None, keys], dv[None, keys])
        window = (window_size_left, window_size_right)
        how: Any = (dropout_p, softmax_scale, causal, *window, softcap, alibi_slopes, deterministic)
        delta[:, rows] = _flash_attn_backward(*part, *into, *how)[0]
    return delta


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
) -> Tensor:
    """Return the output (B, S, H, D), differentiable by autograd."""
    how: Any = (
        dropout_p,
        _scale(q, softmax_scale),
        causal,
        *window_size,
        softcap,
        alibi_slopes,
        False,
    )
    return _flash_attn_forward(q, k, v, *how)[0]


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
) -> Tensor:
    """Return the output (S, H, D) of packed documents, differentiable by autograd."""
    lengths = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    how: Any = (dropout_p, _scale(q, softmax_scale), causal, *window_size, softcap, alibi_slopes)
    return _flash_attn_varlen_forward(q, k, v, *lengths, *how)[0]


def install() -> None:
    """Make `import flash_attn` find this stand-in, unless a `flash_attn` is already loaded."""
    if "flash_attn" in sys.modules:
        return
    package, interface = ModuleType("flash_attn"), ModuleType("flash_attn.flash_attn_interface")
    for module in (package, interface):
        module.__spec__ = ModuleSpec(module.__name__, None)
        sys.modules[module.__name__] = module
    functions = (
        _flash_attn_forward,
        _flash_attn_backward,
        _flash_attn_varlen_forward,
        _flash_attn_varlen_backward,
    )
    vars(interface).update({function.__name__: function for function in functions})
    public = {function.__name__: function for function in (flash_attn_func, flash_attn_varlen_func)}
    vars(package).update(__version__=VERSION, flash_attn_interface=interface, __path__=[], **public)
