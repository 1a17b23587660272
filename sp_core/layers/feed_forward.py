"""The feed-forward layer."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sp_core.communicator import Communicator
from sp_core.layers.replicated import ReplicatedLayer, linear


class FeedForward(ReplicatedLayer):
    """Two linear layers with GELU between them, or three with a gated SiLU.

    Args:
        hidden: E.
        ffn_hidden: F; 4 E if not given.
        comm: the ranks that hold the weights alike.
        gated: SwiGLU, silu(x W_gate) * (x W_up), instead of gelu(x W_up).
        bias: of the linear layers.
        device, dtype: of the weights.

    Source: Shazeer 2020, GLU Variants Improve Transformer, arXiv:2002.05202, equations 1 and 6.
    """

    def __init__(
        self,
        hidden: int,
        ffn_hidden: int | None = None,
        *,
        comm: Communicator,
        gated: bool = False,
        bias: bool = True,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(hidden, comm)
        ffn_hidden = ffn_hidden or 4 * hidden
        self.gated = gated
        self.up = nn.Linear(hidden, ffn_hidden, bias, device, dtype)
        if gated:
            self.gate = nn.Linear(hidden, ffn_hidden, bias, device, dtype)
        self.down = nn.Linear(ffn_hidden, hidden, bias, device, dtype)

    def forward(self, x: Tensor) -> Tensor:
        """(..., E) to (..., E)."""
        weights = self.weights(x)
        up = linear(x, weights, "up")
        inner = F.silu(linear(x, weights, "gate")) * up if self.gated else F.gelu(up)
        return linear(inner, weights, "down")
