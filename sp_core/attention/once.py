"""Rules that all autograd functions of attention follow.

No autocast inside, no second derivative.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Saved = tuple[Tensor, ...]
Backward = Callable[..., tuple[Tensor | None, ...]]


class _Refuse(torch.autograd.Function):
    """The identity in x, with a backward that raises.

    `causes` are the tensors from which x was computed.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, *causes: Tensor | None) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, ...]:
        raise RuntimeError(
            "attention is differentiable once; a second derivative was asked for. Use plain torch "
            "attention for it."
        )


def exact(x: Tensor) -> torch.autocast:
    """Turn autocast off.

    It would run the float32 products of the plain kernel in half precision.
    """
    return torch.autocast(x.device.type, enabled=False)


def differentiable_once(backward: Backward) -> Backward:
    """Decorate a backward `(ctx, saved, *grads)`: its gradients raise when they are differentiated.

    torch's `once_differentiable` refuses only where an incoming gradient is itself differentiable.
    The gradients of attention also depend on q, k and v; that part of a second derivative it would
    drop without a word.
    """

    @functools.wraps(backward)
    def refusing(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors  # once: a checkpoint unpacks them a single time
        with torch.no_grad(), exact(saved[0]):
            results = backward(ctx, saved, *grads)
        if not torch.is_grad_enabled():
            return results
        apply: Any = _Refuse.apply
        return tuple(apply(x, *grads, *saved) if isinstance(x, Tensor) else x for x in results)

    return refusing
