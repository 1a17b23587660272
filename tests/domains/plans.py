"""Declare the domain of collectives prepared once or in place: `plan`, `all_reduce_` and copies."""

import inspect
from functools import partial
from random import Random
from typing import Any

import torch
from oracle.collective_cases import DEFINITIONS, MEMORIES, UNEVEN, total
from torch import Tensor

import sp_core as sp
from domains import collectives
from domains.collectives import APART, APART_ROWS, DTYPES, LIES, SITUATIONS, lying, tensor
from domains.declared import Call, Parts, Values, same, spans, values, whole
from domains.situations import on_group
from sp_core.testing import device

RUNS = {"1": (0,), "3": (0, 0, 0), "100": (0, 98)}
"""By part, for each judged run of a plan, how many runs without a judgement precede it."""


def inputs_of(op: str, drawn: Values, size: int, turn: int) -> list[Tensor]:
    """Return the tensors of all ranks in one run of a plan."""
    memory = "contiguous" if "shared" in drawn["x.memory"] else drawn["x.memory"]
    return [
        tensor(op.removesuffix("_"), drawn | {"seed": drawn["seed"] + 100 * turn}, rank, 0, memory)
        for rank in range(size)
    ]


def placed(x: Tensor, drawn: Values, group: sp.Communicator) -> Tensor:
    """Return the tensor in memory of its own or in shared memory, as drawn."""
    memory, alone = drawn["x.memory"], drawn["seed"] % group.size == group.rank
    if memory == "shared by other allocations":
        rooms = [sp.shared_empty(x.shape, comm=group, dtype=x.dtype) for _ in range(2)]
        return rooms[alone].copy_(x)
    if memory in {"shared", "shared on some ranks"}:
        room = sp.shared_empty(x.shape, comm=group, dtype=x.dtype)
        return x if alone and memory != "shared" else room.copy_(x)
    return x


def refill(x: Tensor, source: Tensor) -> None:
    """Copy `source` into a tensor of which some elements may share memory."""
    narrow = [
        0 if stride == 0 and length > 1 else slice(None)
        for stride, length in zip(x.stride(), x.shape, strict=True)
    ]
    x[tuple(narrow)].copy_(source[tuple(narrow)])


def beside(x: Tensor, drawn: Values) -> Tensor:
    """Return the memory around a tensor's elements; an empty tensor if ranks share the memory."""
    if "shared" in drawn["x.memory"]:
        return x.new_empty(0)
    whole = x.detach().new_empty(0).set_(x.untyped_storage())
    mine = torch.arange(len(whole)).as_strided(x.shape, x.stride(), x.storage_offset())
    left = torch.ones(len(whole), dtype=torch.bool).index_fill_(0, mine.reshape(-1), False)
    return whole.cpu()[left]


def planned(op: str, group: sp.Communicator, drawn: Values) -> Call:
    """Return the call of `plan`. Each judged run has a new input; a second plan may run too."""
    x = placed(inputs_of(op, drawn, group.size, 0)[group.rank], drawn, group)
    arguments = given = collectives.arguments_of(op.removesuffix("_"), drawn)
    if drawn["arguments"] == "left out where the default":
        known = inspect.signature(getattr(sp, op)).parameters
        given = {name: value for name, value in given.items() if known[name].default != value}

    def judge(plan: sp.Plan) -> None:
        assert plan.input is x
        assert drawn["algorithm"] in ("auto", plan.algorithm)
        other = sp.plan(op, x.clone(), comm=group, **given)
        for turn, quiet in enumerate(RUNS[drawn["(runs)"]]):
            for _ in range(quiet):
                plan.run()
            inputs = inputs_of(op, drawn, group.size, turn)
            mine = inputs[group.rank]
            refill(x, mine)
            refill(other.input, mine)
            around = beside(x, drawn)
            results = run_plans(drawn["(form)"], plan, other, group)
            wanted = DEFINITIONS[op.removesuffix("_")](inputs, arguments)[group.rank]
            for result in results:
                same(result, wanted)
            assert results[-1] is x if op == "all_reduce_" else torch.equal(x, mine)
            assert torch.equal(beside(x, drawn), around), "the memory around the input was changed"
            for result in () if op == "all_reduce_" else results:
                result.fill_(1)  # the next run overwrites every element, on every rank

    return Call(partial(sp.plan, op), {"x": x, "comm": group, **given}, judge, ("x",))


def run_plans(form: str, plan: sp.Plan, other: sp.Plan, group: sp.Communicator) -> list[Tensor]:
    """Run a plan, or start it and `other`, as `form` says. Return the results, `plan`'s last."""
    if form == "run":
        return [plan.run()]
    plans = [plan, other] if form == "two under way" else [plan]
    under_way = [each.start() for each in plans]
    group.poll()
    both = reversed(list(zip(plans, under_way, strict=True)))
    return [each.finish(handle) for each, handle in both]


def plan_factors(op: str) -> dict[str, Parts]:
    """Return the domain of a plan: that of its collective, without gradients, and how it is run."""
    found = {
        name: parts
        for name, parts in collectives.factors(op.removesuffix("_")).items()
        if name not in ("x.gradient", "x.upstream")
    }
    own = [memory for memory in MEMORIES if op != "all_reduce_" or memory != "expanded"]
    shared = ("shared", "shared on some ranks", "shared by other allocations")
    return found | {
        "x.memory": values(*own, *shared),
        "op.name": values(op),
        "arguments": values("given", "left out where the default"),
        "(runs)": values("3", "1", "100"),
        "(form)": values("run", "start and finish", "two under way"),
    }


