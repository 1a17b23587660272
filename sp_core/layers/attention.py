"""Self-attention with projections, over any scheme."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor, nn

from sp_core.communicator import Communicator
from sp_core.errors import ShapeError
from sp_core.layers.replicated import ReplicatedLayer, linear
from sp_core.mask import Mask
from sp_core.rope import Rope
from sp_core.schemes import allgather_kv_attention
from sp_core.sharding import Sharding


class Scheme(Protocol):
    """An attention scheme, such as `allgather_kv_attention`."""

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, *, comm: Communicator, sharding: Sharding, mask: Mask | None
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Attention over the tokens of all ranks."""
        ...


class SelfAttention(ReplicatedLayer):
    """Attention of a sequence to itself, with projections; the scheme decides how it is split over the ranks.

    Args:
        hidden: E.
        num_heads: H.
        num_kv_heads: K, a divisor of H; H if not given.
        head_dim: D; E/H if not given.
        comm: the ranks that share the sequence and hold the weights alike.
        attention: the scheme.
        rope: rotary embedding of queries and keys by global position; none if not given.
        bias: of the projections.
        device, dtype: of the weights.

    Raises:
        ShapeError: numbers of heads that do not divide.
    """

    def __init__(
        self,
        hidden: int,
        num_heads: int,
        *,
        comm: Communicator,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        attention: Scheme = allgather_kv_attention,
        rope: Rope | None = None,
        bias: bool = True,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(hidden, comm)
        num_kv_heads = num_kv_heads or num_heads
        if num_heads % num_kv_heads or (head_dim is None and hidden % num_heads):
            raise ShapeError(
                f"hidden={hidden}, num_heads={num_heads}, num_kv_heads={num_kv_heads}: num_heads must be a multiple "
                "of num_kv_heads, and divide hidden unless head_dim is given."
            )
        self.head_dim = head_dim or hidden // num_heads
        self.attention = attention
        self.rope = rope
        width, kv_width = num_heads * self.head_dim, num_kv_heads * self.head_dim
        self.q_proj = nn.Linear(hidden, width, bias, device, dtype)
        self.k_proj = nn.Linear(hidden, kv_width, bias, device, dtype)
        self.v_proj = nn.Linear(hidden, kv_width, bias, device, dtype)
        self.o_proj = nn.Linear(width, hidden, bias, device, dtype)

    def forward(self, x: Tensor, *, sharding: Sharding, mask: Mask | None = None) -> Tensor:
        """(B, S/P, E) to (B, S/P, E), where `sharding` says which tokens these are.

        Communication:
            That of the scheme, and that of `weights`.
        """
        weights = self.weights(x, sharding)
        q, k, v = (self._heads(linear(x, weights, name)) for name in ("q_proj", "k_proj", "v_proj"))
        if self.rope is not None:
            positions = sharding.positions(self.comm.rank).to(x.device)
            q, k = self.rope.apply(q, positions), self.rope.apply(k, positions)
        out = self.attention(q, k, v, comm=self.comm, sharding=sharding, mask=mask)
        assert isinstance(out, Tensor)
        return linear(out.flatten(2), weights, "o_proj")

    def _heads(self, x: Tensor) -> Tensor:
        heads: Tensor = x.unflatten(2, (-1, self.head_dim))
        return heads
