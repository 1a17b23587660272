"""Offer the collectives that programs call, and their backward: the transpose as a linear map.

Every rank of `comm` calls the same functions in the same order. Before a function sends anything,
it checks that the ranks agree on its arguments and on the shape, dtype and `requires_grad` of the
tensor (one agreement: an all-reduce of 32 bytes). An error on one rank is raised on all. With a
mesh made with `check="off"` there is no such check, unless sizes must be found out. Without this
check, only the rank that finds an error raises it, and others may wait for that rank forever.

The backward of a collective is a collective. The backward runs on a rank only if that rank's result
is used, so use the result in the loss on all ranks or on none. This holds for zeros, too, which
`reduce` returns on most ranks. A backward first checks that all ranks are about
to run the same backward, unless the mesh was made with `check="off"`. The collectives of one
backward run in the reverse order of their calls. For a `_start` function, the call that starts the
collective counts.

The functions whose names end in `_start` return a `Pending` before the collective is complete.
They first wait in the check described above, if there is one. On a mesh with `check="off"`, wait
for started collectives on all ranks before a call that runs `algorithm="mpi"`, or on all ranks
after it: inside that call they do not advance.
"""

from torch import Tensor

from sp_core.collectives.build import Sizes
from sp_core.collectives.differentiable import Pending, begin, call
from sp_core.communicator import Communicator


def all_gather(
    x: Tensor, *, comm: Communicator, dim: int = 0, sizes: Sizes = None, algorithm: str = "auto"
) -> Tensor:
    """Give every rank the shards of all ranks, concatenated along `dim` in rank order.

    Args:
        x: this rank's shard, any shape; shards may differ in length along `dim` only. Its dtype is
            float64, float32, float16, bfloat16, int64, int32, int16, int8, uint8 or bool.
        comm: the communicator whose ranks all make this call.
        dim: the dimension of concatenation.
        sizes: length of each rank's shard along `dim`, in rank order, the same on every rank. If
            None, the ranks tell each other first.
        algorithm: "auto" for the one that the mesh was made with; or a name in
            `sp_core.programs.ALGORITHMS["all_gather"]` (each collective has such an entry).

    Returns:
        A tensor like x, but along `dim` as long as all shards together. Differentiable.

    Communication:
        One all-gather: each of the P ranks sends (P-1) times the bytes of x. The backward is a
        reduce-scatter, in which it sends the bytes of the other ranks' shards.

    Raises:
        ShapeError, DtypeError, DeviceError, RankError: on every rank, even if only one rank's
            arguments are wrong.
        CollectiveMismatch: the ranks' arguments differ.
        TypeError, ValueError: an argument of the wrong type, or an algorithm that `comm` does not
            have; on every rank, but that of a wrong `comm` on this rank.
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
    """Sum the tensors of all ranks, and give each rank its part of the sum along `dim`.

    The algorithms "mpi", "pairwise" and "window" sum half types (bfloat16, float16) in float32 and
    round once. The other algorithms round at every addition.

    Args:
        x: the same shape on every rank; a dtype of `all_gather` other than bool.
        comm, algorithm: as in `all_gather`.
        dim: the dimension along which the sum is cut.
        sizes: length of each rank's part along `dim`, in rank order; None: even parts, the first
            ones longer by 1 if necessary.
        deterministic: add in rank order, so that the bits depend neither on the place in the tensor
            nor on the MPI library. The algorithms "pairwise" and "window" can do so; "auto" then
            takes one of them.

    Returns:
        A tensor like x, but of length `sizes[rank]` along `dim`. Differentiable.

    Communication:
        One reduce-scatter: each of the P ranks sends the bytes of the other ranks' parts of x.
        The backward is an all-gather, in which it sends (P-1) times its own part.

    Raises:
        ShapeError, DtypeError, DeviceError, RankError, CollectiveMismatch: as in `all_gather`, on
            every rank.
        TypeError, ValueError: as in `all_gather`; also `deterministic` with an algorithm that does
            not add in rank order.
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
    """Sum the tensors of all ranks, on every rank.

    Half types are summed as in `reduce_scatter`.

    Args:
        x: the same shape on every rank; a dtype of `all_gather` other than bool.
        comm, algorithm, deterministic: as in `reduce_scatter`.
        op: "sum", or "max" and "min", which have no gradient.

    Returns:
        A tensor like x. Differentiable for op "sum".

    Communication:
        One all-reduce of x forward, one of its gradient backward. With "max" or "min" of a floating
        dtype, algorithm "mpi" sends twice the bytes: a mark for NaN beside each number.

    Raises:
        ShapeError, DtypeError, DeviceError, RankError, CollectiveMismatch: as in `all_gather`, on
            every rank.
        TypeError, ValueError: as in `reduce_scatter`; also an unknown `op`, or a tensor that
            requires a gradient with "max" or "min".
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
    """Send each rank its part of x along `split_dim`; concatenate what arrives along `concat_dim`.

    Args:
        x: has the full length along `split_dim`, and this rank's part of the length along
            `concat_dim`. Its dtype is as in `all_gather`.
        comm, algorithm: as in `all_gather`.
        split_dim, concat_dim: two different dimensions.
        split_sizes: length that each rank keeps along `split_dim`, in rank order; None: even parts,
            the first ones longer by 1 if necessary.
        concat_sizes: length that each rank has along `concat_dim`, in rank order; None: the ranks
            tell each other before the all-to-all.

    Returns:
        A tensor with this rank's part along `split_dim` and the full length along `concat_dim`.
        Differentiable.

    Communication:
        One all-to-all of x forward, without the part that stays; its reverse backward.

    Raises:
        ShapeError, DtypeError, DeviceError, RankError, CollectiveMismatch: as in `all_gather`, on
            every rank.
        TypeError, ValueError: as in `all_gather`.
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
    """Send x to the rank `offset` further on in the ring of ranks, and return what arrives.

    Args:
        x: this rank's tensor; tensors of the ranks may differ in length along `dim` only. Its dtype
            is as in `all_gather`.
        comm, algorithm: as in `all_gather`.
        offset: distance from sender to receiver; it may be negative or exceed the number of ranks.
        dim, sizes: as in `all_gather`.

    Returns:
        The tensor of rank `(rank - offset) % size`. Differentiable.

    Communication:
        One message of the bytes of x forward, one of its gradient backward.

    Raises:
        ShapeError, DtypeError, DeviceError, RankError, CollectiveMismatch: as in `all_gather`, on
            every rank.
        TypeError, ValueError: as in `all_gather`.
    """
    return call("shift", x, comm, offset=offset, dim=dim, sizes=sizes, algorithm=algorithm)


