"""Megatron's tensor and sequence parallelism: split weights, and between layers the tokens.

    x (B, S/P, E)  --all-gather-->  (B, S, E) W_r^T  ->  (B, S, F/P)
        column-parallel: a rank has some output features
    y (B, S, F/P) W_r^T  ->  partial (B, S, E)  --reduce-scatter-->  (B, S/P, E)
        row-parallel: a rank has some input features

The sequence travels in chunks: while one chunk is multiplied, the next is being gathered, or the
one before is being summed. Between the two layers a rank holds all tokens in the order of an
all-gather, `sharding.group([range(P)])`. What a layer keeps for its backward grows with S/P on the
side of E. Shapes: B batch, S sequence, E and F features, P ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from sp_core.attention import accumulation_dtype
from sp_core.attention.function import Saved, differentiable_once
from sp_core.collectives.maps import AllGather, ReduceScatter, one_ahead
from sp_core.communicator import Communicator
from sp_core.sharding import split_ranges

Linear = tuple[Tensor, Tensor | None]
"""Weight and bias."""

CHUNKS = 4

Chunk = tuple[tuple[range, ...], tuple[int, ...]]
"""For each rank, the range of its tokens in a chunk, and the lengths of these ranges."""


@dataclass(frozen=True)
class Tokens:
    """The number of tokens of each rank, and the number of chunks in which they are sent."""

    comm: Communicator
    lengths: tuple[int, ...]
    chunks: int = CHUNKS

    def __iter__(self) -> Iterator[Chunk]:
        cuts = [split_ranges(length, self.chunks) for length in self.lengths]
        for number in range(self.chunks):
            ranges = tuple(cut[number] for cut in cuts)
            if number == 0 or any(ranges):
                yield ranges, tuple(map(len, ranges))

    def own(self, x: Tensor, chunk: Chunk) -> Tensor:
        """Return this rank's tokens of a chunk, from (B, S/P, *)."""
        mine = chunk[0][self.comm.rank]
        return x[:, mine.start : mine.stop]

    def take(self, x: Tensor, chunk: Chunk) -> Tensor:
        """Return all ranks' tokens of a chunk, from (B, S, *)."""
        return torch.cat([x[:, rows] for rows in self._rows(chunk)], 1)

    def put(self, x: Tensor, chunk: Chunk, part: Tensor) -> None:
        """Write all ranks' tokens of a chunk into (B, S, *)."""
        for rows, piece in zip(self._rows(chunk), part.split(list(chunk[1]), 1), strict=True):
            x[:, rows] = piece

    def _rows(self, chunk: Chunk) -> list[slice]:
        starts = accumulate(self.lengths[:-1], initial=0)
        return [
            slice(start + r.start, start + r.stop)
            for start, r in zip(starts, chunk[0], strict=True)
        ]


def gather_linears(
    x: Tensor, layers: Sequence[Linear], *, comm: Communicator, lengths: tuple[int, ...]
) -> tuple[Tensor, ...]:
    """Gather the tokens x (B, S/P, E) once, and multiply by the weight (F/P, E) of each layer.

    Each result is (B, S, F/P).

    Communication:
        Forward an all-gather of x in chunks: (P-1) * B*(S/P)*E elements sent per rank. Backward the
        same again (the gathered tokens are not kept), and a reduce-scatter of as many elements.

    Raises:
        RuntimeError: a second derivative.

    Source: Korthikanti et al. 2022, Reducing Activation Recomputation in Large Transformer Models,
    arXiv:2205.05198, section 4.2.
    """
    apply: Any = _GatherLinears.apply
    results: tuple[Tensor, ...] = apply(
        Tokens(comm, lengths), x, *(tensor for layer in layers for tensor in layer)
    )
    return results


def linear_scatter(
    y: Tensor, weight: Tensor, *, comm: Communicator, lengths: tuple[int, ...]
) -> Tensor:
    """Multiply, sum over the ranks, and keep this rank's tokens.

    Shapes: y (B, S, F/P), weight (E, F/P), result (B, S/P, E).

    Communication:
        Forward a reduce-scatter of (B, S, E) in chunks: B*(S - S/P)*E elements sent per rank.
        Backward an all-gather of as many.

    Raises:
        RuntimeError: a second derivative.

    Source: as `gather_linears`.
    """
    apply: Any = _LinearScatter.apply
    result: Tensor = apply(y, weight, Tokens(comm, lengths))
    return result


