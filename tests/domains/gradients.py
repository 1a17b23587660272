"""Declare the domain of gradients over a mesh: their sums over ranks, and their norm."""

import math
from functools import partial
from random import Random
from typing import Any, cast

import numpy as np
import torch
from oracle.collective_cases import MEMORIES, in_memory, total
from torch import Tensor, nn

import sp_core as sp
from domains.collectives import APART, LIES
from domains.declared import Call, Parts, Values, near, same, spans, values, whole
from domains.placements import HELD, held_of, indices
from domains.situations import SITUATIONS, on_mesh
from sp_core.nn.gradients import Placement, clip_gradient_norm, place, reduce_gradients
from sp_core.testing import device
from sp_core.testing.tolerance import bound

KINDS = {
    "one": ("float64",),
    "two": ("float32", "bfloat16"),
    "three": ("float64", "float16", "float32"),
}
UNITS = {"float64": 1 + 2**-40, "float32": 1 + 2**-16}
"""By dtype, a number whose small multiples are exact in it, but not in a narrower dtype."""


class Parameters:
    """Hold the parameters of one rank, and compute the gradients that each rank's backward left.

    The methods' argument `number` is the index of a parameter.
    """

    def __init__(self, drawn: Values, tensor: sp.Communicator, stage: int = 0) -> None:
        self.drawn, self.tensor, self.stage, chance = drawn, tensor, stage, Random(drawn["seed"])
        self.placements: list[Placement] = []
        for number in range(drawn["parameters.number"]):
            shape = tuple(chance.randint(1, 6) for _ in range(chance.randint(0, 3)))
            dim = chance.randrange(max(1, len(shape)))
            kind = drawn["parameters.held"]
            kind = chance.choice(list(HELD)) if kind == "any" else kind
            held = held_of(kind, chance, shape, dim, tensor.size)
            is_partial = drawn["parameters.partial"] and number % 2 == 0
            is_copy = stage > 0 and number % 3 == 0  # an earlier stage holds the same parameter
            self.placements.append(Placement(shape, dim, held, is_partial, is_copy))
        self.list = [self.parameter(number) for number in range(len(self.placements))]

    def whole(self, number: int, *key: int, stage: int = 0) -> Tensor:
        """Return a random gradient of a whole parameter: small multiples of a unit."""
        seed = hash((self.drawn["seed"], number, stage * (number % 3 != 0), *key)) % 2**60
        kinds = KINDS[self.drawn["parameters.dtypes"]]
        kind = kinds[number % len(kinds)]
        x = whole(seed, self.placements[number].shape, kind, -4, 4).to(device())
        x = x * UNITS.get(kind, 1) * self.drawn["parameters.magnitude"]
        x = x.double() if self.drawn["parameters.grad"] == "float64" else x
        return x.clone().copy_(x.flatten()[0]) if self.is_expanded(x) else x

    def is_expanded(self, x: Tensor) -> bool:
        """Return whether all elements of a gradient share one number in memory."""
        return self.drawn["parameters.grad"] == "expanded" and x.dim() > 0 and x.numel() > 0

    def part(self, number: int, whole: Tensor, rank: int) -> Tensor:
        """Return the part of a parameter's whole tensor that a rank of the tensor axis holds."""
        placement = self.placements[number]
        return whole.index_select(placement.dim, indices(placement.held, rank).to(whole.device))

    def gradient(self, number: int, data: int, tensor: int) -> Tensor | None:
        """Return the gradient that the backward of a rank has left, or None if it has left none.

        Ranks of the tensor axis have summands if the placement is partial. Otherwise they have
        slices of one gradient.
        """
        own = (tensor,) if self.placements[number].partial else ()
        missing = {
            "none": False,
            "some": number % 2 == 1,
            "some on a rank": sum((number, data, *own)) % 2 == 1,
        }
        return (
            None
            if missing[self.drawn["parameters.missing"]]
            else self.part(number, self.whole(number, data, *own), tensor)
        )

    def parameter(self, number: int) -> nn.Parameter:
        """Return this rank's part of a parameter, with `grad` None; frozen if that was drawn."""
        kinds = KINDS[self.drawn["parameters.dtypes"]]
        mine = self.part(number, self.whole(number), self.tensor.rank)
        mine = mine.to(getattr(torch, kinds[number % len(kinds)]))
        mine = in_memory(mine, self.drawn["parameters.memory"]) if mine.dim() else mine
        learns = self.drawn["parameters.frozen"] == "none" or number % 2 == 0
        made = nn.Parameter(mine.detach(), requires_grad=learns)
        if self.drawn["parameters.grad"] == "float64":
            made.grad_dtype = torch.float64
        return place(made, self.placements[number])

    def fill(self, gradients: list[Tensor | None]) -> None:
        """Put gradients into the parameters, with a memory layout that autograd gives them."""
        for parameter, grad in zip(self.list, gradients, strict=True):
            if grad is None or self.is_expanded(grad):
                parameter.grad = (
                    None if grad is None else grad.flatten()[:1].clone().expand_as(grad)
                )
            else:
                parameter.grad = torch.empty_like(parameter, dtype=grad.dtype).copy_(grad)

    def again(self, function: Any, gradients: list[Tensor | None], **named: Any) -> Any:
        """Set the gradients as the backward has left them, then call a function."""
        self.fill(gradients)
        is_used_up = self.drawn["parameters"] == "generator"
        return function(**named | ({"parameters": self.given()} if is_used_up else {}))

    def given(self) -> Any:
        """Return the parameters as a list, tuple or iterator, as drawn."""
        return dict[str, Any](list=list, tuple=tuple, generator=iter)[self.drawn["parameters"]](
            self.list
        )

    def reduced(self, number: int, data: int) -> Tensor:
        """Return the gradient of this rank, summed over all ranks that have a summand of it."""
        placement, ranks = self.placements[number], range(self.tensor.size)

        def over_data(tensor: int) -> Tensor:
            found = [self.gradient(number, rank, tensor) for rank in range(data)]
            return total(
                [
                    torch.zeros_like(self.part(number, self.whole(number), tensor))
                    if x is None
                    else x
                    for x in found
                ]
            )

        if not placement.partial:
            return over_data(self.tensor.rank)
        nothing = torch.zeros_like(self.whole(number))
        wholes = [
            nothing.index_copy(
                placement.dim, indices(placement.held, rank).to(device()), over_data(rank)
            )
            for rank in ranks
        ]
        return self.part(number, total(wholes), self.tensor.rank)


