"""The domain of collectives: each and its gradient against their definition on the tensors of all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from random import Random
from typing import Any

import torch
from torch import Tensor

import sp_core as sp
from domains import situations
from domains.declared import Call, Parts, Subject, Values, spans, values
from domains.situations import COMMUNICATOR
from sp_core.collectives.build import MOVABLE, SUMMABLE
from sp_core.schedules import ALGORITHMS, SCHEDULED
from sp_core.sharding import split_sizes

SUMS = (
    "reduce_scatter",
    "all_reduce",
    "all_reduce_",
    "reduce",
    "reduce_from_group",
    "copy_to_group",
    "copy_all_to_group",
)
UNEVEN = ("all_gather", "all_to_all", "shift", "gather_replicated")
"""Collectives whose tensors may have another length along one dim on every rank."""
MEMORIES = ("contiguous", "transposed", "expanded", "sliced at an odd offset", "every second")
DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in MOVABLE}
Definition = Callable[[list[Tensor], Values], list[Tensor]]


def in_memory(x: Tensor, memory: str) -> Tensor:
    """A tensor equal to x, or to its first slice expanded, that lies in memory as named."""
    if memory == "transposed":
        return x.transpose(0, -1).contiguous().transpose(0, -1)
    if memory == "sliced at an odd offset":
        return torch.cat([x.new_ones(1), x.reshape(-1), x.new_ones(2)])[1:-2].view(x.shape)
    if memory == "every second":
        return torch.repeat_interleave(x, 2, -1)[..., ::2]
    if memory == "expanded" and x.shape[-1]:
        return x[..., :1].expand(x.shape)
    return x.contiguous()


def total(tensors: Sequence[Tensor]) -> Tensor:
    """Their sum; exact, because the numbers are small and whole."""
    wide = torch.stack([x if x.dtype == torch.float64 else x.double() for x in tensors]).sum(0)
    return wide.to(tensors[0].dtype)


def part(x: Tensor, sizes: Sequence[int], dim: int, rank: int) -> Tensor:
    """Part `rank` of a tensor that is cut along `dim`."""
    return x.narrow(dim, sum(sizes[:rank]), sizes[rank])


def scattered(inputs: list[Tensor], a: Values) -> list[Tensor]:
    sizes = a["sizes"] or split_sizes(inputs[0].shape[a["dim"]], len(inputs))
    return [part(total(inputs), sizes, a["dim"], rank) for rank in range(len(inputs))]


def exchanged(inputs: list[Tensor], a: Values) -> list[Tensor]:
    sizes = a["split_sizes"] or split_sizes(inputs[0].shape[a["split_dim"]], len(inputs))
    return [
        torch.cat([part(x, sizes, a["split_dim"], rank) for x in inputs], a["concat_dim"])
        for rank in range(len(inputs))
    ]


def reduced(inputs: list[Tensor], a: Values) -> list[Tensor]:
    best = {
        "sum": total,
        "max": lambda x: torch.stack(x).amax(0),
        "min": lambda x: torch.stack(x).amin(0),
    }
    return [best[a.get("op", "sum")](inputs)] * len(inputs)


DEFINITIONS: dict[str, Definition] = {
    "all_gather": lambda x, a: [torch.cat(x, a["dim"])] * len(x),
    "reduce_scatter": scattered,
    "all_reduce": reduced,
    "all_to_all": exchanged,
    "shift": lambda x, a: [x[(rank - a["offset"]) % len(x)] for rank in range(len(x))],
    "broadcast": lambda x, a: [x[a["root"]]] * len(x),
    "reduce": lambda x, a: [
        total(x) if rank == a["root"] else torch.zeros_like(x[0]) for rank in range(len(x))
    ],
    "reduce_from_group": reduced,
    "gather_replicated": lambda x, a: [torch.cat(x, a["dim"])] * len(x),
    "copy_to_group": lambda x, a: list(x),
}
"""What every rank gets, from the tensors of all ranks."""

COUNTS_ONCE = ("reduce_from_group", "gather_replicated")
"""Their results are one value that all ranks hold alike: the gradient of one rank's is that of all."""


