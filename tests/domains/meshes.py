"""Declare the domain of `Mesh`, and of memory that ranks share: `shared_empty`, `peer`, `fence`."""

import math
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import permutations
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from oracle.link import LinkModel

import sp_core as sp
from domains import situations
from domains.collectives import DTYPES
from domains.declared import Call, Parts, Subject, Values, same, spans, values
from domains.situations import on_group
from sp_core.programs import ALGORITHMS
from sp_core.tuning import Curve, Tuning, save

# Mesh

CURVE = Curve(((1, 1e-6), (1 << 30, 1.0)))
TUNING = Tuning({"host": "here"}, (0, 0), {"node": CURVE}, CURVE, CURVE, measured_at="of rank 0")


def cut(chance: Random, drawn: Values, *, number: int) -> dict[str, int]:
    """Return `number` axes with random names, whose sizes multiply to the number of ranks."""
    left, sizes = drawn["comm.ranks"], []
    for _ in range(number - 1):
        sizes.append(chance.choice([size for size in range(1, left + 1) if left % size == 0]))
        left //= sizes[-1]
    return dict(zip(chance.sample("abcd", number), [*sizes, left], strict=True))


@contextmanager
def meshed(comm: Any, drawn: Values) -> Iterator[Call]:
    """Yield the call that makes a mesh over a communicator, whose ranks may be reversed."""
    ranks = comm.Split(0, -comm.rank if drawn["comm.order"] == "reversed" else comm.rank)
    given = {name: drawn[name] for name in ("transport", "check", "tuning")}
    given |= {
        name: drawn[name] for name in ("device", "algorithm", "nodes") if drawn[name] is not None
    }
    if isinstance(drawn["tuning"], Tuning) and ranks.rank:
        given["tuning"] = replace(TUNING, measured_at="of another rank")
    with tempfile.TemporaryDirectory() as folder:
        if isinstance(drawn["tuning"], Path):
            given["tuning"] = Path(folder) / drawn["tuning"]
            if ranks.rank == 0:  # the other ranks have no such file
                save(TUNING, given["tuning"])
        yield Call(
            sp.Mesh, {"comm": ranks, **given, **drawn["axes"]}, partial(judge_mesh, ranks, drawn)
        )
    ranks.Free()


def judge_mesh(comm: Any, drawn: Values, mesh: sp.Mesh) -> None:
    """Compare communicators of a mesh with the grid of ranks, then leave the mesh as drawn."""
    axes = drawn["axes"]
    grid = torch.arange(comm.size).view(*axes.values())
    mine = dict(zip(axes, (int(n) for n in (grid == comm.rank).nonzero()[0]), strict=True))
    assert (mesh.rank, mesh.size, mesh.axes, mesh.device) == (
        comm.rank,
        comm.size,
        axes,
        torch.device("cpu"),
    )
    assert {axis: mesh[axis].rank for axis in axes} == mine
    assert (mesh.tuning and mesh.tuning.measured_at) == (
        "of rank 0" if isinstance(drawn["tuning"], Tuning | Path) else None
    )
    nodes = [0] * comm.size if drawn["nodes"] is None else list(drawn["nodes"])
    with pytest.raises(sp.RankError, match="left") if drawn["(left)"] == "with an error" else mesh:
        products = [
            names for number in range(len(axes) + 1) for names in permutations(axes, number)
        ]
        for names in Random(drawn["seed"]).sample(products, min(5, len(products))):
            judge_group(mesh, names, grid, mine, nodes)
        judge_settings(mesh, drawn)
        if drawn["(left)"] == "with an error":
            with mesh:
                raise sp.RankError("left")
        if drawn["(left)"] == "free":
            mesh.free()
    mesh.free()
    with pytest.raises(sp.RankError, match="has been freed"):
        mesh[tuple(axes)]


