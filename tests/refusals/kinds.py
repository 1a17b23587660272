"""List values of a wrong kind, such as tensors without memory, and wrong uses of plans."""

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import numpy as np
import torch
from refusals.calls import Table, Wrong, attention, call, comm_of, later, scheme
from refusals.pure import NESTED
from torch import Tensor, nn
from torch.autograd import forward_ad

import sp_core as sp
from sp_core.nn.loss import next_token_loss
from sp_core.schemes import SCHEMES

ANY: Any = None


def fake(x: Tensor) -> Tensor:
    """Return a FakeTensor like x, which has a shape and a dtype, but no values."""
    from torch._subclasses import FakeTensorMode  # takes a second

    return FakeTensorMode().from_tensor(x)


def zero(x: Tensor) -> Tensor:
    """Return a ZeroTensor of the shape of x, as forward-mode AD makes them for tangents."""
    return torch._efficientzerotensor(x.shape)


def freed(x: Tensor) -> Tensor:
    """Return x after its memory was freed, as `fully_shard` does with parameters."""
    x.untyped_storage().resize_(0)
    return x


@later
def within(
    context: Callable[[], AbstractContextManager[Any]], wrong: Wrong, mesh: sp.Mesh, here: bool
) -> object:
    """Make a wrong call, in a context on the last rank."""
    with context() if here else nullcontext():
        return wrong(mesh, here)


def graded(wrong: Wrong) -> Wrong:
    """Return a call that is made without gradients on the last rank."""
    return within(torch.no_grad, wrong)


def lowered(wrong: Wrong) -> Wrong:
    """Return a call that is made under autocast on the last rank only."""
    return within(partial(torch.autocast, "cpu", torch.bfloat16), wrong)


@later
def sending(wrong: Wrong, mesh: sp.Mesh, here: bool) -> object:
    """Let a wrong call send before it raises: reset the counters, which the test expects at 0."""
    try:
        return wrong(mesh, here)
    finally:
        comm_of(mesh).counters.reset()


def attended(name: str, x: Tensor, mesh: sp.Mesh) -> Any:
    """Return out and lse of attention of x to itself, by the scheme called `name`."""
    sharding = sp.Sharding.contiguous(2 * mesh.size, mesh.size)
    return SCHEMES[name](x, x, x, comm=comm_of(mesh), sharding=sharding, return_lse=True)


