"""A linear map and its transpose as one autograd function: all that a differentiable collective is.

torch runs the backward of the functions of a graph in the reverse order of their creation. A started collective gets its
function when it is started, which every rank does in the same order. So the collectives of a backward run in one order on all
ranks, whatever the order in which each rank waits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from sp_core.collectives.maps import FlatMap, Map, Started


class _Apply(torch.autograd.Function):
    """Run a map, or start it; the backward runs its transpose."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mapping: Map, run: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.transpose = mapping.transpose
        if isinstance(ctx.transpose, FlatMap):
            ctx.agree, ctx.name = mapping.comm.numbered(), mapping.name
        return run(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        if isinstance(ctx.transpose, FlatMap):
            ctx.agree(f"the backward of {ctx.name}")
        return apply(grads[0], ctx.transpose), None, None


_apply: Callable[[Tensor, Map, Callable[[Tensor], Tensor]], Tensor] = _Apply.apply


def apply(x: Tensor, mapping: Map) -> Tensor:
    """Run a map; the result is a differentiable function of x."""
    return _apply(x, mapping, mapping.run)


class Pending:
    """A collective under way. Do other work, call `comm.poll()` now and then, and `wait()` for the result.

    It keeps alive what it reads of the input, which must not be changed before `wait` has returned.
    """

    def __init__(self, x: Tensor, mapping: Map) -> None:
        self._mapping = mapping
        self._started: Started | None = None
        self._result = _apply(x, mapping, self._start)  # nobody can read it before `wait` has returned

    def _start(self, x: Tensor) -> Tensor:
        self._started = self._mapping.start(x.detach())
        return self._started.result.out.detach()  # the same memory; writing into a view of it would change the graph

    def wait(self) -> Tensor:
        """The result, a differentiable function of the input; a second call returns the same tensor."""
        if self._started is not None:
            self._mapping.comm.wait(self._started.handle, self._mapping.name)
            self._started.result()
            self._started = None
        return self._result
