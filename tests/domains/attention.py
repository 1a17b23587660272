"""Declare the domain of attention: four schemes over ranks, compared with the dense reference."""

from functools import partial
from random import Random
from typing import Any

from oracle.attention_check import Shards, compare
from oracle.strategies import DTYPES, EVERY_LAYOUT, SLOPES, STORAGES, AttentionProblem
from torch import Tensor

import sp_core as sp
from domains import masks
from domains.declared import Call, Draw, Parts, Values, spans, values
from domains.situations import SITUATIONS, on_group, on_mesh
from sp_core.schemes import SCHEMES


def seq_len(chance: Random, drawn: Values, *, shards: int) -> int:
    """Return a length that `shards` shards divide evenly."""
    return shards * chance.randint(1, max(1, 24 // shards))


def lengths() -> Parts:
    """Return parts of a sequence's length, most in relation to the number of ranks."""
    return {
        "even": lambda c, v: seq_len(c, v, shards=2 * size_of(v)),
        "halves uneven": lambda c, v: (
            seq_len(c, v, shards=size_of(v)) | 1 if size_of(v) % 2 else size_of(v)
        ),
        "uneven": lambda c, v: seq_len(c, v, shards=size_of(v)) + c.randint(0, size_of(v) - 1),
        "fewer than ranks": lambda c, v: c.randint(0, size_of(v) - 1),
        "0": lambda c, v: 0,
        "above 100": lambda c, v: c.randint(101, 140),
        "thousands": lambda c, v: c.randint(1050, 1150),
    }


def size_of(drawn: Values) -> int:
    """Return the number of ranks that share the sequence."""
    if "comm.ranks" in drawn:
        return int(drawn["comm.ranks"])
    return int(drawn["mesh.ring"]) * int(drawn["mesh.ulysses"])


def pair(
    chance: Random, drawn: Values, number: tuple[int, int]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return document boundaries of the queries and of the keys, empty documents included."""
    problem, size = problem_of(drawn | {"mask.documents": None}), size_of(drawn)
    count = chance.randint(*number)
    queries = masks.boundaries(chance, count, 0, problem.sharding(size).end)
    if drawn["kv_sharding"] == "own":
        return queries, queries
    return queries, masks.boundaries(chance, count, 0, problem.kv_sharding(size).end)


def window(chance: Random, drawn: Values, *, shards: tuple[int, int]) -> int:
    """Return a window of `shards[0]` to `shards[1]` quarters of a shard's length, at least 2."""
    return max(2, max(1, drawn["q.seq_len"] // size_of(drawn)) * chance.randint(*shards) // 4)


def several(low: int, high: int) -> dict[str, Draw]:
    """Return a part that draws `low` to `high`, but `low` for more than 1000 tokens."""
    return {
        f"{low} to {high}": lambda c, v: (
            low if v.get("q.seq_len", 0) > 1000 else c.randint(low, high)
        )
    }


COMMON: dict[str, Parts] = {
    "q.seq_len": lengths(),
    "q.batch": spans((1, 1), (2, 3)) | several(4, 17),
    "q.head_dim": spans((2, 16), (1, 1), (17, 64), (65, 128), (129, 256), (257, 300)),
    "q.dtype": values(*DTYPES),
    "q.memory": values(*STORAGES),
    "q.magnitude": values(*(1.0, 30.0, 1e3)),
    "q.group": spans((1, 1), (2, 3), (7, 9)) | several(10, 17),
    "k.heads": spans((2, 4), (1, 1), (5, 9)) | several(10, 33),
    "k.memory": values("like q", "shared_empty"),
    "k.gradients": {
        "all": lambda c, v: (True, True, True),
        "q": lambda c, v: (True, False, False),
        "k": lambda c, v: (False, True, False),
        "v": lambda c, v: (False, False, True),
        "k and v": lambda c, v: (False, True, True),
        "none": lambda c, v: (False, False, False),
    },
    "v.values": values("normal", "constant", "cancelling"),
    "v.upstream": values("normal", "one token", "expanded", "transposed", "zero"),
    "sharding.layout": values(*EVERY_LAYOUT),
    "sharding.start": spans((0, 0), (1, 9), (1000, 100_000), (2**40, 2**61)),
    "kv_sharding": values("own", "other"),
    "kv_sharding.layout": values(*EVERY_LAYOUT),
    "kv_sharding.start": spans((0, 0), (1, 9)),
    "kv_sharding.kv_len": {"uneven": lambda c, v: c.randint(1, 33), "0": lambda c, v: 0},
    "mask.causal": values(False, True),
    "mask.window": {
        "none": lambda c, v: None,
        "1": lambda c, v: 1,
        "within a shard": partial(window, shards=(1, 3)),
        "a shard and more": partial(window, shards=(4, 8)),
        "wider than the sequence": lambda c, v: v["q.seq_len"] + c.randint(1, 99),
        "longer than any sequence": lambda c, v: c.choice((2**62, 2**63 - 1, 2**64)),
    },
    "mask.documents": {"none": lambda c, v: None}
    | {
        name: partial(pair, number=number)
        for name, number in (("1", (1, 1)), ("2 to 6", (2, 6)), ("7 to 64", (7, 64)))
    }
    | {"65 to 200": partial(pair, number=(65, 200))},
    "softmax_scale": values(None, 0.25, 0.0, -0.5),
    "softcap": values(None, 0.5, 50.0),
    "sinks": values(None, 1.0, 30.0),
    "alibi": values(None, *SLOPES),
    "return_lse": values("without gradient", "with gradient", "not asked"),
}


def problem_of(drawn: Values) -> AttentionProblem:
    """Return the attention problem that drawn values stand for."""
    own = drawn["kv_sharding"] == "own"
    pair = drawn["mask.documents"] or (None, None)
    return AttentionProblem(
        batch=drawn["q.batch"],
        seq_len=drawn["q.seq_len"],
        kv_len=drawn["q.seq_len"] if own else drawn["kv_sharding.kv_len"],
        kv_heads=drawn["k.heads"],
        group=drawn["q.group"],
        head_dim=drawn["q.head_dim"],
        dtype=drawn["q.dtype"],
        layout=drawn["sharding.layout"],
        kv_layout=drawn["sharding.layout"] if own else drawn["kv_sharding.layout"],
        mask=sp.Mask(drawn["mask.causal"], drawn["mask.window"], pair[0], None if own else pair[1]),
        softmax_scale=drawn.get("softmax_scale"),
        magnitude=drawn["q.magnitude"],
        values=drawn["v.values"],
        upstream=drawn["v.upstream"],
        needs_grad=drawn["k.gradients"],
        storage=drawn["q.memory"],
        seed=drawn["seed"] - drawn["seed"] % 3 + (drawn.get("return_lse") != "with gradient"),
        late=drawn.get("(lateness)") == "a rank",
        start=drawn["sharding.start"],
        kv_start=drawn["sharding.start"] if own else drawn["kv_sharding.start"],
        softcap=drawn.get("softcap"),
        sinks=drawn.get("sinks"),
        alibi=drawn.get("alibi"),
    )


def shared(x: Tensor, group: sp.Communicator) -> Tensor:
    """Return a leaf with the values of `x`, in memory that the ranks share."""
    home = sp.shared_empty(tuple(x.shape), comm=group, dtype=x.dtype)
    return home.copy_(x.detach()).requires_grad_(x.requires_grad)


def arguments_of(shards: Shards, drawn: Values, group: sp.Communicator) -> Values:
    """Return the arguments that every scheme takes. k and v may lie in memory that ranks share."""
    if drawn["k.memory"] == "shared_empty":
        shards.local[1:] = [shared(x, group) for x in shards.local[1:]]
    q, k, v = shards.local
    own = drawn["kv_sharding"] == "own"
    return {
        "q": q,
        "k": k,
        "v": v,
        "sharding": shards.sharding,
        "kv_sharding": None if own else shards.kv_sharding,
        "mask": shards.problem.mask,
        "softmax_scale": shards.problem.softmax_scale,
        "softcap": shards.problem.softcap,
        "sinks": shards.terms.get("sinks"),
        "alibi": shards.terms.get("alibi"),
        "return_lse": drawn["return_lse"] != "not asked",
    }


def judge(
    name: str, shards: Shards, arguments: Values, group: sp.Communicator, result: Any
) -> None:
    """Compare one rank's results, and its gradients, with the reference."""
    assert isinstance(result, tuple) == arguments["return_lse"]
    out, lse = result if arguments["return_lse"] else (result, None)
    found = {"out": out, **shards.gradients(out, out if lse is None else lse)}
    compare(name, shards, found if lse is None else {**found, "lse": lse}, group)


def on_a_communicator(name: str, group: sp.Communicator, drawn: Values) -> Call:
    """Return the call of a scheme on a group of ranks."""
    shards = Shards(problem_of(drawn), group.rank, group.size, group.device)
    inner = {"inner": drawn["inner"]} if name == "ulysses" else {}
    arguments = {**arguments_of(shards, drawn, group), "comm": group, **inner}
    return Call(SCHEMES[name], arguments, partial(judge, name, shards, arguments, group))


def on_a_grid(mesh: sp.Mesh, drawn: Values) -> Call:
    """Return the call of hybrid attention on two axes. Along a third axis the tensors differ."""
    _, axes = grid_of(drawn)
    tokens = mesh[axes]
    number = mesh["third"].rank if "third" in mesh.axes else 0
    problem = problem_of(drawn | {"seed": drawn["seed"] + 3 * number})
    shards = Shards(problem, tokens.rank, tokens.size, tokens.device)
    where = {"mesh": mesh, "axes": axes, "comm": tokens if drawn["comm"] == "given" else None}
    arguments = {**arguments_of(shards, drawn, tokens), **where, "ulysses": drawn["ulysses"]}
    return Call(sp.hybrid_attention, arguments, partial(judge, "hybrid", shards, arguments, tokens))


def grid_of(drawn: Values) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return the sizes of a mesh's axes by name, and the two axes that hybrid attention uses."""
    third = {"third": 2} if drawn["mesh.axes"] == "three" else {}
    lengths = {"ring": drawn["mesh.ring"], "ulysses": drawn["mesh.ulysses"], **third}
    named = sorted(lengths, reverse=drawn["mesh.order"] == "reversed")
    axes = [axis for axis in named if axis != "third"]
    step = -1 if drawn["axes"] == "not the mesh's order" else 1
    return {axis: lengths[axis] for axis in named}, tuple(axes[::step])


INNER: Parts = {"default": lambda c, v: None, "the user's own": lambda c, v: sp.local_attention}
GRID: dict[str, Parts] = {
    "mesh.ring": spans((2, 2), (1, 1), (3, 3), (4, 5)),
    "mesh.ulysses": spans((2, 2), (1, 1), (3, 3), (4, 5)),
    "mesh.axes": values("two", "three"),
    "mesh.order": values("sorted", "reversed"),
    "axes": values("the mesh's order", "not the mesh's order"),
    "ulysses": values("ulysses", "ring"),
    "comm": values("left out", "given"),
}
WIDE = {"q.head_dim": "129 to 256"}
"""A row of wide heads, with the base row's default scale and tokens that see several keys."""
SHARED = {"k.memory": "shared_empty", "mask.causal": "True", "mask.documents": "2 to 6"}
"""A row of keys in memory that ranks share, some of which only their own rank sees."""
TURNED = {"axes": "not the mesh's order", "sinks": "1.0", "alibi": "0.5"}
"""A row of terms that differ between heads, in which heads are not split along the last axis."""

SUBJECTS = [
    *(
        on_group(
            f"{name}_attention",
            COMMON | more,
            partial(on_a_communicator, name),
            together=(WIDE, SHARED),
        )
        for name, more in (("allgather_kv", {}), ("ring", {}), ("ulysses", {"inner": INNER}))
    ),
    on_mesh(
        "hybrid_attention",
        GRID | COMMON | SITUATIONS,
        lambda drawn: grid_of(drawn)[0],
        on_a_grid,
        together=(WIDE, SHARED, TURNED),
    ),
]
