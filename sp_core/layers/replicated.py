"""What all layers share: weights that the ranks hold alike, and one agreement before anything is computed."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sp_core import arguments
from sp_core.collectives.build import check_tensor
from sp_core.collectives.differentiable import copy_all, describe_all
from sp_core.communicator import Communicator
from sp_core.errors import DtypeError, ShapeError
from sp_core.sharding import Sharding


class ReplicatedLayer(nn.Module):
    """A layer whose weights all ranks hold alike, and which each rank applies to its own tokens.

    Args:
        hidden: E, what the layer takes.
        comm: the ranks.
    """

    def __init__(self, hidden: int, comm: Communicator) -> None:
        super().__init__()
        self.hidden = hidden
        self.comm = comm

    def weights(self, x: Tensor, sharding: Sharding | None = None) -> dict[str, Tensor]:
        """The parameters by name, for one forward pass on x; their gradients are summed over the ranks.

        Communication:
            One agreement forward, and where a gradient may follow one all-reduce of all gradients of the layer backward.

        Raises:
            ShapeError, DtypeError, DeviceError, RankError: on every rank, also if only one rank's input is wrong.
            CollectiveMismatch: ranks whose weights, or what needs a gradient, differ.
        """
        names, parameters = zip(*self.named_parameters(), strict=True)
        self.comm.agree_on(partial(self._call, x, parameters, sharding), partial(self._check, x, parameters, sharding))
        if self.comm.size > 1 and torch.is_grad_enabled() and any(p.requires_grad for p in parameters):
            parameters = copy_all(parameters, self.comm)
        return dict(zip(names, parameters, strict=True))

    def _call(self, x: Tensor, parameters: tuple[Tensor, ...], sharding: Sharding | None) -> str:
        tokens = "" if sharding is None else f", {sharding.fingerprint}"
        return f"{type(self).__name__}({x.dtype}, requires_grad={x.requires_grad}{tokens}): {describe_all(parameters, self.comm)}"

    def _check(self, x: Tensor, parameters: tuple[Tensor, ...], sharding: Sharding | None) -> int:
        kind, rank = type(self).__name__, self.comm.rank
        check_tensor(x, self.comm)
        if x.dim() == 0 or x.shape[-1] != self.hidden:
            raise ShapeError(
                f"{kind} of hidden size {self.hidden} was given a tensor of shape {tuple(x.shape)}; its last dim must match."
            )
        if x.dtype != parameters[0].dtype and not torch.is_autocast_enabled(x.device.type):
            raise DtypeError(f"{kind} has weights of {parameters[0].dtype} and was given {x.dtype}. Convert one of them.")
        if sharding is None:
            return 0
        arguments.check_type("sharding", sharding, Sharding, "Make one, such as Sharding.contiguous(seq_len, size).")
        if sharding.size != self.comm.size:
            raise ShapeError(
                f"{kind}: the sharding is for {sharding.size} ranks, {self.comm.name} has {self.comm.size}. "
                f"Make it with size={self.comm.size}."
            )
        if x.dim() != 3 or x.shape[1] != sharding.local_len(rank):
            raise ShapeError(
                f"{kind}: x has shape {tuple(x.shape)} on rank {rank}; "
                f"(batch, {sharding.local_len(rank)}, {self.hidden}) is needed."
            )
        return 0


def linear(x: Tensor, weights: dict[str, Tensor], name: str) -> Tensor:
    """The linear layer of that name."""
    return F.linear(x, weights[f"{name}.weight"], weights.get(f"{name}.bias"))
