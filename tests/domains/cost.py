"""Declare the domain of the formulas of `sp_core.cost`, compared with what a scheme sends."""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from random import Random
from typing import Any, cast

import torch
from oracle.attention_check import Shards
from oracle.strategies import LAYOUTS
from torch import nn

import sp_core as sp
from domains import attention
from domains.declared import Call, Parts, Subject, Values, judged, same, spans, values
from sp_core import cost
from sp_core.schemes import SCHEMES
from sp_core.testing import device

MATTERS = (
    *(
        "q.seq_len",
        "q.batch",
        "q.head_dim",
        "q.dtype",
        "q.group",
        "k.heads",
        "k.gradients",
        "kv_sharding",
    ),
    *(
        "sharding.layout",
        "sharding.start",
        "kv_sharding.layout",
        "kv_sharding.start",
        "kv_sharding.kv_len",
    ),
    *("mask.causal", "mask.window", "mask.documents", "return_lse"),
)
"""Factors of attention that its bytes may depend on; all others are fixed or left out."""
OTHERS: Values = {
    "q.memory": "plain",
    "q.magnitude": 1.0,
    "v.values": "normal",
    "v.upstream": "normal",
}


def inner(drawn: Values) -> Values:
    """Return drawn values under attention's own names: "problem.q.batch" becomes "q.batch"."""
    return OTHERS | {name.partition(".")[2] or name: value for name, value in drawn.items()}


def under(parameter: str, factors: Mapping[str, Parts]) -> dict[str, Parts]:
    """Return factors of attention as aspects of a parameter: "q.batch" as "problem.q.batch"."""
    return {
        f"{parameter}.{name}": {
            part: lambda c, v, draw=draw: draw(c, inner(v))  # type: ignore[misc]
            for part, draw in parts.items()
        }
        for name, parts in factors.items()
    }


TRANSPORTS: Any = {True: "window", False: "host"} if device().type == "cpu" else {False: "staged"}
"""The transport by whether ranks read keys and values in memory that they share."""

FORMULA = under("problem", {name: attention.COMMON[name] for name in MATTERS}) | {
    "problem.shared": values(*sorted(TRANSPORTS)),
    "problem.q.head_dim": spans((2, 16), (1, 1), (65, 80)),
    "problem.k.heads": spans((2, 4), (1, 1), (5, 5), (6, 9)),
}
RANKS = under("rank", {"comm.ranks": spans((2, 2), (1, 1), (3, 3), (4, 4), (5, 8))})


COLLECTIVES = ("all_to_all", "reduce_scatter")


def drained(*comms: sp.Communicator) -> cost.Traffic:
    """Return all bytes since the last call, and all messages except those of `COLLECTIVES`."""
    total = cost.Traffic()
    for comm in comms:
        count = comm.counters.total()
        inside = sum(comm.counters[name].messages for name in COLLECTIVES)
        total += cost.Traffic(count.messages - inside, count.bytes_sent)
        comm.counters.reset()
    return total


def called(
    function: Any, drawn: Values, tokens: sp.Communicator, scheme: Any, *comms: sp.Communicator
) -> Call:
    """Run a scheme. Return its formula's call, which is compared with what `comms` have sent."""
    problem = attention.problem_of(inner(drawn))
    shards = Shards(problem, tokens.rank, tokens.size, tokens.device)
    asked = drawn["problem.return_lse"] != "not asked"
    results: Any = scheme(
        *shards.local,
        sharding=shards.sharding,
        kv_sharding=shards.kv_sharding,
        mask=problem.mask,
        return_lse=asked,
    )
    forward = drained(*comms)
    shards.gradients(*(results if asked else (results, results)))
    sizes = cost.Attention(
        sharding=shards.sharding,
        kv_sharding=shards.kv_sharding,
        mask=problem.mask,
        batch=problem.batch,
        num_heads=problem.kv_heads * problem.group,
        num_kv_heads=problem.kv_heads,
        head_dim=problem.head_dim,
        itemsize=problem.torch_dtype.itemsize,
        return_lse=asked,
        needs_grad=problem.needs_grad,
        lse_grad=problem.upstream_lse_gradient() is not None,
        shared=drawn["problem.shared"],
    )
    both = (forward, drained(*comms))
    return Call(function, {"problem": sizes}, partial(judge, sizes, shards, both))


def judge(sizes: cost.Attention, shards: Shards, sent: cost.Both, formula: cost.Both) -> None:
    """Compare a formula's numbers of messages and bytes with those sent, and check `kv_block`."""
    assert formula == sent
    own, tokens = sum(x.numel() for x in shards.local[1:]), shards.local[1].shape[1]
    assert [sizes.kv_block(tokens, itemsize) for itemsize in (2, 8)] == [2 * own, 8 * own]


@contextmanager
def alone(name: str, comm: Any, drawn: Values) -> Iterator[Call]:
    """Run a scheme on one axis, and yield the call of its formula."""
    transport: Any = TRANSPORTS[drawn["problem.shared"]]
    with sp.Mesh(comm, device=device(), transport=transport, sp=comm.size) as mesh:
        scheme = partial(SCHEMES[name], comm=mesh["sp"])
        call = called(getattr(cost, name), drawn, mesh["sp"], scheme, mesh["sp"])
        call.arguments["rank"] = comm.rank
        yield call


