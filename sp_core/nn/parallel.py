"""Layers whose weights are split over the ranks of a group.

Between two splits all ranks hold a token's activations, or, with Megatron's TP-SP, one rank does:

    x (B, S, E) on every rank   copy_to_group(x) W_r^T  ->  this rank's features
                                ->  reduce_from_group(y_r W_r^T)
    x_r (B, S/P, E)             all_gather(x_r) W_r^T   ->  this rank's features
                                ->  reduce_scatter(y_r W_r^T)

The second one needs `lengths`, how many of the S tokens each rank has between the splits; None
means the first one.
Shapes: B batch, S tokens, E model dim, V vocabulary, P ranks; `/P` is this rank's part, which may
be uneven; (B, S*, E) is either (B, S, E) or (B, S/P, E).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate, pairwise
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sp_core import arguments
from sp_core.collectives.api import reduce_scatter
from sp_core.collectives.differentiable import copy_to_group, reduce_from_group
from sp_core.collectives.maps import AllGather
from sp_core.communicator import Communicator
from sp_core.errors import ShapeError
from sp_core.nn.gradients import Placement, place, placement_of
from sp_core.nn.layers import Function, attended, pre_norm
from sp_core.nn.replicated import check_input
from sp_core.schemes.heads import split_heads
from sp_core.schemes.tp_sp import gather_linears, linear_scatter
from sp_core.sharding import Sharding, check_sharding, split_sizes

Lengths = tuple[int, ...] | None
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Attention of this rank's heads: q (B, S, H/T, D), k and v (B, S, K/T, D), q and k rotated, to
(B, S, H/T, D)."""


class Weight(nn.Module):
    """A weight, not set yet, of which this rank holds the part that its placement says.

    And a bias, if a subclass sets one.
    """

    def __init__(self, placement: Placement, comm: Communicator, dtype: torch.dtype) -> None:
        super().__init__()
        self.comm = comm
        part = torch.empty(placement.local_shape(comm.rank), dtype=dtype, device=comm.device)
        self.placements = {"weight": placement}
        self.weight = place(nn.Parameter(part), placement)
        self.bias: nn.Parameter | None = None

    def __setstate__(self, state: dict[str, Any]) -> None:
        """As in the base class. A copy of a parameter carries no placement."""
        base: Any = super()
        base.__setstate__(state)
        for name, placement in self.placements.items():
            place(self.get_parameter(name), placement)


def project(x: Tensor, *layers: Weight, lengths: Lengths) -> tuple[Tensor, ...]:
    """Multiply x (B, S*, E) by the weight of each layer: this rank's features, (B, S, out/P).

    Communication:
        None forward and one all-reduce of the gradient of x backward; or, with `lengths`, as
        `gather_linears`.
    """
    pairs, comm = [(layer.weight, layer.bias) for layer in layers], layers[0].comm
    if lengths is not None:
        return gather_linears(x, pairs, comm=comm, lengths=lengths)
    x = x if comm.size == 1 else copy_to_group(x, comm=comm)
    return tuple(F.linear(x, weight, bias) for weight, bias in pairs)


def sum_over_ranks(y: Tensor, layer: Weight, *, lengths: Lengths) -> Tensor:
    """Multiply this rank's features (B, S, in/P) by the weight of a layer, and sum over the ranks.

    Returns:
        (B, S*, E).

    Communication:
        One all-reduce of the result, and none backward; or, with `lengths`, as `linear_scatter`.
    """
    if lengths is not None:
        return linear_scatter(y, layer.weight, comm=layer.comm, lengths=lengths)
    y = F.linear(y, layer.weight)
    return y if layer.comm.size == 1 else reduce_from_group(y, comm=layer.comm)


