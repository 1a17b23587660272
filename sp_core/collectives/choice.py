"""Which algorithm a collective uses, and its program."""

from __future__ import annotations

from torch import Tensor

from sp_core.collectives.execution import BoundProgram, Once, Ready
from sp_core.collectives.window import BoundWindow
from sp_core.communicator import Communicator
from sp_core.schedules import ALGORITHMS, Program, Task, program_of
from sp_core.scratch import Scratch
from sp_core.transport import Handle, Op, Transfer

SEGMENT_BYTES = 1 << 18
"""Bytes per segment: a few segments stay in a core's cache while one of them is added and another travels."""


def chosen(comm: Communicator, op: str, algorithm: str) -> str:
    """The algorithm of a call.

    A name that the collective does not have counts as "auto": it was given to the collective whose gradients these are. So does
    "window" where a communicator has none.
    """
    for name in (algorithm, comm.algorithms[op]):
        if name != "auto" and name in ALGORITHMS[op] and not (name == "window" and comm.window is None):
            return name
    return "mpi" if comm.window is None else "window"


def program_for(comm: Communicator, transfer: Transfer, algorithm: str, itemsize: int) -> Program:
    """What this rank does in a transfer."""
    task = Task(
        transfer.op.value, comm.rank, comm.size, transfer.send, transfer.recv, transfer.root, max(SEGMENT_BYTES // itemsize, 1)
    )
    return program_of(task, algorithm)


def start(comm: Communicator, transfer: Transfer, send: Tensor | None, recv: Tensor | None, algorithm: str) -> Handle:
    """Begin a collective over flat contiguous buffers by an algorithm, in a window, or by the MPI library."""
    name = chosen(comm, transfer.op.value, algorithm)
    if name != "mpi":
        return comm.track(Once(bind(comm, transfer, send, recv, name, comm.scratch)))
    return shifted(comm, transfer, send, recv) if transfer.op is Op.SHIFT else comm.start(transfer, send, recv)


def run(comm: Communicator, transfer: Transfer, send: Tensor | None, recv: Tensor | None, algorithm: str) -> None:
    """Carry out a collective over flat contiguous buffers by an algorithm, in a window, or by the MPI library."""
    if transfer.op is not Op.SHIFT and chosen(comm, transfer.op.value, algorithm) == "mpi":
        comm.run(transfer, send, recv)
    else:
        comm.wait(start(comm, transfer, send, recv, algorithm), transfer.op.value)


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
