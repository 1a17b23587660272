"""Declare the domain of collectives: results and gradients are compared with definitions."""

from collections.abc import Callable
from functools import partial
from random import Random
from typing import Any

import torch
from oracle.collective_cases import (
    DEFINITIONS,
    DTYPES as NAMES,
    MEMORIES,
    SUMS,
    UNEVEN,
    in_memory,
    total,
)
from torch import Tensor

import sp_core as sp
from domains import situations
from domains.declared import Call, Parts, Values, same, spans, values, whole
from domains.situations import on_group
from sp_core.programs import ALGORITHMS, SCHEDULED
from sp_core.testing import device

DTYPES = {name: getattr(torch, name) for name in NAMES}

APART = "otherwise on odd ranks"
LIES = values("alike", APART)
"""Whether the tensors of odd ranks are contiguous in memory, whatever layout was drawn."""

COUNTS_ONCE = ("reduce_from_group", "gather_replicated")
"""Collectives whose result is one value of all ranks: its gradient counts once, not per rank."""


def gradients(
    op: str, inputs: list[Tensor], upstream: list[Tensor], a: Values, rank: int
) -> Tensor:
    """Return the gradient of this rank's tensor.

    The loss is the sum of <result, upstream> over all ranks, or this rank's for `COUNTS_ONCE`.
    """
    leaves = [x.detach().double().requires_grad_() for x in inputs]
    results = DEFINITIONS[op](leaves, a)
    chosen = [rank] if op in COUNTS_ONCE else range(len(inputs))
    if op == "copy_to_group":
        return total(upstream)
    loss = torch.stack([(results[r] * upstream[r].double()).sum() for r in chosen]).sum()
    (grad,) = torch.autograd.grad(loss, leaves[rank], allow_unused=True)
    return torch.zeros_like(inputs[rank]) if grad is None else grad.to(inputs[rank].dtype)


def cut(chance: Random, size: int, most: int) -> tuple[int, ...]:
    """Return a random length, 0 to `most`, for each of `size` ranks."""
    return tuple(chance.randint(0, most) for _ in range(size))


def shape_of(op: str, drawn: Values, rank: int) -> tuple[int, ...]:
    """Return the shape of a rank's tensor, with the drawn length along the collective's dim."""
    shape = list(drawn["x.shape"])
    dim = drawn["dim"] if "dim" in drawn else drawn.get("concat_dim", 0)
    if op in UNEVEN:
        shape[dim] = drawn["x.lengths"][rank]
    elif op == "reduce_scatter":
        shape[dim] = sum(drawn["x.lengths"])
    if op == "all_to_all":
        shape[drawn["split_dim"]] = sum(drawn["split_sizes"] or drawn["x.split"])
    return tuple(shape)


def lying(x: Tensor, memory: str, lies: str, rank: int) -> Tensor:
    """Return x in a memory layout, contiguous on odd ranks if `lies` says so."""
    return in_memory(x, "contiguous" if rank % 2 and lies == APART else memory)


def tensor(op: str, drawn: Values, rank: int, key: int, memory: str) -> Tensor:
    """Return a tensor of small whole numbers, which every dtype adds exactly."""
    seed = 1000 * drawn["seed"] + 10 * rank + key
    numbers = whole(seed, shape_of(op, drawn, rank), drawn["x.dtype"])
    return lying(numbers.to(device()), memory, drawn["x.lies"], rank)


def arguments_of(op: str, drawn: Values) -> Values:
    """Return the call's own arguments, without the tensor and the communicator."""
    own = ("dim", "split_dim", "concat_dim", "offset", "root", "op", "deterministic", "algorithm")
    given = {name: drawn[name] for name in own if name in drawn}
    ndim = len(drawn["x.shape"])
    if "dim" in given and drawn["dim.sign"] == "from the end":
        given["dim"] -= ndim
    if "sizes" in drawn:
        given["sizes"] = drawn["x.lengths"] if drawn["sizes"] else None
    if op == "all_to_all":
        given["split_sizes"] = drawn["split_sizes"]
        given["concat_sizes"] = drawn["x.lengths"] if drawn["concat_sizes"] else None
    return given


def judge(op: str, group: sp.Communicator, drawn: Values, x: Tensor, result: Any) -> None:
    """Compare result and gradient with the definition, bit for bit."""
    rank, size = group.rank, group.size
    if isinstance(result, sp.Pending):
        group.poll()
        result = result.wait()
    inputs = [tensor(op, drawn, r, 0, drawn["x.memory"]) for r in range(size)]
    arguments = arguments_of(op, drawn)
    expected = DEFINITIONS[op](inputs, arguments)
    same(result, expected[rank])
    assert torch.equal(x, inputs[rank]), "the input was changed"
    if not result.requires_grad:
        return
    turn = 0 if op in COUNTS_ONCE else 7
    upstream = [
        whole(drawn["seed"] + turn * r, x.shape, drawn["x.dtype"]).to(x.device)
        for r, x in enumerate(expected)
    ]
    upstream = [
        lying(grad, drawn["x.upstream"], drawn["x.lies"], r) if grad.dim() else grad
        for r, grad in enumerate(upstream)
    ]
    (grad,) = torch.autograd.grad(result, x, upstream[rank])
    same(grad, gradients(op, inputs, upstream, arguments, rank))