def axes_of(first: str, drawn: Values) -> dict[str, int]:
    """Return the sizes of the axis `first` and of the tensor axis."""
    return {axis: drawn[f"{axis}.size"] for axis in (first, "tensor")}


def reductions(mesh: sp.Mesh, drawn: Values) -> Call:
    """Return the call of `reduce_gradients`, which first restores the gradients of the backward."""
    data, tensor = mesh["data"], mesh["tensor"]
    own: Values = {"parameters.magnitude": 1}
    if data.rank % 2 and drawn["parameters.lies"] == APART:
        own["parameters.memory"] = "contiguous"
    case = Parameters(drawn | own, tensor)
    gradients = [case.gradient(number, data.rank, tensor.rank) for number in range(len(case.list))]

    def judge(result: None) -> None:
        assert result is None
        for number, (parameter, before) in enumerate(zip(case.list, gradients, strict=True)):
            learns = parameter.requires_grad
            assert parameter.grad is not None or (before is None and not learns)
            if parameter.grad is not None:
                same(parameter.grad, case.reduced(number, data.size) if learns else before)

    given = {"parameters": case.given(), "data": data, "tensor": tensor}
    if drawn["tensor"] == "none":
        given["tensor"] = None
        for parameter in case.list[1::2]:
            del parameter.placement  # type: ignore[attr-defined]
    return Call(partial(case.again, reduce_gradients, gradients), given, judge)


