"""Declare the domain of placements: which slices of a parameter each rank holds."""

import math
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from random import Random
from typing import Any

import torch
from oracle.collective_cases import MEMORIES, in_memory
from torch import Tensor, nn

from domains.declared import Call, Parts, Values, pure, same, spans, values, whole
from sp_core.nn.gradients import Placement, place, placement_of

Held = tuple[tuple[range, ...], ...]


def cuts(chance: Random, length: int, number: int) -> list[range]:
    """Return `number` ranges one after the other, from 0 to `length`, some of them empty."""
    inner = sorted(chance.randint(0, length) for _ in range(number - 1))
    return [range(start, stop) for start, stop in pairwise((0, *inner, length))]


def evenly(_: Random, length: int, size: int) -> Held:
    """Return one range for each rank, as equal as possible."""
    ends = [
        0,
        *(
            int(part[-1]) + 1 if len(part) else length
            for part in torch.arange(length).tensor_split(size)
        ),
    ]
    return tuple((range(start, stop),) for start, stop in pairwise(ends))


def several(chance: Random, length: int, size: int) -> Held:
    """Return the ranges of each rank, dealt at random: several, one or none."""
    pieces = cuts(chance, length, 3 * size)
    owners = [chance.randrange(size) for _ in pieces]
    return tuple(
        tuple(piece for piece, owner in zip(pieces, owners, strict=True) if owner == rank)
        for rank in range(size)
    )


def overlapping(chance: Random, length: int, size: int) -> Held:
    """Return a random range for each rank, but all slices for one rank."""
    chosen = chance.randrange(size)
    ranges = [
        range(*sorted((chance.randint(0, length), chance.randint(0, length)))) for _ in range(size)
    ]
    return tuple((range(length) if rank == chosen else part,) for rank, part in enumerate(ranges))


HELD: dict[str, Callable[[Random, int, int], Held]] = {
    "evenly": evenly,
    "unevenly": lambda c, length, size: tuple((piece,) for piece in cuts(c, length, size)),
    "several or no ranges": several,
    "all on every rank": lambda _, length, size: ((range(length),),) * size,
    "overlapping": overlapping,
    "all on the last rank": lambda _, length, size: (*[()] * (size - 1), (range(length),)),
}
"""Ways to deal slices to the ranks of the tensor axis; each slice is on at least one rank."""


def held_of(name: str, chance: Random, shape: tuple[int, ...], dim: int, size: int) -> Held:
    """Return the slices of each rank, dealt in the named way; each rank holds a single number."""
    if not shape:
        return HELD["all on every rank"](chance, 1, size)
    return HELD[name](chance, shape[dim], size)


def shape_of(chance: Random, drawn: Values, *, dims: tuple[int, int]) -> tuple[int, ...]:
    """Return the shape of a whole parameter."""
    return tuple(chance.randint(1, 5) for _ in range(chance.randint(*dims)))


PLACED: dict[str, Parts] = {
    "size": spans((2, 3), (1, 1), (4, 8)),
    "shape": {
        "2 dims": partial(shape_of, dims=(2, 2)),
        "1 dim": partial(shape_of, dims=(1, 1)),
        "3 to 4 dims": partial(shape_of, dims=(3, 4)),
        "no elements": lambda c, v: (0, 3),
        "many slices": lambda c, v: (c.randint(50, 90), 2),
        "a number": lambda c, v: (),
    },
    "dim": {
        "first": lambda c, v: 0,
        "last": lambda c, v: max(0, len(v["shape"]) - 1),
        "last, from the end": lambda c, v: -1,
    },
}
SPLIT = PLACED | {"shape": {n: draw for n, draw in PLACED["shape"].items() if n != "a number"}}
ASKED: dict[str, Parts] = {
    **PLACED,
    "held": {
        name: lambda c, v, name=name: held_of(  # type: ignore[misc]
            name, c, v["shape"], v["dim"], v["size"]
        )
        for name in HELD
    },
    "partial": values(False, True),
    "copy": values(False, True),
    "rank": {"first": lambda c, v: 0, "last": lambda c, v: v["size"] - 1},
    "whole.memory": values(*MEMORIES),
    "whole.dtype": values("float64", "bfloat16", "int32"),
}


def indices(held: Held, rank: int) -> Tensor:
    """Return the indices of the slices that a rank holds."""
    return torch.tensor([index for part in held[rank] for index in part], dtype=torch.int64)


def counted(drawn: Values, part: Tensor) -> Tensor:
    """Return the slices of a rank that no lower rank holds; none if the parameter is a copy."""
    lower = torch.cat(
        [indices(drawn["held"], rank) for rank in range(drawn["rank"])] or [indices(((),), 0)]
    )
    part = torch.atleast_1d(part) if lower.numel() or drawn["copy"] else part
    stays = [
        place
        for place, index in enumerate(indices(drawn["held"], drawn["rank"]).tolist())
        if index not in lower.tolist()
    ]
    return part.index_select(
        drawn["dim"], torch.tensor([] if drawn["copy"] else stays, dtype=torch.int64)
    )


