"""From the arguments of a collective to the map that carries it out: check, agree with the other ranks, fill in the sizes.

`name` is the public function that was called. Ranks agree on it, because two functions with one map may differ in their backward,
and MPI does not match a blocking collective with a non-blocking one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from sp_core import arguments
from sp_core.collectives import maps
from sp_core.collectives.flat import overlaps
from sp_core.communicator import Communicator
from sp_core.errors import DeviceError, DtypeError, ShapeError
from sp_core.schedules import IN_RANK_ORDER, check_algorithm
from sp_core.sharding import split_sizes as even_sizes

REDUCTIONS = ("sum", "max", "min")
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
MOVABLE = (*SUMMABLE, torch.bool)

Sizes = Sequence[int] | None


def all_gather(
    name: str, x: Tensor, comm: Communicator, dim: int = 0, sizes: Sizes = None, algorithm: str = "auto"
) -> maps.AllGather:
    """The map of an all-gather; without `sizes` every rank says how much it has."""
    dim = _normal(x, dim)
    call = partial(_call, name, x, comm, free_dims=(dim,), dim=dim, sizes=sizes, algorithm=algorithm)

    def check() -> int:
        arguments.check(dim=dim, sizes=sizes)
        _check(x, comm, MOVABLE, (dim,), "all_gather", algorithm)
        _check_sizes("sizes", sizes, comm, own=x.shape[dim])
        return x.shape[dim]

    lengths = _agree(comm, call, check, always=sizes is None)
    return maps.AllGather(comm, dim, tuple(lengths if sizes is None else sizes), algorithm=algorithm)


def reduce_scatter(
    name: str,
    x: Tensor,
    comm: Communicator,
    dim: int = 0,
    sizes: Sizes = None,
    algorithm: str = "auto",
    deterministic: bool = False,
) -> maps.ReduceScatter:
    """The map of a reduce-scatter; without `sizes` the rows are dealt out evenly."""
    dim = _normal(x, dim)
    call = partial(_call, name, x, comm, dim=dim, sizes=sizes, algorithm=algorithm, deterministic=deterministic)

    def check() -> int:
        arguments.check(dim=dim, sizes=sizes)
        _check(x, comm, SUMMABLE, (dim,), "reduce_scatter", algorithm)
        _check_deterministic(algorithm, deterministic)
        _check_sizes("sizes", sizes, comm, total=x.shape[dim])
        return 0

    _agree(comm, call, check)
    chosen = _in_rank_order(algorithm, comm) if deterministic else algorithm
    return maps.ReduceScatter(comm, dim, _or_even(sizes, x.shape[dim], comm), algorithm=chosen)


def all_reduce(
    name: str,
    x: Tensor,
    comm: Communicator,
    op: str = "sum",
    algorithm: str = "auto",
    deterministic: bool = False,
    *,
    in_place: bool = False,
) -> maps.AllReduce:
    """The map of an all-reduce."""
    call = partial(_call, name, x, comm, op=op, algorithm=algorithm, deterministic=deterministic)

    def check() -> int:
        _check_deterministic(algorithm, deterministic)
        if in_place:
            _check_writable(x)
        return _check_reduction(x, comm, op, algorithm)

    _agree(comm, call, check)
    return maps.AllReduce(comm, op, algorithm=_in_rank_order(algorithm, comm) if deterministic else algorithm)


def reduce(name: str, x: Tensor, comm: Communicator, root: int = 0, algorithm: str = "auto") -> maps.Reduce:
    """The map of a reduction to one rank."""
    call = partial(_call, name, x, comm, root=root, algorithm=algorithm)
    _agree(comm, call, lambda: _check_root(x, comm, SUMMABLE, root, "reduce", algorithm))
    return maps.Reduce(comm, root, algorithm=algorithm)


def broadcast(name: str, x: Tensor, comm: Communicator, root: int = 0, algorithm: str = "auto") -> maps.Broadcast:
    """The map of a broadcast."""
    call = partial(_call, name, x, comm, root=root, algorithm=algorithm)
    _agree(comm, call, lambda: _check_root(x, comm, MOVABLE, root, "broadcast", algorithm))
    return maps.Broadcast(comm, root, algorithm=algorithm)


def all_to_all(
    name: str,
    x: Tensor,
    comm: Communicator,
    dims: tuple[int, int],
    split_sizes: Sizes = None,
    concat_sizes: Sizes = None,
    algorithm: str = "auto",
) -> maps.AllToAll:
    """The map of an all-to-all over `dims` = (split, concat)."""
    split, concat = (_normal(x, dim) for dim in dims)
    call = partial(
        _call,
        name,
        x,
        comm,
        free_dims=(concat,),
        split_dim=split,
        concat_dim=concat,
        split_sizes=split_sizes,
        concat_sizes=concat_sizes,
        algorithm=algorithm,
    )

    def check() -> int:
        arguments.check(split_dim=split, concat_dim=concat, split_sizes=split_sizes, concat_sizes=concat_sizes)
        _check(x, comm, MOVABLE, (split, concat), "all_to_all", algorithm)
        if split == concat:
            raise ShapeError(f"all_to_all was asked to split and concatenate dim {split}. Pass two different dims.")
        _check_sizes("split_sizes", split_sizes, comm, total=x.shape[split])
        _check_sizes("concat_sizes", concat_sizes, comm, own=x.shape[concat])
        return x.shape[concat]

    lengths = _agree(comm, call, check, always=concat_sizes is None)
    parts = _or_even(split_sizes, x.shape[split], comm)
    whole = tuple(lengths if concat_sizes is None else concat_sizes)
    return maps.AllToAll(comm, split, concat, parts, whole, algorithm=algorithm)


def shift(name: str, x: Tensor, comm: Communicator, offset: int, dim: int, sizes: Sizes, algorithm: str) -> maps.Shift:
    """The map of a shift by `offset` ranks; without `sizes` every rank says how much it has."""
    dim = _normal(x, dim)
    call = partial(_call, name, x, comm, free_dims=(dim,), offset=offset, dim=dim, sizes=sizes, algorithm=algorithm)

    def check() -> int:
        arguments.check(dim=dim, sizes=sizes, offset=offset)
        _check(x, comm, MOVABLE, (dim,), "shift", algorithm)
        _check_sizes("sizes", sizes, comm, own=x.shape[dim])
        return x.shape[dim]

    lengths = _agree(comm, call, check, always=sizes is None)
    return maps.Shift(comm, offset, dim, tuple(lengths if sizes is None else sizes), algorithm=algorithm)


def _agree(comm: Communicator, call: Callable[[], str], check: Callable[[], int], *, always: bool = False) -> tuple[int, ...]:
    arguments.check_communicator(comm)
    return comm.agree_on(call, check, always=always)


def _normal(x: Tensor, dim: int) -> int:
    """`dim` counted from the front, where that makes sense; `_check` refuses the rest on every rank."""
    return dim + x.dim() if isinstance(x, Tensor) and isinstance(dim, int) and -x.dim() <= dim < 0 else dim


def _call(operation: str, x: Tensor, comm: Communicator, free_dims: tuple[int, ...] = (), **given: object) -> str:
    """What all ranks must be about to do; along `free_dims` their tensors may differ."""
    shown = ", ".join(
        f"{name}={tuple(v) if isinstance(v, Sequence) and not isinstance(v, str) else v}" for name, v in given.items()
    )
    shape = ", ".join("any" if dim in free_dims else str(length) for dim, length in enumerate(x.shape))
    grad = x.requires_grad and torch.is_grad_enabled()
    return f"{operation}(tensor of shape ({shape}), {x.dtype}, requires_grad={grad}, {shown}) on {comm.name}"


def check_device(x: Tensor, comm: Communicator) -> None:
    """Refuse a tensor that lives elsewhere than the communicator's tensors do."""
    want = comm.device
    if x.device.type != want.type or (want.index is not None and x.device.index != want.index):
        raise DeviceError(
            f"the tensor is on {x.device}, {comm.name} is on {want}. "
            f"Move the tensor, or make the mesh with device={str(x.device)!r}."
        )


