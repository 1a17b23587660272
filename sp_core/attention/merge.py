"""Merge partial attention results over disjoint sets of keys."""

from __future__ import annotations

import torch
from torch import Tensor


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which partial results are summed.

    Float64 for float64, float32 for anything narrower.
    """
    return torch.float64 if dtype == torch.float64 else torch.float32


def merge(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Merge the attention of the same queries over two disjoint sets of keys.

    out = w out_a + (1 - w) out_b with w = sigmoid(lse_a - lse_b), lse = log(exp(lse_a) +
    exp(lse_b)). Commutative bitwise, associative to rounding. A row that saw nothing in a (lse_a =
    -inf, out_a = 0) takes b as it is, and the other way round. Weights below the smallest normal
    number of the dtype may become 0.

    Args:
        out_a: (..., Sq, D), of any floating dtype.
        lse_a: (..., Sq), float32 or wider.
        out_b: like out_a.
        lse_b: like lse_a.

    Returns:
        out (..., Sq, D) and lse (..., Sq), in float32 or wider.

    Source: Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018, section 3.1.
    """
    dtype = accumulation_dtype(torch.promote_types(out_a.dtype, out_b.dtype))
    wide = torch.promote_types(dtype, lse_a.dtype)
    out = out_a.to(dtype, copy=True)
    lse = lse_a.to(wide, copy=True, memory_format=torch.contiguous_format)
    merge_into(out, lse, out_b, lse_b)
    return out, lse


def add_sinks(out: Tensor, lse: Tensor, sinks: Tensor | None) -> None:
    """Merge in place one key per head, without a value, whose logit is the head's sink.

    Args:
        out: (B, H, Sq, D), float32 or wider, over all keys; changed.
        lse: (B, H, Sq), likewise; changed.
        sinks: (H,), or None to change nothing.
    """
    if sinks is not None:
        sink = sinks.to(lse.dtype)[:, None].expand_as(lse)
        merge_into(out, lse, out.new_zeros(()), sink)


def sinks_gradient(
    grad_out: Tensor, out: Tensor, lse: Tensor, grad_lse: Tensor | None, sinks: Tensor | None
) -> Tensor | None:
    """Compute the gradient of `add_sinks` by the sinks, (H,), from its results and their gradients.

    Return None for no sinks.

    A sink has the logit of a key whose value is 0: P = exp(sink - lse), dsink = P * (grad_lse -
    rowsum(dO * out)), summed over batch and queries.
    """
    if sinks is None:
        return None
    weights = torch.exp(sinks.to(lse.dtype)[:, None] - lse.masked_fill(lse.isneginf(), torch.inf))
    delta = -(grad_out.to(lse.dtype) * out).sum(-1)
    delta = delta if grad_lse is None else delta + grad_lse
    return (weights * delta).sum((0, 2)).to(sinks.dtype)


def merge_into(out: Tensor, lse: Tensor, part_out: Tensor, part_lse: Tensor) -> None:
    """Merge one partial result into an accumulator in place.

    Args:
        out: (..., Sq, D) accumulator, float32 or wider; changed.
        lse: (..., Sq) accumulator; changed.
        part_out: (..., Sq, D).
        part_lse: (..., Sq).
    """
    # Rows that saw nothing on either side have -inf - -inf here: any weight will do for their two
    # zeros, NaN will not.
    ahead = (
        (lse - part_lse)
        .masked_fill_((lse == -torch.inf) & (part_lse == -torch.inf), 0.0)
        .to(out.dtype)
    )
    # sigmoid may round an element otherwise in a whole vector than in what is left over: strides
    # must not decide which it is in.
    ahead = ahead.contiguous()
    out.mul_(torch.sigmoid(ahead).unsqueeze(-1))
    # Not addcmul_: it rounds one product and not the other, and merging would depend on the order
    # of its arguments.
    out.add_(part_out * torch.sigmoid(ahead.neg_()).unsqueeze(-1))
    # So may logaddexp, and then merging b into a would differ from merging a into b.
    torch.logaddexp(lse, part_lse.to(lse.dtype).contiguous(), out=lse)