def gradients(
    op: str, inputs: list[Tensor], upstream: list[Tensor], a: Values, rank: int
) -> Tensor:
    """The gradient of this rank's tensor: of the sum over ranks of <result, upstream>, or of this rank's where it counts once."""
    leaves = [x.detach().double().requires_grad_() for x in inputs]
    results = DEFINITIONS[op](leaves, a)
    chosen = [rank] if op in COUNTS_ONCE else range(len(inputs))
    if op == "copy_to_group":
        return total(upstream)
    loss = torch.stack([(results[r] * upstream[r].double()).sum() for r in chosen]).sum()
    (grad,) = torch.autograd.grad(loss, leaves[rank], allow_unused=True)
    return torch.zeros_like(inputs[rank]) if grad is None else grad.to(inputs[rank].dtype)


def cut(chance: Random, size: int, most: int, *, even: bool) -> tuple[int, ...]:
    """A length for each rank."""
    return (
        (chance.randint(1, most),) * size
        if even
        else tuple(chance.randint(0, most) for _ in range(size))
    )


def shape_of(op: str, drawn: Values, rank: int) -> tuple[int, ...]:
    """The shape of a rank's tensor: `lengths` along the dim of the collective."""
    shape = list(drawn["x.shape"])
    dim = drawn.get("dim", drawn.get("concat_dim"))
    if op in UNEVEN:
        shape[dim] = drawn["x.lengths"][rank]
    elif op == "reduce_scatter":
        shape[dim] = sum(drawn["x.lengths"])
    if op == "all_to_all":
        shape[drawn["split_dim"]] = sum(drawn["split_sizes"] or drawn["x.split"])
    return tuple(shape)


def tensor(op: str, drawn: Values, rank: int, key: int, memory: str) -> Tensor:
    """A tensor of small whole numbers, which every dtype adds exactly."""
    generator = torch.Generator().manual_seed(1000 * drawn["seed"] + 10 * rank + key)
    x = torch.randint(0, 4, shape_of(op, drawn, rank), generator=generator)
    return in_memory(x.to(DTYPES[drawn["x.dtype"]]), memory)


def arguments_of(op: str, drawn: Values) -> Values:
    """The call's own arguments, without the tensor and the communicator."""
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
    normal = arguments_of(op, drawn)
    normal.update({"dim": drawn["dim"]} if "dim" in drawn else {})
    normal.setdefault("sizes", None)
    if op == "reduce_scatter" and not drawn["sizes"]:
        normal["sizes"] = None
    expected = DEFINITIONS[op](inputs, normal)
    assert result.dtype == x.dtype
    torch.testing.assert_close(result, expected[rank], rtol=0, atol=0)
    assert torch.equal(x, inputs[rank]), "the input was changed"
    if not result.requires_grad:
        return
    made = [
        torch.randint(
            0,
            4,
            tuple(expected[r].shape),
            generator=torch.Generator().manual_seed(drawn["seed"] + 7 * r),
        ).to(x.dtype)
        for r in range(size if op not in COUNTS_ONCE else 1)
    ] * (1 if op not in COUNTS_ONCE else size)
    upstream = [in_memory(grad, drawn["x.upstream"]) if grad.dim() else grad for grad in made]
    (grad,) = torch.autograd.grad(result, x, upstream[rank])
    torch.testing.assert_close(grad, gradients(op, inputs, upstream, normal, rank), rtol=0, atol=0)


@contextmanager
def prepared(op: str, function: Callable[..., Any], comm: Any, drawn: Values) -> Iterator[Call]:
    """A collective along one axis of a mesh, or along the product of two."""
    with situations.opened(comm, drawn, situations.lengths(drawn)) as mesh:
        group = situations.group_of(mesh, drawn)
        drawn = drawn | {"seed": drawn["seed"] + 3 * situations.number_of(mesh, group)}
        x = tensor(op, drawn, group.rank, 0, drawn["x.memory"])
        x.requires_grad_(
            drawn["x.gradient"] and x.is_floating_point() and drawn.get("op", "sum") == "sum"
        )
        yield Call(
            function,
            {"x": x, "comm": group, **arguments_of(op, drawn)},
            partial(judge, op, group, drawn, x),
        )


