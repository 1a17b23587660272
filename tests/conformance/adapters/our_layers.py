"""The parallel layers of this project, called as any library is.

If these do not pass, the harness is wrong.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sp_core import ColumnParallelLinear, Mesh, RowParallelLinear, Sharding


def prepare(comm: Any, variant: str) -> None:
    """Do nothing: each pair makes its mesh."""


class Pair(torch.nn.Module):
    """Both layers of one example, on a mesh of their own."""

    def __init__(self, whole: dict[str, Tensor], *, comm: Any, shards: Any, **rest: Any) -> None:
        super().__init__()
        how = {"comm": Mesh(comm, sp=comm.size)["sp"], "sharding": Sharding.from_positions(shards)}
        self.up = ColumnParallelLinear.from_linear(_linear(whole, "up"), **how)
        self.down = RowParallelLinear.from_linear(_linear(whole, "down"), **how)

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, S/P, E) to (B, S/P, E)."""
        return self.down(self.up(x))

    def finish(self) -> None:
        """Do nothing: backward has summed all gradients."""


def _linear(whole: dict[str, Tensor], name: str) -> torch.nn.Linear:
    weight, bias = whole[f"{name}.weight"], whole.get(f"{name}.bias")
    linear = torch.nn.Linear(weight.shape[1], weight.shape[0], bias is not None, dtype=weight.dtype)
    linear.load_state_dict({"weight": weight} | ({} if bias is None else {"bias": bias}))
    return linear
