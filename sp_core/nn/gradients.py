"""Compute sums and norms of the gradients of weights that are split over the ranks of a mesh.

A training loop calls `reduce_gradients`, then `clip_gradient_norm`. Layers attach a `Placement` to
each parameter with `place`: it says which slices every rank along the tensor axis holds. A slice is
one index along the dim in which a parameter is cut.

Ranks along the data axes have different tokens and the same slices, so every gradient is summed
over these ranks. Ranks along the tensor axis have the same tokens. There the gradient is complete
if one rank holds a slice, or if all ranks use a parameter for the same tokens. A parameter is
`partial` if several ranks hold a slice, and each computes only a summand of the gradient.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from numbers import Real

import torch
from torch import Tensor, nn

from sp_core import arguments
from sp_core.agreement import agreeing_in_turn
from sp_core.collectives.api import all_reduce
from sp_core.collectives.build import SUMMABLE
from sp_core.collectives.maps import overlaps
from sp_core.communicator import Communicator
from sp_core.errors import ShapeError
from sp_core.nn.replicated import gradient_of
from sp_core.segments import concatenated, split_ranges


@dataclass(frozen=True)
class Placement:
    """Say which slices of a whole parameter each rank along the tensor axis holds.

    A slice is one index along `dim`. A rank's part consists of all slices that the rank holds. A
    parameter without dims is a single slice, which every rank holds.

    Args:
        shape: the shape of the whole parameter.
        dim: the dim along which the parameter is cut; a negative one counts from the end.
        held: for each rank the ranges of slices that the rank holds, in ascending order. Several
            ranks may hold a slice.
        partial: whether several ranks hold a slice and use it differently. The gradient of
            a rank is then only a summand, to be summed over the tensor axis.
        copy: whether this is a copy of a parameter that another pipeline stage holds too. Only the
            other stage counts the parameter in the norm.

    Raises:
        ShapeError: on this rank: `shape` has no such `dim`, or `dim` no such slices.
    """

    shape: tuple[int, ...]
    dim: int
    held: tuple[tuple[range, ...], ...]
    partial: bool = False
    copy: bool = False

    def __post_init__(self) -> None:
        """Count a negative `dim` from the first dim, and make tuples of lists."""
        dims = max(len(self.shape), 1)
        if not -dims <= self.dim < dims:
            given = f"dim {self.dim} was given for a parameter of shape {tuple(self.shape)}"
            raise ShapeError(f"{given}. Choose from {-dims} to {dims - 1}.")
        held = tuple(map(tuple, self.held))
        vars(self).update(shape=tuple(self.shape), dim=range(dims)[self.dim], held=held)
        whole = range((*self.shape, 1)[self.dim])
        if outside := [x for x in chain(*held) if x and not (x[0] in whole and x[-1] in whole)]:
            given = f"ranges {outside[:3]} were given for a dim with {len(whole)} slices"
            raise ShapeError(f"{given}. Give each rank only ranges inside {whole}.")

    @classmethod
    def replicated(cls, shape: Sequence[int], size: int, *, partial: bool = False) -> "Placement":
        """Return the placement of a parameter that each of `size` ranks holds whole.

        The ranks use the parameter for the same tokens or, if `partial`, for different tokens.
        """
        return cls(tuple(shape), 0, ((range((*shape, 1)[0]),),) * size, partial)

    @classmethod
    def split(cls, shape: Sequence[int], dim: int, size: int) -> "Placement":
        """Return the placement of a parameter cut along `dim` into one range per rank.

        The `size` ranges have equal lengths, except that the first ones may have one slice more.
        """
        whole = cls(tuple(shape), dim, ())
        return replace(whole, held=tuple((part,) for part in split_ranges(shape[dim], size)))

    @property
    def numel(self) -> int:
        """Return the number of elements of the whole parameter."""
        return math.prod(self.shape)

    @property
    def is_alike(self) -> bool:
        """Return whether there are several ranks and all hold the same slices."""
        return len(set(self.held)) == 1 < len(self.held)

    def local_shape(self, rank: int) -> tuple[int, ...]:
        """Return the shape of the part that `rank` holds."""
        cut = sum(map(len, self.held[rank]))
        whole = (*self.shape[: self.dim], cut, *self.shape[self.dim + 1 :])
        return whole if self.shape else ()

    def take(self, whole: Tensor, rank: int) -> Tensor:
        """Return a copy of the part that `rank` holds, taken from the whole parameter."""
        return whole.index_select(self.dim, _indices(self.held[rank], whole))

    def spread(self, part: Tensor, rank: int) -> Tensor:
        """Return a tensor like the whole parameter: the part of `rank`, and zeros elsewhere."""
        chosen = _indices(self.held[rank], part)
        return part.new_zeros(self.shape).index_copy_(self.dim, chosen, part)

    def join(self, parts: Tensor) -> Tensor:
        """Return the whole parameter. `parts` are all ranks' parts, concatenated in rank order."""
        whole = parts.new_empty(self.shape or (1,))
        whole.index_copy_(self.dim, _indices(sum(self.held, ()), parts), parts)
        return whole.view(self.shape)

    def counted(self, part: Tensor, rank: int) -> Tensor:
        """Return the slices of `part`, the part of `rank`, that `rank` counts in a norm.

        No lower rank holds these slices, so each slice is counted once. With `copy` there are none.
        """
        lower = concatenated(sum(self.held[:rank], ()))
        first = torch.isin(concatenated(self.held[rank]), lower, invert=True) & (not self.copy)
        whole, chosen = torch.atleast_1d(part), first.nonzero()[:, 0]
        # a copy to a GPU would wait for it, so there is none in the usual case
        return part if first.all() else whole.index_select(self.dim, chosen.to(part.device))