def judge_group(
    mesh: sp.Mesh,
    names: tuple[str, ...],
    grid: torch.Tensor,
    mine: dict[str, int],
    nodes: list[int],
) -> None:
    """Compare the communicator along some axes with the ranks that differ along them only."""
    order = [place for place, axis in enumerate(mine) if axis not in names] + [
        list(mine).index(axis) for axis in names
    ]
    rest = tuple(mine[axis] for axis in mine if axis not in names)
    members = grid.permute(order)[rest].reshape(-1).tolist()
    group = mesh[names]
    assert (group.size, members[group.rank]) == (len(members), mesh.rank)
    assert (
        sp.all_gather(torch.tensor([mesh.rank]), comm=group, algorithm="ring").tolist() == members
    )
    seen = list(dict.fromkeys(nodes[rank] for rank in members))
    assert group.nodes == tuple(seen.index(nodes[rank]) for rank in members)
    assert mesh[names] is group
    if names:
        assert (
            sp.all_reduce(torch.ones(3), comm=group, algorithm="ring").tolist()
            == [len(members)] * 3
        )


def judge_settings(mesh: sp.Mesh, drawn: Values) -> None:
    """Check that a communicator has the algorithms, window and agreement given to the mesh."""
    group = mesh[tuple(drawn["axes"])]
    asked: Any = drawn["algorithm"] or "auto"
    if "=" in asked:
        asked = dict(pair.split("=") for pair in asked.split(", "))
    for op, names in ALGORITHMS.items():
        name = asked if isinstance(asked, str) else asked.get(op, "auto")
        assert group.algorithms[op] == (name if name in names else "auto")
    assert (group.window is not None) == (drawn["transport"] == "window")
    group.counters.reset()
    sp.all_gather(torch.ones(2), comm=group, algorithm="ring")
    assert bool(group.counters["control"].calls) or drawn["check"] == "off" or group.size == 1


# memory that ranks share


SHARED: dict[str, Parts] = {
    "shape": {
        "few dims": lambda c, v: [
            (c.randint(1, 3), c.randint(1, 5)) for _ in range(v["comm.ranks"])
        ],
        "another one on each rank": lambda c, v: [
            (rank, 3)[rank % 2 :] for rank in range(v["comm.ranks"])
        ],
        "a number": lambda c, v: [()] * v["comm.ranks"],
        "no elements": lambda c, v: [(2, 0, 3)] * v["comm.ranks"],
        "16 dims": lambda c, v: [(1, 2) * 8] * v["comm.ranks"],
        "thousands": lambda c, v: [[c.randint(3000, 9000), 2]] * v["comm.ranks"],
    },
    "dtype": values("float32", *(name for name in DTYPES if name != "float32"))
    | {"default": lambda c, v: None},
}


def content(drawn: Values, rank: int, turn: int) -> torch.Tensor:
    """Return the tensor that a rank writes in a turn."""
    shape = tuple(drawn["shape"][rank])
    dtype = DTYPES[drawn["dtype"] or "float32"]
    return ((torch.arange(math.prod(shape)) + rank + 3 * turn) % 5).view(shape).to(dtype)


def given_to_empty(drawn: Values, group: sp.Communicator) -> Values:
    """Return the arguments of `shared_empty`."""
    dtype = {} if drawn["dtype"] is None else {"dtype": DTYPES[drawn["dtype"]]}
    return {"shape": drawn["shape"][group.rank], "comm": group, **dtype}


def shared(name: str, group: sp.Communicator, drawn: Values) -> Call:
    """Return the call of `shared_empty`, `peer` or `fence` on memory that a group's ranks share."""
    drawn = {"shape": [(2, 3)] * group.size, "dtype": None} | drawn
    given = given_to_empty(drawn, group)
    if name == "shared_empty":
        return Call(sp.shared_empty, given, partial(judge_empty, group, drawn))
    x = sp.shared_empty(**given).copy_(content(drawn, group.rank, 0))
    if name == "fence":
        return Call(sp.fence, {"comm": group}, partial(judge_fence, group, drawn, x))
    size = group.size
    others: dict[Any, int] = {"own": group.rank, "next": (group.rank + 1) % size, "last": size - 1}
    sp.fence(comm=group)
    given = {"x": x, "rank": others[drawn["rank"]], "comm": group}
    return Call(sp.peer, given, partial(judge_peer, group, drawn, x, given["rank"]))