def prepared(op: str, function: Callable[..., Any], group: Any, drawn: Values) -> Call:
    """Return the call of a collective on a group of ranks."""
    x = tensor(op, drawn, group.rank, 0, drawn["x.memory"])
    learns = drawn["x.gradient"] and drawn.get("op", "sum") == "sum"
    x.requires_grad_(learns and x.is_floating_point())
    given = {"x": x, "comm": group, **arguments_of(op, drawn)}
    return Call(function, given, partial(judge, op, group, drawn, x))


def shapes(op: str) -> Parts:
    """Return parts of shapes: few or many dims, no elements, and more than one message segment.

    The first part has two dims, because transposing a tensor of one dim changes nothing in memory.
    """
    least = 2 if op == "all_to_all" else 1
    return {
        "few dims": lambda c, v: (3, 4),
        "more dims": lambda c, v: tuple(c.randint(1, 3) for _ in range(c.randint(3, 4))),
        "no elements": lambda c, v: (*(2,) * (least - 1), 0, 2),
        "one element": lambda c, v: (1,) * least,
        "thousands": lambda c, v: (c.randint(8_000, 9_000), *(2,) * (least - 1)),
    }


def of_lengths(op: str) -> dict[str, Parts]:
    """Return the domain of the length that each rank has along the dim of the collective."""
    if op not in (*UNEVEN, "reduce_scatter"):
        return {}
    lengths: Parts = {
        "even": lambda c, v: (c.randint(1, 4),) * v["comm.ranks"],
        "uneven": lambda c, v: cut(c, v["comm.ranks"], 4),
        "all 0": lambda c, v: (0,) * v["comm.ranks"],
    }
    if op == "all_to_all":
        return {"x.lengths": lengths}
    sizes = values(True) if op == "reduce_scatter" else values(False, True)
    return {"x.lengths": lengths, "sizes": sizes}


DIM: dict[str, Parts] = {
    "dim": {"first": lambda c, v: 0, "last": lambda c, v: len(v["x.shape"]) - 1},
    "dim.sign": values("from the front", "from the end"),
}
EXCHANGE: dict[str, Parts] = {
    "split_dim": values(0, 1),
    "concat_dim": {"the other": lambda c, v: 1 - v["split_dim"]},
    "split_sizes": {
        "default": lambda c, v: None,
        "uneven": lambda c, v: cut(c, v["comm.ranks"], 4),
    },
    "x.split": {"any": lambda c, v: cut(c, v["comm.ranks"], 3)},
    "concat_sizes": values(False, True),
}
ROOT: dict[str, Parts] = {
    "root": {"first": lambda c, v: 0, "last": lambda c, v: v["comm.ranks"] - 1}
}
DETERMINISTIC = {"deterministic": values(False, True)}
OWN: dict[str, dict[str, Parts]] = {
    "all_gather": DIM,
    "gather_replicated": DIM,
    "reduce_scatter": DIM | DETERMINISTIC,
    "all_to_all": EXCHANGE,
    "shift": DIM | {"offset": spans((1, 1), (0, 0), (-3, -1), (5, 99))},
    "broadcast": ROOT,
    "reduce": ROOT,
    "all_reduce": {"op": values("sum", "max", "min")} | DETERMINISTIC,
}
"""By collective, its factors besides the tensor and the algorithm."""


def factors(op: str) -> dict[str, Parts]:
    """Return the domain that a collective shares with its `_start` function."""
    of = {"gather_replicated": "all_gather", "reduce_from_group": "all_reduce"}.get(op, op)
    algorithm = {} if op == "copy_to_group" else {"algorithm": values(*ALGORITHMS[of])}
    held: dict[str, Parts] = {
        "x.shape": shapes(op),
        "x.dtype": values(*(name for name in DTYPES if name != "bool" or op not in SUMS)),
        "x.memory": values(*MEMORIES),
        "x.gradient": values(False, True),
        "x.upstream": values(*MEMORIES),
        "x.lies": LIES,
    }
    return held | of_lengths(op) | OWN.get(op, {}) | algorithm


SITUATIONS = situations.situations("host in parts", "late sends", "staged", "pipelined")


MANY = {"comm.ranks": "9 to 17"}
"""Every run draws each algorithm with this part, because the other parts have at most 8 ranks."""
APART_ROWS = (
    {"x.lies": APART, "x.memory": "transposed"},
    {"x.lies": APART, "x.gradient": "True", "x.upstream": "transposed"},
)
"""Tensors, or upstream gradients, of which only those of even ranks are not contiguous."""
OWN_RESULTS = {"copy_to_group": ("another dtype", "longer at the end", "one dim more")}
"""Changes of `copy_to_group` that only change a rank's own result: forward sends nothing."""

SUBJECTS = [
    on_group(
        name,
        factors(op),
        partial(prepared, op, getattr(sp, name)),
        SITUATIONS,
        allowed=("x=longer at the end", "offset=far out") if op in UNEVEN else (),
        own_results=OWN_RESULTS.get(op, ("one dim more",)),
        together=(
            *(MANY | {"algorithm": way} for way in SCHEDULED.get(name, ())),
            *APART_ROWS,
        ),
    )
    for op in DEFINITIONS
    for name in (op, f"{op}_start")
    if hasattr(sp, name)
]
