"""The layers of a LLaMA, with their weights split over the tensor ranks. Between two splits the activations of a token are held
alike by all of them, or, as Megatron's TP-SP has it, by one of them:

    copy_to_group(x) W_r^T  ->  this rank's features  ->  reduce_from_group(y_r W_r^T)       x (B, S, E) on every rank
    all_gather(x_r) W_r^T   ->  this rank's features  ->  reduce_scatter(y_r W_r^T)          x_r (B, S/T, E)

The second one takes `lengths`, how many of the S tokens each tensor rank has between the splits; None means the first one.
Shapes: B batch, S tokens of the tensor ranks, E model dim, H heads, K key/value heads, D head dim, F feed-forward dim, V
vocabulary, T tensor ranks; `/T` is this rank's part, which may be uneven; (B, S*, E) is either (B, S, E) or (B, S/T, E).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sp_core.collectives.api import reduce_scatter
from sp_core.collectives.differentiable import copy_to_group, reduce_from_group
from sp_core.communicator import Communicator
from sp_core.gradients import Placement, place, placement_of
from sp_core.llama.config import LlamaConfig
from sp_core.mask import Positions
from sp_core.rope import Rope
from sp_core.schemes.heads import split_heads
from sp_core.schemes.tp_sp import gather_linears, linear_scatter

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Attention of this rank's heads: q (B, S, H/T, D), k and v (B, S, K/T, D) to (B, S, H/T, D)."""
Lengths = tuple[int, ...] | None


class Weight(nn.Module):
    """A weight of which this rank holds the part that its placement says."""

    def __init__(self, placement: Placement, comm: Communicator, dtype: torch.dtype) -> None:
        super().__init__()
        part = torch.empty(placement.local_shape(comm.rank), dtype=dtype, device=comm.device)
        self.weight = place(nn.Parameter(part), placement)


def project(x: Tensor, *layers: Weight, comm: Communicator, lengths: Lengths) -> tuple[Tensor, ...]:
    """(B, S*, E) to this rank's features of each layer, (B, S, out/T).

    Communication:
        None forward and one all-reduce of the gradient of x backward; or, with `lengths`, as `gather_linears`.
    """
    weights = [layer.weight for layer in layers]
    if lengths is not None:
        return gather_linears(x, weights, comm=comm, lengths=lengths)
    x = copy_to_group(x, comm=comm)
    return tuple(F.linear(x, weight) for weight in weights)


def sum_over_ranks(y: Tensor, layer: Weight, *, comm: Communicator, lengths: Lengths) -> Tensor:
    """This rank's features (B, S, in/T) through a layer, summed over the ranks: (B, S*, E).

    Communication:
        One all-reduce of the result, and none backward; or, with `lengths`, as `linear_scatter`.
    """
    if lengths is not None:
        return linear_scatter(y, layer.weight, comm=comm, lengths=lengths)
    return reduce_from_group(F.linear(y, layer.weight), comm=comm)


