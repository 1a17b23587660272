"""Declare the domains of `Rope`, `dropout`, `local_attention` and `merge`, which need no ranks."""

from collections.abc import Sequence
from functools import partial
from random import Random
from typing import Any

import numpy as np
import torch
from oracle import reference
from oracle.collective_cases import MEMORIES
from oracle.strategies import DTYPES, STORAGES, placed, slopes
from torch import Tensor

import sp_core as sp
from domains import attention, masks
from domains.declared import Call, Parts, Values, leaf, near, normal, pure, same, spans, values
from sp_core.attention import accumulation_dtype
from sp_core.mask import plan_blocks
from sp_core.testing import device
from sp_core.testing.tolerance import bound

SHAPE: dict[str, Parts] = {
    "x.batch": spans((2, 3), (1, 1), (0, 0)),
    "x.seq_len": spans((2, 12), (1, 1), (0, 0), (101, 140)),
    "x.heads": spans((1, 3), (0, 0), (4, 9)),
    "x.dtype": values(*DTYPES),
    "x.memory": values(*MEMORIES),
    "x.upstream": values(*MEMORIES),
}
POSITIONS: Parts = {
    "from 0": lambda c, v: range(v["x.seq_len"]),
    "far out": lambda c, v: range(10**6 - 7, 10**6 - 7 + v["x.seq_len"]),
    "beyond int32": lambda c, v: range(2**33 - 7, 2**33 - 7 + v["x.seq_len"]),
    "a stride": lambda c, v: range(3, 3 + 5 * v["x.seq_len"], 5),
    "any list": lambda c, v: [c.randint(0, 10**6) for _ in range(v["x.seq_len"])],
    "int64": lambda c, v: torch.tensor(
        [c.randint(0, 10**6) for _ in range(v["x.seq_len"])], dtype=torch.int64
    ),
    "int32, expanded": lambda c, v: torch.tensor([c.randint(0, 10**6)], dtype=torch.int32).expand(
        v["x.seq_len"]
    ),
    "every second": lambda c, v: torch.arange(c.randint(0, 99), c.randint(10**3, 10**4))[
        : 2 * v["x.seq_len"] : 2
    ],
}


# Rope


YARN = {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 4096}
SCALINGS: dict[str, dict[str, Any] | None] = {
    "none": None,
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "linear, by its old name": {"type": "linear", "factor": 2},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "yarn": YARN,
    "yarn, with other turns, not rounded": {
        **YARN,
        "beta_fast": 20,
        "beta_slow": 2.5,
        "truncate": False,
        "attention_factor": None,
    },
    "yarn, with a length": {**YARN, "attention_factor": 0.7},
    "yarn, with two weights": {**YARN, "mscale": 0.7, "mscale_all_dim": 0.4},
    "yarn, of few tokens": {**YARN, "original_max_position_embeddings": 7, "factor": 0.5},
}


def rope(drawn: Values) -> Call:
    """Return the call of `Rope`. Before the judged rotation there is one at other positions."""
    dim, base, scaling = drawn["head_dim"], drawn["base"], SCALINGS[drawn["scaling"]]
    given = {"head_dim": dim, "base": base, "scaling": scaling}
    kind = (scaling or {}).get("rope_type", (scaling or {}).get("type"))
    known = None if kind in (None, "default") else {**(scaling or {}), "rope_type": kind}
    length = reference.llama_amplitude(known)
    shape = [drawn[f"x.{name}"] for name in ("batch", "seq_len", "heads")]
    x = leaf(normal(drawn["seed"], (*shape, dim), drawn["x.dtype"]), drawn["x.memory"])
    upstream = leaf(
        normal(drawn["seed"] + 1, x.shape, drawn["x.dtype"]), drawn["x.upstream"], learns=False
    )
    places = [int(p) for p in drawn["positions"]]

    def judge(made: sp.Rope) -> None:
        frequencies = reference.llama_frequencies(dim, base, known)
        made.apply(x, [p + 1 for p in places])
        out = made.apply(x, drawn["positions"])
        (grad,) = torch.autograd.grad(out, x, upstream)
        for name, found, of, sign in (("rope", out, x, 1), ("rope gradient", grad, upstream, -1)):
            wide = of.detach().cpu().double() * length
            sizes = (
                torch.stack([half.abs() for half in wide.chunk(2, -1)]).sum(0).repeat(1, 1, 1, 2)
            )
            angle = 1.0 + max(places, default=0) * max(frequencies)
            allowed = bound(sizes, x.dtype) + bound(sizes * angle, torch.float64)
            assert found.dtype == x.dtype
            near(
                name,
                found,
                reference.rotate(wide, [sign * p for p in places], frequencies),
                allowed,
            )

    return Call(sp.Rope, given, judge)


