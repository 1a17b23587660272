"""Compute attention on one device, differentiable once, with tensors (B, S, H, D).

`local_attention` is the public function. The schemes use the other names: `check_qkv` for their
arguments, `without_autocast` and `differentiable_once` for their own autograd functions.
"""

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Unpack

import torch
from torch import Tensor

from sp_core.arguments import check, check_dense, check_memory, check_type
from sp_core.attention.kernels import FLOATS
from sp_core.attention.logits import Logits, Terms
from sp_core.attention.merge import accumulation_dtype, add_sinks, sinks_gradient
from sp_core.attention.shards import attend, attend_backward
from sp_core.compiling import EagerFunction
from sp_core.errors import DeviceError, DtypeError, ShapeError
from sp_core.mask import Mask, Positions, position_tensor

Saved = tuple[Tensor, ...]
"""The tensors that a forward gave to `ctx.save_for_backward`."""
Backward = Callable[..., tuple[Tensor | None, ...]]
"""A function (ctx, saved tensors, *gradients of the outputs) that returns the inputs' gradients."""


def local_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Mask | None = None,
    q_positions: Positions | None = None,
    kv_positions: Positions | None = None,
    softmax_scale: float | None = None,
    return_lse: bool = False,
    **terms: Unpack[Terms],
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute attention on one device, softmax(softmax_scale q k^T) v, masked by global positions.

    Args:
        q: (B, Sq, H, D), queries; float64, float32, bfloat16 or float16.
        k: (B, Sk, K, D), keys; H is a multiple of K.
        v: (B, Sk, K, D), values.
        mask: which keys a query sees; all keys if None.
        q_positions: the global position of each query, Sq integers; 0 .. Sq - 1 if None.
        kv_positions: the global position of each key, Sk integers; 0 .. Sk - 1 if None.
        softmax_scale: factor of the scores q k^T; 1 / sqrt(D) if None.
        return_lse: also return the log-sum-exp of the scores, differentiably.
        terms: arguments that change the scores further, explained in `Terms`: `softcap`, `sinks`,
            `alibi`.

    Returns:
        out (B, Sq, H, D) in q's dtype; with return_lse also lse (B, H, Sq) in float32 or wider.
        With sinks, lse includes them. A query that sees no key gets out = 0, lse = -inf (with
        sinks: the sink of its head) and no gradient. Differentiable once. Results are undefined,
        and differ between schemes, if all scores of a query and one block of keys are below
        -3.4e38.

    Raises:
        ShapeError: shapes do not fit together, the numbers of positions and of tokens differ, the
            mask is for a different length, or a position lies outside the mask's documents.
        DtypeError: q, k or v is no plain tensor, as inside a transform of torch.func; their dtypes
            differ or are not among the four.
        DeviceError: tensors on different devices.
        TypeError: mask, softmax_scale, return_lse, a term or positions have a wrong type, or an
            argument is unknown.
        ValueError: alibi slopes that require a gradient.
        RuntimeError: autograd is asked for a second derivative; only the first is implemented.
    """
    check(return_lse=return_lse, q_positions=q_positions, kv_positions=kv_positions)
    if mask is not None:
        check_type("mask", mask, Mask, "Pass Mask(causal=True), or None to see everything.")
    check_qkv(q, k, v)
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_memory(x, name, is_sent=False)
    logits = Logits.of(q, softmax_scale=softmax_scale, **terms)
    if mask is not None and q_positions is None and kv_positions is None:
        mask.check_lengths(q.shape[1], k.shape[1])
    out, lse = attention(
        *(q, k, v, logits.sinks),
        {
            "q_positions": _kept(q_positions, q.shape[1]),
            "kv_positions": _kept(kv_positions, k.shape[1]),
            "mask": mask,
            "logits": logits,
        },
    )
    return (out, lse) if return_lse else out


def _kept(positions: Positions | None, length: int) -> Positions:
    """Copy positions, because the caller may change them before the backward; None is 0, 1, ..."""
    if positions is None:
        return range(length)
    return positions if isinstance(positions, range) else position_tensor(positions).clone()


def check_qkv(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Refuse q (B, Sq, H, D), k and v (B, Sk, K, D) that do not fit together.

    Raises:
        ShapeError: a sparse tensor or one without four dimensions, shapes of k and v that differ, a
            batch or head dim of q that differs from that of k, head dim 0, or H that is no multiple
            of K.
        DtypeError: not a plain tensor; dtypes that differ or are not among float64, float32,
            bfloat16, float16.
        DeviceError: tensors on different devices.
    """
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_dense(x, name)
    shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    if q.dim() != 4 or k.dim() != 4 or k.shape != v.shape:
        raise ShapeError(
            f"{shapes} given, needed q (B, Sq, H, D) and k, v of one shape (B, Sk, K, D)"
        )
    (batch, _, heads, head_dim), (kv_batch, _, kv_heads, kv_dim) = q.shape, k.shape
    if (batch, head_dim) != (kv_batch, kv_dim) or head_dim == 0:
        raise ShapeError(
            f"{shapes} given, needed the same batch and the same head dim of at least 1"
        )
    if heads % kv_heads if kv_heads else heads:
        raise ShapeError(
            f"{heads} query heads on {kv_heads} key/value heads, needed a multiple; repeat or drop "
            f"heads"
        )
    if not (q.dtype == k.dtype == v.dtype) or q.dtype not in FLOATS:
        raise DtypeError(
            f"dtypes {q.dtype}, {k.dtype}, {v.dtype} given, needed one of {FLOATS} for all three; "
            f"cast first"
        )
    if not (q.device == k.device == v.device):
        raise DeviceError(
            f"devices {q.device}, {k.device}, {v.device} given, needed one device for all three; "
            f"move them first"
        )


