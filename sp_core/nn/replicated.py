"""Layers whose weights all ranks hold alike, and the checks of what a layer is called with.

Every rank runs a layer on its own tokens, so the gradient that it computes for a weight is only its
tokens' part. The backward sums these parts over the ranks: after `loss.backward()` every rank holds
the gradient of the sum of all losses, and replicas stay equal.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sp_core.arguments import check_tensor
from sp_core.collectives.differentiable import copy_all, describe_all
from sp_core.communicator import Communicator
from sp_core.errors import DtypeError, ShapeError
from sp_core.sharding import Sharding, check_sharding


class ReplicatedLayer(nn.Module):
    """A layer whose weights all ranks hold alike, and which each rank applies to its own tokens.

    Args:
        hidden: E, the features of its input.
        comm: the ranks.
    """

    def __init__(self, hidden: int, comm: Communicator) -> None:
        super().__init__()
        self.hidden = hidden
        self.comm = comm

    def weights(self, x: Tensor, *sharding: Sharding) -> dict[str, Tensor]:
        """Return the parameters by name, for one forward pass on x.

        Their gradients are summed over the ranks. With a sharding, x must be the rank's shard.

        Communication:
            One agreement forward, and where a gradient may follow one all-reduce of all gradients
            of the layer backward.

        Raises:
            ShapeError, DtypeError, DeviceError, RankError: on every rank, also if only one rank's
                input is wrong.
            CollectiveMismatch: ranks whose weights, or what needs a gradient, differ.
        """
        names, parameters = zip(*self.named_parameters(), strict=True)
        kind = type(self).__name__

        def call() -> str:
            tokens, owned = None, ""
            for each in sharding:
                check_sharding(each, self.comm, kind)
                tokens, owned = each.local_len(self.comm.rank), f", {each.fingerprint}"
            check_input(
                x,
                self.comm,
                f"{kind} of hidden size {self.hidden}",
                parameters[0],
                self.hidden,
                tokens,
            )
            return (
                f"{kind}({x.dtype}, requires_grad={x.requires_grad}{owned}): "
                f"{describe_all(parameters, self.comm)}"
            )

        self.comm.agree_on(call)
        if (
            self.comm.size > 1
            and torch.is_grad_enabled()
            and any(p.requires_grad for p in parameters)
        ):
            parameters = copy_all(parameters, self.comm)
        return dict(zip(names, parameters, strict=True))


def linear(x: Tensor, weights: dict[str, Tensor], name: str) -> Tensor:
    """Apply the linear layer of that name."""
    return F.linear(x, weights[f"{name}.weight"], weights.get(f"{name}.bias"))


def check_input(
    x: Tensor,
    comm: Communicator,
    layer: str,
    weight: Tensor,
    features: int,
    tokens: int | None = None,
) -> None:
    """Refuse an input of a layer that is not (batch, tokens, features).

    Or not (..., features), if any number of tokens will do.

    Raises:
        DtypeError, DeviceError, ShapeError: naming the layer and the rank.
    """
    check_tensor(x, comm)
    needed = f"(..., {features})" if tokens is None else f"(batch, {tokens}, {features})"
    if (
        x.dim() == 0
        or x.shape[-1] != features
        or (tokens is not None and (x.dim() != 3 or x.shape[1] != tokens))
    ):
        raise ShapeError(
            f"{layer}: x has shape {tuple(x.shape)}; {needed} is needed on rank {comm.rank}."
        )
    if x.dtype != weight.dtype and not torch.is_autocast_enabled(x.device.type):
        raise DtypeError(
            f"{layer} has weights of {weight.dtype} and was given {x.dtype}. Convert one of them."
        )