# dropout


def mixed(z: np.ndarray) -> np.ndarray:
    """Apply SplitMix64's finalizer to unsigned 64-bit numbers."""
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def uniform(seed: int, places: Sequence[Sequence[int]]) -> Tensor:
    """Return a random number in [0, 1) for each element of a part of a tensor.

    `places` has for each dimension the global indices of the part. The result has the counts of
    these as its shape. An element's number is the seed, mixed with one index after the other.
    """
    state = mixed(np.array([seed], dtype=np.uint64) + np.uint64(0x9E3779B97F4A7C15))[0]
    for place in places:
        state = mixed(state[..., None] + np.array([int(n) for n in place], dtype=np.uint64))
    return torch.from_numpy((state & np.uint64(2**53 - 1)).astype(np.float64) / 2**53)


def dropped(drawn: Values) -> Call:
    """Return the call of `dropout`."""
    shape = [drawn["x.batch"], drawn["x.seq_len"], *[2] * drawn["x.middle"], drawn["x.width"]]
    x = leaf(normal(drawn["seed"], shape, drawn["x.dtype"]), drawn["x.memory"])
    upstream = leaf(
        normal(drawn["seed"] + 1, shape, drawn["x.dtype"]), drawn["x.upstream"], learns=False
    )
    given = {name: drawn[name] for name in ("p", "positions", "features", "training")}
    features = range(shape[-1]) if given["features"] is None else given["features"]
    places = [range(shape[0]), given["positions"], *[range(2)] * drawn["x.middle"], features]
    stay = uniform(drawn["seed.value"], places) >= given["p"]
    factor = 1 / (1 - given["p"]) if given["training"] else 1.0
    stay = stay if given["training"] else torch.ones_like(stay)

    def judge(out: Tensor) -> None:
        (grad,) = torch.autograd.grad(out, x, upstream)
        for name, found, of in (("dropout", out, x), ("dropout gradient", grad, upstream)):
            wanted = torch.where(stay, of.detach().cpu().double() * factor, 0.0)
            assert found.dtype == x.dtype
            near(name, found, wanted, bound(wanted, x.dtype))

    return Call(sp.dropout, {"x": x, "seed": drawn["seed.value"], **given}, judge)


# local_attention


def attended(drawn: Values) -> Call:
    """Return the call of `local_attention`, on positions or on whole sequences."""
    chance, seed, dtype = Random(drawn["seed"]), drawn["seed"], drawn["q.dtype"]
    lengths = {"q_positions": drawn["(length)"], "kv_positions": drawn["(kv_length)"]}
    where = {
        name: masks.positions(chance, length, drawn[name])
        for name, length in lengths.items()
        if drawn[name] != "left out"
    }
    known = drawn["kv_documents"] is not None or where or len({*lengths.values()}) == 1
    mask = sp.Mask(**masks.given_to(drawn)) if drawn["mask"] == "given" and known else None
    places = {name: [int(p) for p in where.get(name, range(n))] for name, n in lengths.items()}
    (queries, keys), heads = map(len, places.values()), drawn["k.heads"]
    shape = (drawn["q.batch"], queries, heads * drawn["q.group"], drawn["q.head_dim"])
    shapes = [shape, *[(shape[0], keys, heads, shape[3])] * 2]
    wholes = [normal(seed + n, sizes, dtype) for n, sizes in enumerate(shapes)]
    wholes[0] = (wholes[0] * drawn["q.magnitude"]).to(wholes[0].dtype)
    if drawn["q.memory"] == "expanded":
        wholes = [x[:1].expand_as(x) for x in wholes]
    named = {
        name: placed(x.to(device()), drawn["q.memory"]).requires_grad_()
        for name, x in zip("qkv", wholes, strict=True)
    }
    grads = [leaf(normal(seed + 5, shape, dtype), drawn["q.upstream"], learns=False)]
    if drawn["return_lse"] == "with gradient":
        wide = str(accumulation_dtype(wholes[0].dtype)).removeprefix("torch.")
        grads.append(normal(seed + 6, (shape[0], shape[2], queries), wide).to(device()))
    terms = terms_of(drawn, shape[2], wholes[0].dtype)
    given = {"mask": mask, **terms, "return_lse": drawn["return_lse"] != "no"}
    plain = {} if mask is None else masks.plain(masks.given_to(drawn))
    on_cpu = {} if drawn["sinks"] is None else {"sinks": terms["sinks"].detach().cpu()}
    options = {**places, **plain, **terms, **on_cpu}
    blocks = plan_blocks(places["q_positions"], places["kv_positions"], mask or sp.Mask())
    leaves = {f"d{name}": x for name, x in named.items()}
    leaves |= {} if drawn["sinks"] is None else {"dsinks": terms["sinks"]}
    judge = partial(judge_attended, wholes, leaves, grads, options, len(blocks) + 1)
    return Call(sp.local_attention, {**named, **where, **given}, judge)


