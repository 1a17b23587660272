"""Declare the domain of growing sequences: decoders, generation and unequal prefills."""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from random import Random
from typing import Any

import torch
from llama_cases import Case
from oracle import reference
from oracle.once import once
from torch import Tensor

from domains import models
from domains.config import SAMPLING
from domains.declared import Call, Parts, Values, spans, values
from domains.models import FEW_CALLS, SCHEMES, SMALL, Expected, architecture, meshes, on_model
from domains.situations import CALLS, LATE_SECONDS
from sp_core.llama import Decoder, Llama, Sampling, byte_tokenizer, generate, prefill_unequal
from sp_core.llama.unequal import work_of
from sp_core.scheduling import POLICIES, Assignment


def new(chance: Random, drawn: Values, *, low: int, high: int) -> list[int]:
    """Draw how many tokens each sequence gets, at least one in all; the last none if `low` is 0."""
    found = [chance.randint(low, high) for _ in range(drawn["room.sequences"])]
    found[-1] *= low > 0
    return found if any(found) else [1, *found[1:]]


def last_logits(
    what: str, case: Case, sequences: Sequence[Sequence[int]], dtype: str = ""
) -> Expected:
    """Return the expected logits after each sequence's last token, computed one by one."""

    def run(rounding: Any, weights: dict[str, Tensor]) -> tuple[None, dict[str, Tensor]]:
        rows = [
            reference.llama(torch.tensor([x]), weights, rounding=rounding, **case.options())[0, -1]
            for x in sequences
        ]
        none = torch.empty(0, case.vocab, dtype=torch.float64)
        return None, {"logits": torch.stack(rows) if rows else none}

    return Expected(
        what, case, run, repr(sequences), tokens=max(map(len, sequences), default=0), dtype=dtype
    )


def decoder(name: str, case: Case, model: Llama, drawn: Values) -> Call:
    """Return a decoder's call. The decoder may hold sequences; each call adds the same tokens."""
    calls, new = CALLS[drawn["(call)"]], models.text(case, drawn["tokens"])
    before = [0 if drawn["(history)"] == "none" else 3 + number % 2 for number in range(len(new))]
    old = models.text(case, before)
    room = [
        len(past) + calls * len(more) + drawn["room.spare"]
        for past, more in zip(old, new, strict=True)
    ]
    model.config = replace(model.config, max_position_embeddings=max(room))
    made = Decoder(model, room, micro_batches=drawn["micro_batches"])
    if drawn["(history)"] == "prefill":
        made.prefill(old)
    if drawn["(history)"] == "prefill and decode":
        made.prefill([past[:-1] for past in old])
        made.decode([past[-1:] for past in old])
    given = {"tokens": new}

    def judge(logits: Tensor) -> None:
        both = zip(old, given["tokens"], strict=True)
        sequences = [past + calls * list(more) for past, more in both if more]
        last_logits("llama decoder", case, sequences).check("logits", logits)

    return Call(getattr(made, name), given, judge)


PROMPTS: dict[str, Parts] = {
    "model.stops": {"none": lambda c, v: (), "some": lambda c, v: tuple(range(c.randint(2, 6)))},
    "tp_sp": values(False, True),
    "grid.scheme": values(*SCHEMES),
    "prompts.count": spans((2, 3), (0, 0), (1, 1), (7, 9)),
    "prompts.lengths": values("unequal", "one token", "equal", "long"),
    "max_tokens": spans((2, 4), (0, 0), (1, 1), (8, 10)),
    "stop": {
        "default": lambda c, v: None,
        "none": lambda c, v: (),
        "some": lambda c, v: tuple(range(c.randint(2, 6))),
        "all": lambda c, v: tuple(range(400)),
    },
    "stop_strings": {
        "a character": lambda c, v: (chr(c.randint(1, 6)),),
        "none": lambda c, v: (),
        "several": lambda c, v: ("never", *map(chr, c.sample(range(1, 9), 3))),
        "two characters": lambda c, v: tuple(
            f"{chr(a)}{chr(b)}" for a in range(48) for b in range(48)
        ),
    },
    "tokenizer": {
        "of bytes": lambda c, v: byte_tokenizer(),
        "with special tokens": lambda c, v: with_special_tokens(),
    },
    "on_token": values("none", "recorded"),
}