def judge_empty(group: sp.Communicator, drawn: Values, x: torch.Tensor) -> None:
    """Check that a new tensor is zero; write into it and into a second one, and compare both."""
    same(x, torch.zeros_like(content(drawn, group.rank, 0)))
    second = sp.shared_empty(**given_to_empty(drawn, group))
    x.copy_(content(drawn, group.rank, 0))
    second.copy_(content(drawn, group.rank, 1))
    judge_fence(group, drawn, x, sp.fence(comm=group))  # type: ignore[func-returns-value]
    same(second, content(drawn, group.rank, 1))


def judge_fence(group: sp.Communicator, drawn: Values, x: torch.Tensor, result: None) -> None:
    """Check that every rank's tensor has, after a fence, what the rank wrote before it."""
    assert result is None
    for turn in range(3):
        for rank in range(group.size) if group.window is not None else [group.rank]:
            seen = x if group.window is None else sp.peer(x, rank, comm=group)
            same(seen, content(drawn, rank, turn))
        sp.fence(comm=group)
        x.copy_(content(drawn, group.rank, turn + 1))
        sp.fence(comm=group)


def judge_peer(
    group: sp.Communicator, drawn: Values, x: torch.Tensor, rank: int, seen: torch.Tensor
) -> None:
    """Compare a rank's tensor with what the rank wrote, before and after it writes again."""
    same(seen, content(drawn, rank, 0))
    assert seen.data_ptr() == x.data_ptr() or rank != group.rank
    sp.fence(comm=group)
    x.copy_(content(drawn, group.rank, 1))
    sp.fence(comm=group)
    same(seen, content(drawn, rank, 1))


SUBJECTS = [
    Subject(
        "Mesh",
        {
            "comm.ranks": spans((2, 2), (1, 1), (3, 3), (4, 4), (5, 8)),
            "comm.order": values("as given", "reversed"),
            "axes": {f"{number} of them": partial(cut, number=number) for number in (1, 2, 3, 4)},
            "axis": values("every"),
            "device": {
                "default": lambda c, v: None,
                "name": lambda c, v: "cpu",
                "object": lambda c, v: torch.device("cpu"),
            },
            "transport": values("auto", "host", "window", "distributed")
            | {"a link": lambda c, v: LinkModel(1e-6, 1e9)},
            "check": values("agree", "off"),
            "algorithm": {
                "default": lambda c, v: None,
                "name": lambda c, v: "ring",
                "text": lambda c, v: "all_reduce=rabenseifner, all_gather=bruck",
                "mapping": lambda c, v: {"all_to_all": "pairwise", "reduce": "binomial"},
            },
            "nodes": {
                "default": lambda c, v: None,
                "one": lambda c, v: [5] * v["comm.ranks"],
                "one for each rank": lambda c, v: range(v["comm.ranks"]),
                "any": lambda c, v: [c.choice([-3, 0, 7]) for _ in range(v["comm.ranks"])],
            },
            "tuning": {
                "off": lambda c, v: "off",
                "default": lambda c, v: None,
                "constants": lambda c, v: TUNING,
                "file": lambda c, v: Path("tuning.json"),
            },
            "(left)": values("with", "free", "with an error"),
        },
        meshed,
        lambda drawn: int(drawn["comm.ranks"]),
        ("Mesh.free",),
        allowed=("tuning=unknown", "tuning=None"),
    ),
    on_group(
        "shared_empty",
        SHARED,
        partial(shared, "shared_empty"),
        allowed=("shape=too many", "shape=in another order"),
    ),
    on_group("fence", {}, partial(shared, "fence"), alone=True),
    on_group(
        "peer",
        SHARED | {"x": values("whole"), "rank": values("next", "own", "last")},
        partial(shared, "peer"),
        situations.situations() | {"(transport)": values(*situations.SHARING)},
        alone=True,
    ),
]
