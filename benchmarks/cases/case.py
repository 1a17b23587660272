"""How a case is made, and the work that one rank does in it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from benchmarks.cases.phases import Phases
from benchmarks.records import Case
from sp_core.communicator import Communicator
from sp_core.mesh import Mesh


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