def with_special_tokens() -> Any:
    """Return a byte tokenizer with some bytes as special tokens, which decoded texts leave out."""
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens([tokenizer.id_to_token(token) for token in range(1, 9)])
    return tokenizer


def texts(case: Case, drawn: Values, parameter: str) -> list[list[int]]:
    """Return prompts or sequences of the lengths that were drawn."""
    chance, count = Random(drawn["seed"]), drawn[f"{parameter}.count"]
    most = case.config.max_position_embeddings - drawn.get("max_tokens", 0)
    bounds = {"unequal": (1, 9), "one token": (1, 1), "equal": (4, 4), "long": (most, most)}
    return models.text(
        case, [chance.randint(*bounds[drawn[f"{parameter}.lengths"]]) for _ in range(count)]
    )


def generated(case: Case, model: Llama, drawn: Values) -> Call:
    """Return the call of `generate`; replicas take shares of the prompts."""
    seen: list[tuple[int, int]] = []
    given = {
        "model": model,
        "prompts": texts(case, drawn, "prompts"),
        "max_tokens": drawn["max_tokens"],
        "sampling": Sampling(*(drawn[f"sampling.{name}"] for name in SAMPLING)),
        **{name: drawn[name] for name in ("stop", "stop_strings", "tokenizer")},
        "on_token": None if drawn["on_token"] == "none" else lambda *what: seen.append(what),
    }
    judge = partial(judge_generated, case, given, seen, CALLS[drawn["(call)"]])
    return Call(generate, given, judge)


def judge_generated(
    case: Case,
    given: Values,
    seen: list[tuple[int, int]],
    calls: int,
    results: Sequence[Sequence[int]],
) -> None:
    """Compare all tokens with the reference's, and with those passed to `on_token`."""
    stops = case.stops if given["stop"] is None else given["stop"]
    rest = (given["max_tokens"], given["sampling"] or Sampling(), stops, given["stop_strings"])
    wanted = [
        once(
            ("generate", case, tuple(prompt), number, rest),
            partial(continued, case, prompt, number, *rest),
        )
        for number, prompt in enumerate(given["prompts"])
    ]
    assert results == wanted
    if given["on_token"] is not None:
        replicas = given["model"].grid.replicas
        own = torch.arange(len(wanted)).tensor_split(replicas.size)[replicas.rank].tolist()
        steps = range(given["max_tokens"])
        assert (
            seen
            == [(n, wanted[n][step]) for step in steps for n in own if step < len(wanted[n])]
            * calls
        )


def continued(
    case: Case,
    prompt: Sequence[int],
    number: int,
    max_tokens: int,
    sampling: Sampling,
    stops: Sequence[int],
    strings: Sequence[str],
) -> list[int]:
    """Return a prompt's new tokens, each chosen from the logits of the whole sequence so far."""
    random, found = sampling.random(number), list[int]()
    for _ in range(max_tokens):
        tokens = torch.tensor([[*prompt, *found]])
        logits = reference.llama(tokens, case.kept_weights(), **case.options())[0, -1]
        found.append(sampling.choose(logits, random))
        said = bytes(token for token in found if token < 256).decode(errors="replace")
        if found[-1] in stops or any(text in said for text in strings):
            break
    return found


def planned(drawn: Values, lengths: Sequence[int], size: int, case: Case) -> Assignment:
    """Return the plan of the drawn policy, or one made by hand."""
    policy, numbers = drawn["plan.policy"], tuple(range(len(lengths)))
    if policy not in POLICIES:
        shared, waiting = (numbers, ()) if policy == "all shared" else ((), numbers[::-1])
        return Assignment(tuple(lengths), shared, ((),) * size, waiting)
    extra = {"tolerance": drawn["plan.tolerance"]} if policy in ("balanced", "dynamic") else {}
    return POLICIES[policy](lengths, size, work_of(case.config), **extra)


