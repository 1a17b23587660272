"""Draw small LLaMAs: sizes, rotary embeddings, dtypes, and meshes; with their reference."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from random import Random
from typing import Any

import torch
from llama_cases import SCALINGS, Case
from oracle import reference
from oracle.once import once
from oracle.reference.block import Outputs, Rounding
from torch import Tensor

from domains import situations
from domains.declared import Call, Parts, Subject, Values, near, spans, values
from sp_core.llama import Grid, Llama
from sp_core.llama.model import checkpoint_name
from sp_core.mesh import Mesh
from sp_core.nn.gradients import Placement, placement_of
from sp_core.testing.tolerance import bound

DTYPES = ("float64", "float32", "bfloat16", "float16")
SCHEMES = (None, "allgather_kv", "ring", "ulysses", "hybrid")
SITUATIONS = situations.situations() | {
    "(algorithm)": values("auto", "ring", "window", "mpi"),
    "(call)": values("first", "second", "10th"),
}
"""Fewer than those of a collective: what a model calls is drawn for itself, by every algorithm."""
FEW_CALLS = SITUATIONS | {"(call)": values("first", "second")}
ONE_CALL = {name: parts for name, parts in SITUATIONS.items() if name != "(call)"}


def even(chance: Random, _: Values, *, low: int, high: int) -> int:
    """An even number between two."""
    return 2 * chance.randint(low // 2, high // 2)


ARCHITECTURE: dict[str, Parts] = {
    "heads": {
        "groups": lambda c, v: (10, 2),
        "one key head": lambda c, v: (c.randint(3, 6), 1),
        "three groups": lambda c, v: (3 * c.randint(2, 3), 3),
        "a key head each": lambda c, v: (c.choice([4, 5, 7]),) * 2,
        "large groups": lambda c, v: (7 * c.randint(4, 6), 7),
    },
    "layers": spans((2, 2), (1, 1), (3, 4)),
    "head_dim": {
        **{
            f"{low} to {high}": partial(even, low=low, high=high)
            for low, high in ((4, 16), (18, 64), (66, 128), (130, 160))
        },
        "2": lambda c, v: 2,
    },
    "hidden": spans((5, 16), (33, 64), (65, 90)),
    "ffn": spans((4, 9), (33, 90)),
    "vocab": spans((8, 31), (100, 300)),
    "scaling": values(*sorted(SCALINGS, key=lambda name: name != "none")),
    "theta": values(100.0, 10_000.0, 500_000.0),
    "eps": values(1e-6, 1e-5, 0.0),
    "tied": values(False, True),
}
"""Aspects of a configuration. Heads are at least as many as the ranks that split them."""

SMALL = {
    **{aspect: dict([*parts.items()][:1]) for aspect, parts in ARCHITECTURE.items()},
    **{aspect: ARCHITECTURE[aspect] for aspect in ("scaling", "tied")},
    "heads": {
        name: parts for name, parts in ARCHITECTURE["heads"].items() if name != "large groups"
    },
    "layers": spans((3, 3), (4, 5)),
}
"""Aspects of a model called in ways that ignore sizes; a layer for each of three stages."""


def architecture(parameter: str, aspects: dict[str, Parts]) -> dict[str, Parts]:
    """Return the domain of a parameter that is a configuration, or has one."""
    return {f"{parameter}.{aspect}": parts for aspect, parts in aspects.items()}


def meshes(*axes: str) -> dict[str, Parts]:
    """Return the domain of a mesh with these axes, mostly of two ranks each."""
    return {
        "mesh.axes": values(*axes),
        "mesh.lengths": values("2 each", "3 along the last", "1 along the first"),
    }


def lengths(drawn: Values) -> dict[str, int]:
    """Return the axes of the mesh and how many ranks each has."""
    found = dict.fromkeys(drawn["mesh.axes"].split(", "), 2)
    number, _, which = drawn["mesh.lengths"].partition(" along the ")
    chosen = {"last": list(found)[-1], "first": next(iter(found))}
    return found | ({chosen[which]: int(number)} if which else {})


def sequence_ranks(drawn: Values) -> int:
    """Return over how many ranks a sequence is split."""
    return math.prod(
        length for axis, length in lengths(drawn).items() if axis in ("ring", "ulysses")
    )


def aspect(drawn: Values, name: str, default: Any = None) -> Any:
    """Return the value of an aspect, whichever parameter it belongs to."""
    return next((x for factor, x in drawn.items() if factor.endswith(f".{name}")), default)


def case_of(drawn: Values) -> Case:
    """Return the model that drawn values stand for."""
    named = {name: aspect(drawn, name) for name in ARCHITECTURE}
    named["dtype"] = aspect(drawn, "dtype", "float64")
    return Case(**named, seed=drawn["seed"], stops=aspect(drawn, "stops", ()))


def weights_of(case: Case) -> dict[str, Tensor]:
    """Return all whole tensors by their names in a checkpoint, made once for all ranks."""
    return once(("weights", replace(case, stops=())), case.weights)


def model_of(case: Case, mesh: Mesh, *, scheme: str | None = None, tp_sp: bool = False) -> Llama:
    """Return the model over a mesh, each rank with its part of the weights."""
    grid = Grid.of(mesh, scheme)
    model = Llama(case.config, grid, dtype=getattr(torch, case.dtype), tp_sp=tp_sp)
    model.fill(lambda name, placement: placement.take(weights_of(case)[name], grid.tensor.rank))
    if case.seed % 2:  # as a `Decoder` has left it
        model.join_weights()
    return model


def on_model(
    name: str,
    factors: dict[str, Parts],
    make: Callable[[Case, Llama, Values], Call],
    **more: Any,
) -> Subject:
    """Return the subject of a call with a model over a mesh."""

    def with_model(mesh: Mesh, drawn: Values) -> Call:
        case, scheme = case_of(drawn), drawn.get("grid.scheme")
        return make(case, model_of(case, mesh, scheme=scheme, tp_sp=drawn["tp_sp"]), drawn)

    return situations.on_mesh(name, factors, lengths, with_model, **more)


class Expected:
    """Compute a function of whole weights in float64, and how far rounding may move it.

    Args:
        what: for messages.
        case: the model.
        run: as in `reference.sensitivity`.
        key: everything that `run` depends on besides.
        tokens: the longest sequence.
        positions: one more than the greatest position: an angle of p radians has an error of its
            round-off times p.
        dtype: in which the result is computed; that of the case if not given.
    """

    def __init__(
        self,
        what: str,
        case: Case,
        run: Callable[[Rounding, Tensors], Outputs],
        key: object,
        *,
        tokens: int,
        positions: int = 1,
        dtype: str = "",
    ) -> None:
        self.what, self._positions = what, positions
        self._dtype: torch.dtype = getattr(torch, dtype or case.dtype)
        widths = (case.hidden, case.ffn, case.heads[0] * case.head_dim, case.vocab)
        self._longest_sum = max(*widths, tokens)
        weights = weights_of(case)
        made = partial(reference.sensitivity, run, weights, samples=2)
        self.values, self._scales, _ = once((what, case, key), made)

    def check(
        self, name: str, result: Tensor, part: Callable[[Tensor], Tensor] = lambda x: x
    ) -> None:
        """Compare a result with its part of what is expected."""
        value, allowed = part(self.values[name]), part(self.allowed(name))
        near(self.what, result, value, allowed, f"{self.what}: {name}")

    def allowed(self, name: str) -> Tensor:
        """Return how far a result may be off."""
        scale = self._scales[name]
        return bound(scale, self._dtype, self._longest_sum) + bound(
            scale, torch.float64, self._positions
        )

    def check_weights(self, model: Llama, *, gradients: bool = False) -> None:
        """Compare every parameter of this rank, or its gradient."""
        for name, parameter in model.named_parameters():
            result = parameter.grad if gradients else parameter
            assert result is not None, name
            self._check_part(model, name, placement_of(parameter), result)

    def _check_part(self, model: Llama, name: str, placement: Placement, result: Tensor) -> None:
        times = sum(map(len, sum(placement.held, ()))) / placement.shape[placement.dim]
        assert times > 1 or not placement.partial or model.grid.tensor.size == 1, name
        self.check(
            checkpoint_name(name), result, lambda x: placement.take(x, model.grid.tensor.rank)
        )


Tensors = dict[str, Tensor]


def text(case: Case, lengths: Sequence[int]) -> list[list[int]]:
    """Return random sequences of these lengths."""
    return (
        [row.tolist() for row in case.tokens(sum(lengths)).split(list(lengths))] if lengths else []
    )
