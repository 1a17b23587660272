"""Megatron's tensor parallelism with sequence parallelism: the weights are split over the ranks, and between layers so are the
tokens.

    x (B, S/P, E)  --all-gather-->  (B, S, E) W_r^T  ->  (B, S, F/P)                column-parallel: a rank has some output features
    y (B, S, F/P) W_r^T  ->  partial (B, S, E)  --reduce-scatter-->  (B, S/P, E)    row-parallel: a rank has some input features

The sequence travels in chunks: while one chunk is multiplied, the next is being gathered, or the one before is being summed.
Between the two layers a rank holds all tokens in the order of an all-gather, `sharding.group([range(P)])`. What a layer keeps
for its backward grows with S/P on the side of E. Shapes: B batch, S sequence, E and F features, P ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from sp_core.attention import accumulation_dtype
from sp_core.attention.once import Saved, differentiable_once
from sp_core.collectives.maps import AllGather, ReduceScatter
from sp_core.communicator import Communicator
from sp_core.schemes.chunks import Chunk, Tokens
from sp_core.schemes.overlap import one_ahead


def gather_linear(x: Tensor, weight: Tensor, bias: Tensor | None, *, comm: Communicator, lengths: tuple[int, ...]) -> Tensor:
    """Gather the tokens and multiply: x (B, S/P, E), weight (F/P, E) to (B, S, F/P).

    Communication:
        Forward an all-gather of x in chunks: (P-1) * B*(S/P)*E elements sent per rank. Backward the same again (the gathered
        tokens are not kept), and a reduce-scatter of as many elements.

    Raises:
        RuntimeError: a second derivative.

    Source: Korthikanti et al. 2022, Reducing Activation Recomputation in Large Transformer Models, arXiv:2205.05198, section 4.2.
    """
    apply: Any = _GatherLinear.apply
    result: Tensor = apply(x, weight, bias, Tokens(comm, lengths))
    return result


def linear_scatter(y: Tensor, weight: Tensor, *, comm: Communicator, lengths: tuple[int, ...]) -> Tensor:
    """Multiply, and give each rank its tokens of the sum over the ranks: y (B, S, F/P), weight (E, F/P) to (B, S/P, E).

    Communication:
        Forward a reduce-scatter of (B, S, E) in chunks: B*(S - S/P)*E elements sent per rank. Backward an all-gather of as many.

    Raises:
        RuntimeError: a second derivative.

    Source: as `gather_linear`.
    """
    apply: Any = _LinearScatter.apply
    result: Tensor = apply(y, weight, Tokens(comm, lengths))
    return result


class _GatherLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, tokens: Tokens) -> Tensor:
        ctx.tokens = tokens
        ctx.save_for_backward(x, weight)
        y = x.new_empty(x.shape[0], sum(tokens.lengths), weight.shape[0])
        for chunk, gathered in _gathered(x, tokens):
            tokens.put(y, chunk, F.linear(gathered, weight, bias))
        return y

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, saved: Saved, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = saved
        tokens, (grad,) = ctx.tokens, grads
        dx = _scattered(grad, weight, tokens, x.shape[2]) if ctx.needs_input_grad[0] else None
        dw = None
        if ctx.needs_input_grad[1]:
            pairs = ((tokens.take(grad, chunk), gathered) for chunk, gathered in _gathered(x, tokens))
            dw = _weight_gradient(pairs, weight)
        db = grad.sum((0, 1), dtype=accumulation_dtype(grad.dtype)).to(grad.dtype) if ctx.needs_input_grad[2] else None
        return dx, dw, db, None


class _LinearScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, weight: Tensor, tokens: Tokens) -> Tensor:
        ctx.tokens = tokens
        ctx.save_for_backward(y, weight)
        return _scattered(y, weight.T, tokens, weight.shape[0])

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, saved: Saved, *grads: Tensor) -> tuple[Tensor | None, ...]:
        y, weight = saved
        tokens = ctx.tokens
        dy = torch.empty_like(y)

        def pairs() -> Iterator[tuple[Tensor, Tensor]]:
            for chunk, gathered in _gathered(grads[0], tokens):
                tokens.put(dy, chunk, gathered @ weight)
                yield gathered, tokens.take(y, chunk)

        dw = _weight_gradient(pairs(), weight)
        return dy, dw, None


def _gathered(x: Tensor, tokens: Tokens) -> Iterator[tuple[Chunk, Tensor]]:
    """Each chunk of the tokens of all ranks, while the next one is under way."""
    chunks = list(tokens)
    calls = ((AllGather(tokens.comm, 1, chunk[1]), tokens.own(x, chunk)) for chunk in chunks)
    yield from zip(chunks, one_ahead(calls), strict=True)


def _scattered(y: Tensor, matrix: Tensor, tokens: Tokens, features: int) -> Tensor:
    """This rank's tokens of the sum over the ranks of y @ matrix, (B, S/P, features), while the next chunk is multiplied."""
    out = y.new_empty(y.shape[0], tokens.lengths[tokens.comm.rank], features)
    chunks = list(tokens)
    calls = ((ReduceScatter(tokens.comm, 1, chunk[1]), tokens.take(y, chunk) @ matrix) for chunk in chunks)
    for chunk, mine in zip(chunks, one_ahead(calls), strict=True):
        tokens.own(out, chunk).copy_(mine)
    return out


def _weight_gradient(pairs: Iterator[tuple[Tensor, Tensor]], weight: Tensor) -> Tensor:
    """The sum over chunks of grad^T x, (out, in), rounded once."""
    total = torch.zeros_like(weight, dtype=accumulation_dtype(weight.dtype))
    for grad, x in pairs:
        total += grad.flatten(0, 1).T @ x.flatten(0, 1)
    return total.to(weight.dtype)