def clipped(mesh: sp.Mesh, drawn: Values) -> Call:
    """Return the call of `clip_gradient_norm` on reduced gradients of tensor and pipeline ranks."""
    stages, tensor = mesh["stages"], mesh["tensor"]
    case = Parameters(drawn, tensor, stages.rank)
    wholes = [case.whole(number, stage=stages.rank) for number in range(len(case.list))]
    parts = [case.part(number, whole, tensor.rank) for number, whole in enumerate(wholes)]
    some = drawn["parameters.missing"] != "none"
    gradients = [None if some and number % 2 else x for number, x in enumerate(parts)]
    every = (
        case.whole(number, stage=stage).double()
        for stage in range(stages.size)
        for number, grad in enumerate(gradients)
        if grad is not None and (stage == 0 or number % 3)
    )
    norm = math.sqrt(math.fsum(float(whole.square().sum()) for whole in every))
    most: Values = {
        "above": 2 * norm + 1,
        "below": norm / 4 or 1.0,
        "infinity": math.inf,
        "a whole number": 3,
        "of NumPy": np.float32(0.1),
    }
    given = {
        "parameters": case.given(),
        "max_norm": most[drawn["max_norm"]],
        "tensor": tensor,
        "stages": stages if drawn["stages"] == "given" else None,
    }
    judge = partial(judge_clipped, case.list, gradients, norm, float(given["max_norm"]))
    return Call(partial(case.again, clip_gradient_norm, gradients), given, judge)


def judge_clipped(
    parameters: list[nn.Parameter],
    gradients: list[Tensor | None],
    norm: float,
    most: float,
    found: float,
) -> None:
    """Compare the norm, and each gradient with min(1, most / norm) times the one before."""
    assert math.isclose(found, norm, rel_tol=1e-14)
    for parameter, before in zip(parameters, gradients, strict=True):
        if before is None or norm <= most:
            same(parameter.grad, before)
        else:
            wanted = before.double() * (most / norm)
            allowed = bound(wanted.abs() + torch.finfo(before.dtype).tiny, before.dtype)
            near("clipped", cast("Tensor", parameter.grad), wanted, allowed)


TENSOR: dict[str, Parts] = {"tensor.size": spans((2, 2), (1, 1), (3, 4))}
OVER_RANKS: dict[str, Parts] = {
    "parameters": values("list", "tuple", "generator"),
    "parameters.number": spans((2, 6), (0, 0), (1, 1), (20, 30)),
    "parameters.dtypes": values(*KINDS),
    "parameters.held": values("any", *HELD),
    "parameters.partial": values(False, True),
    "parameters.memory": values(*(memory for memory in MEMORIES if memory != "expanded")),
    "parameters.frozen": values("none", "some"),
    "parameters.missing": values("none", "some", "some on a rank"),
    "parameters.grad": values("of its dtype", "expanded", "float64"),
}


REDUCED: dict[str, Parts] = {
    "data.size": spans((2, 2), (1, 1), (3, 3)),
    "parameters.lies": LIES,  # a rank may have loaded weights that lie otherwise
    "tensor": values("given", "none"),
    "tensor.size": {
        name: lambda c, v, size=size: size(c, v) if v["tensor"] == "given" else 1  # type: ignore[misc]
        for name, size in TENSOR["tensor.size"].items()
    },
}
NARROW = {
    "parameters.dtypes": "two",
    "parameters.grad": "float64",
    "parameters.missing": "some on a rank",
}
"""Parameters with gradients of a wider dtype, which some ranks do not have."""
TINY = {
    "parameters.dtypes": "three",
    "parameters.magnitude": "10000.0",
    "parameters.number": "20 to 30",
    "max_norm": "of NumPy",
}
"""Parameters whose gradients are multiplied by a number that float16 rounds to a few bits."""
SUBJECTS = [
    on_mesh(
        "gradients.reduce_gradients",
        REDUCED | OVER_RANKS | SITUATIONS,
        partial(axes_of, "data"),
        reductions,
        together=(NARROW, {"parameters.lies": APART, "parameters.memory": "transposed"}),
    ),
    on_mesh(
        "gradients.clip_gradient_norm",
        {"stages": values("given", "none")}
        | {
            "stages.size": {
                "1": lambda c, v: 1,
                "2 to 3": lambda c, v: c.randint(2, 3) if v["stages"] == "given" else 1,
            },
            "parameters.magnitude": values(1, 1e-3, 1e4),
            "max_norm": values("below", "above", "infinity", "a whole number", "of NumPy"),
        }
        | TENSOR
        | OVER_RANKS
        | SITUATIONS,
        partial(axes_of, "stages"),
        clipped,
        together=(TINY,),
        allowed=("max_norm=infinity", "stages=None"),
    ),
]