def in_place(group: sp.Communicator, drawn: Values) -> Call:
    """Return the call of `all_reduce_`; each call finds the tensor as it was before the first."""
    x = placed(inputs_of("all_reduce_", drawn, group.size, 0)[group.rank], drawn, group)
    before, around = x.clone(), beside(x, drawn)
    given = collectives.arguments_of("all_reduce", drawn)

    def function(**named: Any) -> Tensor:
        x.copy_(before)
        return sp.all_reduce_(**named)

    def judge(result: Tensor) -> None:
        assert result is x
        inputs = inputs_of("all_reduce_", drawn, group.size, 0)
        same(x, DEFINITIONS["all_reduce"](inputs, given)[group.rank])
        assert torch.equal(beside(x, drawn), around), "the memory around the tensor was changed"

    return Call(function, {"x": x, "comm": group, **given}, judge)


# copy_all_to_group

KINDS = {
    "one": ("float64",),
    "two": ("float32", "bfloat16"),
    "many": tuple(name for name in DTYPES if name != "bool"),
}


def copied(drawn: Values, rank: int, key: int) -> list[Tensor]:
    """Return tensors for a rank and a key; their shapes are the same for all ranks and keys."""
    chance, kinds = Random(drawn["seed"]), KINDS[drawn["tensors.dtypes"]]
    any_shape = [(3, 2), (), (0, 3), (5,), (1, 1, 4)]
    shapes = any_shape if drawn["tensors.shapes"] == "any" else any_shape[:1]
    first = 1000 * drawn["seed"] + 100 * key + 10 * rank
    return [
        whole(first + number, chance.choice(shapes), kinds[number % len(kinds)]).to(device())
        for number in range(drawn["tensors.number"])
    ]


def laid(x: Tensor, memory: str, drawn: Values, rank: int) -> Tensor:
    """Return a rank's tensor in a memory layout (`lying`); without dims it stays as it is."""
    return lying(x, memory, drawn["tensors.lies"], rank) if x.dim() else x


def copies(group: sp.Communicator, drawn: Values) -> Call:
    """Return the call of `copy_all_to_group`; each rank may leave different results unused."""
    tensors = [laid(x, drawn["tensors.memory"], drawn, 0).detach() for x in copied(drawn, 0, 0)]
    learning = {"all": tensors, "some": tensors[::2], "none": []}[drawn["tensors.gradients"]]
    for x in learning:
        x.requires_grad_(x.is_floating_point())
    given = {"tensors": tensors, "comm": group}
    return Call(sp.copy_all_to_group, given, partial(judge_copies, group, drawn, tensors))


def used(drawn: Values, rank: int, number: int, count: int) -> bool:
    """Return whether a rank uses a result; each rank uses at least one."""
    one = number == (rank + drawn["seed"]) % count
    return {"all": True, "some": one or (number + rank) % 2 == 0, "one": one}[drawn["(used)"]]


def judge_copies(
    group: sp.Communicator, drawn: Values, tensors: list[Tensor], result: tuple[Tensor, ...]
) -> None:
    """Compare the results with the tensors, and gradients with sums over all ranks."""
    assert isinstance(result, tuple)
    for out, x in zip(result, tensors, strict=True):
        assert out.requires_grad == x.requires_grad
        same(out, x)
    places = [number for number, x in enumerate(tensors) if x.requires_grad]
    if not places:
        return
    upstream = [
        [laid(x, drawn["tensors.upstream"], drawn, rank) for x in copied(drawn, rank, 1)]
        for rank in range(group.size)
    ]
    taken = [n for place, n in enumerate(places) if used(drawn, group.rank, place, len(places))]
    grads = torch.autograd.grad(
        [result[n] for n in taken],
        [tensors[n] for n in places],
        [upstream[group.rank][n] for n in taken],
    )
    for place, (n, found) in enumerate(zip(places, grads, strict=True)):
        parts = [
            upstream[rank][n] * used(drawn, rank, place, len(places)) for rank in range(group.size)
        ]
        same(found, total(parts))


SUBJECTS = [
    *(
        on_group(
            f"plan of {op}",
            plan_factors(op),
            partial(planned, op),
            SITUATIONS,
            covers=("plan",),
            allowed=("x=longer at the end", "offset=far out") if op in UNEVEN else (),
            together=(APART_ROWS[0], {"x.dtype": "bfloat16", "algorithm": "mpi"}),
        )
        for op in (
            "all_gather",
            "reduce_scatter",
            "all_reduce",
            "all_reduce_",
            "all_to_all",
            "shift",
            "broadcast",
            "reduce",
        )
    ),
    on_group(
        "all_reduce_",
        {
            name: parts
            for name, parts in plan_factors("all_reduce_").items()
            if name not in ("op.name", "arguments", "(runs)", "(form)")
        },
        in_place,
        SITUATIONS,
        together=(APART_ROWS[0] | {"algorithm": "ring"},),
    ),
    on_group(
        "copy_all_to_group",
        {
            "tensors.number": spans((2, 6), (0, 0), (1, 1), (30, 40)),
            "tensors.dtypes": values(*KINDS),
            "tensors.shapes": values("alike", "any"),
            "tensors.memory": values(*MEMORIES),
            "tensors.gradients": values("all", "some", "none"),
            "tensors.upstream": values(*MEMORIES),
            "tensors.lies": LIES,
            "(used)": values("all", "some", "one"),
        },
        copies,
        allowed=("tensors=in another order",),
        together=({"tensors.lies": APART, "tensors.upstream": "transposed"},),
    ),
]