class _Refuse(torch.autograd.Function):
    """Return x unchanged, with a backward that raises RuntimeError.

    `causes` are the tensors from which x was computed. Differentiating x by any of them raises.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, *causes: Tensor | None) -> Tensor:
        return x

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, ...]:
        raise RuntimeError(
            "attention and parallel linear layers are differentiable once; a second derivative was "
            "asked for. Use plain torch in their place."
        )


_refuse: Callable[..., Tensor] = _Refuse.apply
_NOTHING = nullcontext()


def without_autocast(x: Tensor) -> AbstractContextManager[object]:
    """Return a context manager that turns autocast off on the device of x, if it is on.

    Autocast would compute the float32 products of the plain kernel in half precision.
    """
    kind = x.device.type
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else _NOTHING


def differentiable_once(backward: Backward) -> Backward:
    """Turn `backward(ctx, saved, *grads)` into a method whose results cannot be differentiated.

    The method calls `backward` with the saved tensors, without autocast and without recording
    gradients. A second derivative raises RuntimeError.

    torch's `once_differentiable` refuses only if an incoming gradient is itself differentiable. The
    gradients of attention also depend on q, k and v. `once_differentiable` would silently drop that
    part of a second derivative.
    """

    @functools.wraps(backward)
    def refusing(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors  # read once, because a checkpoint unpacks them only once
        with torch.no_grad(), without_autocast(saved[0]):
            results = backward(ctx, saved, *grads)
        if not torch.is_grad_enabled():
            return results
        return tuple(_refuse(x, *grads, *saved) if isinstance(x, Tensor) else x for x in results)

    return refusing


class _Attention(EagerFunction):
    """Autograd function of `local_attention`: `attend`, and `attend_backward` as its derivative."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        call: dict[str, Any],
    ) -> tuple[Tensor, Tensor]:
        """Compute out (B, Sq, H, D) and lse (B, H, Sq).

        In the backward an unused output has gradient None.
        """
        ctx.set_materialize_grads(False)
        ctx.call = call
        dtype = q.dtype if sinks is None else accumulation_dtype(q.dtype)
        with without_autocast(q):
            out, lse = attend(*(t.transpose(1, 2) for t in (q, k, v)), **call, out_dtype=dtype)
            add_sinks(out, lse, sinks)
        out = out.transpose(1, 2).to(q.dtype).detach()  # one of several outputs must be no view
        ctx.save_for_backward(q, k, v, out, lse, sinks)
        return out, lse

    @staticmethod
    @differentiable_once
    def backward(
        ctx: Any, saved: Saved, grad_out: Tensor | None, grad_lse: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        """Compute the gradients, summed in float32 or wider, and rounded once to q's dtype."""
        q, k, v, out, lse, sinks = saved
        grad_out = torch.zeros_like(out) if grad_out is None else grad_out
        do, q_, k_, v_, o = (t.transpose(1, 2) for t in (grad_out, q, k, v, out))
        grads = attend_backward(
            do, q_, k_, v_, o, lse, **ctx.call, grad_lse=grad_lse, out_dtype=q.dtype
        )
        return (
            *(grad.transpose(1, 2) for grad in grads),
            sinks_gradient(do, o, lse, grad_lse, sinks),
            None,
        )


attention: Callable[..., tuple[Tensor, Tensor]] = _Attention.apply
"""A function of q, k, v, sinks and a dict of the other arguments of `attend`.

It computes attention on one device, and returns out (B, Sq, H, D) and lse (B, H, Sq)."""
