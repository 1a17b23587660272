"""List wrong calls of decoders, generation, prefills and saves, with the error of each."""

import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from llama_cases import Wrapped
from refusals.calls import Table, Wrong, later
from refusals.kinds import halved, lowered, sending
from refusals.models import CASE, MIDDLE
from refusals.training import HALVES, converted
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import sp_core as sp
from sp_core.llama import Decoder, Llama, byte_tokenizer, generate, prefill_unequal
from sp_core.llama.pipeline import MicroBatch, loss_and_gradients
from sp_core.llama.train import backward
from sp_core.scheduling import Assignment, Work, balanced

with warnings.catch_warnings(action="ignore"):  # it uses torch.jit
    from torch.distributed.optim.apply_optimizer_in_backward import _apply_optimizer_in_backward

PLAN = balanced([3, 2], 2, Work(1, 1))
TEXTS = [[1, 2, 3], [4, 5]]


def generated(prompts: list[list[int]], count: int) -> Any:
    return lambda mesh, here: generate(CASE.model(mesh), prompts, max_tokens=count)


@later
def stopped(mesh: sp.Mesh, here: bool, *, tokenizer: Any = None, **pairs: Any) -> object:
    """Generate with one of two values for each argument: the second one on the last rank."""
    chosen = {name: pair[here] for name, pair in pairs.items()}
    return generate(CASE.model(mesh), [[1]], max_tokens=1, tokenizer=tokenizer, **chosen)


@later
def computed(
    tokens: Callable[[bool], torch.Tensor], mesh: sp.Mesh, here: bool, *, window: int = 0
) -> object:
    """Compute the logits of three tokens, with a mask whose window is wider on the last rank."""
    mask = sp.Mask(causal=True, window=1 + window * here)
    return CASE.model(mesh)(tokens(here), sharding=sp.Sharding.contiguous(3, 1), mask=mask)


def other_decoder(mesh: sp.Mesh, here: bool) -> object:
    model = CASE.model(mesh)
    long, short = Decoder(model, [3]), Decoder(model, [3])
    long.prefill([[1, 2]])
    short.prefill([[1]])
    return (short if here else long).decode([[3]])


@later
def decoded(tokens: Any, mesh: sp.Mesh, here: bool, **more: Any) -> object:
    decoder = Decoder(CASE.model(mesh), [3, 2], **more)
    decoder.prefill([[1, 2], []])
    return decoder.decode(tokens)


@later
def roomy(room: Any, mesh: sp.Mesh, here: bool, *, others: Any = None, **more: Any) -> object:
    """Make a decoder, with `others` as room on all but the last rank."""
    return Decoder(CASE.model(mesh), others if others and not here else room, **more)


def unequal(texts: list[list[int]], plan: Assignment) -> Any:
    """Return a call of `prefill_unequal`, with wrong sequences or plan on the last rank."""
    return lambda mesh, here: prefill_unequal(
        CASE.model(mesh), *((texts, plan) if here else (TEXTS, PLAN))
    )


def vast(mesh: sp.Mesh, here: bool) -> object:
    """Make a decoder of so many layers on the last rank that no memory holds their keys."""
    model = CASE.model(mesh)
    model.own_layers = range(2**50) if here else model.own_layers
    return Decoder(model, [3])


def reused(change: Callable[[Llama], object]) -> Wrong:
    """Change the model of a decoder on the last rank, then decode."""

    def use(mesh: sp.Mesh, here: bool) -> object:
        decoder = Decoder(CASE.model(mesh), [3, 2])
        decoder.prefill([[1, 2], []])
        change(decoder.model) if here else None
        return decoder.decode([[1], []])

    return sending(use)


def linear(model: Llama, name: str) -> None:
    """Replace a projection by a linear layer."""
    features, hidden = model.get_submodule(name).get_parameter("weight").shape
    model.set_submodule(name, nn.Linear(hidden, features, dtype=model.dtype))


def watched(model: Llama, name: str) -> None:
    """Register a hook on a part of a model."""
    model.get_submodule(name).register_forward_pre_hook(lambda part, given: None)


def stepping(model: Llama) -> None:
    """Let the backward step an optimizer of a weight."""
    _apply_optimizer_in_backward(torch.optim.SGD, model.norm.parameters(), {"lr": 1.0})


@later
def wrapped(wrap: Any, model: Llama) -> None:
    """Register a hook on a part of a layer, and put the layer inside another module."""
    watched(model, "layers.1.mlp.down_proj")
    model.layers[1] = wrap(model.layers[1])


CALLS: dict[str, Callable[[Llama], object]] = {
    "call": lambda model: model(CASE.tokens(1, 2), sharding=sp.Sharding.contiguous(4, 2)),
    "decoder": lambda model: Decoder(model, [2]),
    "generation": lambda model: generate(model, TEXTS, max_tokens=1),
    "unequal prefill": lambda model: prefill_unequal(model, TEXTS, PLAN),
    "backward": lambda model: backward(model, TEXTS),
    "step of micro-batches": lambda model: loss_and_gradients(
        model, [MicroBatch(x := CASE.tokens(1, 2), x, sp.Sharding.contiguous(4, 2))]
    ),
}
"""Calls of a model on two sequence ranks."""