METHODS: dict[str, Callable[[Values, Tensor], tuple[Values, Any]]] = {
    "local_shape": lambda v, whole: (
        {"rank": v["rank"]},
        tuple(whole.index_select(v["dim"], indices(v["held"], v["rank"])).shape),
    ),
    "take": lambda v, whole: (
        {"whole": whole, "rank": v["rank"]},
        whole.index_select(v["dim"], indices(v["held"], v["rank"])),
    ),
    "spread": lambda v, whole: (
        {"part": part_of(v, whole), "rank": v["rank"]},
        torch.zeros_like(whole).index_copy_(
            v["dim"], indices(v["held"], v["rank"]), part_of(v, whole)
        ),
    ),
    "join": lambda v, whole: (
        {
            "parts": torch.cat(
                [torch.atleast_1d(part_of(v | {"rank": r}, whole)) for r in range(v["size"])],
                v["dim"],
            )
        },
        whole,
    ),
    "counted": lambda v, whole: (
        {"part": part_of(v, whole), "rank": v["rank"]},
        counted(v, part_of(v, whole)),
    ),
}
"""For each method, a function that returns its arguments and the expected result."""


def part_of(drawn: Values, whole: Tensor) -> Tensor:
    """Return the part of a whole tensor that the drawn rank holds."""
    return whole.index_select(drawn["dim"], indices(drawn["held"], drawn["rank"]))


def asked(method: str, drawn: Values) -> Call:
    """Return the call of a method of a placement that was made from lists."""
    lists = drawn | {"shape": list(drawn["shape"]), "held": [*map(list, drawn["held"])]}
    placement = Placement(*(lists[name] for name in ("shape", "dim", "held", "partial", "copy")))
    x = whole(drawn["seed"], drawn["shape"], drawn["whole.dtype"], -4, 4)
    x = in_memory(x, drawn["whole.memory"]) if x.dim() else x
    given, wanted = METHODS[method](drawn, x)
    assert placement.numel == math.prod(drawn["shape"])
    return Call(getattr(placement, method), given, partial(same, wanted=wanted))


def placed(drawn: Values) -> Call:
    """Return the call of `place`, after which `placement_of` must find the placement."""
    parameter = nn.Parameter(torch.ones(2))
    placement = Placement(*(drawn[name] for name in ("shape", "dim", "held", "partial", "copy")))

    def judge(found: nn.Parameter) -> None:
        assert found is parameter
        assert placement_of(found) is placement

    return Call(place, {"parameter": parameter, "placement": placement}, judge)


def constructed(name: str, drawn: Values) -> Call:
    """Return the call of a constructor of `Placement`, and compare what each rank holds."""
    dim, size = 0 if name == "replicated" else drawn["dim"], drawn["size"]
    length = (drawn["shape"] or (1,))[dim]
    if name == "replicated":
        given = {"shape": drawn["shape"], "size": size, "partial": drawn["partial"]}
        wanted = Placement(
            drawn["shape"], 0, HELD["all on every rank"](Random(), length, size), drawn["partial"]
        )
    else:
        given = {"shape": drawn["shape"], "dim": drawn["dim"], "size": size}
        wanted = Placement(drawn["shape"], drawn["dim"], HELD["evenly"](Random(), length, size))
    given["shape"] = list(given["shape"]) if drawn["seed"] % 2 else torch.Size(given["shape"])
    return Call(getattr(Placement, name), given, lambda found: judge_held(found, wanted))


def judge_held(found: Placement, wanted: Placement) -> None:
    """Compare two placements by the slices of each rank."""
    assert (found.shape, found.dim, found.partial, found.copy) == (
        wanted.shape,
        wanted.dim,
        wanted.partial,
        wanted.copy,
    )
    assert [[i for part in held for i in part] for held in found.held] == [
        [i for part in held for i in part] for held in wanted.held
    ]


SUBJECTS = [
    pure(
        "gradients.Placement.replicated",
        PLACED | {"partial": values(False, True)},
        partial(constructed, "replicated"),
    ),
    pure("gradients.Placement.split", SPLIT, partial(constructed, "split")),
    *(
        pure(
            f"gradients.Placement.{method}",
            ASKED | {name: values("drawn") for name in ("whole", "part", "parts") if name in used},
            partial(asked, method),
            covers=("gradients.Placement",) if method == "take" else (),
        )
        for method, used in {
            "local_shape": (),
            "take": ("whole",),
            "spread": ("part",),
            "join": ("parts",),
            "counted": ("part",),
        }.items()
    ),
    pure(
        "gradients.place",
        ASKED | {"parameter": values("any"), "placement": values("any")},
        placed,
        covers=("gradients.placement_of",),
    ),
]