USES: dict[str, Callable[[Tensor, sp.Mesh], Any]] = {
    "all_reduce": lambda x, mesh: sp.all_reduce(x, comm=comm_of(mesh)),
    "reduce": lambda x, mesh: sp.reduce(x, comm=comm_of(mesh)),
    "copy_to_group": lambda x, mesh: sp.copy_to_group(x, comm=comm_of(mesh)),
    "copy_all_to_group": lambda x, mesh: sp.copy_all_to_group([x], comm=comm_of(mesh))[0],
    "ring_attention": lambda x, mesh: attended("ring", x, mesh)[0],
    "ColumnParallelLinear": lambda x, mesh: sp.ColumnParallelLinear.from_linear(
        nn.Linear(4, 4), comm=comm_of(mesh), sharding=sp.Sharding.contiguous(4, 2)
    )(x[0]),
    "RowParallelLinear": lambda x, mesh: sp.RowParallelLinear.from_linear(
        nn.Linear(4, 4), comm=comm_of(mesh), sharding=sp.Sharding.contiguous(2, 2)
    )(x[0, ..., :2]),
    "RowParallelLinear without bias": lambda x, mesh: sp.RowParallelLinear.from_linear(
        nn.Linear(4, 4, bias=False), comm=comm_of(mesh), sharding=sp.Sharding.contiguous(2, 2)
    )(x[0, ..., :2]),
}
"""Functions that communicate, of a tensor of the shape (1, 2, 2, 4)."""
IN_PLACE: dict[str, Callable[[Tensor, sp.Mesh], Any]] = {
    "all_reduce_": lambda x, mesh: sp.all_reduce_(x, comm=comm_of(mesh)),
    "plan": lambda x, mesh: sp.plan("all_reduce_", x, comm=comm_of(mesh)),
    "a ring": lambda x, mesh: sp.all_reduce_(x, comm=comm_of(mesh), algorithm="ring"),
    "a sum without gradients": lambda x, mesh: torch.no_grad()(sp.all_reduce_)(
        x, comm=comm_of(mesh)
    ),
}
MADE_INSIDE: dict[str, Callable[[Tensor, sp.Mesh], Any]] = {
    "a plan that was made in that mode": lambda x, mesh: torch.inference_mode()(sp.plan)(
        "all_reduce_", x, comm=comm_of(mesh), algorithm="ring"
    ).run(),
}
LEARNING: dict[str, Callable[[Tensor, sp.Mesh], Any]] = {
    **{name: USES[name] for name in ("ColumnParallelLinear", "RowParallelLinear")},
    "FeedForward": lambda x, mesh: sp.FeedForward(4, comm=comm_of(mesh))(x),
    "next_token_loss": lambda x, mesh: next_token_loss(
        x,
        torch.zeros(1, 2, 2, dtype=torch.int64),
        tensor=comm_of(mesh),
        data=mesh[()],
        head=torch.ones(5, 4, requires_grad=True),
    ),
    "ring_attention of a query that learns": lambda x, mesh: sp.ring_attention(
        torch.ones_like(x, requires_grad=True),
        *(x, x),
        comm=comm_of(mesh),
        sharding=sp.Sharding.contiguous(2 * mesh.size, mesh.size),
    ),
    "ring_attention with sinks, of a query that learns": lambda x, mesh: sp.ring_attention(
        *[torch.ones(1, 2, 2, 4, requires_grad=True)] * 3,
        comm=comm_of(mesh),
        sharding=sp.Sharding.contiguous(2 * mesh.size, mesh.size),
        sinks=x[0, 0, :, 0],
    ),
}
"""Functions of such a tensor and of others that require a gradient."""
FORWARDS = USES | IN_PLACE
"""The same, and functions without a backward."""


def given(use: Callable[[Tensor, sp.Mesh], Any], change: Callable[[Tensor], Any]) -> Wrong:
    """Return a call of a function, with a changed tensor on the last rank."""
    return lambda mesh, here: use((change if here else torch.clone)(torch.ones(1, 2, 2, 4)), mesh)


@later
def halved(wrong: Wrong, mesh: sp.Mesh, here: bool) -> object:
    """Make a call under autocast to bfloat16, on the last rank to float16."""
    with torch.autocast("cpu", torch.float16 if here else torch.bfloat16):
        return wrong(mesh, here)


@later
def transformed(
    transform: Callable[..., Any], x: Tensor, mesh: sp.Mesh, here: bool, *, outer: bool
) -> object:
    """Sum over all ranks, inside a transform of torch.func on the last rank.

    With `outer`, the ranks add a tensor that the transform does not wrap.
    """
    ones = torch.ones(2)

    def total(x: Tensor) -> Tensor:
        return sp.all_reduce(ones if outer else x, comm=comm_of(mesh)).sum()

    return transform(total)(x) if here else total(torch.ones(2))


@later
def batched(use: Callable[[Tensor, sp.Mesh], Any], mesh: sp.Mesh, here: bool) -> object:
    """Run a backward that computes two gradients at once on the last rank."""
    x = torch.ones(1, 2, 2, 4, requires_grad=True)
    y = use(x, mesh)
    comm_of(mesh).counters.reset()
    grad = torch.ones(2, *y.shape) if here else torch.ones_like(y)
    return torch.autograd.grad(y, x, grad, is_grads_batched=here)


def dual(use: Callable[[Tensor, sp.Mesh], Any]) -> Wrong:
    """Return a call of a function with a dual tensor of forward-mode AD on the last rank."""
    return within(forward_ad.dual_level, given(use, lambda x: forward_ad.make_dual(x, x)))


