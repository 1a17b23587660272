"""Make the map of a collective (the collective with all sizes known) from its arguments.

`build` checks the arguments, checks that the ranks agree on them, and fills in those that the
caller left out. The ranks must also agree on the name of the public function that was called. The
reason is that two functions with the same map may differ in their backward, and that MPI does not
match a blocking collective with a non-blocking one.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from sp_core import arguments
from sp_core.collectives import maps
from sp_core.communicator import Communicator
from sp_core.errors import ShapeError
from sp_core.programs import IN_RANK_ORDER, REDUCTIONS, check_algorithm
from sp_core.sharding import split_sizes as even_sizes

SUMMABLE = (
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
)
"""Dtypes of the collectives that add."""
MOVABLE = (*SUMMABLE, torch.bool)
"""Dtypes of the collectives that only move data."""
NEEDED = object()
"""Stands for the default of an argument that must be given."""
Sizes = Sequence[int] | None
"""One length per rank, or None."""


@dataclass(frozen=True)
class Kind:
    """Describe the arguments of a collective.

    Args:
        map: the subclass of `maps.Map`, whose fields have the names of the arguments.
        dtypes: the dtypes that the collective takes.
        arguments: name -> default, for all arguments except the tensor, the communicator and the
            algorithm. `NEEDED` means that there is no default.
        joined: (name of the argument for the dimension along which the ranks' tensors may differ in
            length, name of the argument for these lengths). The ranks tell each other lengths that
            are not given.
        cut: (name of the argument for the dimension along which a tensor is cut into parts, name of
            the argument for their lengths). Parts are even if no lengths are given.
    """

    map: type[maps.Map]
    dtypes: tuple[torch.dtype, ...]
    arguments: dict[str, Any]
    joined: tuple[str, str] | None = None
    cut: tuple[str, str] | None = None

    @cached_property
    def dims(self) -> tuple[str, ...]:
        """Return the names of the arguments that are dimensions."""
        return tuple(pair[0] for pair in (self.cut, self.joined) if pair)


_SUM = {"op": "sum", "deterministic": False}
KINDS = {
    "all_gather": Kind(maps.AllGather, MOVABLE, {"dim": 0, "sizes": None}, joined=("dim", "sizes")),
    "reduce_scatter": Kind(
        maps.ReduceScatter,
        SUMMABLE,
        {"dim": 0, "sizes": None, "deterministic": False},
        cut=("dim", "sizes"),
    ),
    "all_reduce": Kind(maps.AllReduce, SUMMABLE, _SUM),
    "all_reduce_": Kind(maps.InPlace, SUMMABLE, _SUM),
    "all_to_all": Kind(
        maps.AllToAll,
        MOVABLE,
        {
            **dict.fromkeys(("split_dim", "concat_dim"), NEEDED),
            **dict.fromkeys(("split_sizes", "concat_sizes")),
        },
        joined=("concat_dim", "concat_sizes"),
        cut=("split_dim", "split_sizes"),
    ),
    "shift": Kind(
        maps.Shift, MOVABLE, {"offset": 1, "dim": 0, "sizes": None}, joined=("dim", "sizes")
    ),
    "broadcast": Kind(maps.Broadcast, MOVABLE, {"root": 0}),
    "reduce": Kind(maps.Reduce, SUMMABLE, {"root": 0}),
}
"""For each collective that can be called, planned or started, its arguments."""


def build(name: str, which: str, x: Tensor, comm: Communicator, /, **given: Any) -> maps.Map:
    """Return the map of a collective (see `maps`), once the ranks agree on its arguments.

    Args:
        name: the public function that was called, for the check and its error texts.
        which: the collective, one of `KINDS`.
        x: this rank's tensor.
        comm: the communicator whose ranks make the call.
        given: the other arguments, by name. If lengths that may differ between ranks are left out,
            the ranks exchange the lengths of their tensors.

    Returns:
        A map with all sizes filled in, and with an algorithm if `deterministic=True` was given.

    Communication:
        One agreement (32-byte all-reduce), which also exchanges lengths that are left out. If these
        differ, the ranks gather 64 bytes per rank. With `check="off"` there is an agreement only if
        lengths are left out.

    Raises:
        The errors of `api.all_gather`, on the ranks that are named there.
    """
    arguments.check_communicator(comm)
    kind = KINDS[which]
    given = {n: arguments.plain(v) for n, v in given.items()}  # sums of NumPy's numbers may wrap
    given = {**kind.arguments, "algorithm": "auto", **given}
    joined, lengths = kind.joined or ("", "")
    tell = bool(joined) and given[lengths] is None
    told = comm.agree_on(
        lambda: _call(name, x, comm, (given.get(joined),), given),
        lambda: _checked(kind, x, comm, given),
        always=tell,
    )
    if joined:
        given[lengths] = told if tell else given[lengths]
    if kind.cut:
        dim, parts = kind.cut
        if given[parts] is None:
            given[parts] = even_sizes(x.shape[given[dim]], comm.size)
    if given.pop("deterministic", False) and given["algorithm"] == "auto":
        given["algorithm"] = "pairwise" if comm.window is None else "window"
    return kind.map(comm, **given)


def _call(
    name: str, x: Tensor, comm: Communicator, free_dims: tuple[int | None], given: dict[str, Any]
) -> str:
    """Return a text that describes the call; it must be the same on all ranks.

    Args:
        name: the name of the public function.
        x: this rank's tensor.
        comm: the communicator, whose name is in the text.
        free_dims: dimensions whose length may differ between ranks, and is not in the text.
        given: the other arguments by name.
    """
    shown = ", ".join(f"{n}={v}" for n, v in given.items())
    shape = ", ".join(
        "any" if dim in free_dims else str(length) for dim, length in enumerate(x.shape)
    )
    grad = x.requires_grad and torch.is_grad_enabled()
    call = f"{name}(tensor of shape ({shape}), {x.dtype}, requires_grad={grad}, {shown})"
    return f"{call} on {comm.name}"


def _checked(kind: Kind, x: Tensor, comm: Communicator, given: dict[str, Any]) -> int:
    """Raise an error if this rank's arguments are wrong. Make dims in `given` count from the front.

    Return this rank's length along the dimension whose length may differ between ranks. Return 0 if
    there is none, or if all lengths are given: then ranks with different lengths say the same.
    """
    arguments.check(**given)
    arguments.check_tensor(x, comm, dtypes=kind.dtypes)
    lengths = {name: arguments.length_along(x, given[name]) for name in kind.dims}
    given.update({name: given[name] % x.dim() for name in kind.dims})
    if len({given[name] for name in kind.dims}) < len(kind.dims):
        raise ShapeError(
            f"{kind.map.name} was asked to split and concatenate dim {given[kind.dims[0]]}. "
            "Pass two different dims."
        )
    _check_algorithm(
        kind.map.name, given["algorithm"], comm, deterministic=given.get("deterministic", False)
    )
    if kind.cut:
        dim, sizes = kind.cut
        _check_sizes(sizes, given[sizes], comm, total=lengths[dim])
    if "op" in given:
        check_sum(x, given["op"], in_place=kind.map is maps.InPlace)
    if not 0 <= given.get("root", 0) < comm.size:
        raise ShapeError(
            f"root={given['root']} was given for {comm.size} ranks. "
            f"Pass a rank of {comm.name}, 0..{comm.size - 1}."
        )
    if not kind.joined:
        return 0
    dim, sizes = kind.joined
    _check_sizes(sizes, given[sizes], comm, own=lengths[dim])
    return lengths[dim] if given[sizes] is None else 0


def check_summable(tensors: Sequence[Tensor], comm: Communicator) -> None:
    """Raise an error if an all-reduce cannot take one of the tensors."""
    arguments.check(tensors=tensors)
    for x in tensors:
        arguments.check_tensor(x, comm, dtypes=SUMMABLE)


def _check_algorithm(op: str, algorithm: str, comm: Communicator, *, deterministic: bool) -> None:
    """Raise `ValueError` if `comm` lacks the algorithm, or if it cannot add in rank order.

    Args:
        op: the name of the collective, such as "all_reduce".
        algorithm: as the caller has given it.
        comm: the communicator of the call.
        deterministic: whether the sum must be made in rank order.
    """
    check_algorithm(op, algorithm)
    if algorithm == "window" and comm.window is None:
        raise ValueError(
            f"algorithm='window' was given; {comm.name} has no shared memory: {comm.no_window}. "
            "Pass another algorithm, or make the mesh with transport='window' ('ipc' on CUDA) "
            "over ranks of one machine."
        )
    if deterministic and algorithm not in ("auto", *IN_RANK_ORDER):
        raise ValueError(
            f"algorithm={algorithm!r} was given with deterministic=True, which only "
            f"{IN_RANK_ORDER} can do: these add in the order "
            "of the ranks. Pass one of them, or leave one out."
        )


def _check_sizes(
    name: str, sizes: Sizes, comm: Communicator, *, own: int | None = None, total: int | None = None
) -> None:
    """Raise `ShapeError` if sizes do not describe the tensors.

    Args:
        name: the name of the argument.
        sizes: one per rank, or None, which is always right.
        comm: the communicator of the call.
        own: length of this rank's tensor, which this rank's size must equal; None: no such check.
        total: length that the sum of all sizes must equal; None: no such check.
    """
    if sizes is None:
        return
    if len(sizes) != comm.size or min(sizes) < 0:
        raise ShapeError(
            f"{name}={tuple(sizes)} was given; {comm.size} sizes >= 0 are needed, one per rank."
        )
    if own is not None and sizes[comm.rank] != own:
        raise ShapeError(
            f"{name}={tuple(sizes)} says that rank {comm.rank} has {sizes[comm.rank]}; "
            f"its tensor has {own}."
        )
    if total is not None and sum(sizes) != total:
        raise ShapeError(
            f"{name}={tuple(sizes)} adds up to {sum(sizes)}; the tensor has {total} along that dim."
        )


def check_sum(x: Tensor, op: str, *, in_place: bool) -> None:
    """Raise an error if `op` is unknown, or does not allow x's gradient or shared elements.

    Here `op` is the caller's "sum", "max" or "min", not the name of the collective.
    """
    wants_grad = x.requires_grad and torch.is_grad_enabled()
    if op not in REDUCTIONS:
        raise ValueError(f"op={op!r} was given; there are {tuple(REDUCTIONS)}. Pass one of them.")
    if op != "sum" and wants_grad:
        raise ValueError(
            f"all_reduce with op={op!r} has no gradient. "
            "Call it under torch.no_grad(), or on x.detach()."
        )
    if in_place and wants_grad:
        raise ValueError(
            "a tensor that requires a gradient was given to a sum in place, which has none. "
            "Use all_reduce, or torch.no_grad()."
        )
    if in_place and x.is_inference() and not torch.is_inference_mode_enabled():
        raise ValueError(
            "a tensor made in torch.inference_mode() was given to a sum in place outside of it, "
            "where it cannot be written. Clone it, or make the call in that mode."
        )
    if in_place and maps.overlaps(x):
        raise ShapeError(
            f"elements of the tensor share memory (strides {x.stride()}); "
            "a sum in place needs room for each. Clone it."
        )
