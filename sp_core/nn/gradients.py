"""Gradients over a mesh.

Each parameter's is summed over exactly the ranks that have a part of it, and counted once in the
norm.

A parameter carries as data what each rank along the tensor axis holds of it (`Placement`). Tokens
differ along the data axes, so every gradient is summed over these. Along the tensor axis ranks see
the same tokens: a slice that one rank holds is complete there, and so is the gradient of a
parameter that all ranks use alike. What several ranks hold and each uses in its own way is
`partial`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from sp_core import arguments
from sp_core.agreement import agreeing_in_turn
from sp_core.collectives.api import all_reduce
from sp_core.collectives.maps import overlaps
from sp_core.communicator import Communicator
from sp_core.errors import ShapeError
from sp_core.segments import concatenated, split_ranges


@dataclass(frozen=True)
class Placement:
    """Which slices of a whole parameter each rank along the tensor axis holds.

    Args:
        shape: of the whole parameter.
        dim: along which it is cut.
        held: for each rank the ranges of slices that it holds, in ascending order; ranks may hold
            the same ones.
        partial: several ranks hold a slice, and the gradient of each is only a part of the sum.
        copy: another pipeline stage holds the same parameter, and counts it in the norm.
    """

    shape: tuple[int, ...]
    dim: int
    held: tuple[tuple[range, ...], ...]
    partial: bool = False
    copy: bool = False

    @classmethod
    def replicated(cls, shape: Sequence[int], size: int, *, partial: bool = False) -> Placement:
        """Place all slices on each of `size` ranks.

        They use them alike or, if `partial`, each for tokens of its own.
        """
        return cls(tuple(shape), 0, ((range(shape[0]),),) * size, partial)

    @classmethod
    def split(cls, shape: Sequence[int], dim: int, size: int) -> Placement:
        """Cut evenly along `dim`, the first ranks one slice more."""
        return cls(tuple(shape), dim, tuple((part,) for part in split_ranges(shape[dim], size)))

    @property
    def numel(self) -> int:
        """The number of elements of the whole parameter."""
        return math.prod(self.shape)

    def local_shape(self, rank: int) -> tuple[int, ...]:
        """Return the shape of the part of a rank."""
        cut = sum(map(len, self.held[rank]))
        return (*self.shape[: self.dim], cut, *self.shape[self.dim + 1 :])

    def take(self, whole: Tensor, rank: int) -> Tensor:
        """Return the part of a rank, from the whole parameter."""
        return whole.index_select(self.dim, _indices(self.held[rank], whole))

    def spread(self, part: Tensor, rank: int) -> Tensor:
        """Return the whole parameter with the part of a rank in its place, and zeros elsewhere."""
        return part.new_zeros(self.shape).index_copy_(
            self.dim, _indices(self.held[rank], part), part
        )

    def join(self, parts: Tensor) -> Tensor:
        """Return the whole parameter, from the parts of all ranks along `dim` in rank order."""
        return parts.new_empty(self.shape).index_copy_(
            self.dim, _indices(sum(self.held, ()), parts), parts
        )

    def counted(self, part: Tensor, rank: int) -> Tensor:
        """Return the slices of a rank that no lower rank holds.

        Each slice of the whole is counted on one rank.
        """
        lower = concatenated(sum(self.held[:rank], ()))
        first = torch.isin(concatenated(self.held[rank]), lower, invert=True) & (not self.copy)
        return (
            part
            if first.all()
            else part.index_select(self.dim, first.nonzero().squeeze(1).to(part.device))
        )


def _indices(ranges: Sequence[range], like: Tensor) -> Tensor:
    return concatenated(ranges).to(like.device)


Placed = list[tuple[nn.Parameter, Placement]]


def place(parameter: nn.Parameter, placement: Placement) -> nn.Parameter:
    """Attach a placement to a parameter. Return the parameter."""
    vars(parameter)["placement"] = placement
    return parameter


def placement_of(parameter: nn.Parameter) -> Placement:
    """Return the placement that is attached to a parameter.

    Raises:
        ShapeError: it carries none.
    """
    found = vars(parameter).get("placement")
    if not isinstance(found, Placement):
        raise ShapeError(
            f"a parameter of shape {tuple(parameter.shape)} carries no placement; give it one "
            f"with `place`."
        )
    return found


@torch.no_grad()
def reduce_gradients(
    parameters: Iterable[nn.Parameter], *, data: Communicator, tensor: Communicator | None = None
) -> None:
    """Turn the gradients of each rank into those of the sum of all ranks' losses, in place.

    Args:
        parameters: the same ones in the same order on every rank; one without a gradient counts as
            zero. With `tensor` each has a placement.
        data: the ranks that hold the same slices and have other tokens.
        tensor: the ranks along the tensor axis, which share their tokens; None if no weight is
            split.

    Communication:
        One agreement over `data`, one over `tensor`. One all-reduce over `data` per dtype, of all
        gradients; one over `tensor` per dtype, of the partial ones, whole.

    Raises:
        ShapeError: with `tensor` a parameter without a placement; one that does not fit.
        CollectiveMismatch: ranks with different parameters.

    All of these on every rank of both groups.
    """
    wanted: Placed = []
    _agree_in_turn(
        lambda: f"reduce_gradients({_listed(wanted)}, tensor={tensor and 'given'})",
        lambda: wanted.extend(_placed(parameters, tensor, lambda p: p.requires_grad)),
        *((data,) if tensor is None else (data, tensor)),  # a rank without `tensor` is told first
    )
    gradients = [_own_gradient(parameter) for parameter, _ in wanted]
    _sum_in_place(gradients, data)
    if tensor is None:
        return
    pairs = zip(gradients, wanted, strict=True)
    shared = [(x, placement) for x, (_, placement) in pairs if placement.partial]
    wholes = [placement.spread(x, tensor.rank) for x, placement in shared]
    _sum_in_place(wholes, tensor)
    for (x, placement), whole in zip(shared, wholes, strict=True):
        x.copy_(placement.take(whole, tensor.rank))


def _own_gradient(parameter: nn.Parameter) -> Tensor:
    """Return the gradient as memory of its own; zeros if there is none."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    elif overlaps(parameter.grad):
        parameter.grad = parameter.grad.contiguous()
    return parameter.grad


