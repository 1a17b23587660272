"""Which algorithm a collective uses, and its program."""

from __future__ import annotations

from functools import lru_cache

from torch import Tensor

from sp_core.collectives.execution import BoundProgram, Once, Ready
from sp_core.collectives.window import BoundWindow
from sp_core.communicator import Communicator
from sp_core.schedules import ALGORITHMS, SEGMENT_BYTES, Program, Task, program_of, segment_length
from sp_core.scratch import Scratch
from sp_core.transport import Handle, Op, Transfer
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


def chosen_for(
    comm: Communicator, transfer: Transfer, send: Tensor | None, recv: Tensor | None, algorithm: str, *, planned: bool = False
) -> str:
    """The algorithm of a transfer over flat buffers."""
    return chosen(comm, transfer.op.value, algorithm, vector_bytes(comm, transfer, send, recv), planned=planned)


def vector_bytes(comm: Communicator, transfer: Transfer, send: Tensor | None, recv: Tensor | None) -> int:
    """Bytes of the whole vector, from what every rank knows."""
    given = send if send is not None else recv
    return 0 if given is None else elements(transfer, comm.size) * given.itemsize


def elements(transfer: Transfer, size: int) -> int:
    """Elements of the whole vector, from what every rank knows; an all-to-all counts as if all pieces were the longest."""
    match transfer.op:
        case Op.ALL_GATHER:
            return sum(transfer.recv)
        case Op.REDUCE_SCATTER:
            return sum(transfer.send)
        case Op.ALL_TO_ALL:
            return transfer.steps * size
        case _:
            return transfer.steps


def program_for(comm: Communicator, transfer: Transfer, algorithm: str, itemsize: int) -> Program:
    """What this rank does in a transfer."""
    task = Task(
        transfer.op.value,
        comm.rank,
        comm.size,
        transfer.send,
        transfer.recv,
        transfer.root,
        segment_length(elements(transfer, comm.size), comm.size, itemsize, SEGMENT_BYTES),
        comm.nodes,
    )
    return program_of(task, algorithm)


def start(comm: Communicator, transfer: Transfer, send: Tensor | None, recv: Tensor | None, algorithm: str) -> Handle:
    """Begin a collective over flat contiguous buffers by an algorithm, in a window, or by the MPI library."""
    name = chosen_for(comm, transfer, send, recv, algorithm)
    if name != "mpi":
        return comm.track(Once(bind(comm, transfer, send, recv, name, comm.scratch)))
    return shifted(comm, transfer, send, recv) if transfer.op is Op.SHIFT else comm.start(transfer, send, recv)


def run(comm: Communicator, transfer: Transfer, send: Tensor | None, recv: Tensor | None, algorithm: str) -> None:
    """Carry out a collective over flat contiguous buffers by an algorithm, in a window, or by the MPI library."""
    name = chosen_for(comm, transfer, send, recv, algorithm)
    if transfer.op is not Op.SHIFT and name == "mpi":
        comm.run(transfer, send, recv)
    else:
        comm.wait(start(comm, transfer, send, recv, name), transfer.op.value)


def bind(
    comm: Communicator,
    transfer: Transfer,
    send: Tensor | None,
    recv: Tensor | None,
    algorithm: str,
    scratch: Scratch,
    *,
    resident: bool = False,
) -> Ready:
    """A transfer by an algorithm on its memory, with scratch taken from `scratch`; `resident` where all agree that IN is shared."""
    comm.ensure_open()
    like = send if send is not None else recv
    assert like is not None
    if algorithm == "window":
        return BoundWindow(comm, transfer, send, recv, scratch, resident=resident)
    program = program_for(comm, transfer, algorithm, like.itemsize)
    return BoundProgram(comm, transfer.op.value, program, send, recv, transfer.reduction, scratch)


def shifted(comm: Communicator, transfer: Transfer, send: Tensor | None, recv: Tensor | None) -> Handle:
    """Begin a shift by one message to one rank, and one from another."""
    assert send is not None
    assert recv is not None
    dest, source = (comm.rank + transfer.root) % comm.size, (comm.rank - transfer.root) % comm.size
    if dest == comm.rank:
        recv.copy_(send)
        return comm.exchange([], [], "shift")
    return comm.exchange([(dest, send)], [(source, recv)], "shift")
