"""Offer the collectives that programs call. The backward of each is its transpose.

Each function compares its arguments over the ranks before it sends anything, unless the mesh was
made with `check="off"`. The backward of a collective is a collective: it runs on a rank only if
that rank's result is used, so use it on all ranks or on none. Before a backward the ranks compare
which backward each is about to run, unless the mesh was made with `check="off"`. The collectives of
one backward run in the reverse order of their calls; a started one counts where it was started.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from sp_core.collectives.differentiable import Pending, begin, call
from sp_core.communicator import Communicator

Sizes = Sequence[int] | None


def all_gather(
    x: Tensor, *, comm: Communicator, dim: int = 0, sizes: Sizes = None, algorithm: str = "auto"
) -> Tensor:
    """Give every rank the shards of all ranks, put together along `dim` in rank order.

    Args:
        x: this rank's shard, any shape; shards differ at most along `dim`.
        comm: the ranks.
        dim: along which the shards are put together.
        sizes: length of each rank's shard along `dim`; found out by agreement where not given.
        algorithm: one of `sp_core.schedules.ALGORITHMS[name of the function]`; "auto" is what the
            mesh was made with.

    Returns:
        `(sum(sizes), *)` with `dim` in its place.

    Communication:
        One all-gather: (P-1) times the bytes of x per rank forward, the other shards' bytes
        backward (a reduce-scatter).

    Raises:
        ShapeError, DtypeError, DeviceError, RankError: on every rank, also if only one rank's
            arguments are wrong.
        CollectiveMismatch: the ranks' arguments differ.
    """
    return call("all_gather", x, comm, dim=dim, sizes=sizes, algorithm=algorithm)


def reduce_scatter(
    x: Tensor,
    *,
    comm: Communicator,
    dim: int = 0,
    sizes: Sizes = None,
    algorithm: str = "auto",
    deterministic: bool = False,
) -> Tensor:
    """Sum the tensors of all ranks, and deal the sum out along `dim`.

    "mpi" and "pairwise" sum half types in float32 and round once; the other algorithms round at
    every addition, as their modules in `sp_core.schedules` say.

    Args:
        x: the same shape on every rank.
        comm, algorithm: as in `all_gather`.
        dim: along which the sum is dealt out.
        sizes: what each rank receives along `dim`; even where not given, the first ranks one more.
        deterministic: add in the order of the ranks, so that the bits depend neither on the place
            in the tensor nor on the library.

    Returns:
        `(sizes[rank], *)` with `dim` in its place.

    Communication:
        One reduce-scatter: the bytes of the other ranks' parts of x forward, (P-1) times the own
        part backward (an all-gather).

    Raises:
        ShapeError, DtypeError, DeviceError, RankError, CollectiveMismatch: as in
            `all_gather`, on every rank.
    """
    return call(
        "reduce_scatter",
        x,
        comm,
        dim=dim,
        sizes=sizes,
        algorithm=algorithm,
        deterministic=deterministic,
    )


def all_reduce(
    x: Tensor,
    *,
    comm: Communicator,
    op: str = "sum",
    algorithm: str = "auto",
    deterministic: bool = False,
) -> Tensor:
    """Sum the tensors of all ranks, on every rank. Half types are summed as in `reduce_scatter`.

    Args:
        x: the same shape on every rank.
        comm, algorithm, deterministic: as in `reduce_scatter`.
        op: "sum", or "max" and "min", which have no gradient.

    Returns:
        A tensor like x.

    Communication:
        One all-reduce of x forward, one of its gradient backward. The MPI library finds the
        greatest or least of floating numbers with marks beside them, so that it sends twice the
        bytes.

    Raises:
        ShapeError, DtypeError, DeviceError, RankError, CollectiveMismatch: as in
            `all_gather`, on every rank.
        ValueError: another `op`, or `deterministic` with an algorithm that is not.
    """
    return call("all_reduce", x, comm, op=op, algorithm=algorithm, deterministic=deterministic)


def all_to_all(
    x: Tensor,
    *,
    comm: Communicator,
    split_dim: int,
    concat_dim: int,
    split_sizes: Sizes = None,
    concat_sizes: Sizes = None,
    algorithm: str = "auto",
) -> Tensor:
    """Deal x out along `split_dim`, and put what arrives together along `concat_dim`.

    Args:
        x: all of `split_dim`, this rank's part of `concat_dim`.
        comm, algorithm: as in `all_gather`.
        split_dim, concat_dim: two different dims.
        split_sizes: what each rank keeps of `split_dim`; even where not given.
        concat_sizes: what each rank has of `concat_dim`; found out by agreement where not given.

    Returns:
        This rank's part of `split_dim`, all of `concat_dim`.

    Communication:
        One all-to-all of x forward, without the part that stays; its reverse backward.

    Raises:
        ShapeError, DtypeError, DeviceError, RankError, CollectiveMismatch: as in
            `all_gather`, on every rank.
    """
    return call(
        "all_to_all",
        x,
        comm,
        split_dim=split_dim,
        concat_dim=concat_dim,
        split_sizes=split_sizes,
        concat_sizes=concat_sizes,
        algorithm=algorithm,
    )


def shift(
    x: Tensor,
    *,
    comm: Communicator,
    offset: int = 1,
    dim: int = 0,
    sizes: Sizes = None,
    algorithm: str = "auto",
) -> Tensor:
    """Pass x to the rank `offset` further on in the ring, and receive from the rank as far behind.

    Args:
        x: this rank's tensor; those of the ranks differ at most along `dim`.
        comm, algorithm: as in `all_gather`.
        offset: how far, also negative or beyond the number of ranks.
        dim, sizes: as in `all_gather`.

    Returns:
        The tensor of rank `(rank - offset) % size`.

    Communication:
        One message of the bytes of x each way.

    Raises:
        ShapeError, DtypeError, DeviceError, RankError, CollectiveMismatch: as in
            `all_gather`, on every rank.
    """
    return call("shift", x, comm, offset=offset, dim=dim, sizes=sizes, algorithm=algorithm)


def broadcast(x: Tensor, *, comm: Communicator, root: int = 0, algorithm: str = "auto") -> Tensor:
    """Give every rank the root's tensor.

    The others pass a tensor of the same shape and dtype, whose values are not read.

    Communication:
        One broadcast forward; one reduction to the root backward.

    Raises:
        ShapeError, DtypeError, DeviceError, RankError, CollectiveMismatch: as in
            `all_gather`, on every rank.
    """
    return call("broadcast", x, comm, root=root, algorithm=algorithm)


def reduce(x: Tensor, *, comm: Communicator, root: int = 0, algorithm: str = "auto") -> Tensor:
    """Sum the tensors of all ranks on the root. The others get zeros.

    Communication:
        One reduction forward; one broadcast backward.

    Raises:
        ShapeError, DtypeError, DeviceError, RankError, CollectiveMismatch: as in
            `all_gather`, on every rank.
    """
    return call("reduce", x, comm, root=root, algorithm=algorithm)


# The non-blocking forms: the same arguments, communication and errors.


def all_gather_start(
    x: Tensor, *, comm: Communicator, dim: int = 0, sizes: Sizes = None, algorithm: str = "auto"
) -> Pending:
    """Begin an `all_gather`. `wait()` of the returned `Pending` gives the result."""
    return begin("all_gather", x, comm, dim=dim, sizes=sizes, algorithm=algorithm)


def reduce_scatter_start(
    x: Tensor,
    *,
    comm: Communicator,
    dim: int = 0,
    sizes: Sizes = None,
    algorithm: str = "auto",
    deterministic: bool = False,
) -> Pending:
    """Begin a `reduce_scatter`. `wait()` of the returned `Pending` gives the result."""
    return begin(
        "reduce_scatter",
        x,
        comm,
        dim=dim,
        sizes=sizes,
        algorithm=algorithm,
        deterministic=deterministic,
    )


def all_reduce_start(
    x: Tensor,
    *,
    comm: Communicator,
    op: str = "sum",
    algorithm: str = "auto",
    deterministic: bool = False,
) -> Pending:
    """Begin an `all_reduce`. `wait()` of the returned `Pending` gives the result."""
    return begin("all_reduce", x, comm, op=op, algorithm=algorithm, deterministic=deterministic)


def all_to_all_start(
    x: Tensor,
    *,
    comm: Communicator,
    split_dim: int,
    concat_dim: int,
    split_sizes: Sizes = None,
    concat_sizes: Sizes = None,
    algorithm: str = "auto",
) -> Pending:
    """Begin an `all_to_all`. `wait()` of the returned `Pending` gives the result."""
    return begin(
        "all_to_all",
        x,
        comm,
        split_dim=split_dim,
        concat_dim=concat_dim,
        split_sizes=split_sizes,
        concat_sizes=concat_sizes,
        algorithm=algorithm,
    )


def shift_start(
    x: Tensor,
    *,
    comm: Communicator,
    offset: int = 1,
    dim: int = 0,
    sizes: Sizes = None,
    algorithm: str = "auto",
) -> Pending:
    """Begin a `shift`. `wait()` of the returned `Pending` gives the result."""
    return begin("shift", x, comm, offset=offset, dim=dim, sizes=sizes, algorithm=algorithm)


def broadcast_start(
    x: Tensor, *, comm: Communicator, root: int = 0, algorithm: str = "auto"
) -> Pending:
    """Begin a `broadcast`. `wait()` of the returned `Pending` gives the result."""
    return begin("broadcast", x, comm, root=root, algorithm=algorithm)
