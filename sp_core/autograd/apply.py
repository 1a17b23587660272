"""A linear map and its transpose as one autograd function: all that a differentiable collective is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from sp_core.collectives.maps import Map, Started


class _Apply(torch.autograd.Function):
    """Run a map; the backward runs its transpose."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mapping: Map) -> Tensor:
        ctx.mapping = mapping
        return mapping.run(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return apply(grads[0], ctx.mapping.transpose), None


class _Finish(torch.autograd.Function):
    """Place the result of a map that was started earlier into the graph."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, result: Tensor, mapping: Map) -> Tensor:
        ctx.mapping = mapping
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return apply(grads[0], ctx.mapping.transpose), None, None


apply: Callable[[Tensor, Map], Tensor] = _Apply.apply
_place: Callable[[Tensor, Tensor, Map], Tensor] = _Finish.apply


class Pending:
    """A collective under way. Do other work, call `comm.poll()` now and then, and `wait()` for the result.

    It keeps the input alive; the input must not be changed before `wait` has returned.
    """

    def __init__(self, x: Tensor, mapping: Map) -> None:
        self._x: Tensor | None = x
        self._mapping = mapping
        self._grad = torch.is_grad_enabled()  # what the ranks have agreed on
        self._started: Started | None = mapping.start(x.detach())
        self._result: Tensor | None = None

    def wait(self) -> Tensor:
        """The result, a differentiable function of the input; a second call returns the same tensor."""
        if self._result is None:
            assert self._started is not None
            assert self._x is not None
            self._mapping.comm.wait(self._started.handle, self._mapping.name)
            with torch.set_grad_enabled(self._grad):
                self._result = _place(self._x, self._started.result(), self._mapping)
            self._x = self._started = None
        return self._result