def broadcast(x: Tensor, *, comm: Communicator, root: int = 0, algorithm: str = "auto") -> Tensor:
    """Give every rank the root's tensor.

    Args:
        x: the root's tensor; on the other ranks a tensor of the same shape, dtype and
            `requires_grad`, whose values are not read. The dtype is as in `all_gather`.
        comm, algorithm: as in `all_gather`.
        root: rank whose tensor is sent.

    Returns:
        A new tensor with the root's values. Differentiable.

    Communication:
        One broadcast forward; one reduction to the root backward.

    Raises:
        ShapeError, DtypeError, DeviceError, RankError, CollectiveMismatch: as in `all_gather`, on
            every rank.
        TypeError, ValueError: as in `all_gather`.
    """
    return call("broadcast", x, comm, root=root, algorithm=algorithm)


def reduce(x: Tensor, *, comm: Communicator, root: int = 0, algorithm: str = "auto") -> Tensor:
    """Sum the tensors of all ranks on the root.

    Args:
        x: the same shape on every rank; a dtype of `all_gather` other than bool.
        comm, algorithm: as in `all_gather`.
        root: rank that gets the sum.

    Returns:
        A tensor like x: the sum on the root, zeros on the other ranks. Differentiable.

    Communication:
        One reduction forward; one broadcast backward.

    Raises:
        ShapeError, DtypeError, DeviceError, RankError, CollectiveMismatch: as in `all_gather`, on
            every rank.
        TypeError, ValueError: as in `all_gather`.
    """
    return call("reduce", x, comm, root=root, algorithm=algorithm)


# The non-blocking forms have the same arguments, communication and errors.


def all_gather_start(
    x: Tensor, *, comm: Communicator, dim: int = 0, sizes: Sizes = None, algorithm: str = "auto"
) -> Pending:
    """Begin `all_gather` and return a `Pending`, whose `wait()` gives the result.

    Arguments, communication and errors are those of `all_gather`. This call raises the errors of
    wrong arguments. All ranks start their collectives in the same order. Later each rank must call
    `wait()` for all of them, in any order. x must not be changed until `wait()` has returned.
    """
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
    """Begin `reduce_scatter` and return a `Pending`, whose `wait()` gives the result.

    Arguments, communication and errors are those of `reduce_scatter`. This call raises the errors
    of wrong arguments. All ranks start their collectives in the same order. Later each rank must
    call `wait()` for all of them, in any order. x must not be changed until `wait()` has returned.
    """
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
    """Begin `all_reduce` and return a `Pending`, whose `wait()` gives the result.

    Arguments, communication and errors are those of `all_reduce`. This call raises the errors of
    wrong arguments. All ranks start their collectives in the same order. Later each rank must call
    `wait()` for all of them, in any order. x must not be changed until `wait()` has returned.
    """
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
    """Begin `all_to_all` and return a `Pending`, whose `wait()` gives the result.

    Arguments, communication and errors are those of `all_to_all`. This call raises the errors of
    wrong arguments. All ranks start their collectives in the same order. Later each rank must call
    `wait()` for all of them, in any order. x must not be changed until `wait()` has returned.
    """
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
    """Begin `shift` and return a `Pending`, whose `wait()` gives the result.

    Arguments, communication and errors are those of `shift`. This call raises the errors of wrong
    arguments. All ranks start their collectives in the same order. Later each rank must call
    `wait()` for all of them, in any order. x must not be changed until `wait()` has returned.
    """
    return begin("shift", x, comm, offset=offset, dim=dim, sizes=sizes, algorithm=algorithm)


def broadcast_start(
    x: Tensor, *, comm: Communicator, root: int = 0, algorithm: str = "auto"
) -> Pending:
    """Begin `broadcast` and return a `Pending`, whose `wait()` gives the result.

    Arguments, communication and errors are those of `broadcast`. This call raises the errors of
    wrong arguments. All ranks start their collectives in the same order. Later each rank must call
    `wait()` for all of them, in any order. x must not be changed until `wait()` has returned.
    """
    return begin("broadcast", x, comm, root=root, algorithm=algorithm)
