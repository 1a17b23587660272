"""The domain of collectives that are prepared once or made in place: `plan`, `all_reduce_`, `copy_all_to_group`."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from random import Random
from typing import Any

import torch
from torch import Tensor

import sp_core as sp
from domains import collectives, situations
from domains.collectives import DEFINITIONS, DTYPES, MEMORIES, in_memory, reduced, tensor
from domains.declared import Call, Parts, Subject, Values, spans, values
from domains.situations import COMMUNICATOR

PLANNED = (
    "all_gather",
    "reduce_scatter",
    "all_reduce",
    "all_reduce_",
    "all_to_all",
    "shift",
    "broadcast",
    "reduce",
)
RUNS = {"1": (0,), "3": (0, 0, 0), "100": (0, 98)}
"""How often a plan runs before each run that is judged."""


def moved(op: str) -> str:
    """Return the collective whose definition is that of `op`."""
    return "all_reduce" if op == "all_reduce_" else op


def inputs_of(op: str, drawn: Values, size: int, turn: int) -> list[Tensor]:
    """Return the tensors of all ranks in one run of a plan."""
    memory = "contiguous" if "shared" in drawn["x.memory"] else drawn["x.memory"]
    return [
        tensor(moved(op), drawn | {"seed": drawn["seed"] + 100 * turn}, rank, 0, memory)
        for rank in range(size)
    ]


def placed(x: Tensor, drawn: Values, group: sp.Communicator) -> Tensor:
    """Return the tensor where it was drawn to be: in memory of its own or in memory that all ranks see."""
    memory, alone = drawn["x.memory"], drawn["seed"] % group.size == group.rank
    if memory == "shared by other allocations":
        rooms = [sp.shared_empty(x.shape, comm=group, dtype=x.dtype) for _ in range(2)]
        return rooms[alone].copy_(x)
    if memory == "shared" or (memory == "shared on some ranks"):
        room = sp.shared_empty(x.shape, comm=group, dtype=x.dtype)
        return x if alone and memory != "shared" else room.copy_(x)
    return x


def refill(x: Tensor, source: Tensor) -> None:
    """Write other numbers into a tensor of which some elements may share memory."""
    narrow = [
        0 if stride == 0 and length > 1 else slice(None)
        for stride, length in zip(x.stride(), x.shape, strict=True)
    ]
    x[tuple(narrow)].copy_(source[tuple(narrow)])


def beside(x: Tensor, drawn: Values) -> Tensor:
    """Return the memory around and between the elements of a tensor; nothing of memory that ranks share."""
    if "shared" in drawn["x.memory"]:
        return x.new_empty(0)
    whole = x.detach().new_empty(0).set_(x.untyped_storage())
    mine = torch.arange(len(whole)).as_strided(x.shape, x.stride(), x.storage_offset())
    left = torch.ones(len(whole), dtype=torch.bool).index_fill_(0, mine.reshape(-1), False)
    return whole[left].clone()


class Planned:
    """A plan of one collective on one rank."""

    def __init__(self, op: str, drawn: Values, group: sp.Communicator) -> None:
        self.op, self.drawn, self.group = op, drawn, group
        self.x = placed(inputs_of(op, drawn, group.size, 0)[group.rank], drawn, group)
        self.normal = collectives.arguments_of(moved(op), drawn)
        self.given = dict(self.normal)
        if drawn["arguments"] == "left out where the default":
            known = inspect.signature(getattr(sp, op)).parameters
            self.given = {
                name: value for name, value in self.given.items() if known[name].default != value
            }
        self.normal |= {"dim": drawn["dim"]} if "dim" in drawn else {}
        self.normal.setdefault("sizes", None)

    def call(self) -> Call:
        """Return the call of `plan`."""
        return Call(
            partial(sp.plan, self.op),
            {"x": self.x, "comm": self.group, **self.given},
            self.judge,
            ("x",),
        )

    def judge(self, plan: sp.Plan) -> None:
        """Run a plan on other numbers each time; a second plan may be under way meanwhile."""
        assert plan.input is self.x
        assert self.drawn["algorithm"] in ("auto", plan.algorithm)
        other = sp.plan(self.op, self.x.clone(), comm=self.group, **self.given)
        for turn, quiet in enumerate(RUNS[self.drawn["(runs)"]]):
            for _ in range(quiet):
                plan.run()
            inputs = inputs_of(self.op, self.drawn, self.group.size, turn)
            mine = inputs[self.group.rank]
            refill(self.x, mine)
            refill(other.input, mine)
            around = beside(self.x, self.drawn)
            if self.drawn["(form)"] == "run":
                results = [plan.run()]
            else:
                plans = [plan, other] if self.drawn["(form)"] == "two under way" else [plan]
                under_way = [each.start() for each in plans]
                self.group.poll()
                results = [
                    each.finish(handle)
                    for each, handle in reversed(list(zip(plans, under_way, strict=True)))
                ]
            wanted = DEFINITIONS[moved(self.op)](inputs, self.normal)[self.group.rank]
            for result in results:
                torch.testing.assert_close(result, wanted, rtol=0, atol=0)
            assert results[-1] is self.x if self.op == "all_reduce_" else torch.equal(self.x, mine)
            assert torch.equal(beside(self.x, self.drawn), around), (
                "the memory around the input was changed"
            )


@contextmanager
def planned(op: str, comm: Any, drawn: Values) -> Iterator[Call]:
    """A plan along one axis of a mesh."""
    with situations.opened(comm, drawn, situations.lengths(drawn)) as mesh:
        group = situations.group_of(mesh, drawn)
        yield Planned(
            op, drawn | {"seed": drawn["seed"] + 3 * situations.number_of(mesh, group)}, group
        ).call()


def plan_factors(op: str) -> dict[str, Parts]:
    """Return the domain of a plan: that of its collective, without gradients, and how it is run."""
    found = {
        name: parts
        for name, parts in collectives.factors(moved(op)).items()
        if name not in ("x.gradient", "x.upstream")
    }
    own = (
        MEMORIES
        if op != "all_reduce_"
        else tuple(memory for memory in MEMORIES if memory != "expanded")
    )
    shared = ("shared", "shared on some ranks", "shared by other allocations")
    return found | {
        "x.memory": values(*own, *shared),
        "op.name": values(op),
        "arguments": values("given", "left out where the default"),
        "(runs)": values("3", "1", "100"),
        "(form)": values("run", "start and finish", "two under way"),
    }


@contextmanager
def in_place(comm: Any, drawn: Values) -> Iterator[Call]:
    """A sum in place; every call finds the tensor as it was before the first."""
    with situations.opened(comm, drawn, situations.lengths(drawn)) as mesh:
        group = situations.group_of(mesh, drawn)
        drawn = drawn | {"seed": drawn["seed"] + 3 * situations.number_of(mesh, group)}
        x = placed(inputs_of("all_reduce_", drawn, group.size, 0)[group.rank], drawn, group)
        before, around = x.clone(), beside(x, drawn)
        given = collectives.arguments_of("all_reduce", drawn)

        def function(**named: Any) -> Tensor:
            x.copy_(before)
            return sp.all_reduce_(**named)

        def judge(result: Tensor) -> None:
            assert result is x
            wanted = reduced(inputs_of("all_reduce_", drawn, group.size, 0), given)[group.rank]
            torch.testing.assert_close(x, wanted, rtol=0, atol=0)
            assert torch.equal(beside(x, drawn), around), "the memory around the tensor was changed"

        yield Call(function, {"x": x, "comm": group, **given}, judge)


# copy_all_to_group

KINDS = {"one": ("float64",), "two": ("float32", "bfloat16"), "many": tuple(DTYPES)}


def copied(drawn: Values, rank: int, key: int) -> list[Tensor]:
    """Return some tensors of one rank; those of one key have the same shapes on every rank."""
    chance = Random(drawn["seed"])
    kinds = [name for name in KINDS[drawn["tensors.dtypes"]] if name != "bool"]
    found = []
    for number in range(drawn["tensors.number"]):
        shape = (
            chance.choice([(3, 2), (), (0, 3), (5,), (1, 1, 4)])
            if drawn["tensors.shapes"] == "any"
            else (3, 2)
        )
        generator = torch.Generator().manual_seed(
            1000 * drawn["seed"] + 100 * key + 10 * rank + number
        )
        found.append(
            torch.randint(0, 4, shape, generator=generator).to(DTYPES[kinds[number % len(kinds)]])
        )
    return found


def laid(x: Tensor, memory: str) -> Tensor:
    """Return a tensor that lies in memory as named; a number lies anyhow."""
    return in_memory(x, memory) if x.dim() else x


@contextmanager
def copies(comm: Any, drawn: Values) -> Iterator[Call]:
    """Tensors that every rank holds alike; some results go unused, other ones on each rank."""
    with situations.opened(comm, drawn, situations.lengths(drawn)) as mesh:
        group = situations.group_of(mesh, drawn)
        drawn = drawn | {"seed": drawn["seed"] + 3 * situations.number_of(mesh, group)}
        tensors = [laid(x, drawn["tensors.memory"]).detach() for x in copied(drawn, 0, 0)]
        for number, x in enumerate(tensors):
            wanted = drawn["tensors.gradients"] == "all" or (
                drawn["tensors.gradients"] == "some" and number % 2 == 0
            )
            x.requires_grad_(wanted and x.is_floating_point())
        yield Call(
            sp.copy_all_to_group,
            {"tensors": tensors, "comm": group},
            partial(judge_copies, group, drawn, tensors),
        )


def used(drawn: Values, rank: int, number: int, count: int) -> bool:
    """Say whether a rank uses a result; each rank uses at least one."""
    kind = drawn["(used)"]
    return (
        kind == "all"
        or number == (rank + drawn["seed"]) % count
        or (kind == "some" and (number + rank) % 2 == 0)
    )


def judge_copies(
    group: sp.Communicator, drawn: Values, tensors: list[Tensor], result: tuple[Tensor, ...]
) -> None:
    """The results are the tensors; their gradients are those of all ranks."""
    assert isinstance(result, tuple)
    for out, x in zip(result, tensors, strict=True):
        assert out.requires_grad == x.requires_grad
        torch.testing.assert_close(out, x, rtol=0, atol=0)
    places = [number for number, x in enumerate(tensors) if x.requires_grad]
    if not places:
        return
    upstream = {rank: copied(drawn, rank, 1) for rank in range(group.size)}
    taken = [n for place, n in enumerate(places) if used(drawn, group.rank, place, len(places))]
    grads = torch.autograd.grad(
        [result[n] for n in taken],
        [tensors[n] for n in places],
        [laid(expanded(upstream[group.rank][n], drawn), drawn["tensors.upstream"]) for n in taken],
    )
    for place, (n, found) in enumerate(zip(places, grads, strict=True)):
        parts = [
            expanded(upstream[rank][n], drawn) * used(drawn, rank, place, len(places))
            for rank in range(group.size)
        ]
        torch.testing.assert_close(found, collectives.total(parts), rtol=0, atol=0)


def expanded(x: Tensor, drawn: Values) -> Tensor:
    """Return the numbers that an upstream gradient holds once it lies in memory as drawn."""
    return laid(x, drawn["tensors.upstream"]).contiguous()


COPIES: dict[str, Parts] = {
    "tensors.number": spans((2, 6), (0, 0), (1, 1), (30, 40)),
    "tensors.dtypes": values(*KINDS),
    "tensors.shapes": values("alike", "any"),
    "tensors.memory": values(*MEMORIES),
    "tensors.gradients": values("all", "some", "none"),
    "tensors.upstream": values(*MEMORIES),
    "(used)": values("all", "some", "one"),
}
SUMMED = {
    name: parts
    for name, parts in plan_factors("all_reduce_").items()
    if name not in ("op.name", "arguments", "(runs)", "(form)")
}
SUBJECTS = [
    *(
        Subject(
            f"plan of {op}",
            COMMUNICATOR | plan_factors(op) | collectives.SITUATIONS,
            partial(planned, op),
            situations.ranks,
            ("plan",),
            allowed=("x=longer at the end", "offset=far out") if op in collectives.UNEVEN else (),
        )
        for op in PLANNED
    ),
    Subject(
        "all_reduce_",
        COMMUNICATOR | SUMMED | collectives.SITUATIONS,
        in_place,
        situations.ranks,
    ),
    Subject(
        "copy_all_to_group",
        COMMUNICATOR | COPIES | situations.SITUATIONS,
        copies,
        situations.ranks,
        allowed=("tensors=in another order",),
    ),
]
