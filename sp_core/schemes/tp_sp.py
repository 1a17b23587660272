"""Megatron's tensor parallelism with sequence parallelism: linear layers with split weights.

    gather_linears: x (B, S/P, E)  --all-gather-->  (B, S, E) W_r^T  ->  (B, S, F/P)
        column-parallel: rank r has some output features
    linear_scatter: y (B, S, F/P) W_r^T  ->  partial (B, S, E)  --reduce-scatter-->  (B, S/P, E)
        row-parallel: rank r has some input features

The sequence is sent in chunks, parts of every rank's tokens. While a rank multiplies one chunk, the
next is gathered, or the previous one is summed. Between the two layers a rank holds all tokens in
the order of an all-gather, `sharding.group([range(P)])`. For the backward, `gather_linears` saves
only x, not the gathered tokens. Shapes: B batch, S sequence, E and F features, P ranks.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from sp_core.arguments import check_gradients
from sp_core.attention import Saved, accumulation_dtype, differentiable_once
from sp_core.collectives.maps import AllGather, ReduceScatter, one_ahead
from sp_core.communicator import Communicator
from sp_core.compiling import EagerFunction
from sp_core.sharding import split_ranges

CHUNKS = 4
"""The number of chunks of a sequence: the tokens of each rank are cut into this many parts."""

Chunk = tuple[tuple[range, ...], tuple[int, ...]]
"""(ranges, lengths): for each rank which of its tokens are in the chunk, and how many."""


@dataclass(frozen=True)
class Tokens:
    """Divide the tokens of all ranks into chunks. Iterating yields each `Chunk` that has tokens.

    Args:
        comm: the communicator of the ranks that hold the tokens.
        lengths: for each rank its number of tokens.
    """

    comm: Communicator
    lengths: tuple[int, ...]

    def __iter__(self) -> Iterator[Chunk]:
        cuts = [split_ranges(length, CHUNKS) for length in self.lengths]
        for ranges in zip(*cuts, strict=True):
            if any(ranges):
                yield ranges, tuple(map(len, ranges))

    def own(self, x: Tensor, chunk: Chunk) -> Tensor:
        """Return a view of those of this rank's tokens x (B, S/P, *) that belong to a chunk."""
        mine = chunk[0][self.comm.rank]
        return x[:, mine.start : mine.stop]

    def take(self, x: Tensor, chunk: Chunk) -> Tensor:
        """Copy the tokens in a chunk, rank after rank, from the tokens x (B, S, *) of all ranks."""
        return torch.cat([x[:, rows] for rows in self._rows(chunk)], 1)

    def put(self, x: Tensor, chunk: Chunk, part: Tensor) -> None:
        """Write the tokens of one chunk to their places in x (B, S, *), which holds all tokens.

        `part` (B, tokens of the chunk, *) has the first rank's tokens first, then the second's.
        """
        for rows, piece in zip(self._rows(chunk), part.split(list(chunk[1]), 1), strict=True):
            x[:, rows] = piece

    def _rows(self, chunk: Chunk) -> list[slice]:
        """Return for each rank where its tokens of a chunk lie: a slice of dim 1 of (B, S, *).

        That tensor has the tokens of all ranks in rank order.
        """
        starts = accumulate(self.lengths[:-1], initial=0)
        return [
            slice(start + r.start, start + r.stop)
            for start, r in zip(starts, chunk[0], strict=True)
        ]


def gather_linears(
    x: Tensor,
    layers: Sequence[tuple[Tensor, Tensor | None]],
    *,
    comm: Communicator,
    lengths: tuple[int, ...],
) -> tuple[Tensor, ...]:
    """Gather the tokens of all ranks once, and apply several linear layers to them.

    Every rank calls this with the same number of layers. Arguments are not checked.

    Args:
        x: (B, S/P, E), this rank's tokens.
        layers: (weight, bias) of each layer, for this rank's output features: weight (F/P, E), and
            bias (F/P,) or None.
        comm: the communicator whose ranks all make this call.
        lengths: for each rank its number of tokens, the same on every rank.

    Returns:
        For each layer its output (B, S, F/P) for all tokens, rank after rank.

    Communication:
        The forward all-gathers x in chunks: each rank sends `(P-1) * B*(S/P)*E` elements. The
        backward does so again for the gradients of weights, and reduce-scatters as many elements
        for the gradient of x. It begins with an agreement, in which the ranks check that they all
        call this backward, unless `comm` has `check="off"`.

    Raises:
        RuntimeError: autograd is asked for a second derivative; only the first is implemented.

    Source: Korthikanti et al. 2022, Reducing Activation Recomputation in Large Transformer Models,
    arXiv:2205.05198, section 4.2.
    """
    tensors = (tensor for layer in layers for tensor in layer)
    return _gather_linears(Tokens(comm, lengths), x, *tensors)


def linear_scatter(
    y: Tensor, weight: Tensor, *, comm: Communicator, lengths: tuple[int, ...]
) -> Tensor:
    """Apply a linear layer without bias, sum over the ranks, and return this rank's tokens.

    Every rank calls this. Arguments are not checked.

    Args:
        y: (B, S, F/P), this rank's input features of all tokens, rank after rank.
        weight: (E, F/P), the columns of the layer's weight for this rank's input features.
        comm: the communicator whose ranks all make this call.
        lengths: for each rank its number of tokens, the same on every rank.

    Returns:
        This rank's tokens (B, S/P, E), in the dtype of y.

    Communication:
        The forward reduce-scatters a tensor (B, S, E) in chunks: each rank sends `B*(S - S/P)*E`
        elements. The backward all-gathers the gradient of the result: as many elements. It begins
        with an agreement, in which the ranks check that they all call this backward, unless `comm`
        has `check="off"`.

    Raises:
        RuntimeError: autograd is asked for a second derivative; only the first is implemented.

    Source: as in `gather_linears`.
    """
    return _linear_scatter(y, weight, Tokens(comm, lengths))