def unequal(case: Case, model: Llama, drawn: Values) -> Call:
    """Return the call of `prefill_unequal`; one rank may be late in each pass."""
    ring, sequences = model.grid.sequence, texts(case, drawn, "sequences")
    if ring.rank == drawn["seed"] % ring.size and drawn["(lateness)"] == "a rank in each pass":
        model.layers[0].register_forward_pre_hook(lambda *_: time.sleep(LATE_SECONDS))
        vars(ring)["counter"] = partial(slow_counter, ring.counter)
    plan = planned(drawn, list(map(len, sequences)), model.grid.sequence.size, case)
    given: Values = {
        "model": model,
        "sequences": sequences,
        "plan": plan,
        "pass_tokens": drawn["pass_tokens"],
    }

    def judge(logits: Tensor) -> None:
        last_logits("llama unequal", case, given["sequences"]).check("logits", logits)

    return Call(prefill_unequal, given, judge)


def slow_counter(make: Callable[[], Any]) -> Any:
    """Make a counter whose `take` sleeps, while the other ranks compute what they took."""
    counter = make()
    take = counter.take

    def late() -> Any:
        time.sleep(25 * LATE_SECONDS)
        return take()

    counter.take = late
    return counter


MODEL = architecture("model", SMALL | {"dtype": values(*models.DTYPES)})

STAGED = (
    "ring, ulysses",
    "tp",
    "pp",
    "pp, ring",
    "ring, tp",
    "pp, tp",
    "dp, ulysses",
    "pp, ring, tp",
)

ENDING = {
    "stop": "some",
    "max_tokens": "8 to 10",
    "prompts.count": "7 to 9",
    "sampling.temperature": "50.0",
    "prompts.lengths": "long",
}

SUBJECTS = [
    *(
        on_model(
            f"llama.Decoder.{name}",
            MODEL
            | meshes(*STAGED)
            | {
                "tp_sp": values(False, True),
                "grid.scheme": values(*SCHEMES),
                "room.sequences": spans((2, 3), (1, 1), (7, 9)),
                "room.spare": spans((0, 0), (1, 40)),
                "micro_batches": {**values(None, 1, 50), "2 to 3": lambda c, v: c.randint(2, 3)},
                "tokens": {
                    "unequal": partial(new, low=1, high=7),
                    "one each": partial(new, low=1, high=1),
                    "none for some": partial(new, low=0, high=2),
                    "many": partial(new, low=20, high=33),
                },
                "(history)": values("none", "prefill", "prefill and decode"),
            }
            | models.SITUATIONS,
            partial(decoder, name),
            covers=covers,
            together=({"tokens": "none for some", "(history)": "prefill"},),
        )
        for name, covers in (("prefill", ("llama.Decoder",)), ("decode", ()))
    ),
    on_model(
        "llama.generate",
        architecture("model", SMALL | {"dtype": values("float64", "float32")})
        | meshes(*STAGED, "dp, pp")
        | PROMPTS
        | {f"sampling.{name}": parts for name, parts in SAMPLING.items()}
        | FEW_CALLS,
        generated,
        allowed=("stop=too many", "stop_strings=too many", "on_token=gpipe", "on_token=contiguous"),
        together=(ENDING, ENDING | {"model.stops": "some", "stop": "none"}),
    ),
    on_model(
        "llama.prefill_unequal",
        MODEL
        | meshes("ring, ulysses", "tp", "ring", "ring, tp", "tp, ulysses")
        | FEW_CALLS
        | {
            "tp_sp": values(False, True),
            "grid.scheme": values(*SCHEMES),
            "sequences.count": spans((2, 4), (0, 0), (1, 1), (8, 12)),
            "sequences.lengths": values("unequal", "one token", "equal", "long"),
            "plan.policy": values(*POLICIES, "all shared", "all waiting"),
            "plan.tolerance": values(0.02, 10.0),
            "pass_tokens": values(1024, 1, 8),
            "(lateness)": values("no rank", "a rank", "a rank in each pass"),
        },
        unequal,
        allowed=("pass_tokens=far out",),
        together=tuple(
            {
                "(lateness)": "a rank in each pass",
                "sequences.count": "8 to 12",
                "pass_tokens": "8",
                "plan.policy": policy,
            }
            for policy in ("dynamic", "all waiting")
        ),
    ),
]