EVERYWHERE: Table = {
    "ring": {
        "an empty prompt": (ValueError, "prompt 1 is empty", generated([[1], []], 4)),
        "too many positions": (
            ValueError,
            "exceeds the model's 128 positions",
            generated([[1]], 128),
        ),
        "a prompt beyond the vocabulary": (ValueError, "has 0..12", generated([[13]], 1)),
        "a prompt beyond whole numbers of 64 bits": (
            ValueError,
            f"token {2**70} was given; the vocabulary has 0..12",
            generated([[2**70]], 1),
        ),
        "a token beyond whole numbers of 64 bits": (
            ValueError,
            f"token {2**70} was given; the vocabulary has 0..12",
            sending(decoded([[1], [2**70]])),
        ),
        "a prompt below the vocabulary": (ValueError, "token -1 was given", generated([[-1]], 1)),
        "stop strings without a tokenizer": (
            ValueError,
            "without a tokenizer",
            stopped(stop_strings=([], ["a"])),
        ),
        "an empty stop string": (TypeError, "none of them empty", stopped(stop_strings=[[""]] * 2)),
        "a negative number of tokens": (ValueError, "max_tokens=-1", generated([[1]], -1)),
        "tokens without room": (
            sp.ShapeError,
            "sequence 0 has 2 tokens and room for 3",
            sending(decoded([[1, 2], [3]])),
        ),
        "tokens without room in the second micro-batch": (
            sp.ShapeError,
            "sequence 1 has 0 tokens and room for 2",
            sending(decoded([[1], [2, 3, 4]], micro_batches=2)),
        ),
        "more room than positions": (
            ValueError,
            "room of sequence 1 has 129 tokens; with 0 more it exceeds the model's 128 positions",
            roomy([128, 129]),
        ),
        "an unequal sequence longer than the positions": (
            ValueError,
            "sequence 1 has 129 tokens; with 0 more it exceeds the model's 128 positions",
            lambda mesh, here: prefill_unequal(
                CASE.model(mesh),
                [[1], [2] * 129],
                balanced([1, 129], mesh.size, Work(1, 1)),
            ),
        ),
        **{
            f"tokens {wrong}": (TypeError, "a list with a list of", sending(decoded(wrong)))
            for wrong in ([1, 2], [[1, 2.5], [3]], [[1], [3, True]])
        },
        **{
            f"room of {what}": (TypeError, f"room={room!r} was given; pass a list", roomy(room))
            for what, room in (
                ("a number", 5),
                ("half a token", [2.5]),
                ("text", "55"),
                ("fewer than no token", [3, -1]),
            )
        },
        "tokens of one sequence": (sp.ShapeError, "there are 2", sending(decoded([[1]]))),
        "no token to decode": (ValueError, "no token", sending(decoded([[], []]))),
    },
}
"""Calls that are wrong on every rank."""

