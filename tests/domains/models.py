"""Draw small LLaMAs: sizes, rotary embeddings, dtypes, and meshes; with their reference.

Logits and all gradients of `Llama.forward` are compared with the dense float64 model.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from random import Random
from typing import Any

import torch
from llama_cases import SCALINGS, Case
from oracle import reference
from oracle.attention_check import ascending
from oracle.once import contents, once
from oracle.reference.block import Outputs, Rounding
from oracle.strategies import EVERY_LAYOUT
from torch import Tensor

import sp_core as sp
from domains import situations
from domains.blocks import mask_of
from domains.declared import Call, Parts, Subject, Values, near, normal, spans, values
from domains.layers import sharding_of
from domains.masks import documents
from sp_core import schemes
from sp_core.llama import Llama
from sp_core.llama.names import checkpoint_name
from sp_core.mesh import Mesh
from sp_core.nn.gradients import placement_of, reduce_gradients
from sp_core.testing.tolerance import bound

DTYPES = ("float64", "float32", "bfloat16", "float16")
SCHEMES = (None, *schemes.SCHEMES, "hybrid")
SITUATIONS = situations.situations() | {
    "(algorithm)": values("auto", "ring", "window", "mpi"),
    "(call)": values("first", "second", "10th"),
}
"""Fewer situations than of collectives, which are drawn by themselves with every algorithm."""
FEW_CALLS = SITUATIONS | {"(call)": values("first", "second")}
ONE_CALL = {name: parts for name, parts in SITUATIONS.items() if name != "(call)"}


def even(chance: Random, _: Values, *, low: int, high: int) -> int:
    """Return an even number from `low` to `high`, which are even."""
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
"""Aspects of a configuration. It has at least as many heads as ranks that split them."""

SMALL = {
    **{aspect: dict([*parts.items()][:1]) for aspect, parts in ARCHITECTURE.items()},
    **{aspect: ARCHITECTURE[aspect] for aspect in ("scaling", "tied")},
    "heads": {
        name: parts for name, parts in ARCHITECTURE["heads"].items() if name != "large groups"
    },
    "layers": spans((3, 3), (4, 5)),
}
"""Aspects of a model for calls that do not depend on sizes; a layer for each of three stages."""


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
    return Case(
        **{name: aspect(drawn, name) for name in ARCHITECTURE},
        dtype=aspect(drawn, "dtype", "float64"),
        seed=drawn["seed"],
        stops=aspect(drawn, "stops", ()),
    )


def on_model(
    name: str,
    factors: dict[str, Parts],
    make: Callable[[Case, Llama, Values], Call],
    **more: Any,
) -> Subject:
    """Return the subject of a call with a model over a mesh."""

    def with_model(mesh: Mesh, drawn: Values) -> Call:
        case, scheme = case_of(drawn), drawn.get("grid.scheme")
        return make(case, case.model(mesh, scheme, tp_sp=drawn["tp_sp"]), drawn)

    return situations.on_mesh(name, factors, lengths, with_model, **more)


class Expected:
    """Compute a function of whole weights in float64, and how far rounding may move it.

    Args:
        what: the name of the results in messages.
        case: the model, which has the whole weights.
        run: the function, as in `reference.sensitivity`.
        key: everything that `run` depends on besides `case`.
        tokens: the length of the longest sequence.
        positions: one more than the greatest position: an angle of p radians has an error of its
            round-off times p.
        dtype: the dtype in which the result is computed; that of the case if not given.
    """

    def __init__(
        self,
        what: str,
        case: Case,
        run: Callable[[Rounding, dict[str, Tensor]], Outputs],
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
        made = partial(reference.sensitivity, run, case.kept_weights(), samples=2)
        self.values, self._scales, _ = once((what, case, key), made)

    def check(
        self, name: str, result: Tensor, part: Callable[[Tensor], Tensor] = lambda x: x
    ) -> None:
        """Compare a result with `part` of the expected tensor of that name."""
        value, allowed = part(self.values[name]), part(self.allowed(name))
        near(self.what, result, value, allowed, f"{self.what}: {name}")

    def allowed(self, name: str) -> Tensor:
        """Return how far each element of a result may be off."""
        scale = self._scales[name]
        return bound(scale, self._dtype, self._longest_sum) + bound(
            scale, torch.float64, self._positions
        )

    def check_weights(self, model: Llama, *, gradients: bool = False) -> None:
        """Compare every parameter of this rank, or its gradient."""
        for name, parameter in model.named_parameters():
            result, placement = parameter.grad if gradients else parameter, placement_of(parameter)
            assert result is not None, name
            times = sum(map(len, sum(placement.held, ()))) / placement.shape[placement.dim]
            assert times > 1 or not placement.partial or model.grid.tensor.size == 1, name
            part = partial(placement.take, rank=model.grid.tensor.rank)
            self.check(checkpoint_name(name), result, part)


def text(case: Case, lengths: Sequence[int]) -> list[list[int]]:
    """Return random sequences of these lengths."""
    return (
        [row.tolist() for row in case.tokens(sum(lengths)).split(list(lengths))] if lengths else []
    )


# Llama.forward

AXES = (
    "ring, ulysses",
    "tp",
    "dp",
    "ulysses, ring",
    "ring, tp",
    "tp, ulysses",
    "dp, ring",
    "ring, tp, ulysses",
)


LENGTH = "tokens.seq_len"


def tokens_of(drawn: Values) -> tuple[int, int]:
    """Return the first position at which a document may begin, and the end of all positions."""
    return 0, sharding_of(drawn, sequence_ranks(drawn), LENGTH).end


def expected(
    case: Case, tokens: Tensor, upstream: Tensor, positions: list[int], mask: Values
) -> Expected:
    """Return the expected logits, and the gradients of sum(logits * upstream) by all weights.

    `positions` are the global positions of the tokens (B, S); `mask` has the arguments of `Mask`.
    """
    seen = {"positions": positions, **mask}

    def run(rounding: Any, weights: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        logits = reference.llama(tokens, weights, rounding=rounding, **case.options(), **seen)
        return (logits * upstream).sum(), {"logits": logits}

    key = (contents(tokens, upstream), repr(seen))
    ends: dict[str, Any] = {"tokens": tokens.shape[1], "positions": max(positions, default=0) + 1}
    return Expected("llama forward", case, run, key, **ends)


def forwarded(case: Case, model: Llama, drawn: Values) -> Call:
    """Return the call of a model; each replica has its own sequences."""
    sharding = sharding_of(drawn, model.grid.sequence.size, LENGTH)
    whole = case.tokens(drawn["tokens.batch"], drawn[LENGTH])
    tokens = own(model, sharding, whole).to(model.grid.everyone.device)
    given = {"tokens": tokens, "sharding": sharding, "mask": sp.Mask(**mask_of(drawn))}
    return Call(model, given, partial(judge_logits, case, model, whole, given, drawn))


def own(model: Llama, sharding: sp.Sharding, x: Tensor) -> Tensor:
    """Return this rank's part of a tensor (B, S, ...) of all replicas."""
    replicas = model.grid.replicas
    return sharding.shard(x.tensor_split(replicas.size)[replicas.rank], model.grid.sequence.rank, 1)


