"""LLaMA's transformer block, whose weights are split over the ranks of a group.

Shapes as in `sp_core.nn.parallel`: B batch, S tokens (of one sequence rank, if a sequence is
split), E model dim, F feed-forward dim, H heads, K key/value heads, D head dim, T tensor ranks.
(B, S or S/T, E) is (B, S/T, E) with `lengths`, the number of tokens S/T of each tensor rank, else
(B, S, E).
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sp_core.communicator import Communicator
from sp_core.nn.gradients import Placement
from sp_core.nn.layers import Function, attended, pre_norm
from sp_core.nn.memory import tiled
from sp_core.nn.parallel import Lengths, Norm, Weight, check_part, join, project, sum_over_ranks
from sp_core.schemes.heads import split_heads
from sp_core.sharding import split_sizes

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Attention of this rank's heads, from rotated q (B, S, H/T, D) and k and v (B, S, K/T, D) to
(B, S, H/T, D)."""


class ParallelBlock(nn.Module):
    """LLaMA's transformer block: RMSNorm, grouped-query attention and SwiGLU, split over ranks.

    A rank holds some query heads and the key/value heads they read. Names are Hugging Face's. The
    block reads the weights of its projections and never calls them: hooks on them are refused.

    Args:
        hidden, ffn_hidden: E and F, the feed-forward dim.
        heads: H query heads and K key/value heads of the whole block.
        head_dim: D, the elements of a head.
        eps: added to the mean square in the norms.
        comm: the ranks over which the block is split.
        dtype: the dtype of the weights.
        tp_sp: whether each rank applies the norms to different tokens. `reduce_gradients` then sums
            the gradients of the norms over the ranks.

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
            tuple(range(head * dim, (head + 1) * dim) for head in sorted(set(read)))
            for read in kv_heads
        )
        # a rank has only a summand of the gradient of a key/value head that several ranks hold
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

    def check_parts(self, name: str) -> None:
        """Apply `check_part` to all modules that `forward` reads. `name` is the block's name."""
        for group in ("self_attn", "mlp"):
            held: Any = self._modules[group]
            check_part(f"{name}.{group}", held, nn.ModuleDict)
            for last, part in held._modules.items():  # `named_children` takes longer
                check_part(f"{name}.{group}.{last}", part)

    def join_weights(self) -> None:
        """Lay out the weights for products with few tokens; `join` says how."""
        weights: Any = (*self.self_attn.values(), *self.mlp.values())
        q, k, v, o, gate, up, _ = weights
        for layers in ((q, k, v), (o,), (gate, up)):
            join(*layers)

    def forward(
        self,
        x: Tensor,
        rotate: Function,
        attend: Attend,
        lengths: Lengths,
        chunk: int | None = None,
    ) -> Tensor:
        """Apply the block to x: all tokens (B, S, E), or with `lengths` this rank's (B, S/T, E).

        Return a tensor of the same shape. `rotate` turns q and k by position, `attend` computes
        attention. The feed-forward computes at most `chunk` tokens at a time, but at least one of
        each sequence. With `lengths` these are tokens of each rank. None computes all at once.

        Communication:
            Two all-reduces of (B, S, E), or with `lengths` two all-gathers and two reduce-scatters;
            and the messages of `attend`. Backward the same, with `lengths` two more all-gathers.
            With `chunk` the feed-forward calls its collectives once for each chunk. If there are
            several chunks, it repeats its forward collectives in the backward.
        """
        weights: Any = (*self.self_attn.values(), *self.mlp.values())
        q, k, v, o, gate, up, down = weights

        def attention(y: Tensor) -> Tensor:
            projected = project(y, q, k, v, lengths=lengths)
            out = attended(projected, self.head_dim, rotate, attend)
            return sum_over_ranks(out, o, lengths=lengths)

        def transform(y: Tensor, cut: tuple[int, ...]) -> Tensor:
            own = None if lengths is None else cut
            gates, ups = project(y, gate, up, lengths=own)
            return sum_over_ranks(F.silu(gates) * ups, down, lengths=own)

        def feed_forward(y: Tensor) -> Tensor:
            tokens = (y.shape[1],) if lengths is None else lengths
            longest = max(1, *tokens)
            most = longest if chunk is None else max(chunk // max(len(y), 1), 1)
            count = -(-longest // most)
            cuts = zip(*(split_sizes(n, count) for n in tokens), strict=True)
            parts, reads = y.split(split_sizes(y.shape[1], count), 1), [*self.mlp.parameters()]
            return tiled(transform, parts, cuts, dim=1, reads=reads)

        return pre_norm(
            x, self.input_layernorm, attention, self.post_attention_layernorm, feed_forward
        )


def blocks_in(layer: nn.Module) -> list[ParallelBlock]:
    """Return a layer that is a block, or the blocks inside one of another class."""
    parts = (layer,) if isinstance(layer, ParallelBlock) else layer.modules()
    return [part for part in parts if isinstance(part, ParallelBlock)]
