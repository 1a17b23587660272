"""Normalisation of each token."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sp_core.communicator import Communicator
from sp_core.layers.replicated import ReplicatedLayer


class LayerNorm(ReplicatedLayer):
    """Layer normalisation of each token.

    Args:
        hidden: E.
        comm: the ranks that hold the weights alike.
        eps: added to the variance.
        device, dtype: of the weights.

    Source: Ba et al. 2016, Layer Normalization, arXiv:1607.06450, equation 4.
    """

    def __init__(
        self,
        hidden: int,
        *,
        comm: Communicator,
        eps: float = 1e-5,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(hidden, comm)
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(hidden, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.zeros(hidden, device=device, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        """(..., E) to (..., E)."""
        weights = self.weights(x)
        return F.layer_norm(x, self.weight.shape, weights["weight"], weights["bias"], self.eps)


class RMSNorm(ReplicatedLayer):
    """Division of each token by its root mean square.

    Args:
        hidden: E.
        comm: the ranks that hold the weight alike.
        eps: added to the mean square.
        device, dtype: of the weight.

    Source: Zhang and Sennrich 2019, Root Mean Square Layer Normalization, arXiv:1910.07467, equation 4.
    """

    def __init__(
        self,
        hidden: int,
        *,
        comm: Communicator,
        eps: float = 1e-6,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(hidden, comm)
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(hidden, device=device, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        """(..., E) to (..., E)."""
        out: Tensor = F.rms_norm(x, self.weight.shape, self.weights(x)["weight"], self.eps)
        return out