def copied(duplicate: Callable[[Any], Any], make: Callable[..., Any]) -> Wrong:
    """Return a copy of a plan or of a collective under way."""
    return sending(lambda mesh, here: duplicate(make(torch.ones(3), comm=comm_of(mesh))))


def begun(algorithm: str, mesh: sp.Mesh, here: bool) -> object:
    """Run a plan, which the last rank only starts."""
    made = sp.plan("all_reduce", torch.ones(2), comm=comm_of(mesh), algorithm=algorithm)
    return made.start() if here else made.run()


def kept(x: Tensor) -> Tensor:
    """Return a copy of x that was made in inference mode."""
    return torch.inference_mode()(x.clone)()


WRONG_SIZES: dict[str, Callable[[int], list[int]]] = {
    "for other lengths": lambda ranks: [1] * ranks,
    "for more ranks": lambda ranks: [9] * (ranks + 1),
    "below 0": lambda ranks: [-1, 10, 0][:ranks],
    "for no rank": lambda ranks: [],
}
"""Sizes that do not describe tensors of length 9 on each rank."""
EVERYWHERE: Table = {
    "ring": {
        **{
            f"shared memory of {dtype}": (
                sp.DtypeError,
                f"{dtype} was given; needed is one of float64, ",
                lambda mesh, here, dtype=dtype: sp.shared_empty(  # type: ignore[misc]
                    (2,), comm=comm_of(mesh), dtype=dtype
                ),
            )
            for dtype in (torch.complex64, torch.qint8, torch.uint16, torch.float8_e4m3fn)
        },
        **{
            f"the axis {axis!r}": (
                sp.ShapeError,
                "this mesh has ('ring',)",
                lambda mesh, here, axis=axis: mesh[axis],  # type: ignore[misc]
            )
            for axis in (0, None, slice(None), [["ring"]])
        },
        **{
            f"{name} of {op} {what}": (
                sp.ShapeError,
                f"{name}=",
                lambda mesh, here, op=op, name=name, wrong=wrong, more=more: getattr(sp, op)(  # type: ignore[misc]
                    torch.ones(9, 9), comm=comm_of(mesh), **more, **{name: wrong(mesh.size)}
                ),
            )
            for op, name, more in (
                *((op, "sizes", {}) for op in ("all_gather", "gather_replicated")),
                *((op, "sizes", {}) for op in ("reduce_scatter", "shift")),
                *(
                    ("all_to_all", name, {"split_dim": 0, "concat_dim": 1})
                    for name in ("split_sizes", "concat_sizes")
                ),
            )
            for what, wrong in WRONG_SIZES.items()
        },
        **{
            f"a {duplicate.__name__} of a {what}": (
                TypeError,
                f"{remedy} on every rank",
                copied(duplicate, make),
            )
            for duplicate in (copy.copy, copy.deepcopy)
            for what, remedy, make in (
                ("plan", "Make a new plan", partial(sp.plan, "all_reduce")),
                ("collective under way", "Begin the collective again", sp.all_reduce_start),
            )
        },
        **{
            f"{side} of {what}": (
                sp.ShapeError,
                "Pass x.contiguous().view(-1)",
                lambda mesh, here, messages=messages: comm_of(mesh).exchange(*messages),  # type: ignore[misc]
            )
            for what, x in (
                ("columns", torch.ones(2, 3).t()),
                ("every second element", torch.ones(6)[::2]),
                ("a single number", torch.ones(())),
            )
            for side, messages in (("a send", ([(0, x)], ())), ("a receive", ((), [(0, x)])))
        },
    }
}
"""Calls that are wrong on every rank."""