def shapes(op: str) -> Parts:
    """Shapes with one to four dims, without elements, and beyond the segments into which messages are cut."""
    least = 2 if op == "all_to_all" else 1
    return {
        "few dims": lambda c, v: (3, 4)[-least:],
        "more dims": lambda c, v: tuple(c.randint(1, 3) for _ in range(c.randint(3, 4))),
        "no elements": lambda c, v: (*(2,) * (least - 1), 0, 2),
        "one element": lambda c, v: (1,) * least,
        "thousands": lambda c, v: (c.randint(8_000, 9_000), *(2,) * (least - 1)),
    }


def root(chance: Random, drawn: Values, *, last: bool) -> int:
    """The first or the last rank."""
    return drawn["comm.ranks"] - 1 if last else 0


def factors(op: str) -> dict[str, Parts]:
    """The domain of a collective and of its started form."""
    sums = op in SUMS
    names = [str(dtype).removeprefix("torch.") for dtype in (SUMMABLE if sums else MOVABLE)]
    found: dict[str, Parts] = {
        "x.shape": shapes(op),
        "x.dtype": values("float64", *(name for name in names if name != "float64")),
        "x.memory": values(*MEMORIES),
        "x.gradient": values(False, True),
        "x.upstream": values(*MEMORIES),
    }
    if op in UNEVEN or op == "reduce_scatter":
        found["x.lengths"] = {
            "even": lambda c, v: cut(c, v["comm.ranks"], 4, even=True),
            "uneven": lambda c, v: cut(c, v["comm.ranks"], 4, even=False),
            "all 0": lambda c, v: (0,) * v["comm.ranks"],
        }
        if op == "reduce_scatter":
            found["sizes"] = values(True)
        elif op != "all_to_all":
            found["sizes"] = values(False, True)
    if op in ("all_gather", "gather_replicated", "reduce_scatter", "shift"):
        found["dim"] = {"first": lambda c, v: 0, "last": lambda c, v: len(v["x.shape"]) - 1}
        found["dim.sign"] = values("from the front", "from the end")
    if op == "all_to_all":
        found["split_dim"] = values(0, 1)
        found["concat_dim"] = {"the other": lambda c, v: 1 - v["split_dim"]}
        found["split_sizes"] = {
            "default": lambda c, v: None,
            "uneven": lambda c, v: cut(c, v["comm.ranks"], 4, even=False),
        }
        found["x.split"] = {"any": lambda c, v: cut(c, v["comm.ranks"], 3, even=False)}
        found["concat_sizes"] = values(False, True)
    if op == "shift":
        found["offset"] = spans((1, 1), (0, 0), (-3, -1), (5, 99))
    if op in ("broadcast", "reduce"):
        found["root"] = {"first": partial(root, last=False), "last": partial(root, last=True)}
    if op == "all_reduce":
        found["op"] = values("sum", "max", "min")
    if op in ("all_reduce", "reduce_scatter"):
        found["deterministic"] = values(False, True)
    if op not in ("copy_to_group",):
        of = {"gather_replicated": "all_gather", "reduce_from_group": "all_reduce"}.get(op, op)
        found["algorithm"] = values(*ALGORITHMS[of])
    return found


SITUATIONS = situations.situations("host in parts", "late sends", "staged", "pipelined")


def subjects() -> Iterator[Subject]:
    """A subject for every collective, and for its started form."""
    for op in DEFINITIONS:
        for name in (op, f"{op}_start"):
            function = getattr(sp, name, None)
            if function is not None:
                domain = COMMUNICATOR | factors(op) | SITUATIONS
                allowed = ("x=longer at the end", "offset=far out") if op in UNEVEN else ()
                yield Subject(
                    name,
                    domain,
                    partial(prepared, op, function),
                    situations.ranks,
                    allowed=allowed,
                    own_results=OWN.get(op, ("one dim more",)),
                    together=tuple(MANY | {"algorithm": way} for way in SCHEDULED.get(name, ())),
                )


MANY = {"comm.ranks": "9 to 17"}
"""In every run each algorithm meets more ranks than a power of two, or four bits, can number."""
OWN = {"copy_to_group": ("another dtype", "longer at the end", "one dim more")}
"""What is copied is not sent."""

SUBJECTS = list(subjects())
