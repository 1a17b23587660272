"""Which algorithm carries a collective out."""

from __future__ import annotations

from functools import lru_cache

from sp_core.communicator import Communicator
from sp_core.schedules import ALGORITHMS
from sp_core.tuning import decide

RESIDENT_BYTES = 1 << 14
"""From so many bytes on, a vector that lives in shared memory is read there: below, a message is there before two flags are."""


def named(comm: Communicator, op: str, algorithm: str) -> str:
    """What a call, or else the mesh, asks for; "auto" where they leave it open.

    A name that the collective does not have counts as "auto": it was given to the collective whose gradients these are. So does
    "window" where a communicator has none.
    """
    for name in (algorithm, comm.algorithms[op]):
        if name != "auto" and name in ALGORITHMS[op] and not (name == "window" and comm.window is None):
            return name
    return "auto"


def chosen(comm: Communicator, op: str, algorithm: str, nbytes: int = 0, *, planned: bool = False) -> str:
    """The algorithm of a call: the one that is `named`.

    Where nothing but "auto" is said, constants decide for tensors in host memory, where there are any; else it is the window, or
    the library where there is none.

    Args:
        comm: the ranks.
        op, algorithm: what is called, and what was asked for.
        nbytes: of the whole vector, the same on every rank.
        planned: whether it is prepared once for many runs.
    """
    name = named(comm, op, algorithm)
    if name != "auto":
        return name
    if comm.tuning is None or comm.device.type != "cpu" or op not in comm.tuning.times:
        return "mpi" if comm.window is None else "window"
    return decide(comm.tuning, op, comm.nodes, nbytes, among=usable(comm, op), planned=planned)


def usable(comm: Communicator, op: str) -> tuple[str, ...]:
    """What "auto" may take on a communicator."""
    return _usable(comm.nodes, op, comm.window is not None)


@lru_cache(maxsize=256)
def _usable(nodes: tuple[int, ...], op: str, window: bool) -> tuple[str, ...]:
    """A hierarchy only where there are several nodes, one of them with several ranks."""
    possible = {"hierarchical": 1 < len(set(nodes)) < len(nodes), "window": window, "auto": False}
    return tuple(name for name in ALGORITHMS[op] if possible.get(name, True))
