"""How a case is made, and the work that one rank does in it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from benchmarks.records import Case
from sp_core.communicator import Communicator
from sp_core.mesh import Mesh
from sp_core.schedules import Operation
from sp_core.transport import Bound, Handle, Messages


def dtype_of(case: Case) -> torch.dtype:
    """Return the dtype of a case as torch knows it."""
    found: torch.dtype = getattr(torch, case.dtype)
    return found


@dataclass
class Work:
    """What one rank does in one step.

    Args:
        step: the step, which all ranks take together.
        comms: the communicators that it uses.
        held: tensors that are alive when it begins.
        sent: bytes that this rank sends in a step, by formula; None where there is none.
        result_bytes: of the largest buffer of a collective.
        flops, tokens: of a step over all ranks.
        phases: where parts of the step are noted.
    """

    step: Callable[[], object]
    comms: Sequence[Communicator]
    held: Sequence[Tensor]
    sent: int | None = None
    result_bytes: int | None = None
    flops: int | None = None
    tokens: int | None = None
    phases: Phases | None = None


Build = Callable[[Case, Mesh, Callable[[], None]], Work]
"""From a case, a mesh with its axes and the device's `sync` to this rank's work."""


@dataclass
class Training:
    """A step over `forward`, alone or with its backward.

    Args:
        direction: "forward" or "both".
        forward: gives the output.
        leaves: what has gradients.
        phases: notes the backward, and what the forward notes nowhere else as "other".
    """

    direction: str | None
    forward: Callable[[], Tensor]
    leaves: Sequence[Tensor]
    phases: Phases
    _upstream: Tensor | None = field(default=None, init=False)

    def __call__(self) -> None:
        """Take the step."""
        training = self.direction == "both"
        with nullcontext() if training else torch.no_grad(), self.phases("other"):
            out = self.forward()
        if not training:
            return
        if self._upstream is None:
            self._upstream = torch.ones_like(out)
        with self.phases("backward"):
            torch.autograd.grad(out, list(self.leaves), self._upstream)


def meshes(case: Case, world: Any, device: torch.device) -> Mesh:
    """The mesh of a case, in which only schemes and layers compare their arguments."""
    axes: dict[str, Any] = dict(case.mesh)  # of numbers, which mypy takes for any of the options
    if case.algorithm is not None and case.layer != "collectives":  # those are called with theirs
        axes["algorithm"] = case.algorithm
    return Mesh(world, device=device, transport=case.transport, check="off", **axes)


COMMUNICATION = "communication"
_OPERATION = "op:"


class Phases:
    """Seconds of this rank by phase; each phase without the phases inside it, and without the time spent waiting for others.

    Args:
        comms: whose waiting counts as communication.
        sync: waits until the device has done everything, so that a phase's kernels count in it.
    """

    def __init__(self, comms: Sequence[Communicator], sync: Callable[[], None]) -> None:
        self._comms, self._sync = comms, sync
        self._seconds: dict[str, float] = {}
        self._inside = [0.0]

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """What happens in this block belongs to the phase."""
        self._sync()
        start = self._computing()
        self._inside.append(0.0)
        try:
            yield
        finally:
            self._sync()
            elapsed = self._computing() - start
            self._seconds[name] = self._seconds.get(name, 0.0) + elapsed - self._inside.pop()
            self._inside[-1] += elapsed

    def note(self) -> dict[str, float]:
        """All seconds so far, by phase and by operation of the communicators."""
        waited = operations(self._comms)
        return {
            **self._seconds,
            COMMUNICATION: sum(waited.values()),
            **{_OPERATION + name: s for name, s in waited.items()},
        }

    def _computing(self) -> float:
        """A clock that stands still while this rank waits for others."""
        return time.perf_counter() - sum(
            comm.counters.total(control=True).seconds for comm in self._comms
        )


def operations(comms: Sequence[Communicator]) -> dict[str, float]:
    """Seconds of waiting by operation, `control` included."""
    found: dict[str, float] = {}
    for comm in comms:
        for name, count in comm.counters.snapshot().items():
            found[name] = found.get(name, 0.0) + count["seconds"]
    return found


def phase_names(notes: list[list[dict[str, float]]]) -> list[str]:
    """The phases that any rank noted."""
    names = {name for rank in notes for sample in rank for name in sample}
    return sorted(name for name in names if not name.startswith(_OPERATION))


def operation_key(name: str) -> str:
    """What the seconds of an operation are noted under."""
    return _OPERATION + name


CONTROL = "control"


def counts_of(comms: Sequence[Communicator]) -> dict[str, dict[str, int]]:
    """Calls, messages and bytes by operation, over several communicators."""
    found: dict[str, dict[str, int]] = {}
    for comm in comms:
        for name, count in comm.counters.snapshot().items():
            entry = found.setdefault(name, {"calls": 0, "messages": 0, "bytes_sent": 0})
            for part in entry:
                entry[part] += int(count[part])
    return found


class Watched:
    """A transport that notes the largest buffer it is given to send: one message, or a collective's input on this rank.

    Nothing that was started completes before it is waited for. When it would otherwise is chance,
    and buffers live until then: so the bytes alive are the most that they can be, and the same
    every time.

    Args:
        comm: whose transport it takes the place of.
    """

    def __init__(self, comm: Communicator) -> None:
        self.largest = 0
        self.name = comm.transport.name
        self._inner = comm.transport
        comm.transport = self
        object.__setattr__(comm, "poll", lambda: None)

    def start(self, operation: Operation, send: Tensor | None, recv: Tensor | None) -> Handle:
        """Begin a collective."""
        self._note(send)
        return self._inner.start(operation, send, recv)

    def prepare(
        self, operation: Operation, send: Tensor | None, recv: Tensor | None
    ) -> Callable[[], object]:
        """A collective for many runs."""
        self._note(send)
        return self._inner.prepare(operation, send, recv)

    def exchange(self, sends: Messages, recvs: Messages) -> Handle:
        """Begin point-to-point messages."""
        self._note(*(x for _, x in sends))
        return self._inner.exchange(sends, recvs)

    def announce(self, sends: Messages, recvs: Messages) -> None:
        """Say which messages will be posted."""
        self._note(*(x for _, x in sends))
        self._inner.announce(sends, recvs)

    def bind(self, messages: Messages) -> Bound:
        """Bring messages into the form that `post` takes."""
        return self._inner.bind(messages)

    def post(self, sends: Bound, recvs: Bound, tag: int) -> Handle:
        """Begin announced messages."""
        return self._inner.post(sends, recvs, tag)

    def close(self, *, together: bool) -> None:
        """Give back what it holds."""
        self._inner.close(together=together)

    def _note(self, *sent: Tensor | None) -> None:
        self.largest = max(self.largest, *(0 if x is None else x.nbytes for x in sent), 0)