def _indices(ranges: Sequence[range], like: Tensor) -> Tensor:
    """Return all numbers in some ranges as an int64 tensor on the device of `like`."""
    return concatenated(ranges).to(like.device)


Placed = dict[int, tuple[nn.Parameter, Placement]]
"""Parameters with their placements, by their numbers among all parameters that were given."""


def place(parameter: nn.Parameter, placement: Placement) -> nn.Parameter:
    """Record for `clip_gradient_norm` which rank holds which part of a parameter. Return it."""
    vars(parameter)["placement"] = placement
    return parameter


def placement_of(parameter: nn.Parameter) -> Placement:
    """Return the attribute `placement` of a parameter: which rank holds which part.

    Raises:
        ShapeError: the parameter has none.
    """
    found = getattr(parameter, "placement", None)  # torch.compile cannot trace vars()
    if not isinstance(found, Placement):
        raise ShapeError(
            f"a parameter of shape {tuple(parameter.shape)} carries no placement; give it one with "
            "`place`."
        )
    return found


@torch.no_grad()
def reduce_gradients(
    parameters: Iterable[nn.Parameter], *, data: Communicator, tensor: Communicator | None = None
) -> None:
    """Replace each gradient by the gradient of the sum of all ranks' losses.

    Every rank calls this once before each step of the optimizer, after the backwards of all
    micro-batches: a second call sums the sums again. Leave out the weights of `TransformerBlock`
    and the other layers of `sp_core.nn.layers`: these layers sum their gradients in backward, over
    their own `comm`. If `comm` lacks axes of the data, such as replicas, call this for these
    weights, too, with only the axes that `comm` lacks as `data`. Call this before `unscale_` of a
    `torch.amp.GradScaler`.

    Args:
        parameters: corresponding parameters, in the same order on every rank; those without
            requires_grad are skipped. One that is given twice counts once. A gradient that is None
            counts as zero. With `tensor` each parameter needs a placement, which says which rank
            holds which part.
        data: the ranks that hold the same parts and have different tokens.
        tensor: the ranks along the tensor axis, which have the same tokens; None on every rank if
            no weight is split.

    Communication:
        One agreement (32-byte all-reduce) over `data` and one over `tensor`, also with
        `check="agree"`. For each dtype one all-reduce of gradients over `data`; if `tensor` has
        several ranks, one more, of parameters that all of them hold alike (not
        `Placement.partial`). For each dtype one all-reduce over `tensor` of the gradients that are
        partial, padded with zeros to the shape of the whole parameter. The last two add in rank
        order if both groups have several ranks: copies must stay equal to the bit.

    Raises:
        ShapeError: with `tensor`, a parameter has no placement, or a placement for other ranks; or
            a gradient is sparse.
        DeviceError: a parameter is not on the device of `data`.
        DtypeError: a gradient is complex.
        TypeError: an item of `parameters` is not a parameter.
        ValueError: `parameters` is an iterator that yields none, as after an optimizer's use.
        CollectiveMismatch: the ranks pass different parameters or placements, or have others
            frozen.

    Every error is raised on every rank of both groups, except in one case. If only some ranks pass
    `tensor`, these ranks wait in the agreement over `tensor`. They get an error as soon as the
    other ranks next use that communicator, or leave the `with` block of the mesh.
    """
    wanted: Placed = {}
    _agree_in_turn(
        lambda: f"reduce_gradients({_listed(wanted)}, tensor={tensor and 'given'})",
        lambda: wanted.update(_placed(parameters, data, tensor, lambda p: p.requires_grad)),
        # data first: a rank that was called without `tensor` gets errors of other ranks only there
        *((data,) if tensor is None else (data, tensor)),
    )
    pairs = [(_own_gradient(parameter), placement) for parameter, placement in wanted.values()]
    # other algorithms round by an element's place, and by how the ranks of `data` lie on nodes
    with data.agreed():
        for copied in (True, False):
            chosen = [x for x, at in pairs if (at.is_alike and not at.partial) == copied]
            _sum_in_place(chosen, data, deterministic=copied)
    if tensor is None:
        return
    shared = [(x, placement) for x, placement in pairs if placement.partial]
    wholes = [placement.spread(x, tensor.rank) for x, placement in shared]
    with tensor.agreed():
        _sum_in_place(wholes, tensor, deterministic=data.size > 1)
    for (x, placement), whole in zip(shared, wholes, strict=True):
        x.copy_(placement.take(whole, tensor.rank))


