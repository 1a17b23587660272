"""Collectives for the hot path: prepared once for one tensor and run many times, and the sum in place."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor

from sp_core.arguments import check_communicator
from sp_core.collectives import execution
from sp_core.collectives.build import KINDS, NEEDED, build
from sp_core.collectives.maps import Map, Prepared
from sp_core.communicator import Communicator
from sp_core.schedules import Op
from sp_core.scratch import Scratch
from sp_core.transport import Handle

RESIDENT_BYTES = 1 << 14
"""From this many bytes on, other ranks read a vector in shared memory in place. A smaller one travels faster as a message."""


class Plan:
    """A collective on one tensor, whose buffers and messages are made once. `plan` makes it.

    Attributes:
        input: the tensor that every run reads.
        algorithm: what carries it out; "mpi" is the MPI library.
    """

    def __init__(self, mapping: Map, x: Tensor, prepared: Prepared) -> None:
        comm, moves, send, recv = mapping.comm, prepared.operation, prepared.send, prepared.recv
        self.input = x
        resident = _resident(comm, prepared, mapping.named)
        self.algorithm = "window"
        if not resident:
            self.algorithm = mapping.chosen(moves.nbytes, planned=True)
        self._comm, self._name, self._prepared = comm, mapping.name, prepared
        self._agree = comm.numbered()
        self._bound: execution.Ready | None = None
        if self.algorithm != "mpi":
            own = Scratch(comm.device)
            self._bound = execution.bind(
                comm, moves, send, recv, self.algorithm, own, resident=resident
            )
            self._call: Callable[[], object] = self._run
        elif moves.op is Op.SHIFT:
            self._call = partial(execution.run, comm, moves, send, recv, "mpi")
        else:
            self._call = comm.prepare(moves, send, recv)

    def run(self) -> Tensor:
        """Carry it out on what the input holds now.

        Returns:
            As the function that the plan is for, without a gradient. The next run overwrites it.
        """
        self._agree(f"a run of the plan of {self._name}")
        if self._prepared.refresh is not None:
            self._prepared.refresh()
        self._call()
        return self._prepared.result()

    def start(self) -> Handle:
        """Begin a run; `finish` waits for it. Until then the input must not be changed, nor another run begun."""
        self._agree(f"a started run of the plan of {self._name}")
        prepared = self._prepared
        if prepared.refresh is not None:
            prepared.refresh()
        if self._bound is None:
            return execution.start(
                self._comm, prepared.operation, prepared.send, prepared.recv, "mpi"
            )
        return self._comm.track(self._bound.start())

    def finish(self, handle: Handle) -> Tensor:
        """Wait for a run and return its result, as `run` does."""
        self._comm.wait(handle, self._name)
        return self._prepared.result()

    def _run(self) -> None:
        assert self._bound is not None
        start = time.perf_counter()
        self._bound.run()
        self._comm.counters[self._name].seconds += time.perf_counter() - start


def _resident(comm: Communicator, prepared: Prepared, asked: str) -> bool:
    """Return whether every rank has its tensor in the same place of shared memory, so that others read it there."""
    if (
        comm.window is None
        or asked not in ("auto", "window")
        or prepared.operation.op is Op.ALL_TO_ALL
    ):
        return False  # the pieces of an all-to-all are packed first
    if asked == "auto" and prepared.operation.nbytes < RESIDENT_BYTES:
        return False
    mine = comm.window.place(prepared.send) if prepared.refresh is None else -1
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
        As the function of that name; ValueError for another `op`.
    """
    check_communicator(comm)
    if problem := _problem(op, arguments):
        comm.agree_on(lambda: f"plan of {op}", lambda: _refuse(problem))
    if op == "all_reduce_":
        mapping = _in_place(f"plan of {op}", x, comm, planned=True, **arguments)
        return Plan(mapping, x, mapping.prepare(x))
    mapping = build(f"plan of {op}", op, x, comm, **arguments)
    return Plan(mapping, x, mapping.prepare(x.detach()))


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
        As `all_reduce`; ValueError for a tensor that requires a gradient, ShapeError for one whose
        elements share memory.
    """
    given = {"op": op, "algorithm": algorithm, "deterministic": deterministic}
    return _in_place("all_reduce_", x, comm, planned=False, **given).run(x)


def _in_place(name: str, x: Tensor, comm: Communicator, *, planned: bool, **given: Any) -> Map:
    mapping = build(name, "all_reduce_", x, comm, **given)
    return replace(
        mapping, algorithm=mapping.chosen(x.numel() * x.itemsize, planned=planned)
    )  # it says where the result is made


def _problem(op: str, given: Mapping[str, Any]) -> str:
    """Say what is wrong with the names of a plan's arguments; nothing if all is well."""
    if op not in KINDS:
        return f"a plan of {op!r} was asked for; there are {tuple(KINDS)}. Pass one of them."
    taken = {*KINDS[op].arguments, "algorithm"}
    needed = {name for name, default in KINDS[op].arguments.items() if default is NEEDED}
    if needed <= set(given) <= taken:
        return ""
    return f"a plan of {op} was given {sorted(given)}; it takes {sorted(taken)} and needs {sorted(needed)}."


def _refuse(problem: str) -> int:
    raise ValueError(problem)
