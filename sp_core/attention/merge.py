"""Merge partial results of attention, of the same queries over disjoint sets of keys.

A partial result is out (..., Sq, D) and lse (..., Sq), the log-sum-exp of each query's logits. A
query that saw no key has out = 0 and lse = -inf.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from sp_core.arguments import check_dense
from sp_core.errors import ShapeError


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which values of `dtype` are summed: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def merge(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Merge the attention of the same queries over two disjoint sets of keys.

    out = w out_a + (1 - w) out_b with w = sigmoid(lse_a - lse_b), lse = log(exp(lse_a) +
    exp(lse_b)). Exchanging a and b gives the same bits; regrouping changes only the rounding. A
    query that saw no key on one side (lse = -inf, out = 0) takes the other side's result unchanged.
    Weights below the smallest normal number of the dtype may become 0.

    Attention functions return out as (B, Sq, H, D) and lse as (B, H, Sq): transpose dims 1 and 2 of
    out before the merge, and back afterwards. Pass `sinks` in the attention over one set only.

    Args:
        out_a: (..., Sq, D), of any floating dtype.
        lse_a: (..., Sq), float32 or wider.
        out_b: like out_a.
        lse_b: like lse_a.

    Returns:
        out (..., Sq, D) and lse (..., Sq), in float32 or wider. Differentiable any number of times.

    Raises:
        ShapeError: the shapes of the two partial results differ, or do not fit.
        DtypeError: an argument is no tensor.

    Source: Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018, section 3.1.
    """
    given = {"out_a": out_a, "lse_a": lse_a, "out_b": out_b, "lse_b": lse_b}
    for name, x in given.items():
        check_dense(x, name)
    shapes = [tuple(x.shape) for x in given.values()]
    if shapes[:2] != shapes[2:] or shapes[0][:-1] != shapes[1]:
        raise ShapeError(
            f"out and lse of shapes {shapes[:2]} and {shapes[2:]} given; needed one shape "
            f"(..., Sq, D) of out and its (..., Sq) of lse."
        )
    dtype = accumulation_dtype(torch.promote_types(out_a.dtype, out_b.dtype))
    wide = torch.promote_types(dtype, torch.promote_types(lse_a.dtype, lse_b.dtype))
    out = out_a.to(dtype, copy=True)
    unseen = (lse_a == -torch.inf) & (lse_b == -torch.inf)
    # The derivatives of -inf - -inf would be NaN. Any weight will do there: both outs are 0.
    # Contiguous, because strides must not decide how an element is rounded (see `merge_into`).
    a, b = (x.to(wide).masked_fill(unseen, 0.0).contiguous() for x in (lse_a, lse_b))
    _add_weighted(out, (a - b).to(dtype), out_b)
    return out, _log_add_exp(a, b).masked_fill(unseen, -torch.inf)


class _LogAddExp(torch.autograd.Function):
    """Compute `torch.logaddexp`, whose own second derivative overflows to NaN for distant a and b.

    The backward is differentiable any number of times.
    """

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(a, b)
        return torch.logaddexp(a, b)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        a, b = ctx.saved_tensors
        return grad * torch.sigmoid(a - b), grad * torch.sigmoid(b - a)


_log_add_exp: Callable[[Tensor, Tensor], Tensor] = _LogAddExp.apply


def add_sinks(out: Tensor, lse: Tensor, sinks: Tensor | None) -> None:
    """Merge in place, for each head, a key without a value whose logit is the head's sink.

    Args:
        out: (B, H, Sq, D), attention over all keys, float32 or wider; changed.
        lse: (B, H, Sq), float32 or wider; changed.
        sinks: (H,), or None to change nothing.
    """
    if sinks is not None:
        sink = sinks.to(lse.dtype)[:, None].expand_as(lse)
        merge_into(out, lse, out.new_zeros(()), sink)


def sinks_gradient(
    grad_out: Tensor, out: Tensor, lse: Tensor, grad_lse: Tensor | None, sinks: Tensor | None
) -> Tensor | None:
    """Compute the gradient of the sinks, (H,), in their dtype. Return None for no sinks.

    A sink is the logit of a key whose value is 0: P = exp(sink - lse), dsink = P * (grad_lse -
    rowsum(dO * out)), summed over batch and queries. dO is `grad_out`.

    Args:
        grad_out: (B, H, Sq, D), gradient of out.
        out: (B, H, Sq, D), after `add_sinks`.
        lse: (B, H, Sq), after `add_sinks`.
        grad_lse: (B, H, Sq), gradient of lse; None for zero.
        sinks: (H,), or None.
    """
    if sinks is None:
        return None
    weights = torch.exp(sinks.to(lse.dtype)[:, None] - lse.masked_fill(lse.isneginf(), torch.inf))
    delta = -(grad_out.to(lse.dtype) * out).sum(-1)
    delta = delta if grad_lse is None else delta + grad_lse
    return (weights * delta).sum((0, 2)).to(sinks.dtype)


def merge_into(out: Tensor, lse: Tensor, part_out: Tensor, part_lse: Tensor) -> None:
    """Merge two partial results of attention in place, by the formula of `merge`.

    Args:
        out: (..., Sq, D), float32 or wider; changed to the merged result.
        lse: (..., Sq), float32 or wider; changed to the merged log-sum-exp.
        part_out: (..., Sq, D), attention of the same queries to keys that `out` does not cover.
        part_lse: (..., Sq), the log-sum-exp of `part_out`.
    """
    # For queries that saw no key on either side -inf - -inf would be NaN. Any other weight will do,
    # because both outs are 0.
    ahead = (
        (lse - part_lse)
        .masked_fill_((lse == -torch.inf) & (part_lse == -torch.inf), 0.0)
        .to(out.dtype)
    )
    # sigmoid may round an element of a SIMD vector and one of the remainder differently. Strides
    # must not decide where an element falls.
    ahead = ahead.contiguous()
    _add_weighted(out, ahead, part_out)
    # logaddexp may round by place too, so it also gets contiguous operands.
    lse.copy_(torch.logaddexp(lse.contiguous(), part_lse.to(lse.dtype).contiguous()))


def _add_weighted(out: Tensor, ahead: Tensor, part_out: Tensor) -> None:
    """Replace `out` by sigmoid(ahead) * out + sigmoid(-ahead) * part_out.

    `ahead` is lse - part_lse, contiguous; it is overwritten.
    """
    out.mul_(torch.sigmoid(ahead).unsqueeze(-1))
    # Not addcmul_: it rounds only one of the products, so exchanging a and b would change bits.
    out.add_(part_out * torch.sigmoid(ahead.neg_()).unsqueeze(-1))
