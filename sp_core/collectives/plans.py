"""Prepare a collective once for one tensor, and run it many times; sum in place."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from sp_core.arguments import check_communicator
from sp_core.collectives import execution
from sp_core.collectives.build import KINDS, NEEDED, build
from sp_core.collectives.maps import Map, Prepared, nothing
from sp_core.communicator import Communicator
from sp_core.scratch import Scratch
from sp_core.transport import Handle

RESIDENT_BYTES = 1 << 14
"""From this many bytes on, other ranks read a vector in shared memory in place.

A smaller one travels faster as a message.
"""


class Plan:
    """A collective on one tensor, whose buffers and messages are made once. `plan` makes it.

    Attributes:
        input: the tensor that every run reads.
        algorithm: what carries it out; "mpi" is the MPI library.
    """

    def __init__(self, mapping: Map, x: Tensor) -> None:
        comm, prepared = mapping.comm, mapping.prepare(x)
        moves, resident = prepared.operation, _resident(mapping, prepared)
        self.input = x
        self.algorithm = "window" if resident else mapping.chosen(moves.nbytes)
        self._comm, self._name, self._prepared = comm, mapping.name, prepared
        self._agree, buffers = comm.numbered(), (prepared.send, prepared.recv)
        self._bound = execution.bind(
            *(comm, moves, *buffers, self.algorithm, Scratch(comm.device)), resident=resident
        )

    def run(self) -> Tensor:
        """Carry it out on what the input holds now.

        Returns:
            As the function that the plan is for, without a gradient. The next run overwrites it.
        """
        self._agree(f"a run of the plan of {self._name}")
        self._prepared.refresh()
        self._bound.run()
        return self._prepared.result()

    def start(self) -> Handle:
        """Begin a run; `finish` waits for it.

        Until then the input must not be changed, nor another run begun.
        """
        self._agree(f"a started run of the plan of {self._name}")
        self._prepared.refresh()
        return self._bound.start()

    def finish(self, handle: Handle) -> Tensor:
        """Wait for a run and return its result, as `run` does."""
        self._comm.wait(handle, self._name)
        return self._prepared.result()


def _resident(mapping: Map, prepared: Prepared) -> bool:
    """Return whether every rank has its tensor in the same place of shared memory.

    Others read it there then. The pieces of an all-to-all are packed first.
    """
    comm, moves, asked = mapping.comm, prepared.operation, mapping.named
    if comm.window is None or asked not in ("auto", "window") or moves.op == "all_to_all":
        return False
    if asked == "auto" and moves.nbytes < RESIDENT_BYTES:
        return False
    mine = comm.window.place(prepared.send) if prepared.refresh is nothing else -1
    places = comm.agree_on(lambda: "where the input of a plan lives", lambda: mine)
    return len(set(places)) == 1 and mine >= 0


def plan(op: str, x: Tensor, /, *, comm: Communicator, **arguments: Any) -> Plan:
    """Prepare a collective on one tensor, to be run many times.

    Args:
        op: "all_gather", "reduce_scatter", "all_reduce", "all_to_all", "shift", "broadcast" or
            "reduce"; or "all_reduce_", in place.
        x: what every run reads. Contiguous memory is read where it is, anything else is copied
            first in every run. In a window a tensor of `shared_empty` is read in place by the other
            ranks too.
        comm: the ranks.
        arguments: those of the function of that name. "auto" takes the window for a tensor that
            lives there and is not small.

    Returns:
        A plan. With `check="off"` its `run` agrees on nothing, because that is done here. In host
        memory it makes no tensor, unless `transport="distributed"` carries it.

    Communication:
        One agreement, in a window two. Each run: as the function of that name; its agreement
        compares which plan is run.

    Raises:
        ValueError: another `op`; all others as the function of that name.
    """
    check_communicator(comm)
    if problem := _problem(op, arguments):
        comm.agree_on(lambda: _refuse(problem))
    return Plan(replace(build(f"plan of {op}", op, x, comm, **arguments), planned=True), x)


def all_reduce_(
    x: Tensor,
    *,
    comm: Communicator,
    op: str = "sum",
    algorithm: str = "auto",
    deterministic: bool = False,
) -> Tensor:
    """Replace x by the sum of the tensors of all ranks.

    Args:
        x: the same shape on every rank; without a gradient.
        comm, op, algorithm, deterministic: as in `all_reduce`.

    Returns:
        x.

    Communication:
        One all-reduce. The algorithms of `sp_core.schedules` need their scratch, the MPI library a
        copy of x.

    Raises:
        ValueError: a tensor that requires a gradient.
        ShapeError: elements of the tensor share memory; all others as `all_reduce`.
    """
    given = {"op": op, "algorithm": algorithm, "deterministic": deterministic}
    return build("all_reduce_", "all_reduce_", x, comm, **given).run(x)


def _problem(op: str, given: Mapping[str, Any]) -> str:
    """Say what is wrong with the names of a plan's arguments. Return nothing if all is well."""
    if op not in KINDS:
        return f"a plan of {op!r} was asked for; there are {tuple(KINDS)}. Pass one of them."
    known = KINDS[op].arguments
    taken, needed = {*known, "algorithm"}, {name for name in known if known[name] is NEEDED}
    if needed <= set(given) <= taken:
        return ""
    return (
        f"a plan of {op} was given {sorted(given)}; "
        f"it takes {sorted(taken)} and needs {sorted(needed)}."
    )


def _refuse(problem: str) -> str:
    raise ValueError(problem)
