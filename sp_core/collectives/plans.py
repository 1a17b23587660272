"""Prepare a collective on one tensor to run it many times (`plan`), or sum in place."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NoReturn

import torch
from torch import Tensor

from sp_core.arguments import check_communicator
from sp_core.collectives import execution
from sp_core.collectives.build import KINDS, NEEDED, build, check_sum
from sp_core.collectives.maps import Map, Prepared
from sp_core.communicator import Communicator
from sp_core.compiling import eager
from sp_core.errors import RankError
from sp_core.scratch import Scratch
from sp_core.transport import Done, Handle

RESIDENT_BYTES = 1 << 14
"""Fewest bytes of a vector that a plan lets other ranks read in place, with algorithm "auto".

A smaller vector is faster with the algorithm that "auto" takes for other tensors."""

_INSIDE = Done()  # stands for the run that `Plan.run` is in


class Plan:
    """Hold a collective for one tensor; its buffers and messages are made once. `plan` returns it.

    All ranks of the communicator must run their plans in the same order.

    Attributes:
        input: the tensor that every run reads.
        algorithm: name of the algorithm in use; "mpi" is the MPI library's own.
    """

    @torch.inference_mode(False)  # a run outside of that mode could not write buffers made in it
    def __init__(self, mapping: Map, x: Tensor) -> None:
        comm, shared = mapping.comm, replace(mapping, algorithm="window")
        resident = _resident(mapping, shared.prepare(x))
        mapping = shared if resident else mapping
        prepared = mapping.prepare(x)
        moves, self.input, self._memory = prepared.operation, x, _memory(x)
        self.algorithm = mapping.choose_algorithm(moves.nbytes)
        self._comm, self._name, self._prepared = comm, mapping.name, prepared
        self._under_way: Handle | None = None
        self._agree, buffers = comm.numbered(), (prepared.send, prepared.recv)
        self._bound = execution.bind(
            *(comm, moves, *buffers, self.algorithm, Scratch(comm.device)), resident=resident
        )

    @eager
    def run(self) -> Tensor:
        """Run the collective on the values that `input` has now, and wait for the end.

        Returns:
            The result of the planned function, such as `all_gather`, but without a gradient. The
            next run overwrites this tensor.

        Raises:
            CollectiveMismatch: the ranks run different plans. `check="off"` skips this check.
            RankError: `finish` was not called for a run that `start` began; an error has ended an
                earlier run; or the memory, shape or dtype of `input` has changed, as by
                `x.data = ...`. Every rank raises it; with `check="off"` only this rank does.
            ValueError: as `all_reduce_`, if the plan is in place and runs in another mode.
        """
        self._agree(f"a run of the plan of {self._name}", self._check_ready)
        self._prepared.refresh()
        self._under_way = _INSIDE  # stays after an error: MPI may go on in this plan's memory
        self._bound.run()
        self._under_way = None
        return self._prepared.result()

    @eager
    def start(self) -> Handle:
        """Begin a run, after one agreement unless `check="off"`. Return a handle for `finish`.

        Until `finish` has returned, `input` must not be changed, and no other run of this plan may
        begin.

        Raises:
            CollectiveMismatch, RankError, ValueError: as `run`.
        """
        self._agree(f"a started run of the plan of {self._name}", self._check_ready)
        self._prepared.refresh()
        self._prepared.overwrite()
        self._under_way = _INSIDE  # as in `run`
        self._under_way = self._bound.start()
        return self._under_way

    @eager
    def finish(self, handle: Handle) -> Tensor:
        """Wait until the run that `start` began is complete. Return the result, as `run` does.

        Raises:
            ValueError: `handle` is not that of the unfinished run; on this rank.
            RankError: another rank has left (`PeerFailed`), or the communicator was freed.
        """
        if handle is None or handle is not self._under_way:
            raise ValueError(
                f"finish of the plan of {self._name} was given {handle!r}, which is not under way. "
                "Pass the handle that the last start() of this plan returned, once."
            )
        self._comm.wait(handle, self._name)
        self._under_way = None
        return self._prepared.result()

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"a plan of {self._name} cannot be copied or pickled. Make a new plan on every rank."
        )

    def _check_ready(self) -> None:
        """Raise an error if a run is under way, `input` has other memory, or may not be changed."""
        if self._under_way is not None:
            raise RankError(
                f"a run of the plan of {self._name} was begun while another one is under way. Call "
                "finish with the handle of that run first, or make a second plan. If an error has "
                "ended that run, make a new plan on every rank."
            )
        if _memory(self.input) != self._memory:
            shape, dtype = tuple(self.input.shape), self.input.dtype
            raise RankError(
                f"the memory, shape, strides or dtype of the input of the plan of {self._name} "
                f"(now {shape} and {dtype}) has changed since the plan was made. Make a new plan "
                "on every rank."
            )
        if self._prepared.out is self.input:  # a run may be in another mode than the plan was made
            check_sum(self.input, "sum", in_place=True)


def _memory(x: Tensor) -> tuple[object, ...]:
    """Return the address, shape, strides and dtype of a tensor."""
    return x.data_ptr(), x.shape, x.stride(), x.dtype


def _resident(mapping: Map, prepared: Prepared) -> bool:
    """Return whether the inputs are tensors of one call of `shared_empty`, at the same offset.

    The ranks then read each other's inputs there. The result is False for small tensors, for
    algorithms without shared memory, and for an all-to-all, which packs its pieces first. Otherwise
    the ranks compare where their inputs lie (one agreement: a 32-byte all-reduce).
    """
    comm, moves, asked = mapping.comm, prepared.operation, mapping.requested_algorithm
    if comm.window is None or asked not in ("auto", "window") or moves.op == "all_to_all":
        return False
    if asked == "auto" and moves.nbytes < RESIDENT_BYTES:
        return False
    mine = comm.window.place(prepared.send)
    places = comm.agree_on(lambda: "where the input of a plan lives", lambda: mine)
    return len(set(places)) == 1 and mine >= 0


def plan(op: str, x: Tensor, /, *, comm: Communicator, **arguments: Any) -> Plan:
    """Prepare a collective for one tensor, to be run many times. Every rank of `comm` calls this.

    Args:
        op: "all_gather", "reduce_scatter", "all_reduce", "all_to_all", "shift", "broadcast" or
            "reduce"; or "all_reduce_", in place.
        x: the tensor that every run reads. It is read in place if it is contiguous with `dim`
            first; otherwise, and for an all-to-all, it is copied first in every run. If the mesh
            has a window (memory that the ranks share), other ranks read a tensor of `shared_empty`
            in place, too, except in a broadcast.
        comm: the communicator whose ranks run the plan.
        arguments: the other arguments of the function called `op`, also its own `op`, as in
            `plan("all_reduce", x, comm=comm, op="max")`. The algorithm "auto" takes the window for
            tensors of `shared_empty`, if the whole vector has 16 KiB or more.

    Returns:
        A `Plan`. If the mesh was made with `check="off"`, its runs do not check that the ranks
        agree. In host memory over MPI `run` allocates no tensor, unless the mesh has
        `transport="distributed"`.

    Communication:
        One agreement (32-byte all-reduce) of the arguments; with `check="off"` only if lengths are
        left out. With a window there is one more, on where the tensors lie, unless the algorithm
        cannot read them in place, or is "auto" and the whole vector has less than 16 KiB. Each run
        communicates as the function called `op` does, but its agreement is on which plan is run.

    Raises:
        ValueError: an unknown `op`, or arguments that the function does not have, on every rank.
        All others: as the function called `op`.
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
    """Replace x by the sum of the tensors of all ranks (or their maximum or minimum).

    Args:
        x: the same shape on every rank; a tensor that requires a gradient only under
            `torch.no_grad()`.
        comm, op, algorithm, deterministic: as in `all_reduce`.

    Returns:
        x.

    Communication:
        That of the forward of `all_reduce`. The call needs memory beside x. "mpi" needs a copy of
        x, and so does an x that is not contiguous. "mpi" with "max" or "min" of a floating dtype
        needs more than five copies. Other algorithms need the scratch of `sp_core.programs.cost`.

    Raises:
        ValueError: x requires a gradient and gradients are enabled; or x was made in
            torch.inference_mode(), and the call is outside of it.
        ShapeError: elements of x share memory, as in an expanded tensor.
        All others: as `all_reduce`.
    """
    given = {"op": op, "algorithm": algorithm, "deterministic": deterministic}
    return build("all_reduce_", "all_reduce_", x, comm, **given).run(x)


def _problem(op: str, given: Mapping[str, Any]) -> str:
    """Return what is wrong with the name `op` or the argument names of a plan, or "" if nothing."""
    if not isinstance(op, str) or op not in KINDS:
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
    """Raise `ValueError` with this text."""
    raise ValueError(problem)