ON_ONE_RANK: Table = {
    "ring": {
        **{
            f"a FakeTensor in {name}": (
                sp.DtypeError,
                "(FakeTensor) without memory that could be sent",
                given(use, fake),
            )
            for name, use in USES.items()
        },
        **{
            f"a {kind} in {name}": (sp.DtypeError, "without memory that could be sent, or", wrong)
            for name, use in FORWARDS.items()
            for kind, wrong in (
                ("dual tensor", dual(use)),
                ("ZeroTensor", given(use, zero)),
                ("view of a ZeroTensor", given(use, lambda x: zero(torch.cat((x, x)))[1:])),
            )
        },
        **{
            f"{'an outer tensor in ' * outer}a {kind} of torch.func": (
                sp.DtypeError,
                "without memory that could be sent",
                transformed(transform, torch.ones(shape), outer=outer),
            )
            for outer in (False, True)
            for kind, transform, shape in (
                ("vmap", torch.func.vmap, (3, 2)),
                ("grad", torch.func.grad, (2,)),
                ("jvp", lambda f: lambda x: torch.func.jvp(f, (x,), (x,)), (2,)),
            )
        },
        **{
            f"two gradients at once of {name}": (
                sp.DtypeError,
                "without memory that could be sent",
                batched(use),
            )
            for name, use in {**USES, "lse": lambda x, mesh: attended("ring", x, mesh)[1]}.items()
        },
        **{
            f"a lazy parameter in {op}": (
                ValueError,
                "Attempted to use an uninitialized parameter",
                given(use, lambda _: nn.LazyLinear(3).weight),
            )
            for op, use in (
                ("all_reduce", USES["all_reduce"]),
                ("all_gather", lambda x, mesh: sp.all_gather(x, comm=comm_of(mesh))),
            )
        },
        "a tensor with freed memory": (
            sp.DtypeError,
            "without memory that could be sent, or",
            given(USES["all_reduce"], freed),
        ),
        **{
            f"a tensor of inference mode in {name}": (
                ValueError,
                f"made in torch.inference_mode() was given {text}",
                given(use, kept),
            )
            for text, uses in (
                ("to a sum in place outside of it", IN_PLACE | MADE_INSIDE),
                ("beside one that requires a gradient", LEARNING),
            )
            for name, use in uses.items()
        },
        **{
            f"the value {value!r} to send": (
                ValueError,
                f"rank 1: the value {value!r} was given",
                lambda mesh, here, x=value: comm_of(mesh).agree_on(str, lambda: x if here else 7),  # type: ignore[misc]
            )
            for value in (1 << 63, 0.5, torch.tensor(0.5))
        },
        "a nested tensor": (
            sp.ShapeError,
            "has layout nested; a dense one is needed. Pass x.to_padded_tensor(0.0).",
            given(USES["all_reduce"], lambda _: NESTED),
        ),
        **{
            f"a plan of {op!r}": (
                ValueError,
                f"a plan of {op!r} was asked for; there are",
                lambda mesh, here, op=op: sp.plan(  # type: ignore[misc]
                    op if here else "all_reduce", torch.ones(2), comm=comm_of(mesh)
                ),
            )
            for op in (["all_reduce"], 3, ANY, np.ones(2))
        },
        **{
            f"a started run of a plan by {algorithm}": (
                sp.CollectiveMismatch,
                "a started run of the plan",
                partial(begun, algorithm),
            )
            for algorithm in ("mpi", "ring")
        },
        "sequences in a batch": (
            sp.CollectiveMismatch,
            "rank",
            lambda mesh, here: attention(mesh, batch=2 + here),
        ),
        **{
            f"gradients of {name}": (sp.CollectiveMismatch, "grad", graded(made))
            for name, made in (
                ("a collective", call("all_reduce", torch.ones(2, requires_grad=True))),
                ("a scheme", scheme(sp.ring_attention, learns=True)),
                ("copies", call("copy_all_to_group", [torch.ones(2, requires_grad=True)])),
            )
        },
        "a tensor that does not learn": (
            sp.CollectiveMismatch,
            "copy_all_to_group",
            lambda mesh, here: sp.copy_all_to_group(
                [torch.ones(2, requires_grad=learns) for learns in (True, not here)],
                comm=comm_of(mesh),
            ),
        ),
    },
    "r u": {
        "axes in one name": (
            sp.ShapeError,
            "axes='ru'",
            lambda mesh, here: attention(
                *(mesh, sp.hybrid_attention), ulysses="u", axes="ru" if here else ("r", "u")
            ),
        ),
    },
}
"""Calls that are wrong on the last rank only."""