def terms_of(drawn: Values, heads: int, dtype: torch.dtype) -> Values:
    """Return the scale and the terms of the logits; slopes are a tuple or a tensor."""
    terms = {name: drawn[name] for name in ("softmax_scale", "softcap")}
    if drawn["sinks"] is not None:
        sinks = normal(drawn["seed"] + 7, (heads,), drawn["q.dtype"]) * drawn["sinks"]
        terms["sinks"] = sinks.to(device(), dtype).requires_grad_()
    alibi = slopes(heads, drawn["alibi"])
    terms["alibi"] = alibi if alibi is None or drawn["seed"] % 2 else torch.tensor(alibi)
    return terms


def judge_attended(
    wholes: list[Tensor],
    leaves: dict[str, Tensor],
    grads: list[Tensor],
    options: Values,
    partials: int,
    result: Any,
) -> None:
    """Compare results and gradients with the dense reference."""
    results = dict(
        zip(("out", "lse"), result if isinstance(result, tuple) else (result,), strict=False)
    )
    q, k, v = wholes
    wanted = reference.attention(q, k, v, *(x.cpu() for x in grads), **options)
    made = torch.autograd.grad(list(results.values())[: len(grads)], list(leaves.values()), grads)
    for name, actual in (results | dict(zip(leaves, made, strict=True))).items():
        allowed = bound(wanted.scales[name], wholes[0].dtype, wanted.growth, partials)
        near(f"local attention {name}", actual, wanted.values[name], allowed)


TERMS = ("softcap", "sinks", "alibi")

STRIPS = {
    "q.batch": "2 to 3",
    "k.heads": "3 to 9",
    "q.group": "10 to 17",
    "(length)": "101 to 140",
    "causal": "True",
    "softcap": "0.5",
}
"""A row with so many scores that the plain kernel cuts a block into several strips."""

# merge


def merged(drawn: Values) -> Call:
    """Return the call of `merge` on two partial results; some of their rows have seen no key."""
    shape, chance = drawn["out_a.shape"], Random(drawn["seed"])
    given: Values = {}
    for n, name in enumerate("ab"):
        lse = (
            normal(drawn["seed"] + n, shape[:-1], drawn["lse_a.dtype"])
            * drawn[f"lse_{name}.magnitude"]
        )
        blind = (
            torch.rand(lse.shape, generator=torch.Generator().manual_seed(chance.randrange(99)))
            < drawn[f"lse_{name}.blind"]
        )
        out = normal(drawn["seed"] + 2 + n, shape, drawn[f"out_{name}.dtype"]).masked_fill(
            blind[..., None], 0.0
        )
        given[f"out_{name}"] = leaf(out, drawn[f"out_{name}.memory"], learns=False)
        given[f"lse_{name}"] = leaf(
            lse.masked_fill(blind, -torch.inf), drawn[f"lse_{name}.memory"], learns=False
        )
    return Call(sp.merge, given, partial(judge_merge, given))