def _own_gradient(parameter: nn.Parameter) -> Tensor:
    """Return `parameter.grad`, after replacing None by zeros and overlapping memory by a copy."""
    if parameter.grad is None:
        parameter.grad = gradient_of(parameter)
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
    """Scale reduced gradients so that the 2-norm of all of them together is at most `max_norm`.

    Args:
        parameters: all parameters to clip, in the same order on every rank. Call
            `reduce_gradients` first, for those whose layers do not sum their gradients. Parameters
            without a gradient are skipped.
        max_norm: greater than 0; with infinity nothing is scaled.
        tensor: the ranks along the tensor axis, which hold the parts of the same parameters.
        stages: the ranks along the pipeline axis, which hold different layers; None without one.

    Returns:
        The norm before scaling, computed in float64. Each element of each parameter counts once,
        also if several ranks hold it.

    Communication:
        One agreement (32-byte all-reduce) and one all-reduce of one number, by recursive doubling,
        over `tensor`; the same over `stages`. No other agreement, also with `check="agree"`.

    Raises:
        ValueError: max_norm is not above 0, or `parameters` is an iterator that yields none; or the
            norm is not finite. No gradient is scaled then.
        ShapeError: a parameter has no `placement` (see `place`), or one for different ranks; or a
            gradient is sparse.
        DeviceError: a parameter is not on the device of `tensor`.
        DtypeError: a gradient is complex.
        TypeError: an item of `parameters` is not a parameter.
        CollectiveMismatch: max_norm differs between ranks of a group, or the parameters between
            those of `tensor`.

    All are raised on every rank of both groups. Replicas are not compared: pass the same max_norm.
    """
    wanted: Placed = {}
    max_norm = arguments.plain(max_norm)
    others = () if stages is None else (stages,)

    def check() -> None:
        if isinstance(max_norm, bool) or not isinstance(max_norm, Real) or not max_norm > 0:
            raise ValueError(
                f"{max_norm=} was given; pass a number above 0, or infinity to only measure."
            )
        wanted.update(_placed(parameters, tensor, tensor, lambda p: p.grad is not None))

    call = f"clip_gradient_norm({max_norm=})"
    _agree_in_turn(lambda: call, check, tensor, *others, own=lambda: _listed(wanted))
    gradients = [(_own_gradient(p), placement) for p, placement in wanted.values()]
    total = torch.zeros((), dtype=torch.float64, device=tensor.device)
    for x, placement in gradients:
        counted = placement.counted(x, tensor.rank)
        total += torch.linalg.vector_norm(counted, dtype=torch.float64).square()
    for comm in (tensor, *others):
        with comm.agreed():
            total = all_reduce(total, comm=comm, algorithm="recursive_doubling")
    norm = float(total.sqrt())
    if not norm < torch.inf:
        raise ValueError(
            f"the norm of the gradients is {norm}; skip this step, or look for what overflows."
        )
    if norm > max_norm:
        for x, _ in gradients:
            x.mul_(float(max_norm) / norm)
    return norm