@torch.no_grad()
def clip_gradient_norm(
    parameters: Iterable[nn.Parameter],
    max_norm: float,
    *,
    tensor: Communicator,
    stages: Communicator | None = None,
) -> float:
    """Scale reduced gradients so that the norm of all of them together is at most `max_norm`.

    Args:
        parameters: as in `reduce_gradients`, which has to come first.
        max_norm: greater than 0; infinity only measures.
        tensor: the ranks along the tensor axis.
        stages: the ranks that hold other layers, if there are any.

    Returns:
        The norm before, in float64: each slice of each whole parameter counted once.

    Communication:
        One agreement and one all-reduce of one number over `tensor`, the same over `stages`.

    Raises:
        ValueError: max_norm is not above 0, or the norm is not finite.
        ShapeError: a parameter without a placement, or with one that does not fit.
        CollectiveMismatch: ranks with another max_norm.

    All of these on every rank.
    """
    wanted: Placed = []
    others = () if stages is None else (stages,)

    def check() -> None:
        if isinstance(max_norm, bool) or not isinstance(max_norm, int | float) or not max_norm > 0:
            raise ValueError(
                f"{max_norm=} was given; pass a number above 0, or infinity to only measure."
            )
        wanted.extend(_placed(parameters, tensor, lambda p: p.grad is not None))

    call = f"clip_gradient_norm({max_norm=})"
    _agree_in_turn(lambda: call, check, tensor, *others, own=lambda: _listed(wanted))
    gradients = [(p.grad, placement) for p, placement in wanted if p.grad is not None]
    total = torch.zeros((), dtype=torch.float64, device=tensor.device)
    for x, placement in gradients:
        counted = placement.counted(x, tensor.rank)
        total += torch.linalg.vector_norm(counted, dtype=torch.float64).square()
    for comm in (tensor, *others):
        total = all_reduce(total, comm=comm)
    norm = float(total.sqrt())
    if not norm < torch.inf:
        raise ValueError(
            f"the norm of the gradients is {norm}; skip this step, or look for what overflows."
        )
    if norm > max_norm:
        for x, _ in gradients:
            x.mul_(max_norm / norm)
    return norm


def _placed(
    parameters: Iterable[nn.Parameter],
    tensor: Communicator | None,
    is_wanted: Callable[[nn.Parameter], bool],
) -> Placed:
    """Return some of the parameters with their placements, which must fit the part of this rank."""
    arguments.check(parameters=parameters)
    found = []
    for parameter in parameters:
        arguments.check_type(
            "a parameter",
            parameter,
            nn.Parameter,
            "Pass those of a module, such as model.parameters().",
        )
        if not is_wanted(parameter):
            continue
        if tensor is None and "placement" not in vars(parameter):
            found.append((parameter, Placement(tuple(parameter.shape), 0, ())))
            continue
        placement = placement_of(parameter)
        rank, size = (0, 1) if tensor is None else (tensor.rank, tensor.size)
        if len(placement.held) != size or placement.local_shape(rank) != parameter.shape:
            raise ShapeError(
                f"a parameter of shape {placement.shape} carries a placement for "
                f"{len(placement.held)} ranks, which is not how rank {rank} of {size} holds it. "
                f"Pass the ranks over which it is cut as `tensor`."
            )
        found.append((parameter, placement))
    return found


def _agree_in_turn(
    call: Callable[[], str],
    check: Callable[[], None],
    first: Communicator,
    *others: Communicator,
    own: Callable[[], str] = str,
) -> None:
    """Agree on communicators that are axes of one grid.

    The text of `own` has to be the same along the first axis only.
    """
    for each in (first, *others):
        arguments.check_communicator(each, "tensor, data or stages")
    with agreeing_in_turn() as agree_on:
        agree_on(first, lambda: f"{call()} on {first.name} {own()}", check)
        for comm in others:
            if comm.size > 1:
                agree_on(comm, partial("{0} on {1.name}".format, call(), comm))


def _listed(parameters: Placed) -> str:
    return ", ".join(
        f"{placement.shape} {x.dtype}{' partial' * placement.partial}"
        for x, placement in parameters
    )


def _sum_in_place(tensors: Sequence[Tensor], comm: Communicator) -> None:
    """Sum many tensors over ranks, in one all-reduce per dtype."""
    for dtype in sorted({x.dtype for x in tensors}, key=str):
        chosen = [x for x in tensors if x.dtype == dtype]
        flat = all_reduce(torch.cat([x.reshape(-1) for x in chosen]), comm=comm)
        for x, part in zip(chosen, flat.split([x.numel() for x in chosen]), strict=True):
            x.copy_(part.view_as(x))