def judge_merge(given: Values, result: tuple[Tensor, Tensor]) -> None:
    """Compare with softmax weights in float64; order and strides change no bit.

    A query that saw no key on one side has the bits of the other side.
    """
    out_a, lse_a, out_b, lse_b = (
        given[name].cpu().double() for name in ("out_a", "lse_a", "out_b", "lse_b")
    )
    dtype = accumulation_dtype(torch.promote_types(given["out_a"].dtype, given["out_b"].dtype))
    weights = torch.stack((lse_a, lse_b)).softmax(0).nan_to_num(0.5).unsqueeze(-1)
    out, lse = result
    assert (out.dtype, lse.dtype) == (dtype, torch.promote_types(dtype, given["lse_a"].dtype))
    narrow = torch.float32 if torch.float32 in (dtype, given["lse_a"].dtype) else torch.float64
    sizes = weights[0] * out_a.abs() + weights[1] * out_b.abs()
    lost = torch.finfo(narrow).tiny * (out_a.abs() + out_b.abs())  # for weights below tiny
    finite = torch.stack((lse_a, lse_b)).nan_to_num(neginf=0.0)
    greatest = max(finite.abs().flatten().tolist(), default=0.0)
    near(
        "merged out",
        out,
        weights[0] * out_a + weights[1] * out_b,
        bound(sizes, narrow, 1 + greatest) + lost,
    )
    wanted = torch.logaddexp(lse_a, lse_b)
    near("merged lse", lse, wanted, bound(wanted.abs().nan_to_num(posinf=0.0) + 1, narrow))
    for side, other in ("ab", "ba"):
        alone = given[f"lse_{other}"].isneginf() & given[f"lse_{side}"].isfinite()
        for found, name in ((out, "out"), (lse, "lse")):
            same(found[alone], given[f"{name}_{side}"][alone].to(found.dtype))
    for names in (("out_a", "lse_a", "out_b", "lse_b"), ("out_b", "lse_b", "out_a", "lse_a")):
        same(result, sp.merge(*(given[name].contiguous() for name in names)))


ROPE: dict[str, Parts] = {
    "head_dim": {
        name: lambda c, v, low=low, high=high: 2 * c.randint(low, high)  # type: ignore[misc]
        for name, low, high in (
            ("4 to 16", 2, 8),
            ("2", 1, 1),
            ("18 to 64", 9, 32),
            ("66 to 256", 33, 128),
        )
    },
    "base": values(10000.0, 500000.0, 1.0, 7),
    "scaling": values(*SCALINGS),
    "positions": POSITIONS,
}
SUBJECTS = [
    pure(
        "Rope",
        SHAPE | ROPE,
        rope,
        covers=("Rope.apply",),
    ),
    pure(
        "dropout",
        (
            {name: parts for name, parts in SHAPE.items() if name != "x.heads"}
            | {
                "x.middle": spans((0, 0), (1, 2)),
                "x.width": spans((2, 9), (1, 1), (0, 0), (65, 100)),
                "p": values(0.3, 0.0, 0.999),
                "seed.value": spans((0, 99), (2**31, 2**40), (2**62 - 9, 2**62 - 1)),
                "positions": POSITIONS,
                "features": {
                    "all": lambda c, v: None,
                    "a part": lambda c, v: range(7, 7 + v["x.width"]),
                    "any": lambda c, v: torch.tensor(
                        c.sample(range(200), v["x.width"]), dtype=torch.int64
                    ),
                },
                "training": values(True, False),
            }
        ),
        dropped,
    ),
    pure(
        "local_attention",
        (
            {
                name: parts
                for name, parts in attention.COMMON.items()
                if name
                in ("q.head_dim", "q.dtype", "q.magnitude", "q.group", "softmax_scale", *TERMS)
            }
            | {
                "q.batch": spans((1, 1), (2, 3), (0, 0)),
                "k.heads": spans((1, 2), (3, 9), (0, 0)),
                "v": values("normal"),
                "q.memory": values(*STORAGES),
                "q.upstream": values(*MEMORIES),
                "return_lse": values("with gradient", "without", "no"),
                "mask": values("given", "none"),
                "q_positions": values("left out", *masks.KINDS),
                "kv_positions": values("left out", *masks.KINDS),
            }
            | masks.MASK
            | {"(length)": spans((10, 40), (0, 0), (1, 9), (101, 140))}
        ),
        attended,
        together=(attention.WIDE, STRIPS, STRIPS | {"causal": "False", "alibi": "0.5"}),
    ),
    pure(
        "merge",
        {
            "out_a.shape": {
                "4 dims": lambda c, v: (2, c.randint(1, 3), c.randint(20, 90), c.randint(2, 17)),
                "2 dims": lambda c, v: (c.randint(1, 9), c.randint(1, 200)),
                "no rows": lambda c, v: (2, 0, 3),
            },
            **{
                f"{of}_{name}.{aspect}": parts
                for name in "ab"
                for of, aspect, parts in (
                    ("out", "dtype", values(*DTYPES)),
                    ("out", "memory", values(*MEMORIES)),
                    ("lse", "magnitude", values(1.0, 100.0, 1e4)),
                    ("lse", "blind", values(0.3, 0.0, 1.0)),
                    ("lse", "memory", values(*MEMORIES)),
                )
            },
            "lse_a.dtype": values("float64", "float32"),
        },
        merged,
        together=({"lse_b.memory": "every second"},),
    ),
]
