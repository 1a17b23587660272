"""The domain of a LLaMA over a mesh: logits and all gradients against the dense float64 model."""

from __future__ import annotations

from functools import partial
from typing import Any

from llama_cases import Case
from oracle import reference
from oracle.attention_check import ascending
from oracle.once import contents
from oracle.strategies import EVERY_LAYOUT
from torch import Tensor

import sp_core as sp
from domains import models
from domains.blocks import mask_of
from domains.declared import Call, Values, normal, spans, values
from domains.layers import sharding_of
from domains.masks import documents
from domains.models import ARCHITECTURE, DTYPES, SCHEMES, Expected, architecture, meshes, on_model
from sp_core.llama import Llama
from sp_core.nn.gradients import reduce_gradients

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
    """Return the first position at which a document may begin, and the end of all."""
    return 0, sharding_of(drawn, models.sequence_ranks(drawn), LENGTH).end


def expected(
    case: Case, tokens: Tensor, upstream: Tensor, positions: list[int], mask: Values
) -> Expected:
    """Return logits, and the gradients of their product with `upstream`."""
    seen = {"positions": positions, **mask}

    def run(rounding: Any, weights: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        logits = reference.llama(tokens, weights, rounding=rounding, **case.options(), **seen)
        return (logits * upstream).sum(), {"logits": logits}

    key = (contents(tokens, upstream), repr(seen))
    ends: dict[str, Any] = {"tokens": tokens.shape[1], "positions": max(positions, default=0) + 1}
    return Expected("llama forward", case, run, key, **ends)


def forward(case: Case, model: Llama, drawn: Values) -> Call:
    """Call a model; each replica has its own sequences."""
    sharding = sharding_of(drawn, model.grid.sequence.size, LENGTH)
    whole = case.tokens(drawn["tokens.batch"], drawn[LENGTH])
    tokens = own(model, sharding, whole).to(model.grid.everyone.device)
    given = {"tokens": tokens, "sharding": sharding, "mask": sp.Mask(**mask_of(drawn))}
    return Call(model, given, partial(judge, case, model, whole, given, drawn))


def own(model: Llama, sharding: sp.Sharding, x: Tensor) -> Tensor:
    """Return this rank's part of a tensor (B, S, ...) of all replicas."""
    replicas = model.grid.replicas
    return sharding.shard(x.tensor_split(replicas.size)[replicas.rank], model.grid.sequence.rank, 1)


def judge(
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
        | models.SITUATIONS,
        forward,
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
                ("hidden", "lengths", "one", "count", "q", "k", "v", "kv_sharding", "x"),
                "`forward` makes it",
            ),
            "read": "every row fills its model",
            "dtype": "config.dtype",
            "grid": "mesh.axes",
            "saving": "`backward` makes it",
        },
    ),
]