class _GatherLinears(torch.autograd.Function):
    """Multiplies gathered tokens with several layers. `layers` holds weights and biases in turn."""

    @staticmethod
    def forward(ctx: Any, tokens: Tokens, x: Tensor, *layers: Tensor | None) -> tuple[Tensor, ...]:
        ctx.tokens, ctx.agree = tokens, tokens.comm.numbered()
        weights: Any = layers[::2]
        ctx.save_for_backward(x, *weights)
        out = tuple(
            x.new_empty(x.shape[0], sum(tokens.lengths), weight.shape[0]) for weight in weights
        )
        for chunk, gathered in _gathered(x, tokens):
            for y, weight, bias in zip(out, weights, layers[1::2], strict=True):
                tokens.put(y, chunk, F.linear(gathered, weight, bias))
        return out

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, saved: Saved, *grads: Tensor) -> tuple[Tensor | None, ...]:
        ctx.agree("the backward of gather_linear")
        x, *weights = saved
        needs = ctx.needs_input_grad
        dx = (
            _scattered(list(zip(grads, weights, strict=True)), ctx.tokens, x.shape[2])
            if needs[1]
            else None
        )
        sums = {
            number: _zeros(weight) for number, weight in enumerate(weights) if needs[2 + 2 * number]
        }
        for chunk, gathered in _gathered(x, ctx.tokens) if sums else ():
            for number, total in sums.items():
                _add(total, ctx.tokens.take(grads[number], chunk), gathered)
        found: list[Tensor | None] = []
        for number, (grad, weight) in enumerate(zip(grads, weights, strict=True)):
            found.append(sums[number].to(weight.dtype) if number in sums else None)
            found.append(_bias_gradient(grad) if needs[3 + 2 * number] else None)
        return None, dx, *found


class _LinearScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, weight: Tensor, tokens: Tokens) -> Tensor:
        ctx.tokens, ctx.agree = tokens, tokens.comm.numbered()
        ctx.save_for_backward(y, weight)
        return _scattered([(y, weight.T)], tokens, weight.shape[0])

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, saved: Saved, *grads: Tensor) -> tuple[Tensor | None, ...]:
        ctx.agree("the backward of linear_scatter")
        y, weight = saved
        tokens = ctx.tokens
        dy, dw = torch.empty_like(y), _zeros(weight)
        for chunk, gathered in _gathered(grads[0], tokens):
            tokens.put(dy, chunk, gathered @ weight)
            _add(dw, gathered, tokens.take(y, chunk))
        return dy, dw.to(weight.dtype), None


def _gathered(x: Tensor, tokens: Tokens) -> Iterator[tuple[Chunk, Tensor]]:
    """Yield each chunk with the tokens of all ranks. The next chunk is gathered meanwhile."""
    chunks = list(tokens)
    calls = ((AllGather(tokens.comm, 1, chunk[1]), tokens.own(x, chunk)) for chunk in chunks)
    yield from zip(chunks, one_ahead(calls), strict=True)


def _scattered(products: Sequence[tuple[Tensor, Tensor]], tokens: Tokens, features: int) -> Tensor:
    """Return this rank's tokens of the sum over ranks of products, (B, S/P, features).

    Chunks overlap.
    """
    first = products[0][0]
    out = first.new_empty(first.shape[0], tokens.lengths[tokens.comm.rank], features)
    chunks = list(tokens)
    calls = (
        (ReduceScatter(tokens.comm, 1, chunk[1]), _product(products, tokens, chunk))
        for chunk in chunks
    )
    for chunk, mine in zip(chunks, one_ahead(calls), strict=True):
        tokens.own(out, chunk).copy_(mine)
    return out


def _product(products: Sequence[tuple[Tensor, Tensor]], tokens: Tokens, chunk: Chunk) -> Tensor:
    (y, matrix), *others = products
    total = tokens.take(y, chunk) @ matrix
    for y, matrix in others:
        total += tokens.take(y, chunk) @ matrix
    return total


def _zeros(weight: Tensor) -> Tensor:
    """Make zeros, in float32 or wider, in which the gradient of a weight is summed."""
    return torch.zeros_like(weight, dtype=accumulation_dtype(weight.dtype))


def _add(total: Tensor, grad: Tensor, x: Tensor) -> None:
    """Add grad^T x, (out, in), to the gradient of a weight."""
    total += grad.flatten(0, 1).T @ x.flatten(0, 1)


def _bias_gradient(grad: Tensor) -> Tensor:
    return grad.sum((0, 1), dtype=accumulation_dtype(grad.dtype)).to(grad.dtype)