class _GatherLinears(EagerFunction):
    """Autograd function of `gather_linears`. `layers` holds weight, bias, weight, bias, ..."""

    @staticmethod
    def forward(ctx: Any, tokens: Tokens, x: Tensor, *layers: Tensor | None) -> tuple[Tensor, ...]:
        ctx.tokens, ctx.agree = tokens, tokens.comm.numbered()
        weights: Any = layers[::2]
        ctx.save_for_backward(*weights, x if any(ctx.needs_input_grad[2::2]) else None)
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
        ctx.agree(
            "the backward of gather_linear", partial(check_gradients, ctx.tokens.comm, *grads)
        )
        *weights, x = saved
        needs = ctx.needs_input_grad
        products = list(zip(grads, weights, strict=True))
        dx = _scattered(products, ctx.tokens, weights[0].shape[1]) if needs[1] else None
        learn, biases_learn = needs[2::2], needs[3::2]
        sums = [
            _zeros(weight) if learns else None
            for weight, learns in zip(weights, learn, strict=True)
        ]
        for chunk, gathered in _gathered(x, ctx.tokens) if any(learn) else ():
            for grad, total in zip(grads, sums, strict=True):
                if total is not None:
                    _add(total, ctx.tokens.take(grad, chunk), gathered)
        found: list[Tensor | None] = []
        for (grad, weight), total, learns in zip(products, sums, biases_learn, strict=True):
            dtype = accumulation_dtype(grad.dtype)
            found += (
                None if total is None else total.to(weight.dtype),
                grad.sum((0, 1), dtype=dtype).to(grad.dtype) if learns else None,
            )
        return None, dx, *found


class _LinearScatter(EagerFunction):
    """Autograd function of `linear_scatter`."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, weight: Tensor, tokens: Tokens) -> Tensor:
        ctx.tokens, ctx.agree = tokens, tokens.comm.numbered()
        ctx.save_for_backward(weight, y if ctx.needs_input_grad[1] else None)
        return _scattered([(y, weight.T)], tokens, weight.shape[0])

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, saved: Saved, grad: Tensor) -> tuple[Tensor | None, ...]:
        ctx.agree("the backward of linear_scatter", partial(check_gradients, ctx.tokens.comm, grad))
        weight, y = saved
        tokens = ctx.tokens
        shape = grad.shape[0], sum(tokens.lengths), weight.shape[1]
        dy = grad.new_empty(shape) if ctx.needs_input_grad[0] else None
        dw = None if y is None else _zeros(weight)
        for chunk, gathered in _gathered(grad, tokens):
            if dy is not None:
                tokens.put(dy, chunk, gathered @ weight.to(gathered.dtype))
            if dw is not None:
                _add(dw, gathered, tokens.take(y, chunk))
        return dy, None if dw is None else dw.to(weight.dtype), None


_gather_linears: Callable[..., tuple[Tensor, ...]] = _GatherLinears.apply
_linear_scatter: Callable[..., Tensor] = _LinearScatter.apply


def _gathered(x: Tensor, tokens: Tokens) -> Iterator[tuple[Chunk, Tensor]]:
    """Gather this rank's tokens x (B, S/P, *) from all ranks, chunk by chunk.

    Before a chunk is yielded, the all-gather of the next chunk is started.

    Yields:
        (chunk, the tokens of all ranks in this chunk, rank after rank: (B, tokens, *)).
    """
    chunks = list(tokens)
    calls = ((AllGather(tokens.comm, 1, chunk[1]), tokens.own(x, chunk)) for chunk in chunks)
    yield from zip(chunks, one_ahead(calls), strict=True)


def _scattered(products: Sequence[tuple[Tensor, Tensor]], tokens: Tokens, features: int) -> Tensor:
    """Sum several matrix products and all ranks' results, and return this rank's tokens.

    The reduce-scatter of one chunk runs while the next chunk is multiplied.

    Args:
        products: pairs of all tokens (B, S, n) and a matrix (n, features).
        tokens: divides the tokens into chunks.
        features: the number of columns of each matrix.

    Returns:
        This rank's tokens (B, S/P, features) of the sum of all products of all ranks.
    """
    (first, _), *_ = products
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
    """Sum this rank's products for the tokens in a chunk; return (B, tokens, features).

    A matrix is converted to the dtype of its tokens. Under autocast these dtypes may differ.
    """
    each = (tokens.take(y, chunk) @ matrix.to(y.dtype) for y, matrix in products)
    return reduce(Tensor.add_, each)


def _zeros(weight: Tensor) -> Tensor:
    """Return zeros of the shape of a weight, in float32 or wider, to sum its gradient in."""
    return torch.zeros_like(weight, dtype=accumulation_dtype(weight.dtype))


def _add(total: Tensor, grad: Tensor, x: Tensor) -> None:
    """Add grad^T x in place to `total` (out, in), the sum that becomes the gradient of a weight.

    `grad` (B, tokens, out) is the gradient of the layer's output, and x (B, tokens, in) its input.
    """
    total += grad.flatten(0, 1).T @ x.flatten(0, 1)
