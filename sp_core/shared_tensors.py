"""Make tensors in shared memory, which all ranks of one machine read without a message.

Every rank makes these calls:

    x = sp.shared_empty((2, 100, 8), comm=comm)
    x.copy_(...)
    sp.fence(comm=comm)                             now each rank sees what all have written
    left = sp.peer(x, (comm.rank - 1) % comm.size, comm=comm)
    ...                                             read `left`; no rank writes into its x
    sp.fence(comm=comm)                             now each rank may write into x again
"""

import math
from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from sp_core import arguments
from sp_core.agreement import make_alike
from sp_core.collectives.build import MOVABLE
from sp_core.communicator import Communicator
from sp_core.errors import DtypeError, RankError, ShapeError


def shared_empty(
    shape: Sequence[int], *, comm: Communicator, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Make a tensor of zeros in memory that all ranks of a communicator can read.

    Only this rank writes into it; other ranks read it with `peer`. If the communicator has no
    shared memory (`comm.window` is None) it is an ordinary tensor.

    Args:
        shape: the shape of this rank's tensor; may differ between ranks. The tensors of all ranks
            must fit into memory together; each alone is compared with the memory of the job.
        comm: the ranks. Every rank calls this.
        dtype: the tensor's dtype, one that `all_gather` takes, the same on every rank.

    Returns:
        Zeros of that shape, on the device of `comm`. Host memory is freed when no rank has a tensor
        in it any more. Unused memory of a GPU is freed in the next call of this function, or when
        the communicator is freed. GPU memory that is still in use then stays until the process
        ends. In host memory each call takes as many of this process's file descriptors as `comm`
        has ranks, until the memory is freed. Their number is limited, often to 1,024 (`ulimit -n`).

    Communication:
        One agreement on the call; with shared memory also three all-gathers of a few bytes. On a
        GPU, after the first call, there may be one more, and a barrier for each tensor that is
        freed.

    Raises:
        ShapeError, DtypeError, CollectiveMismatch, RankError (no memory): on every rank.
        TypeError: a wrong type of `shape` or `dtype`, on every rank; of `comm`, on this rank.
    """
    arguments.check_communicator(comm)
    shape = arguments.plain(shape)

    def make() -> tuple[Tensor | None, str]:
        _check(shape, dtype, comm)
        x = None if comm.window is not None else _zeros(shape, dtype, comm)
        return x, f"shared_empty({dtype}) on {comm.name}"

    x = make_alike(comm, make)
    if comm.window is None:
        return cast("Tensor", x)
    comm.settle()
    return comm.window.allocate(shape, dtype)


def peer(x: Tensor, rank: int, *, comm: Communicator) -> Tensor:
    """Return the tensor that another rank got from the same call of `shared_empty` as x.

    It is not copied, and nothing is sent.

    Args:
        x: the tensor that `shared_empty` returned on this rank, not a slice of it. It must not have
            been moved by `x.share_memory_()`, which torch.multiprocessing calls.
        rank: the rank whose tensor is returned. For this rank's own number, that is x.
        comm: the communicator of that call.

    Returns:
        The other rank's tensor, with its shape; read it between two calls of `fence`.

    Raises:
        RankError: x is not such a tensor, there is no such rank, or there is no shared memory.
        TypeError: x is not a tensor. Both on this rank.
    """
    arguments.check_communicator(comm)
    comm.ensure_open()
    arguments.check(rank=rank)
    arguments.check_type("x", x, Tensor, "Pass what shared_empty gave.")
    tensors = [] if comm.window is None else comm.window.tensors(x)
    if not 0 <= rank < len(tensors):
        raise RankError(
            f"the tensor of rank {rank} was asked for, from the shared_empty call that returned x "
            f"of shape {tuple(x.shape)}; {comm.name} has {len(tensors)} tensors of such a call "
            f"({comm.no_window or 'it has shared memory'}). Pass x as shared_empty returned it, "
            "and the communicator of that call."
        )
    return x if rank == comm.rank else tensors[rank]


def fence(*, comm: Communicator) -> None:
    """Wait for all ranks, so that each sees what the others wrote into shared memory.

    Args:
        comm: the ranks. Every rank calls this.

    Communication:
        One agreement. In shared memory also two flags; there `check="off"` skips the agreement.

    Raises:
        TypeError: `comm` is no communicator; on this rank.
        CollectiveMismatch: only some ranks call this; on every rank, unless `check="off"`.
    """
    arguments.check_communicator(comm)
    comm.fence()


def _zeros(shape: Sequence[int], dtype: torch.dtype, comm: Communicator) -> Tensor:
    """Return zeros in ordinary memory, or raise a RankError if there is not enough."""
    try:
        return torch.zeros(tuple(shape), dtype=dtype, device=comm.device)
    except RuntimeError as error:
        raise _too_large(shape, dtype, comm) from error


def _too_large(shape: Sequence[int], dtype: torch.dtype, comm: Communicator) -> RankError:
    return RankError(
        f"{math.prod(shape) * dtype.itemsize:,} bytes were asked for, but rank {comm.rank} "
        f"cannot allocate them on {comm.device}. Free some, or pass a smaller shape."
    )


def _check(shape: Sequence[int], dtype: torch.dtype, comm: Communicator) -> None:
    arguments.check(shape=shape)
    arguments.check_type("dtype", dtype, torch.dtype, "Pass one, such as torch.float32.")
    if any(length < 0 for length in shape):
        raise ShapeError(f"shape {tuple(shape)} was given; pass lengths >= 0.")
    if dtype not in MOVABLE:
        names = ", ".join(str(each).removeprefix("torch.") for each in MOVABLE)
        raise DtypeError(
            f"{dtype} was given; needed is one of {names}, which collectives take. Pass one of "
            "them, and use x.view(...) to read x as another dtype."
        )
    if math.prod(length or 1 for length in shape) >= 1 << 63:  # torch's strides are int64
        raise _too_large(shape, dtype, comm)
