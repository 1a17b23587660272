"""Describe a problem on so many ranks by one value in each dimension, to count draws."""

from __future__ import annotations

from collections import defaultdict
from itertools import combinations, product

import torch
from torch import Tensor

from oracle import reference
from oracle.strategies import DRAWN, DTYPES, STORAGES, AttentionProblem
from sp_core.sharding import Sharding

FEWER = "fewer than ranks"
DIMENSIONS: dict[str, tuple[str, ...]] = {
    "scheme": ("allgather_kv", "hybrid", "ring", "tp_sp", "ulysses"),
    "ranks": tuple(map(str, range(1, 9))),
    "layout": tuple(sorted(DRAWN)),
    "tokens": (FEWER, "even", "halves uneven", "uneven"),
    "dtype": DTYPES,
    "keys": ("own", "other"),
    "mask": ("full", "causal"),
    "window": ("none", "narrower", "shard - 1", "shard", "shard + 1", "2 shard + 1", "wider"),
    "documents": ("none", "one", "on shards", "inside shards", "on and inside"),
    "blind": ("nobody", "in the first block", "always"),
    "heads": ("MHA", "GQA", "MQA"),
    "head split": ("even", "uneven", "copied", FEWER),
    "logits": ("1", "30", "1000", "10000"),
    "values": ("normal", "constant", "cancelling"),
    "upstream": ("normal", "one token", "expanded", "transposed", "zero"),
    "lse": ("with gradient", "without"),
    "gradients": ("all", "some", "none"),
    "storage": STORAGES,
    "batch": ("1", "more"),
    "scale": ("default", "given"),
    "softcap": ("none", "given"),
    "sinks": ("none", "with gradient", "without"),
    "alibi": ("none", "given"),
    "late": ("nobody", "a rank"),
}
"""Every dimension and its values."""

LINEAR = ("scheme", "ranks", "layout", "tokens", "dtype", "batch")
"""The dimensions of parallel linear layers."""
ONE_RANK_HAS_ALL = (
    *(
        "documents=on shards",
        "documents=on and inside",
        "tokens=uneven",
        "blind=in the first block",
    ),
    *("head split=uneven", "head split=copied", "head split=fewer than ranks"),
)
IMPOSSIBLE: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("one rank has all tokens and heads", "ranks=1", ONE_RANK_HAS_ALL),
    ("a query sees its own key", "keys=own", ("blind=in the first block", "blind=always")),
    ("a single key/value head is one group", "heads=MQA", ("head split=uneven",)),
    ("heads that are copied are fewer than the query heads", "heads=MHA", ("head split=copied",)),
    ("expanded over a batch of one is plain", "batch=1", ("storage=expanded",)),
    ("its gradients leave the range of float16", "dtype=float16", ("logits=10000",)),
    ("linear layers are tested on integers", "scheme=tp_sp", ("dtype=bfloat16", "dtype=float16")),
)
"""Reason, a feature, and those that cannot come with it."""


def universe() -> tuple[list[tuple[str, str]], dict[str, list[tuple[str, str]]]]:
    """All pairs of values of two dimensions, each in alphabetical order.

    Returns:
        Those that can be drawn, and those that cannot by reason.
    """
    possible: list[tuple[str, str]] = []
    impossible: dict[str, list[tuple[str, str]]] = defaultdict(list)
    for one, two in combinations(DIMENSIONS, 2):
        for a, b in product(DIMENSIONS[one], DIMENSIONS[two]):
            pair = sorted((f"{one}={a}", f"{two}={b}"))
            reason = why_impossible(pair[0], pair[1])
            (impossible[reason] if reason else possible).append((pair[0], pair[1]))
    return possible, dict(impossible)


def why_impossible(a: str, b: str) -> str:
    """Why no example has both features; nothing where some can."""
    if "scheme=tp_sp" in (a, b) and {a.partition("=")[0], b.partition("=")[0]} - set(LINEAR):
        return "linear layers have neither heads nor masks"
    reasons = [
        reason
        for reason, one, others in IMPOSSIBLE
        if (a == one and b in others) or (b == one and a in others)
    ]
    return reasons[0] if reasons else ""


def points() -> list[str]:
    """Return features to be drawn: every remainder, and meshes with unequal or three axes."""
    remainders = [remainder(length, size) for size in range(1, 9) for length in range(2 * size)]
    grids = [
        "1 x 2 x 3",
        "1 x 3 x 2",
        "1 x 2 x 4",
        "1 x 4 x 2",
        "2 x 2 x 2",
        "2 x 1 x 2",
        "2 x 2 x 1",
    ]
    return remainders + [f"grid {grid}" for grid in grids]


