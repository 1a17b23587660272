"""Checks that the layers share."""

from __future__ import annotations

import torch
from torch import Tensor

from sp_core import arguments
from sp_core.collectives.build import check_tensor
from sp_core.communicator import Communicator
from sp_core.errors import DtypeError, ShapeError
from sp_core.sharding import Sharding


def check_sharding(sharding: Sharding, comm: Communicator, layer: str) -> None:
    """Refuse a sharding that is not over the ranks of a communicator.

    Raises:
        TypeError, ShapeError: naming the layer.
    """
    arguments.check_type("sharding", sharding, Sharding, "Make one, such as Sharding.contiguous(seq_len, size).")
    if sharding.size != comm.size:
        raise ShapeError(
            f"{layer}: the sharding is for {sharding.size} ranks, {comm.name} has {comm.size}. Make it with size={comm.size}."
        )


def check_input(x: Tensor, comm: Communicator, layer: str, weight: Tensor, features: int, tokens: int | None = None) -> None:
    """Refuse an input of a layer that is not (batch, tokens, features); or not (..., features), if any number of tokens will do.

    Raises:
        DtypeError, DeviceError, ShapeError: naming the layer and the rank.
    """
    check_tensor(x, comm)
    needed = f"(..., {features})" if tokens is None else f"(batch, {tokens}, {features})"
    if x.dim() == 0 or x.shape[-1] != features or (tokens is not None and (x.dim() != 3 or x.shape[1] != tokens)):
        raise ShapeError(f"{layer}: x has shape {tuple(x.shape)}; {needed} is needed on rank {comm.rank}.")
    if x.dtype != weight.dtype and not torch.is_autocast_enabled(x.device.type):
        raise DtypeError(f"{layer} has weights of {weight.dtype} and was given {x.dtype}. Convert one of them.")