def _placed(
    parameters: Iterable[nn.Parameter],
    comm: Communicator,
    tensor: Communicator | None,
    is_wanted: Callable[[nn.Parameter], bool],
) -> Placed:
    """Return the parameters for which `is_wanted` is true, each once, with their placements.

    If `tensor` is None, a parameter without a placement gets a placement without slices.

    Raises:
        DeviceError: on this rank: a parameter is not on the device of `comm`.
        ShapeError: on this rank: a placement is missing, or does not fit the ranks or the shape;
            or a gradient is sparse.
        DtypeError: on this rank: a gradient is complex.
        TypeError: on this rank: an item of `parameters` is not a parameter.
        ValueError: on this rank: `parameters` is an iterator that yields none.
    """
    arguments.check(parameters=parameters)
    found: Placed = {}
    given = {id(each): each for each in parameters}
    if not given and isinstance(parameters, Iterator):
        text = "parameters is an iterator that yields none; an optimizer may have used it up."
        raise ValueError(f"{text} Pass a list, such as list(model.parameters()).")
    for number, parameter in enumerate(given.values()):
        arguments.check_type("a parameter", parameter, nn.Parameter, "Pass model.parameters().")
        if not is_wanted(parameter):
            continue
        arguments.check_tensor(parameter, comm, "a parameter")
        if parameter.grad is not None:
            arguments.check_tensor(parameter.grad, comm, "a gradient", SUMMABLE)
        if tensor is None and "placement" not in vars(parameter):
            found[number] = parameter, Placement(tuple(parameter.shape), 0, ())
            continue
        placement = placement_of(parameter)
        rank, size = (0, 1) if tensor is None else (tensor.rank, tensor.size)
        if len(placement.held) != size or placement.local_shape(rank) != parameter.shape:
            raise ShapeError(
                f"a parameter of shape {placement.shape} carries a placement for "
                f"{len(placement.held)} ranks, which is not how rank {rank} of {size} holds it. "
                f"Pass the ranks over which it is cut as `tensor`."
            )
        found[number] = parameter, placement
    return found


def _agree_in_turn(
    call: Callable[[], str],
    check: Callable[[], None],
    first: Communicator,
    *others: Communicator,
    own: Callable[[], str] = str,
) -> None:
    """Check this rank's arguments, and that all ranks of each communicator make the same call.

    The communicators are axes of one grid. An error on one rank is raised on every rank of the
    grid.

    Args:
        call: returns a text that must be equal on all ranks of each communicator.
        check: raises an error if this rank's arguments are wrong. It runs before `own`.
        first, others: the communicators, checked in this order.
        own: returns a text that must be equal only on the ranks of `first`.
    """
    for each in (first, *others):
        arguments.check_communicator(each, "tensor, data or stages")
    with agreeing_in_turn() as agree_on:
        agree_on(first, lambda: f"{call()} on {first.name} {own()}", check)
        for comm in others:
            agree_on(comm, partial("{0} on {1.name}".format, call(), comm))


def _listed(parameters: Placed) -> str:
    """Return a text that must match on all ranks: numbers, placements and dtypes of gradients."""
    return ", ".join(
        f"number {number} {placement.shape} {dtype} {placement.held} along dim {placement.dim}"
        f"{' partial' * placement.partial}"
        for number, (x, placement) in parameters.items()
        for dtype in ((x.grad_dtype or x.dtype) if x.grad is None else x.grad.dtype,)
    )


def _sum_in_place(tensors: Sequence[Tensor], comm: Communicator, *, deterministic: bool) -> None:
    """Replace each tensor by its sum over the ranks, with one all-reduce per dtype."""
    for dtype in sorted({x.dtype for x in tensors}, key=str):
        chosen = [x for x in tensors if x.dtype == dtype]
        flat = torch.cat([x.reshape(-1) for x in chosen])
        flat = all_reduce(flat, comm=comm, deterministic=deterministic)
        for x, part in zip(chosen, flat.split([x.numel() for x in chosen]), strict=True):
            x.copy_(part.view_as(x))
