"""Time every collective with every algorithm over every transport, for three sizes of buffers.

The cases are read from the library's tables: a collective, an algorithm or a transport that is
added there is timed without a change here. `elements` is the size of the largest buffer of a rank
in the call: the result of an all-gather, the input of a reduce-scatter.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.cases.case import Phases, Work, dtype_of
from benchmarks.records import AXIS, Case, make_case
from sp_core.collectives import api
from sp_core.mesh import Mesh
from sp_core.programs import ALGORITHMS
from sp_core.sharding import split_sizes
from sp_core.transport import MAY_BE_REFUSED, NAMES

ELEMENTS = (256, 65_536, 1_048_576)  # of float32: 1 KiB, 256 KiB, 4 MiB
QUICK = {("all_gather", 65_536), ("all_reduce", 65_536), ("reduce_scatter", 65_536)}
WIDTH = 64  # size of the dim that an all-to-all splits
LIBRARY = "mpi"  # the algorithm whose bytes have a formula here
WINDOW = "window"
WITH_WINDOW = (WINDOW, "ipc", "pinned")  # transports for the algorithm "window"


def algorithms(operation: str, transport: str) -> list[str]:
    """Return the algorithms of a collective over a transport, without the choice "auto".

    Transports that share memory have only "window", which needs no messages; others have the rest.
    """
    return [
        name
        for name in ALGORITHMS[operation]
        if name != "auto" and (name == WINDOW) == (transport in WITH_WINDOW)
    ]


def cases(ranks: int, device: str = "cpu") -> list[Case]:
    """Return all cases for a number of ranks and a kind of device."""
    return [
        make_case(
            "collectives",
            operation,
            {AXIS: ranks},
            {"elements": elements},
            transport,
            algorithm=algorithm,
            detail=f"{transport}/{elements}",
        )
        for operation in sorted(ALGORITHMS)
        for transport in NAMES[device]
        if transport not in MAY_BE_REFUSED
        for algorithm in algorithms(operation, transport)
        for elements in ELEMENTS
    ]


def quick(case: Case) -> bool:
    """Return whether a case is part of the small selection."""
    return case.algorithm == LIBRARY and (case.scheme, case.shape["elements"]) in QUICK


def build(case: Case, mesh: Mesh, sync: Callable[[], None]) -> Work:
    """Return this rank's work: one call of a collective, without gradients."""
    comm = mesh[AXIS]
    x, arguments = _input(case.scheme, case.shape["elements"], mesh, dtype_of(case))
    how = {"comm": comm, "algorithm": case.algorithm, **arguments}
    sent = SENT.get(case.scheme) if case.algorithm == LIBRARY else None
    return Work(
        partial(torch.no_grad()(getattr(api, case.scheme)), x, **how),
        Phases([comm], sync),
        [x],
        sent=None if sent is None else sent(x, comm.rank, comm.size),
        result_bytes=case.shape["elements"] * x.itemsize,
    )


def _input(
    operation: str, elements: int, mesh: Mesh, dtype: torch.dtype
) -> tuple[Tensor, dict[str, Any]]:
    """Return this rank's tensor, and the sizes as arguments, so that ranks need not gather them."""
    size, rank = mesh[AXIS].size, mesh[AXIS].rank
    if operation == "all_gather":
        sizes = split_sizes(elements, size)
        return torch.ones(sizes[rank], device=mesh.device, dtype=dtype), {"sizes": sizes}
    x = torch.ones(elements // WIDTH, WIDTH, device=mesh.device, dtype=dtype)
    lengths = (len(x),) * size
    if operation == "all_to_all":
        return x, {"split_dim": 1, "concat_dim": 0, "concat_sizes": lengths}
    return x, {"sizes": lengths} if operation == "shift" else {}


def _others(x: Tensor, rank: int, size: int, dim: int) -> int:
    """Return the bytes of the parts of x along `dim` that go to other ranks."""
    kept = split_sizes(x.shape[dim], size)[rank]
    return x.nbytes // x.shape[dim] * (x.shape[dim] - kept)


SENT: dict[str, Callable[[Tensor, int, int], int]] = {
    "all_gather": lambda x, rank, size: (size - 1) * x.nbytes,
    "reduce_scatter": lambda x, rank, size: _others(x, rank, size, 0),
    "all_to_all": lambda x, rank, size: _others(x, rank, size, 1),
    "all_reduce": lambda x, rank, size: x.nbytes if size > 1 else 0,
    "shift": lambda x, rank, size: x.nbytes if size > 1 else 0,
    "broadcast": lambda x, rank, size: (size - 1) * x.nbytes if rank == 0 else 0,
    "reduce": lambda x, rank, size: x.nbytes if rank != 0 else 0,
}
"""By collective, the bytes that a rank gives to the MPI library for others, or sends itself.

A function takes the rank's tensor, its rank and P.
"""
