"""Where a value that all ranks hold alike begins, and where it ends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sp_core.arguments import check_communicator
from sp_core.autograd.apply import apply
from sp_core.collectives import build
from sp_core.collectives.maps import AllGather, AllReduce, Map, Started
from sp_core.communicator import Communicator


@dataclass(frozen=True)
class _Identity(Map):
    """Nothing moves; the gradients of all copies are summed."""

    name = "copy_to_group"

    @property
    def transpose(self) -> Map:
        return _ReduceFromGroup(self.comm, algorithm=self.algorithm)

    def run(self, x: Tensor) -> Tensor:
        return x.view_as(x)

    def start(self, x: Tensor) -> Started:
        raise NotImplementedError


@dataclass(frozen=True)
class _ReduceFromGroup(AllReduce):
    """Partial sums become one value, whose gradient all ranks hold alike."""

    @property
    def transpose(self) -> Map:
        return _Identity(self.comm, algorithm=self.algorithm)


@dataclass(frozen=True)
class _GatherReplicated(AllGather):
    """Shards become one value, whose gradient all ranks hold alike."""

    @property
    def transpose(self) -> Map:
        return _Slice(self.comm, self.dim, self.sizes, algorithm=self.algorithm)


@dataclass(frozen=True)
class _Slice(Map):
    """This rank's part of a value that all ranks hold alike."""

    name = "slice"
    dim: int
    sizes: tuple[int, ...]

    @property
    def transpose(self) -> Map:
        return _GatherReplicated(self.comm, self.dim, self.sizes, algorithm=self.algorithm)

    def run(self, x: Tensor) -> Tensor:
        rank = self.comm.rank
        return x.narrow(self.dim, sum(self.sizes[:rank]), self.sizes[rank]).clone()

    def start(self, x: Tensor) -> Started:
        raise NotImplementedError


def copy_to_group(x: Tensor, *, comm: Communicator) -> Tensor:
    """Turn one value that all ranks hold alike into a copy for each rank to use in its own way.

    Args:
        x: the same values on every rank.
        comm: the ranks.

    Returns:
        x; its gradient is the sum of the gradients of all ranks.

    Communication:
        None forward; one all-reduce of the gradient backward.

    Raises:
        As `all_gather`.

    Source: Shoeybi et al. 2019, Megatron-LM, arXiv:1909.08053, section 3, the operator f.
    """
    mapping = build.all_reduce("copy_to_group", x, comm, "sum", "auto")
    return apply(x, _Identity(mapping.comm))


def reduce_from_group(x: Tensor, *, comm: Communicator, algorithm: str = "auto") -> Tensor:
    """Sum partial results of the ranks into one value that all hold alike.

    Args:
        x: this rank's part of the sum, the same shape on every rank.
        comm, algorithm: as in `all_gather`.

    Returns:
        The sum; the gradient passes through unchanged.

    Communication:
        One all-reduce forward; none backward.

    Raises:
        As `all_gather`.

    Source: Shoeybi et al. 2019, Megatron-LM, arXiv:1909.08053, section 3, the operator g.
    """
    mapping = build.all_reduce("reduce_from_group", x, comm, "sum", algorithm)
    return apply(x, _ReduceFromGroup(comm, algorithm=mapping.algorithm))


def gather_replicated(
    x: Tensor, *, comm: Communicator, dim: int = 0, sizes: Sequence[int] | None = None, algorithm: str = "auto"
) -> Tensor:
    """Put shards together into one value that all ranks hold alike, and that counts once.

    Args:
        x, comm, dim, sizes, algorithm: as in `all_gather`.

    Returns:
        As `all_gather`; its gradient, alike on all ranks, is cut and not summed.

    Communication:
        One all-gather forward; none backward.

    Raises:
        As `all_gather`.
    """
    mapping = build.all_gather("gather_replicated", x, comm, dim, sizes, algorithm)
    return apply(x, _GatherReplicated(comm, mapping.dim, mapping.sizes, algorithm=algorithm))


class _CopyAllToGroup(torch.autograd.Function):
    """`copy_to_group` for many tensors, whose gradients are summed in one all-reduce per dtype."""

    @staticmethod
    def forward(ctx: Any, comm: Communicator, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.comm, ctx.agree = comm, comm.numbered()
        return tuple(x.view_as(x) for x in tensors)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        ctx.agree("the backward of copy_all_to_group")
        summed: list[Tensor | None] = [None] * len(grads)
        for dtype in sorted({grad.dtype for grad in grads}, key=str):
            places = [place for place, grad in enumerate(grads) if grad.dtype == dtype]
            flat = AllReduce(ctx.comm).run(torch.cat([grads[place].reshape(-1) for place in places]))
            for place, part in zip(places, flat.split([grads[p].numel() for p in places]), strict=True):
                summed[place] = part.view(grads[place].shape)
        return None, *summed


def copy_all_to_group(tensors: Sequence[Tensor], *, comm: Communicator) -> tuple[Tensor, ...]:
    """`copy_to_group` for many tensors at once, such as the parameters of a layer.

    Args:
        tensors: the same shapes, dtypes and `requires_grad` on every rank.
        comm: the ranks.

    Returns:
        The tensors; the gradient of each is the sum of the gradients of all ranks.

    Communication:
        One agreement forward. Backward one all-reduce per dtype, once the gradients of all of them have been computed.

    Raises:
        As `all_gather`.
    """
    check_communicator(comm)
    comm.agree_on(lambda: describe_all(tensors, comm), lambda: build.check_all(tensors, comm))
    return copy_all(tensors, comm)


def describe_all(tensors: Sequence[Tensor], comm: Communicator) -> str:
    """What ranks that copy these tensors must have in common."""
    shown = ", ".join(f"{tuple(x.shape)} {x.dtype} {x.requires_grad}" for x in tensors)
    return f"copy_all_to_group({shown}, grad={torch.is_grad_enabled()}) on {comm.name}"


def copy_all(tensors: Sequence[Tensor], comm: Communicator) -> tuple[Tensor, ...]:
    """`copy_all_to_group` once its arguments have been agreed on."""
    apply_all: Any = _CopyAllToGroup.apply
    copies = iter(apply_all(comm, *(x for x in tensors if x.requires_grad)))
    return tuple(next(copies) if x.requires_grad else x for x in tensors)
