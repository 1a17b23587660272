"""A layer of a LLaMA: the block of `sp_core.nn.layers`, with weights that tensor ranks split."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sp_core.communicator import Communicator
from sp_core.llama.config import LlamaConfig
from sp_core.nn.gradients import Placement
from sp_core.nn.layers import Function, attended, pre_norm
from sp_core.nn.parallel import Lengths, Norm, Weight, project, sum_over_ranks
from sp_core.schemes.heads import split_heads

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Attention of this rank's heads: q (B, S, H/T, D), k and v (B, S, K/T, D), q and k rotated, to
(B, S, H/T, D)."""


class Layer(nn.Module):
    """A pre-norm block of grouped heads and SwiGLU. Each rank holds the key/value heads it reads.

    Source: Shazeer 2020, GLU Variants Improve Transformer, arXiv:2002.05202, equation 6 (SwiGLU).
    """

    def __init__(
        self, config: LlamaConfig, comm: Communicator, dtype: torch.dtype, tp_sp: bool
    ) -> None:
        super().__init__()
        hidden, inner, dim = config.hidden_size, config.intermediate_size, config.head_dim
        num_heads, num_kv_heads = config.num_attention_heads, config.num_key_value_heads
        heads, kv_heads = split_heads(num_heads, num_kv_heads, comm.size)
        cut = tuple((range(part.start * dim, part.stop * dim),) for part in heads)
        kv_held = tuple(
            tuple(range(head * dim, (head + 1) * dim) for head in sorted(set(slots)))
            for slots in kv_heads
        )
        # the gradients of key/value heads that several ranks hold are parts of a sum
        shared = sum(map(len, kv_held)) > num_kv_heads
        kv = Placement((num_kv_heads * dim, hidden), 0, kv_held, partial=shared)
        self.head_dim, width = dim, num_heads * dim
        held = partial(Weight, comm=comm, dtype=dtype)
        norm = partial(Norm, hidden, config.rms_norm_eps, comm, dtype, partial=tp_sp)
        weights = {
            "q_proj": held(Placement((width, hidden), 0, cut)),
            "k_proj": held(kv),
            "v_proj": held(kv),
            "o_proj": held(Placement((hidden, width), 1, cut)),
        }
        self.input_layernorm, self.self_attn = norm(), nn.ModuleDict(weights)
        weights = {
            "gate_proj": held(Placement.split((inner, hidden), 0, comm.size)),
            "up_proj": held(Placement.split((inner, hidden), 0, comm.size)),
            "down_proj": held(Placement.split((hidden, inner), 1, comm.size)),
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