def check_tensor(x: Tensor, comm: Communicator) -> None:
    """Refuse what is no dense tensor on the device of the communicator."""
    if not isinstance(x, Tensor):
        raise DtypeError(f"a tensor is needed, {type(x).__name__} was given. Pass torch.as_tensor(...) of it.")
    check_device(x, comm)
    if x.layout is not torch.strided:
        raise ShapeError(f"a tensor of layout {x.layout} was given; a dense one is needed. Pass x.to_dense().")


def _check(x: Tensor, comm: Communicator, dtypes: tuple[torch.dtype, ...], dims: tuple[int, ...], op: str, algorithm: str) -> None:
    comm.ensure_open()
    check_tensor(x, comm)
    if x.dtype not in dtypes:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise DtypeError(f"a tensor of {x.dtype} was given; this collective takes {names}. Convert it first.")
    arguments.check(algorithm=algorithm)
    for dim in dims:
        if not 0 <= dim < x.dim():
            raise ShapeError(
                f"dim {dim} was given for a tensor with {x.dim()} dims, shape {tuple(x.shape)}. Pass a dim that it has."
            )
    check_algorithm(op, algorithm)
    if algorithm == "window" and comm.window is None:
        raise ValueError(
            f"algorithm='window' was given; {comm.name} has no shared memory: {comm.no_window}. "
            "Pass another algorithm, or make the mesh with transport='window' ('ipc' on CUDA) over ranks of one machine."
        )