class Norm(Weight):
    """Division of each token by its root mean square; all ranks hold the weight, and with TP-SP each uses it for other tokens.

    Source: Zhang and Sennrich 2019, Root Mean Square Layer Normalization, arXiv:1910.07467, equation 4.
    """

    def __init__(self, config: LlamaConfig, comm: Communicator, dtype: torch.dtype, tp_sp: bool) -> None:
        super().__init__(Placement.replicated((config.hidden_size,), comm.size, partial=tp_sp), comm, dtype)
        self.eps = config.rms_norm_eps

    def forward(self, x: Tensor) -> Tensor:
        """(..., E) to (..., E)."""
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class Embedding(Weight):
    """The vectors of tokens, of which each rank holds those of a part of the vocabulary; a `copy` is the head of a later stage."""

    def __init__(self, config: LlamaConfig, comm: Communicator, dtype: torch.dtype, *, copy: bool = False) -> None:
        placement = Placement.split((config.vocab_size, config.hidden_size), 0, comm.size)
        super().__init__(replace(placement, copy=copy), comm, dtype)
        self.comm = comm

    def forward(self, tokens: Tensor, lengths: Lengths) -> Tensor:
        """(B, S) to (B, S*, E).

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


class Attention(nn.Module):
    """Causal self-attention. A key/value head that several ranks read is on each of them."""

    def __init__(self, config: LlamaConfig, comm: Communicator, dtype: torch.dtype) -> None:
        super().__init__()
        hidden, dim = config.hidden_size, config.head_dim
        heads, kv_heads = split_heads(config.num_attention_heads, config.num_key_value_heads, comm.size)
        width = config.num_attention_heads * dim
        cut = tuple((range(part.start * dim, part.stop * dim),) for part in heads)
        kv = _kv_placement(config, kv_heads)
        self.comm = comm
        self.head_dim = dim
        self.q_proj = Weight(Placement((width, hidden), 0, cut), comm, dtype)
        self.k_proj = Weight(kv, comm, dtype)
        self.v_proj = Weight(kv, comm, dtype)
        self.o_proj = Weight(Placement((hidden, width), 1, cut), comm, dtype)

    def forward(self, x: Tensor, rope: Rope, positions: Positions, attend: Attend, lengths: Lengths) -> Tensor:
        """(B, S*, E) to (B, S*, E).

        Communication:
            That of `project`, `attend` and `sum_over_ranks`.
        """
        projected = project(x, self.q_proj, self.k_proj, self.v_proj, comm=self.comm, lengths=lengths)
        q, k, v = (y.unflatten(2, (-1, self.head_dim)) for y in projected)
        out = attend(rope.apply(q, positions), rope.apply(k, positions), v)
        return sum_over_ranks(out.flatten(2), self.o_proj, comm=self.comm, lengths=lengths)


class FeedForward(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x)).

    Source: Shazeer 2020, GLU Variants Improve Transformer, arXiv:2002.05202, equation 6.
    """

    def __init__(self, config: LlamaConfig, comm: Communicator, dtype: torch.dtype) -> None:
        super().__init__()
        hidden, inner = config.hidden_size, config.intermediate_size
        self.comm = comm
        self.gate_proj = Weight(Placement.split((inner, hidden), 0, comm.size), comm, dtype)
        self.up_proj = Weight(Placement.split((inner, hidden), 0, comm.size), comm, dtype)
        self.down_proj = Weight(Placement.split((hidden, inner), 1, comm.size), comm, dtype)

    def forward(self, x: Tensor, lengths: Lengths) -> Tensor:
        """(B, S*, E) to (B, S*, E).

        Communication:
            That of `project` and `sum_over_ranks`.
        """
        gate, up = project(x, self.gate_proj, self.up_proj, comm=self.comm, lengths=lengths)
        return sum_over_ranks(F.silu(gate) * up, self.down_proj, comm=self.comm, lengths=lengths)


class Layer(nn.Module):
    """x + attention(norm(x)), then x + feed_forward(norm(x))."""

    def __init__(self, config: LlamaConfig, comm: Communicator, dtype: torch.dtype, tp_sp: bool) -> None:
        super().__init__()
        self.input_layernorm = Norm(config, comm, dtype, tp_sp)
        self.self_attn = Attention(config, comm, dtype)
        self.post_attention_layernorm = Norm(config, comm, dtype, tp_sp)
        self.mlp = FeedForward(config, comm, dtype)

    def forward(self, x: Tensor, rope: Rope, positions: Positions, attend: Attend, lengths: Lengths) -> Tensor:
        """(B, S*, E) to (B, S*, E)."""
        x = x + self.self_attn(self.input_layernorm(x), rope, positions, attend, lengths)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x), lengths)
        return out


def kv_slots(config: LlamaConfig, comm: Communicator) -> list[int] | None:
    """For each key/value slot of this rank's attention, the place of its head among those that the rank holds; None if that is all.

    Where the query heads of a rank read its key/value heads unequally often, each query head has a slot of its own.
    """
    _, kv_heads = split_heads(config.num_attention_heads, config.num_key_value_heads, comm.size)
    slots, held = list(kv_heads[comm.rank]), held_kv_heads(config, comm)
    return None if slots == held else [held.index(head) for head in slots]


def held_kv_heads(config: LlamaConfig, comm: Communicator) -> list[int]:
    """The key/value heads of this rank."""
    return sorted(set(split_heads(config.num_attention_heads, config.num_key_value_heads, comm.size)[1][comm.rank]))


def _kv_placement(config: LlamaConfig, kv_heads: Sequence[Sequence[int]]) -> Placement:
    """The rows of the key/value heads that each rank reads; with fewer of them than ranks, gradients are parts of a sum."""
    dim = config.head_dim
    held = tuple(tuple(range(head * dim, (head + 1) * dim) for head in sorted(set(heads))) for heads in kv_heads)
    everybody = [head for heads in kv_heads for head in set(heads)]
    shape = (config.num_key_value_heads * dim, config.hidden_size)
    return Placement(shape, 0, held, partial=len(everybody) > len(set(everybody)))
