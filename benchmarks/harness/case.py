"""What is measured: a case by name, and the work that one rank does in it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness.phases import Phases
from sp_core.communicator import Communicator
from sp_core.mesh import Mesh

AXIS = "sp"


@dataclass(frozen=True)
class Case:
    """One thing to measure, on one number of ranks.

    Args:
        layer: the suite: "collectives", "schemes", "layers" or "llama".
        scheme: what is called.
        mesh: size of each axis; the product is P.
        shape: sizes of the whole problem, the same for every P.
        transport: a name of `sp_core.transport.NAMES`.
        direction: "forward" or "both", forward and backward; None where there is only one.
        layout, mask, algorithm: where there is a choice.
        dtype: of the tensors.
        detail: what else tells cases of one scheme apart.
        quick: part of the small selection.
    """

    layer: str
    scheme: str
    mesh: dict[str, int]
    shape: dict[str, int]
    transport: str
    direction: str | None = None
    layout: str | None = None
    mask: str | None = None
    algorithm: str | None = None
    dtype: str = "float32"
    detail: str | None = None
    quick: bool = False

    @property
    def ranks(self) -> int:
        """P."""
        return math.prod(self.mesh.values())

    @property
    def id(self) -> str:
        """The name of the case, the same for every P."""
        parts = (self.layer, self.scheme, self.algorithm, self.layout, self.mask, self.detail, self.direction)
        return "/".join(part for part in parts if part is not None)

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype as torch knows it."""
        found: torch.dtype = getattr(torch, self.dtype)
        return found

    def as_dict(self) -> dict[str, Any]:
        """The case as a record holds it."""
        kept = {name: value for name, value in asdict(self).items() if name not in ("detail", "quick")}
        return {"id": self.id, "ranks": self.ranks, **kept}


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