def _check_writable(x: Tensor) -> None:
    if not isinstance(x, Tensor):
        return
    if x.requires_grad and torch.is_grad_enabled():
        raise ValueError(
            "a tensor that requires a gradient was given to a sum in place, which has none. Use all_reduce, or torch.no_grad()."
        )
    if overlaps(x):
        raise ShapeError(
            f"elements of the tensor share memory (strides {x.stride()}); a sum in place needs room for each. Clone it."
        )


def _check_deterministic(algorithm: str, deterministic: bool) -> None:
    arguments.check(deterministic=deterministic)
    if deterministic and algorithm not in ("auto", *IN_RANK_ORDER):
        raise ValueError(
            f"algorithm={algorithm!r} was given with deterministic=True, which only {IN_RANK_ORDER} can do: these add in the order "
            "of the ranks. Pass one of them, or leave one out."
        )


def _in_rank_order(algorithm: str, comm: Communicator) -> str:
    """The algorithm of a sum in the order of the ranks."""
    if algorithm != "auto":
        return algorithm
    return "pairwise" if comm.window is None else "window"


def check_all(tensors: Sequence[Tensor], comm: Communicator) -> int:
    """Refuse tensors that an all-reduce could not take."""
    arguments.check(tensors=tensors)
    for x in tensors:
        _check(x, comm, SUMMABLE, (), "all_reduce", "auto")
    return 0


def _check_sizes(name: str, sizes: Sizes, comm: Communicator, *, own: int | None = None, total: int | None = None) -> None:
    """Refuse sizes that do not describe this rank's tensor: `own` on this rank, `total` over all."""
    if sizes is None:
        return
    if len(sizes) != comm.size or min(sizes) < 0:
        raise ShapeError(f"{name}={tuple(sizes)} was given; {comm.size} sizes >= 0 are needed, one per rank.")
    if own is not None and sizes[comm.rank] != own:
        raise ShapeError(f"{name}={tuple(sizes)} says that rank {comm.rank} has {sizes[comm.rank]}; its tensor has {own}.")
    if total is not None and sum(sizes) != total:
        raise ShapeError(f"{name}={tuple(sizes)} adds up to {sum(sizes)}; the tensor has {total} along that dim.")


def _check_reduction(x: Tensor, comm: Communicator, op: str, algorithm: str) -> int:
    _check(x, comm, SUMMABLE, (), "all_reduce", algorithm)
    arguments.check(op=op)
    if op not in REDUCTIONS:
        raise ValueError(f"op={op!r} was given; there are {REDUCTIONS}. Pass one of them.")
    if op != "sum" and x.requires_grad and torch.is_grad_enabled():
        raise ValueError(f"all_reduce with op={op!r} has no gradient. Call it under torch.no_grad(), or on x.detach().")
    return 0


def _check_root(x: Tensor, comm: Communicator, dtypes: tuple[torch.dtype, ...], root: int, op: str, algorithm: str) -> int:
    _check(x, comm, dtypes, (), op, algorithm)
    arguments.check(root=root)
    if not 0 <= root < comm.size:
        raise ShapeError(f"root={root} was given for {comm.size} ranks. Pass a rank of {comm.name}, 0..{comm.size - 1}.")
    return 0


def _or_even(sizes: Sizes, length: int, comm: Communicator) -> tuple[int, ...]:
    return even_sizes(length, comm.size) if sizes is None else tuple(sizes)
