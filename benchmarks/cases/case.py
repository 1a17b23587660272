"""Measure a case: make its mesh, run one rank's work, and return the parts of its record."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, cast

import torch
from torch import Tensor

import sp_core as sp
from benchmarks.records import Case
from benchmarks.sample import (
    Budget,
    Counts,
    Notes,
    Span,
    agree,
    highest_and_mean,
    peak_memory,
    step_seconds,
    take,
    timing,
    undisturbed,
)
from benchmarks.worker import Intracomm
from sp_core.counters import Count

Parts = dict[str, Any]
CONTROL = "control"
_OPERATION = "op:"


def dtype_of(case: Case) -> torch.dtype:
    """Return the torch dtype of a case."""
    return cast("torch.dtype", getattr(torch, case.dtype))


class Phases:
    """A clock that adds up this rank's seconds by phase.

    A phase does not count the phases inside it, nor the time spent waiting for other ranks.

    Args:
        comms: communicators; the time that they wait counts as communication.
        sync: waits until the device is idle, so that the kernels of a phase count in it.
    """

    def __init__(self, comms: Sequence[sp.Communicator], sync: Callable[[], None]) -> None:
        self.comms, self._sync = comms, sync
        self._seconds: dict[str, float] = {}
        self._inside = [0.0]

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Add the time of the block to the phase `name`."""
        self._sync()
        start = self._computing()
        self._inside.append(0.0)
        yield
        self._sync()
        elapsed = self._computing() - start
        self._seconds[name] = self._seconds.get(name, 0.0) + elapsed - self._inside.pop()
        self._inside[-1] += elapsed

    def note(self) -> dict[str, float]:
        """Return all seconds so far, by phase and by operation of the communicators."""
        counts = counts_of(self.comms).items()
        waited = {_OPERATION + name: count.seconds for name, count in counts}
        return {**self._seconds, "communication": sum(waited.values()), **waited}

    def _computing(self) -> float:
        """Read a clock that stands still while this rank waits for others."""
        return time.perf_counter() - sum(
            comm.counters.total(control=True).seconds for comm in self.comms
        )


@dataclass
class Work:
    """The work of one rank in one step.

    Args:
        step: runs the step; all ranks call it together.
        phases: the clock of the step's phases, with all communicators that the step uses.
        held: tensors that are alive when the step begins.
        sent: bytes that this rank sends in a step, by formula; None if there is no formula.
        result_bytes: bytes of the largest buffer of a collective; None for other work.
        flops, tokens: floating-point operations and tokens of a step over all ranks, if known.
    """

    step: Callable[[], object]
    phases: Phases
    held: Sequence[Tensor]
    sent: int | None = None
    result_bytes: int | None = None
    flops: int | None = None
    tokens: int | None = None


Named = Callable[[str], AbstractContextManager[Any]]
"""Returns a context manager that marks its block as the phase of the given name."""


def training(
    direction: str | None, forward: Callable[[], Tensor], leaves: Sequence[Tensor], phases: Named
) -> Callable[[], None]:
    """Return a function that runs one step: `forward` alone, or `forward` and its backward.

    Args:
        direction: "both" for forward and backward; otherwise the forward runs without gradients.
        forward: computes the output. The output's gradient is a tensor of ones.
        leaves: the tensors whose gradients are computed.
        phases: marks the backward as "backward". It marks the forward as "other", except for the
            blocks that `forward` itself marks.
    """
    upstream: list[Tensor] = []

    def step() -> None:
        with torch.set_grad_enabled(direction == "both"), phases("other"):
            out = forward()
        if direction == "both":
            if not upstream:
                upstream.append(torch.ones_like(out))
            with phases("backward"):
                torch.autograd.grad(out, list(leaves), upstream[0])

    return step


def meshes(case: Case, world: Any, device: torch.device) -> sp.Mesh:
    """Return a case's mesh. Schemes and layers check that the ranks agree, collectives do not."""
    axes: dict[str, Any] = dict(case.mesh)  # mypy takes its numbers for any of the options
    if case.algorithm is not None and case.layer != "collectives":  # these get theirs in the call
        axes["algorithm"] = case.algorithm
    return sp.Mesh(world, device=device, transport=case.transport, check="off", **axes)


def counts_of(comms: Sequence[sp.Communicator]) -> dict[str, Count]:
    """Return calls, messages, bytes and seconds by operation, over several communicators."""
    found: dict[str, Count] = {}
    for counters in (comm.counters for comm in comms):
        found |= {name: found.get(name, Count()) + counters[name] for name in counters.snapshot()}
    return found


SENDING = {"run": 1, "start": 1, "prepare": 1, "exchange": 0, "announce": 0}
"""The methods of a transport that get buffers to send, and the index of that argument."""


