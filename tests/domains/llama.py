"""The domain of a LLaMA over a mesh: logits and all gradients against the dense float64 model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from random import Random
from typing import Any

import torch
from llama_cases import Case
from oracle import reference
from oracle.attention_check import ascending
from oracle.strategies import LAYOUTS, LISTED, listed
from torch import Tensor

import sp_core as sp
from domains import models, situations
from domains.declared import Call, Parts, Subject, Values, spans, values
from domains.models import (
    ARCHITECTURE,
    DTYPES,
    SCHEMES,
    SITUATIONS,
    Expected,
    architecture,
    case_of,
    meshes,
)
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


def boundaries(chance: Random, drawn: Values, *, number: tuple[int, int]) -> tuple[int, ...]:
    """Document boundaries, empty documents included."""
    end = sharding_of(drawn, models.sequence_ranks(drawn)).end
    return (0, *sorted(chance.randint(0, end) for _ in range(chance.randint(*number) - 1)), end)


def documents() -> Parts:
    """Numbers of packed documents."""
    named = {"1": (1, 1), "2 to 6": (2, 6), "7 to 64": (7, 64)}
    found: Parts = {"none": lambda c, v: None}
    return {**found, **{name: partial(boundaries, number=number) for name, number in named.items()}}


FORWARD: dict[str, Parts] = {
    "config.dtype": values(*DTYPES),
    "tp_sp": values(False, True),
    "grid.scheme": values(*SCHEMES),
    "tokens.batch": spans((2, 3), (1, 1)),
    "tokens.seq_len": spans((5, 12), (1, 1), (2, 4), (33, 40)),
    "sharding.layout": values(*LAYOUTS, LISTED),
    "sharding.start": spans((0, 0), (1, 9), (1000, 100_000)),
    "mask.causal": values(True, False),
    "mask.window": {
        "none": lambda c, v: None,
        "1": lambda c, v: 1,
        "2 to 30": lambda c, v: c.randint(2, 30),
    },
    "mask.documents": documents(),
}


def sharding_of(drawn: Values, size: int) -> sp.Sharding:
    """Who owns which tokens, over so many ranks."""
    layout = listed if drawn["sharding.layout"] == LISTED else LAYOUTS[drawn["sharding.layout"]]
    return layout(drawn["tokens.seq_len"], size, drawn["sharding.start"])


def expected(
    case: Case, tokens: Tensor, upstream: Tensor, positions: list[int], mask: sp.Mask
) -> Expected:
    """Logits, and the gradients of their product with `upstream`."""
    seen = {
        "positions": positions,
        "causal": mask.causal,
        "window": mask.window,
        "documents": mask.documents,
    }

    def run(rounding: Any, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        def outputs(leaves: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
            logits = reference.llama(tokens, leaves, rounding=rounding, **case.options(), **seen)
            return (logits * upstream).sum(), {"logits": logits}

        return models.with_gradients(outputs, weights)

    key = (models.told(tokens, upstream), repr(seen))
    ends = {"tokens": tokens.shape[1], "positions": max(positions, default=0) + 1}
    return Expected("llama forward", case, run, key, **ends)


@contextmanager
def forward(comm: Any, drawn: Values) -> Iterator[Call]:
    """A model on a mesh; each replica has its own sequences."""
    case = case_of(drawn, drawn["config.dtype"])
    with situations.opened(comm, drawn, models.lengths(drawn)) as mesh:
        model = models.model_of(case, mesh, scheme=drawn["grid.scheme"], tp_sp=drawn["tp_sp"])
        sharding = sharding_of(drawn, model.grid.sequence.size)
        whole = case.tokens(drawn["tokens.batch"], drawn["tokens.seq_len"])
        mask = sp.Mask(drawn["mask.causal"], drawn["mask.window"], drawn["mask.documents"])
        given = {
            "tokens": own(model, sharding, whole).to(mesh.device),
            "sharding": sharding,
            "mask": mask,
        }
        yield Call(model, given, partial(judge, case, model, whole, given, drawn))


def own(model: Llama, sharding: sp.Sharding, x: Tensor) -> Tensor:
    """This rank's part of a tensor (B, S, ...) of all replicas."""
    replicas = model.grid.replicas
    return sharding.shard(x.tensor_split(replicas.size)[replicas.rank], model.grid.sequence.rank, 1)


def judge(
    case: Case, model: Llama, whole: Tensor, given: Values, drawn: Values, logits: Tensor
) -> None:
    """Compare this rank's logits, and the gradients of all of its weights."""
    random = torch.Generator().manual_seed(drawn["seed"])
    upstream = (
        torch.randn(*whole.shape, case.vocab, generator=random, dtype=torch.float64)
        .to(logits.dtype)
        .double()
    )
    wanted = expected(case, whole, upstream, ascending(given["sharding"]), given["mask"])

    def part(x: Tensor) -> Tensor:
        return own(model, given["sharding"], x).tensor_split(model.grid.tensor.size, -1)[
            model.grid.tensor.rank
        ]

    wanted.check("logits", logits, part)
    model.zero_grad()
    logits.backward(part(upstream).to(logits))
    reduce_gradients(model.parameters(), data=model.grid.data, tensor=model.grid.tensor)
    wanted.check_gradients(model)


MADE = dict.fromkeys(
    ("hidden", "lengths", "one", "count", "q", "k", "v", "kv_sharding", "x"), "`forward` makes it"
)
SUBJECTS = [
    Subject(
        "llama.Llama.forward",
        architecture("config", ARCHITECTURE) | meshes(*AXES) | FORWARD | SITUATIONS,
        forward,
        models.ranks,
        covers=tuple(
            f"llama.Llama{name}"
            for name in (
                "",
                ".fill",
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
            **MADE,
            "read": "every row fills its model",
            "dtype": "config.dtype",
            "grid": "mesh.axes",
        },
    ),
]