def judge_logits(
    case: Case, model: Llama, whole: Tensor, given: Values, drawn: Values, logits: Tensor
) -> None:
    """Compare this rank's logits, and the gradients of all of its weights."""
    shape, dtype = (*whole.shape, case.vocab), str(logits.dtype).removeprefix("torch.")
    upstream = normal(drawn["seed"], shape, dtype).double()
    wanted = expected(case, whole, upstream, ascending(given["sharding"]), mask_of(drawn))

    def part(x: Tensor) -> Tensor:
        return own(model, given["sharding"], x).tensor_split(model.grid.tensor.size, -1)[
            model.grid.tensor.rank
        ]

    wanted.check("logits", logits, part)
    model.zero_grad()
    logits.backward(part(upstream).to(logits))
    reduce_gradients(model.parameters(), data=model.grid.data, tensor=model.grid.tensor)
    wanted.check_weights(model, gradients=True)


SUBJECTS = [
    on_model(
        "llama.Llama.forward",
        architecture("config", ARCHITECTURE)
        | meshes(*AXES)
        | {
            "config.dtype": values(*DTYPES),
            "tp_sp": values(False, True),
            "grid.scheme": values(*SCHEMES),
            "tokens.batch": spans((2, 3), (1, 1)),
            "tokens.seq_len": spans((5, 12), (1, 1), (2, 4), (33, 40)),
            "sharding.layout": values(*EVERY_LAYOUT),
            "sharding.start": spans((0, 0), (1, 9), (1000, 100_000)),
            "mask.causal": values(True, False),
            "mask.window": {
                "none": lambda c, v: None,
                "1": lambda c, v: 1,
                "2 to 30": lambda c, v: c.randint(2, 30),
            },
            "mask.documents": documents(tokens_of, (1, 1), (2, 6), (7, 64)),
        }
        | SITUATIONS,
        forwarded,
        together=({"mesh.axes": "tp", "mesh.lengths": "3 along the last"},),
        covers=tuple(
            f"llama.Llama{name}"
            for name in (
                "",
                ".fill",
                ".begin",
                ".one_pass",
                ".check",
                ".lengths",
                ".hidden",
                ".logits",
                ".attend",
                ".spread",
            )
        ),
        outside={
            **dict.fromkeys(
                ("hidden", "lengths", "one", "count", "q", "k", "v", "kv_sharding", "x", "compare"),
                "`forward` makes it",
            ),
            "read": "every row fills its model",
            "dtype": "config.dtype",
            "grid": "mesh.axes",
            "saving": "`backward` makes it",
        },
    ),
]