ON_ONE_RANK: Table = {
    "ring": {
        **{
            f"{name} of a {what} that {how}": (
                TypeError,
                f": {name} {found}; needed is the",
                converted(
                    call,
                    partial(change, name=name),
                    case=replace(CASE, tied=name == "embed_tokens"),
                ),
            )
            for what, call in CALLS.items()
            for how, change, found, names in (
                (
                    "is replaced",
                    linear,
                    "is a Linear",
                    ("layers.0.self_attn.q_proj", "lm_head", "embed_tokens"),
                ),
                (
                    "has a hook",
                    watched,
                    "has hooks",
                    ("layers.1.mlp.down_proj", "layers.0.self_attn"),
                ),
            )
            for name in names
        },
        "a backward that steps an optimizer": (
            ValueError,
            "norm.weight has a hook on its gradient, which",
            converted(CALLS["backward"], stepping),
        ),
        **{
            f"a {how} layer with a hook in it": (
                TypeError,
                "layers.1.mlp.down_proj has hooks",
                converted(CALLS["call"], wrapped(wrap)),
            )
            for how, wrap in (
                ("compiled", partial(torch.compile, backend="eager")),
                ("recomputed", checkpoint_wrapper),
                ("wrapped", Wrapped),
            )
        },
        "another decoder": (
            sp.CollectiveMismatch,
            "decode([[3]]) after [1]",
            sending(other_decoder),
        ),
        "rows of another length": (
            sp.CollectiveMismatch,
            "pass_tokens=2",
            lambda mesh, here: prefill_unequal(CASE.model(mesh), TEXTS, PLAN, pass_tokens=1 + here),
        ),
        "rows of no token": (
            ValueError,
            "pass_tokens=0 was given",
            lambda mesh, here: prefill_unequal(
                CASE.model(mesh), TEXTS, PLAN, pass_tokens=int(not here)
            ),
        ),
        "room for fewer than no token, on one rank": (
            TypeError,
            "rank 1: room=[3, -1] was given",
            roomy([3, -1], others=[3, 1]),
        ),
        "more room than memory": (sp.RankError, "rank 1: ", vast),
        "other stop tokens": (sp.CollectiveMismatch, "[2], [])", stopped(stop=([1], [2]))),
        "other stop strings": (
            sp.CollectiveMismatch,
            "['b'])",
            stopped(stop_strings=(["a"], ["b"]), tokenizer=byte_tokenizer()),
        ),
        "another room": (sp.CollectiveMismatch, "Decoder([3, 2]", roomy([3, 2], others=[3, 1])),
        "a plan for other lengths": (
            sp.ShapeError,
            "Make a plan for these",
            unequal([[1], *TEXTS], PLAN),
        ),
        "a plan for another order": (
            sp.ShapeError,
            "sequence 0 has 2 tokens, in the plan 3",
            unequal(TEXTS[::-1], PLAN),
        ),
        "tokens of a plan in another order": (
            sp.CollectiveMismatch,
            "prefill_unequal(2 sequences and a plan #",
            unequal([TEXTS[0][::-1], TEXTS[1]], PLAN),
        ),
        "a plan for more ranks": (
            sp.ShapeError,
            "Make a plan for these",
            unequal(TEXTS, balanced(PLAN.lengths, 3, Work(1, 1))),
        ),
        "a sequence without tokens": (
            ValueError,
            "sequence 1 is empty",
            unequal([TEXTS[0], []], Assignment((3, 0), (), ((0,), (1,)))),
        ),
        "a sequence beyond the vocabulary": (
            ValueError,
            "vocabulary has 0..12",
            unequal([[13] * 3, TEXTS[1]], PLAN),
        ),
    },
    "tp": {
        "other tokens on a tensor rank": (
            sp.CollectiveMismatch,
            "tensor ranks have other tokens",
            computed(lambda here: (CASE.tokens(1, 3) + here) % CASE.vocab),
        ),
        "one other token of many on a tensor rank": (
            sp.CollectiveMismatch,
            "tensor ranks have other tokens",
            computed(lambda here: torch.ones(600, 3).long().index_fill(0, MIDDLE, 1 + here)),
        ),
        "another mask on a tensor rank": (
            sp.CollectiveMismatch,
            "tensor ranks have other tokens",
            computed(lambda _: CASE.tokens(1, 3), window=1),
        ),
        "a model converted in part under a decoder": (
            sp.DtypeError,
            "rank 1: the parameters have the dtypes ['torch.float32', 'torch.float64']",
            reused(lambda model: model.layers[-1].float()),
        ),
        "a norm converted under a decoder": (
            sp.DtypeError,
            "rank 1: the parameters have the dtypes ['torch.float32', 'torch.float64']",
            reused(lambda model: model.norm.float()),
        ),
        "a decoder of a half type under autocast to another": (
            sp.DtypeError,
            f"rank 1: {HALVES}",
            lowered(lambda mesh, here: Decoder(CASE.model(mesh).half(), [3]).prefill([[1]])),
        ),
        "a decoder under autocast": (
            sp.CollectiveMismatch,
            "autocast=torch.bfloat16",
            lowered(decoded([[1], []])),
        ),
        "a decoder under autocast to two half types": (
            sp.CollectiveMismatch,
            "autocast=torch.float16",
            halved(decoded([[1], []])),
        ),
        "a hook on a projection of a decoder": (
            TypeError,
            "rank 1: layers.1.mlp.down_proj has hooks",
            reused(lambda model: watched(model, "layers.1.mlp.down_proj")),
        ),
    },
    "dp": {
        "a hook on a projection of one replica": (
            TypeError,
            "layers.1.mlp.down_proj has hooks",
            converted(CALLS["generation"], partial(watched, name="layers.1.mlp.down_proj")),
        ),
        "unequal sequences on replicas": (
            sp.ShapeError,
            "leave dp out",
            lambda mesh, here: prefill_unequal(
                CASE.model(mesh), TEXTS, balanced([3, 2], 1, Work(1, 1))
            ),
        ),
    },
    "pp": {
        "a model converted under a decoder": (
            sp.DtypeError,
            "rank 1: the model has been converted to torch.float32",
            reused(nn.Module.float),
        ),
        "unequal sequences on stages": (
            sp.ShapeError,
            "leave pp out",
            lambda mesh, here: prefill_unequal(
                CASE.model(mesh), TEXTS, balanced([3, 2], 1, Work(1, 1))
            ),
        ),
        "no micro-batch for a decoder": (
            sp.ShapeError,
            "micro_batches=0",
            roomy([3], micro_batches=0),
        ),
        "no micro-batch for a decoder of one stage": (
            sp.ShapeError,
            "rank 1: micro_batches=0",
            lambda mesh, here: Decoder(CASE.model(mesh), [3], micro_batches=int(not here)),
        ),
    },
}
"""Calls that are wrong on the last rank only, or wrong only with several ranks."""