class Norm(Weight):
    """Divide each token by its root mean square.

    All ranks hold the weight, and if it is `partial` each for other tokens.

    Source: Zhang and Sennrich 2019, Root Mean Square Layer Normalization, arXiv:1910.07467,
    equation 4.
    """

    def __init__(
        self, hidden: int, eps: float, comm: Communicator, dtype: torch.dtype, *, partial: bool
    ) -> None:
        super().__init__(Placement.replicated((hidden,), comm.size, partial=partial), comm, dtype)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Map x (..., E) to (..., E)."""
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class Embedding(Weight):
    """The vectors of tokens, of which each rank holds those of a part of the vocabulary.

    A `copy` is the head of a later stage.
    """

    def __init__(
        self, vocab: int, hidden: int, comm: Communicator, dtype: torch.dtype, *, copy: bool
    ) -> None:
        super().__init__(
            replace(Placement.split((vocab, hidden), 0, comm.size), copy=copy), comm, dtype
        )

    def forward(self, tokens: Tensor, lengths: Lengths) -> Tensor:
        """Map tokens (B, S) to vectors (B, S*, E).

        Communication:
            One all-reduce, or with `lengths` one reduce-scatter, of (B, S, E).
        """
        own = placement_of(self.weight).held[self.comm.rank][0]
        here = (tokens >= own.start) & (tokens < own.stop)
        vectors = F.embedding((tokens - own.start).where(here, 0), self.weight)
        vectors = vectors.where(here.unsqueeze(-1), 0.0)
        if lengths is not None:
            return reduce_scatter(vectors, comm=self.comm, dim=1, sizes=lengths)
        return reduce_from_group(vectors, comm=self.comm)


class ParallelBlock(nn.Module):
    """A pre-norm block of grouped heads and SwiGLU. Each rank holds the key/value heads it reads.

    Its parameters have the names of Hugging Face's LLaMA.

    Args:
        hidden, ffn_hidden: E and F.
        heads: numbers of query heads and of key/value heads.
        head_dim: D.
        eps: of the norms.
        comm: the ranks.
        dtype: of the weights.
        tp_sp: the norms see a part of the tokens, so that their gradients are `partial`.

    Source: Shazeer 2020, GLU Variants Improve Transformer, arXiv:2002.05202, equation 6 (SwiGLU).
    """

    def __init__(
        self,
        hidden: int,
        ffn_hidden: int,
        heads: tuple[int, int],
        head_dim: int,
        eps: float,
        *,
        comm: Communicator,
        dtype: torch.dtype,
        tp_sp: bool,
    ) -> None:
        super().__init__()
        num_heads, num_kv_heads = heads
        self.head_dim = dim = head_dim
        own_heads, kv_heads = split_heads(num_heads, num_kv_heads, comm.size)
        cut = tuple((range(part.start * dim, part.stop * dim),) for part in own_heads)
        kv_held = tuple(
            tuple(range(head * dim, (head + 1) * dim) for head in sorted(set(slots)))
            for slots in kv_heads
        )
        # the gradients of key/value heads that several ranks hold are parts of a sum
        shared = sum(map(len, kv_held)) > num_kv_heads
        kv = Placement((num_kv_heads * dim, hidden), 0, kv_held, partial=shared)
        width = num_heads * dim
        held = partial(Weight, comm=comm, dtype=dtype)
        norm = partial(Norm, hidden, eps, comm, dtype, partial=tp_sp)
        weights = {
            "q_proj": held(Placement((width, hidden), 0, cut)),
            "k_proj": held(kv),
            "v_proj": held(kv),
            "o_proj": held(Placement((hidden, width), 1, cut)),
        }
        self.input_layernorm, self.self_attn = norm(), nn.ModuleDict(weights)
        weights = {
            "gate_proj": held(Placement.split((ffn_hidden, hidden), 0, comm.size)),
            "up_proj": held(Placement.split((ffn_hidden, hidden), 0, comm.size)),
            "down_proj": held(Placement.split((hidden, ffn_hidden), 1, comm.size)),
        }
        self.post_attention_layernorm, self.mlp = norm(), nn.ModuleDict(weights)

    def forward(self, x: Tensor, rotate: Function, attend: Attend, lengths: Lengths) -> Tensor:
        """Map x (B, S*, E) to (B, S*, E).

        Communication:
            That of `project`, `attend` and `sum_over_ranks`.
        """
        weights: Any = (*self.self_attn.values(), *self.mlp.values())
        q, k, v, o, gate, up, down = weights

        def attention(y: Tensor) -> Tensor:
            projected = project(y, q, k, v, lengths=lengths)
            out = attended(projected, self.head_dim, rotate, attend)
            return sum_over_ranks(out, o, lengths=lengths)

        def feed_forward(y: Tensor) -> Tensor:
            gates, ups = project(y, gate, up, lengths=lengths)
            return sum_over_ranks(F.silu(gates) * ups, down, lengths=lengths)

        return pre_norm(
            x, self.input_layernorm, attention, self.post_attention_layernorm, feed_forward
        )


class _ParallelLinear(Weight):
    """A linear layer whose weight is split along one dim over the ranks; `sizes` says how."""

    split_dim: int

    def __init__(
        self,
        linear: nn.Linear,
        comm: Communicator,
        sharding: Sharding | None,
        sizes: Sequence[int] | None,
    ) -> None:
        arguments.check_communicator(comm)
        cut = _agreed_sizes(type(self), linear, comm, sharding, sizes)
        held = tuple((range(start, stop),) for start, stop in pairwise(accumulate(cut, initial=0)))
        super().__init__(
            Placement(tuple(linear.weight.shape), self.split_dim, held), comm, linear.weight.dtype
        )
        self.sizes, self.lengths = cut, None if sharding is None else sharding.lengths
        if linear.bias is not None:
            whole = Placement.replicated(linear.bias.shape, comm.size)
            self.placements["bias"] = whole if self.split_dim else replace(whole, held=held)
        for name, placement in self.placements.items():
            parameter = getattr(linear, name)
            part = placement.take(parameter.detach(), comm.rank).to(comm.device)
            setattr(self, name, place(nn.Parameter(part, parameter.requires_grad), placement))

    @classmethod
    def from_linear(
        cls,
        linear: nn.Linear,
        *,
        comm: Communicator,
        sharding: Sharding | None = None,
        sizes: Sequence[int] | None = None,
    ) -> Self:
        """Take this rank's part of an ordinary layer that all ranks hold alike.

        Args:
            linear: the whole layer.
            comm: the ranks.
            sharding: who owns which tokens between the layers; if not given, every rank has all of
                them.
            sizes: features of each rank, of the output (`ColumnParallelLinear`) or the input
                (`RowParallelLinear`); even if not given.

        Raises:
            ShapeError: sizes or a sharding that do not fit; CollectiveMismatch: ranks that differ.
                On every rank.
        """
        return cls(linear, comm, sharding, sizes)

    def to_linear(self) -> nn.Linear:
        """Return the whole layer again, on every rank.

        Communication:
            One agreement, one all-gather of the weight, and one of the bias if each rank has a part
            of it.
        """
        self.comm.agree_on(lambda: f"{type(self).__name__}.to_linear() on {self.comm.name}")
        weight = AllGather(self.comm, self.split_dim, self.sizes).run(self.weight.detach())
        linear = nn.Linear(
            weight.shape[1], weight.shape[0], self.bias is not None, weight.device, weight.dtype
        )
        linear.weight.data.copy_(weight)
        if self.bias is not None:
            bias = self.bias.detach()
            linear.bias.data.copy_(
                bias if self.split_dim else AllGather(self.comm, 0, self.sizes).run(bias)
            )
        return linear

    def _agree(self, x: Tensor, tokens: int | None) -> None:
        """Compare a call over the ranks."""

        def call() -> str:
            check_input(
                x, self.comm, type(self).__name__, self.weight, self.weight.shape[1], tokens
            )
            shape = tuple(x.shape[:-1]) if tokens is None else f"batch {x.shape[0]}"
            grad = torch.is_grad_enabled() and (x.requires_grad, self.weight.requires_grad)
            return (
                f"{type(self).__name__}({shape}, {x.dtype}, requires_grad={grad}) on "
                f"{self.comm.name}"
            )

        self.comm.agree_on(call)


class ColumnParallelLinear(_ParallelLinear):
    """A linear layer of which each rank has some output features.

    If the tokens are split over the ranks, it gathers them.

    Weight `(sizes[rank], in_features)`, bias `(sizes[rank],)`. Made by `from_linear`.
    """

    split_dim = 0

    def forward(self, x: Tensor) -> Tensor:
        """Map x (B, S/P, E) to (B, S, sizes[rank]), the tokens in the order of an all-gather.

        Without `sharding` from (..., E).

        Communication:
            As `sp_core.schemes.tp_sp.gather_linears`; without `sharding` one all-reduce of the
            gradient of x backward.
        """
        self._agree(x, None if self.lengths is None else self.lengths[self.comm.rank])
        return project(x, self, lengths=self.lengths)[0].to(
            x.dtype
        )  # autocast multiplies in another one


class RowParallelLinear(_ParallelLinear):
    """A linear layer of which each rank has some input features.

    It sums over the ranks and gives each its tokens, or all of them.

    Weight `(out_features, sizes[rank])`; the bias `(out_features,)` is held alike by all ranks. Its
    gradient is that of all tokens on every rank. Made by `from_linear`.
    """

    split_dim = 1

    def forward(self, x: Tensor) -> Tensor:
        """Map x (B, S, sizes[rank]), tokens in the order of an all-gather, to (B, S/P, E).

        Without `sharding` (..., E).

        Communication:
            As `sp_core.schemes.tp_sp.linear_scatter`, and an all-reduce of the bias gradient
            backward; without `sharding` one all-reduce of the result.
        """
        self._agree(x, None if self.lengths is None else sum(self.lengths))
        out = sum_over_ranks(x, self, lengths=self.lengths).to(x.dtype)
        if self.bias is None:
            return out
        return out + (
            self.bias if self.lengths is None else copy_to_group(self.bias, comm=self.comm)
        )


def _agreed_sizes(
    kind: type[_ParallelLinear],
    linear: Any,
    comm: Communicator,
    sharding: Sharding | None,
    sizes: Sequence[int] | None,
) -> tuple[int, ...]:
    """Agree on a parallel layer, and return the features of each rank."""
    cut: tuple[int, ...] = ()

    def call() -> str:
        nonlocal cut
        arguments.check_type("linear", linear, nn.Linear, "Pass the whole layer.")
        arguments.check(sizes=sizes)
        if sharding is not None:
            check_sharding(sharding, comm, kind.__name__)
        features = linear.weight.shape[kind.split_dim]
        cut = split_sizes(features, comm.size) if sizes is None else tuple(sizes)
        if len(cut) != comm.size or min(cut) < 0 or sum(cut) != features:
            raise ShapeError(
                f"{kind.__name__}: sizes={cut} were given; {comm.size} sizes >= 0 that add up to "
                f"{features} are needed."
            )
        shown = (
            f"{tuple(linear.weight.shape)}, {linear.weight.dtype}, bias={linear.bias is not None}"
        )
        tokens = "all tokens" if sharding is None else sharding.fingerprint
        return f"{kind.__name__}.from_linear({shown}, sizes={cut}, {tokens}) on {comm.name}"

    comm.agree_on(call)
    return cut