def attention_features(scheme: str, problem: AttentionProblem, size: int) -> dict[str, str]:
    """The value of a problem in every dimension.

    Args:
        scheme: who computes it.
        problem: what is computed.
        size: number of ranks that share the sequence.
    """
    sharding, kv_sharding = problem.sharding(size), problem.kv_sharding(size)
    needed = sum(problem.needs_grad)
    return {
        **token_features(
            scheme, problem.layout, problem.seq_len, size, problem.dtype, problem.batch
        ),
        "keys": "own" if sharding == kv_sharding else "other",
        "mask": "causal" if problem.mask.causal else "full",
        "window": _window(problem.mask.window, max(1, *kv_sharding.lengths)),
        "documents": _documents(problem.mask.key_documents, kv_sharding),
        "blind": _blind(problem, sharding, kv_sharding),
        "heads": "MHA" if problem.group == 1 else "MQA" if problem.kv_heads == 1 else "GQA",
        "head split": _head_split(problem.kv_heads, problem.kv_heads * problem.group, size),
        "logits": f"{problem.magnitude:.0f}",
        "values": problem.values,
        "upstream": problem.upstream,
        "lse": "without" if problem.upstream_lse_gradient() is None else "with gradient",
        "gradients": "all" if needed == 3 else "some" if needed else "none",
        "storage": "plain"
        if problem.storage == "expanded" and problem.batch == 1
        else problem.storage,
        "scale": "default" if problem.softmax_scale is None else "given",
        "softcap": "none" if problem.softcap is None else "given",
        "sinks": "none"
        if problem.sinks is None
        else ("without" if problem.seed % 2 else "with gradient"),
        "alibi": "none" if problem.alibi is None else "given",
        "late": "a rank" if problem.late else "nobody",
    }


def token_features(
    scheme: str, layout: str, seq_len: int, size: int, dtype: str, batch: int
) -> dict[str, str]:
    """The values in the dimensions that linear layers have too."""
    split = "uneven" if seq_len % size else "halves uneven" if seq_len % (2 * size) else "even"
    return {
        "scheme": scheme,
        "ranks": str(size),
        "layout": layout,
        "tokens": FEWER if seq_len < size else split,
        "dtype": dtype,
        "batch": "1" if batch == 1 else "more",
    }


def remainder(seq_len: int, size: int) -> str:
    """The number of ranks P and what is left of a length modulo 2P."""
    return f"P = {size}, S mod 2P = {seq_len % (2 * size)}"


def _window(window: int | None, shard: int) -> str:
    if window is None:
        return "none"
    named = {
        2 * shard + 1: "2 shard + 1",
        shard + 1: "shard + 1",
        shard: "shard",
        shard - 1: "shard - 1",
    }
    return named.get(window, "narrower" if window < shard else "wider")


def _documents(boundaries: tuple[int, ...] | None, sharding: Sharding) -> str:
    if boundaries is None:
        return "none"
    owner = _owners(sharding)
    inner = {b for b in boundaries if 0 < b < len(owner)}
    on = {b for b in inner if owner[b - 1] != owner[b]}
    return (
        "one"
        if not inner
        else "on and inside"
        if on and on != inner
        else "on shards"
        if on
        else "inside shards"
    )


def _blind(problem: AttentionProblem, sharding: Sharding, kv_sharding: Sharding) -> str:
    """Whether a query sees no key at all, or none of its own rank's."""
    mask = problem.mask
    seen = reference.visible(
        *(range(problem.seq_len), range(problem.kv_len)),
        causal=mask.causal,
        window=mask.window,
        documents=mask.documents,
        kv_documents=mask.kv_documents,
    )
    if not seen.any(1).all():
        return "always"
    own = _owners(sharding)[:, None] == _owners(kv_sharding)[None, :]
    return "nobody" if (seen & own).any(1).all() else "in the first block"


def _owners(sharding: Sharding) -> Tensor:
    """The rank of each token."""
    owners = torch.empty(sharding.seq_len, dtype=torch.int64)
    for rank in range(sharding.size):
        owners[sharding.positions(rank)] = rank
    return owners


def _head_split(kv_heads: int, heads: int, size: int) -> str:
    if kv_heads >= size:
        return "uneven" if kv_heads % size else "even"
    return "copied" if heads >= size else FEWER