class Watched:
    """A transport that notes the largest buffer it is given to send.

    The buffer is one message, or a collective's input on this rank. A started call completes only
    when the rank waits for it. Otherwise chance would decide when it completes, and buffers live
    until then. So the live bytes are the most that are possible, and the same in every run.

    Args:
        comm: the communicator whose transport is replaced.
    """

    def __init__(self, comm: sp.Communicator) -> None:
        self.largest = 0
        self._inner: Any = comm.transport
        comm.transport = self
        object.__setattr__(comm, "poll", lambda: None)

    def __getattr__(self, name: str) -> Any:
        """Return the transport's own method; one that sends notes the largest buffer, too."""
        method = getattr(self._inner, name)
        if name not in SENDING:
            return method

        def noted(*arguments: Any) -> Any:
            sent = arguments[SENDING[name]]
            tensors = [x for _, x in sent] if isinstance(sent, Sequence) else [sent]
            sizes = (x.nbytes for x in tensors if x is not None)
            self.largest = max(self.largest, *sizes, 0)
            return method(*arguments)

        return noted


def wait_for(device: torch.device) -> None:
    """Wait until a device is idle."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def measure(
    work: Work,
    world: Intracomm,
    device: torch.device,
    budget: Budget | Counts,
    *,
    tell: Callable[[str, int, int], None] = lambda *_: None,
    memory: bool = True,
) -> Parts:
    """Time one rank's work and count what it sends.

    Args:
        work: the step of this rank, and the numbers that are known of it.
        world: all ranks, on a communicator that the work does not use.
        device: the device of the tensors.
        budget: how long all samples may take, or how many to take.
        tell: called with a text, the number of samples taken and their total.
        memory: whether to measure the peak memory, too. On a CPU its imports take seconds.

    Returns:
        The parts of the record that were measured, the same on all ranks.
    """
    with undisturbed():
        step, sync, counts = work.step, partial(wait_for, device), budget
        if isinstance(counts, Budget):
            counts = agree(step, world, counts, sync=sync)
        spans, notes = take(step, world, counts, sync=sync, note=work.phases.note, tell=tell)
        for comm in work.phases.comms:
            comm.counters.reset()
        # one more step, not timed
        peak, method = peak_memory(work.step, work.held, device) if memory else (0, work.step())
    sent = {name: count.bytes_sent for name, count in counts_of(work.phases.comms).items()}
    formulas: list[int | None] = world.allgather(work.sent)
    known = [formula for formula in formulas if formula is not None]
    formula = sum(known) if len(known) == len(formulas) else None
    highest = max(world.allgather(peak))
    return {
        "timing": timing(spans, counts.inner),
        "phases": _phases(spans, counts.inner, notes),
        "comm": _comm(world.allgather(sent), notes, work),
        "memory": {"peak_bytes": highest, "method": method} if memory else None,
        "work": {"flops": work.flops, "tokens": work.tokens, "bytes_formula": formula},
    }


def problem(parts: Parts) -> str | None:
    """Return an error text if the counted bytes are not those of the formula, else None."""
    counted = sum(entry["bytes_sent"] for name, entry in parts["comm"].items() if name != CONTROL)
    expected = parts["work"]["bytes_formula"]
    if expected is None or counted == expected:
        return None
    return f"the ranks sent {counted} bytes in one step; by formula it is {expected}."


def _phases(spans: list[list[Span]], inner: int, notes: Notes) -> Parts:
    noted = {name for rank in notes for sample in rank for name in sample}
    names = sorted(name for name in noted if not name.startswith(_OPERATION))
    total = {"total": highest_and_mean(step_seconds(spans, inner))}
    return total | {name: highest_and_mean(_noted(notes, name)) for name in names}


def _noted(notes: Notes, name: str) -> list[list[float]]:
    return [[sample.get(name, 0.0) for sample in rank] for rank in notes]


def _comm(told: list[dict[str, int]], notes: Notes, work: Work) -> Parts:
    """Return by operation the bytes of all ranks, and the seconds of the one that waited longest.

    Args:
        told: the bytes that each rank sent, by operation.
        notes: for each rank and sample, the seconds that it waited, by operation.
        work: has the bytes of the collective's largest buffer, which are repeated here.
    """
    result = {} if work.result_bytes is None else {"bytes_result": work.result_bytes}
    return {
        name: {
            "bytes_sent": sum(rank.get(name, 0) for rank in told),
            "seconds": highest_and_mean(_noted(notes, _OPERATION + name))["max_s"],
            **({} if name == CONTROL else result),
        }
        for name in sorted({*chain(*told)})
    }