@contextmanager
def gridded(comm: Any, drawn: Values) -> Iterator[Call]:
    """Run a hybrid on two axes, and yield its formula's call. Groups along a third are alike."""
    (lengths, axes), heads = attention.grid_of(inner(drawn)), drawn["groups.ulysses"]
    (around,) = {*axes} - {heads}
    transport: Any = TRANSPORTS[drawn["problem.shared"]]
    with sp.Mesh(comm, device=device(), transport=transport, **lengths) as mesh:
        scheme = partial(sp.hybrid_attention, mesh=mesh, axes=cast("Any", axes), ulysses=heads)
        call = called(cost.hybrid, drawn, mesh[axes], scheme, mesh[around], mesh[heads])
        numbers = torch.arange(mesh[axes].size).view([lengths[axis] for axis in axes])
        groups = numbers if axes[1] == heads else numbers.T
        ranks = {"ring_rank": mesh[around].rank, "ulysses_rank": mesh[heads].rank}
        call.arguments |= {**ranks, "groups": groups.tolist()}
        yield call


@contextmanager
def layers(comm: Any, drawn: Values) -> Iterator[Call]:
    """Run a column-parallel and a row-parallel layer, and yield the call of their formula."""
    sharding = LAYOUTS[drawn["sharding.layout"]](drawn["sharding.seq_len"], comm.size)
    dtype = {8: torch.float64, 4: torch.float32, 2: torch.bfloat16}[drawn["itemsize"]]
    chance, size, hidden = Random(drawn["seed"]), comm.size, drawn["hidden"]
    features = (
        [chance.randint(0, 9) for _ in range(size)]
        if drawn["(features)"] == "uneven"
        else [4] * size
    )
    up, down = (
        nn.Linear(width, height, bias=False, dtype=dtype)
        for width, height in ((hidden, sum(features)), (sum(features), hidden))
    )
    with sp.Mesh(comm, device=device(), transport=TRANSPORTS[False], sp=size) as mesh:
        group = mesh["sp"]
        column = sp.ColumnParallelLinear.from_linear(
            up, comm=group, sharding=sharding, sizes=features
        )
        row = sp.RowParallelLinear.from_linear(down, comm=group, sharding=sharding, sizes=features)
        x = torch.ones(
            drawn["batch"], sharding.local_len(comm.rank), hidden, dtype=dtype, device=mesh.device
        )
        group.counters.reset()
        out = row(column(x.requires_grad_()))
        forward = group.counters.total().bytes_sent
        out.backward(torch.ones_like(out))
        backward = group.counters.total().bytes_sent - forward
        wanted = (cost.Traffic(0, forward), cost.Traffic(0, backward))
        given = {name: drawn[name] for name in ("batch", "hidden", "itemsize")} | {
            "sharding": sharding,
            "rank": comm.rank,
        }
        yield Call(cost.tp_sp, given, partial(same, wanted=wanted))


def judge_sum(given: Values, traffic: cost.Traffic) -> None:
    """Check that adding two `Traffic` adds their messages and their bytes."""
    assert traffic + cost.Traffic(3, 5) == cost.Traffic(
        given["messages"] + 3, given["bytes_sent"] + 5
    )


ALIKE_INSIDE = {
    "ulysses_rank.mesh.ulysses": "3 to 4",
    "groups.ulysses": "ring",
    "problem.q.seq_len": "halves uneven",
    "problem.kv_sharding": "other",
}
"""Parts with which query and key shards have equal lengths in some groups that exchange heads."""
SOME = ({"problem.k.gradients": some} for some in ("q", "k", "k and v"))
"""Rows of the gradients that are asked for, because they decide which gradients are sent."""


ASPECTS = """
    sharding kv_sharding mask batch num_heads num_kv_heads head_dim itemsize
    return_lse needs_grad lse_grad shared tokens
"""
SUBJECTS = [
    *(
        Subject(
            f"cost.{name}",
            RANKS | FORMULA,
            partial(alone, name),
            lambda drawn: int(drawn["rank.comm.ranks"]),
            covers=("cost.Attention", "cost.Attention.kv_block"),
            outside={
                **dict.fromkeys(ASPECTS.split(), "an aspect of problem"),
                "sinks_grad": "counted by hand in test_cost",
            },
        )
        for name in ("allgather_kv", "ring", "ulysses")
    ),
    Subject(
        "cost.hybrid",
        {
            **under("ring_rank", {"mesh.ring": spans((2, 2), (1, 1), (3, 3))}),
            **under("ulysses_rank", {"mesh.ulysses": spans((2, 2), (1, 1), (3, 4))}),
            **under(
                "groups",
                {
                    name: attention.GRID[name]
                    for name in ("mesh.axes", "mesh.order", "axes", "ulysses")
                },
            ),
        }
        | FORMULA,
        gridded,
        lambda drawn: math.prod(attention.grid_of(inner(drawn))[0].values()),
        together=(
            *(
                {
                    "ring_rank.mesh.ring": "2",
                    "ulysses_rank.mesh.ulysses": "3 to 4",
                    "problem.k.heads": heads,
                }
                for heads in ("5", "2 to 4", "1")
            ),
            *(
                inside | some
                for some in SOME
                for inside in (ALIKE_INSIDE, {"ulysses_rank.mesh.ulysses": "1"})
            ),
        ),
    ),
    Subject(
        "cost.tp_sp",
        {
            **RANKS,
            "sharding.layout": values(*LAYOUTS),
            "sharding.seq_len": spans((9, 20), (0, 0), (1, 3), (100, 130)),
            "batch": spans((1, 3), (5, 9)),
            "hidden": spans((3, 8), (1, 1), (65, 90)),
            "itemsize": values(8, 4, 2),
            "(features)": values("even", "uneven"),
        },
        layers,
        lambda drawn: int(drawn["rank.comm.ranks"]),
    ),
    judged(
        "cost.Traffic",
        cost.Traffic,
        {"messages": spans((0, 9), (1000, 9999)), "bytes_sent": spans((0, 9), (10**9, 10**12))},
        judge_sum,
    ),
]
