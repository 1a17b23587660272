"""Declare the domain of self-attention and transformer block: schemes, masks and shardings."""

from functools import partial
from random import Random
from typing import Any

from oracle import reference
from oracle.strategies import SLOPES, slopes
from torch import Tensor

import sp_core as sp
from domains import layers, numeric
from domains.declared import Call, Parts, Values, spans, values
from domains.layers import COMMON, LOWER, TOKENS, WIDTHS, Kind, Weights, precision
from domains.masks import documents
from domains.situations import on_group
from sp_core.schemes import SCHEMES

ROPE_BASE = 100.0
OWN_SCHEME = partial(sp.ring_attention)
"""Stands for a user's own scheme."""


def num_heads(chance: Random, drawn: Values, *, group: tuple[int, int]) -> int:
    """Return a number of query heads, a multiple of the number of key and value heads."""
    return (drawn["num_kv_heads"] or chance.randint(1, 3)) * chance.randint(*group)


def hidden(chance: Random, drawn: Values, *, least: int, most: int) -> int:
    """Return a model dim. If it decides the heads' dim, that dim is even, as `Rope` requires."""
    step = 2 * drawn["num_heads"] if drawn["head_dim"] is None else 1
    lowest = -(-max(least, 3) // step)
    return step * chance.randint(lowest, max(lowest, most // step))


def tokens_of(drawn: Values) -> tuple[int, int]:
    """Return the first position that a token may have, and the end of all positions."""
    end = layers.sharding_of(drawn, drawn["comm.ranks"]).end
    return min(drawn["sharding.start"], end), end


MASK: dict[str, Parts] = {
    "mask.causal": values(True, False),
    "mask.window": {"none": lambda c, v: None} | spans((1, 1), (2, 9), (10, 200)),
    "mask.documents": documents(tokens_of, (1, 1), (2, 6), (7, 64), (65, 300)),
}
ATTENTION: dict[str, Parts] = {
    "x.magnitude": TOKENS["x.magnitude"]
    | {
        "large": lambda c, v: {8: 30.0, 4: 10.0, 2: 2.0}[precision(v).itemsize],
    },
    "num_kv_heads": {"default": lambda c, v: None} | spans((1, 1), (2, 3), (4, 6)),
    "num_heads": {
        "as many": partial(num_heads, group=(1, 1)),
        "2 to 3 times": partial(num_heads, group=(2, 3)),
        "5 to 7 times": partial(num_heads, group=(5, 7)),
    },
    "head_dim": {
        "default": lambda c, v: None,
        "2 to 16": lambda c, v: 2 * c.randint(1, 8),
        "odd": lambda c, v: 2 * c.randint(0, 4) + 1,
        "18 to 64": lambda c, v: 2 * c.randint(9, 32),
        "66 to 130": lambda c, v: 2 * c.randint(33, 65),
    },
    "hidden": {
        "3 to 32": partial(hidden, least=3, most=32),
        "65 to 130": partial(hidden, least=65, most=130),
    },
    "attention": {"default": lambda c, v: "default", "the user's own": lambda c, v: OWN_SCHEME}
    | {name: lambda c, v, name=name: SCHEMES[name] for name in SCHEMES},
    "rope": {
        "none": lambda c, v: None,
        "given": lambda c, v: None if dim_of(v) % 2 else sp.Rope(dim_of(v), ROPE_BASE),
    },
    "bias": values(True, False),
    "softcap": values(None, 0.5, 20.0),
    "sinks": values(False, True),
    "alibi": {
        str(first): lambda c, v, first=first: slopes(v["num_heads"], first)  # type: ignore[misc]
        for first in (None, *SLOPES)
    },
}


def dim_of(drawn: Values) -> int:
    """Return the dim of a head."""
    return int(drawn["head_dim"] or drawn["hidden"] // drawn["num_heads"])


def mask_of(drawn: Values) -> Values:
    """Return the drawn arguments of the mask."""
    return {name: drawn[f"mask.{name}"] for name in ("causal", "window", "documents")}


def terms_of(drawn: Values) -> Values:
    """Return the terms of the logits, as the reference takes them."""
    return {name: drawn[name] for name in ("softcap", "alibi")}


def check_weights(weights: Weights, drawn: Values) -> None:
    """Check that a layer has sinks and biases exactly if they were drawn."""
    assert any(name.endswith("sinks") for name in weights) == drawn["sinks"]
    assert any(name.endswith("proj.bias") for name in weights) == drawn["bias"]


def attended(
    x: Tensor, weights: Weights, drawn: Values, positions: Tensor, rounding: Any
) -> Tensor:
    """Return the reference's self-attention of the whole sequence."""
    check_weights(weights, drawn)
    seen = reference.visible(positions, positions, **mask_of(drawn))
    base = None if drawn["rope"] is None else ROPE_BASE
    heads = drawn["num_heads"]
    return rounding(
        reference.self_attention(
            *(rounding(x), weights, heads, positions, base, seen),
            rounding=rounding,
            **terms_of(drawn),
        )
    )


def block(x: Tensor, weights: Weights, drawn: Values, positions: Tensor, rounding: Any) -> Tensor:
    """Return the output of the reference's transformer block on the whole sequence."""
    check_weights(weights, drawn)
    layers.check_fed_forward(weights, drawn, "feed_forward.")
    kept: tuple[Tensor | float, ...] = (1.0, 1.0)
    if p := drawn["dropout"] * drawn["(training)"]:
        places = [range(x.shape[0]), positions.tolist(), range(x.shape[2])]
        kept = tuple(
            (numeric.uniform(2 * drawn["seed.value"] + place, places) >= p).double() / (1 - p)
            for place in (0, 1)
        )
    return reference.transformer_block(
        x,
        weights,
        num_heads=drawn["num_heads"],
        norm=drawn["norm"],
        rope_base=None if drawn["rope"] is None else ROPE_BASE,
        positions=positions,
        **mask_of(drawn),
        **terms_of(drawn),
        kept=kept,
        rounding=rounding,
    )


def masked(kind: Kind, group: sp.Communicator, drawn: Values) -> Call:
    """Return a layer's call, with the mask in the call, in the constructor or in both, as drawn."""
    mask, other = sp.Mask(**mask_of(drawn)), sp.Mask(causal=not drawn["mask.causal"])
    ways = {"constructor": (mask, None), "call": (None, mask), "both": (other, mask)}
    made, called = ways[drawn.get("(mask)", "call")]
    return layers.on_ranks(kind, group, drawn | {"mask": made, "(call mask)": called})


HEADS = (
    "hidden",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "attention",
    "rope",
    "bias",
    "softcap",
    "sinks",
    "alibi",
)
BLOCK: dict[str, Parts] = {
    "ffn_hidden": values("default") | WIDTHS,
    "gated": values(False, True),
    **layers.CHUNK,
    "norm": values("layer", "rms"),
    "(mask)": values("call", "constructor", "both"),
    "dropout": values(0.0, 0.4),
    "(training)": values(True, False),
    "seed.value": {
        "none": lambda c, v: c.randint(0, 99) if v["dropout"] and v["(training)"] else None,
    }
    | spans((0, 99), (2**31, 2**40)),
}

MANY_OF_ONE_SIGN = {
    "comm.ranks": "1",
    "dtype": "float16",
    "(autocast)": "weights of two dtypes",
    "x.seq_len": "thousands",
    "x.upstream": "expanded",
    "hidden": "65 to 130",
    "mask.causal": "False",
}
"""A row whose tokens have nearly equal gradients of a norm's bias: their float16 sum stagnates."""
SATURATED = {"alibi": "8.0", "x.magnitude": "large", "mask.causal": "False", "hidden": "65 to 130"}
"""A row of parts that saturates the softmax: gradients are what is left over from 1 - 1."""
KINDS: tuple[tuple[Any, ...], ...] = (
    ({}, Kind(sp.SelfAttention, HEADS, attended, ("x", "sharding", "mask"))),
    (
        BLOCK,
        Kind(
            sp.TransformerBlock,
            (*HEADS, "ffn_hidden", "gated", "chunk", "norm", "mask", "dropout"),
            block,
            ("x", "sharding", "mask", "seed"),
        ),
        {"dropout": "0.4", "sharding.layout": "zigzag"},
    ),
)
SUBJECTS = [
    on_group(
        kind.made.__name__,
        TOKENS | ATTENTION | MASK | more | COMMON | LOWER,
        partial(masked, kind),
        covers=(f"{kind.made.__name__}.forward",),
        together=(
            {"rope": "given", "sharding.layout": "zigzag"},
            MANY_OF_ONE_SIGN,
            SATURATED,
            *dropped,
        ),
    )
    for more, kind, *dropped in KINDS
]
