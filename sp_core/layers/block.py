"""The transformer block."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from sp_core.communicator import Communicator
from sp_core.counter_dropout import dropout
from sp_core.layers.attention import Scheme, SelfAttention
from sp_core.layers.feed_forward import FeedForward
from sp_core.layers.norms import LayerNorm, RMSNorm
from sp_core.mask import Mask
from sp_core.rope import Rope
from sp_core.schemes import allgather_kv_attention
from sp_core.sharding import Sharding


class TransformerBlock(nn.Module):
    """A pre-norm transformer block: x + attention(norm(x)), then x + feed_forward(norm(x)).

    Args:
        hidden: E.
        num_heads, num_kv_heads, head_dim, attention, rope: as in `SelfAttention`.
        ffn_hidden, gated: as in `FeedForward`.
        comm: the ranks that share the sequence and hold the weights alike.
        norm: "layer" or "rms".
        mask: who sees whom, where a call does not say.
        bias: of all linear layers.
        dropout: probability with which an element of what attention and feed-forward add to x is dropped, in training.
        device, dtype: of the weights.

    Raises:
        ShapeError: numbers of heads that do not divide.
        ValueError: another `norm`.

    Source: Xiong et al. 2020, On Layer Normalization in the Transformer Architecture, arXiv:2002.04745, figure 1 b.
    """

    def __init__(
        self,
        hidden: int,
        num_heads: int,
        *,
        comm: Communicator,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        ffn_hidden: int | None = None,
        gated: bool = False,
        norm: str = "layer",
        attention: Scheme = allgather_kv_attention,
        mask: Mask | None = None,
        rope: Rope | None = None,
        bias: bool = True,
        dropout: float = 0.0,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if norm not in ("layer", "rms"):
            raise ValueError(f"norm={norm!r} was given; pass 'layer' or 'rms'.")
        make_norm = LayerNorm if norm == "layer" else RMSNorm
        self.mask = mask
        self.dropout = dropout
        self.comm = comm
        self.norm1 = make_norm(hidden, comm=comm, device=device, dtype=dtype)
        self.attention = SelfAttention(
            hidden,
            num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            comm=comm,
            attention=attention,
            rope=rope,
            bias=bias,
            device=device,
            dtype=dtype,
        )
        self.norm2 = make_norm(hidden, comm=comm, device=device, dtype=dtype)
        self.feed_forward = FeedForward(hidden, ffn_hidden, comm=comm, gated=gated, bias=bias, device=device, dtype=dtype)

    def forward(self, x: Tensor, *, sharding: Sharding, mask: Mask | None = None, seed: int | None = None) -> Tensor:
        """(B, S/P, E) to (B, S/P, E), where `sharding` says which tokens these are.

        With dropout, `seed` is the same on all ranks and another one for each block and step.

        Communication:
            That of the scheme; with gradients also one all-reduce per layer backward, of all its weights. With dropout one
            agreement.

        Raises:
            ValueError: dropout without a seed, on every rank.
            CollectiveMismatch: the ranks' seeds differ.
        """
        if self.training and self.dropout:
            self.comm.agree_on(lambda: f"a block with dropout={self.dropout}, seed={seed}", partial(_check_seed, seed))
        mask = self.mask if mask is None else mask
        x = x + self._drop(self.attention(self.norm1(x), sharding=sharding, mask=mask), sharding, seed, 0)
        out: Tensor = x + self._drop(self.feed_forward(self.norm2(x)), sharding, seed, 1)
        return out

    def _drop(self, x: Tensor, sharding: Sharding, seed: int | None, place: int) -> Tensor:
        if not self.training or not self.dropout or seed is None:
            return x
        return dropout(x, self.dropout, seed=2 * seed + place, positions=sharding.positions(self.comm.rank))


def _check_seed(seed: int | None) -> int:
    if seed is None:
        raise ValueError("a block with dropout was called in training without seed=; pass a number, the same on all ranks.")
    return 0
