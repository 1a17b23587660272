"""List wrong calls of collectives, attention and layers, with the error expected of each."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import sp_core as sp
from sp_core.schemes import SCHEMES

S, K, D = 12, 2, 8
Wrong = Callable[[sp.Mesh, bool], object]
"""A wrong call; the flag says whether the rank is the last."""
Row = tuple[type[Exception], str, Wrong]
"""The expected error, a part of its text, and the call."""
Table = dict[str, dict[str, Row]]
"""Rows by the axes of the mesh and by a description."""


def later(call: Callable[..., object]) -> Callable[..., Callable[..., Any]]:
    """Let `call` take its last arguments later: `later(f)(a)(b)` is `f(a, b)`."""
    return partial(partial, call)


def comm_of(mesh: sp.Mesh) -> sp.Communicator:
    return mesh[tuple(mesh.axes)]


def attention(mesh: sp.Mesh, scheme: Any = sp.allgather_kv_attention, **changes: Any) -> Any:
    """Call a scheme with arguments that are valid but for `changes`."""
    ranks, comm = mesh.size, comm_of(mesh)
    given = {"batch": 2, "heads": 2 * K, "kv_heads": K, "seq": S, "learns": False, **changes}
    tokens = sp.Sharding.contiguous(given.pop("seq"), ranks).local_len(comm.rank)
    batch, learns = given.pop("batch"), given.pop("learns")
    shapes = [(batch, tokens, given.pop(name), D) for name in ("heads", "kv_heads")]
    q, k, v = (torch.ones(shapes[place], requires_grad=learns) for place in (0, 1, 1))
    where = {"mesh": mesh} if scheme is sp.hybrid_attention else {"comm": comm}
    return scheme(q, k, v, **where | {"sharding": sp.Sharding.contiguous(S, ranks)} | given)


def scheme(change: Any = sp.allgather_kv_attention, **changes: Any) -> Any:
    return lambda mesh, here: attention(mesh, change, **changes)


def hybrid(**changes: Any) -> Any:
    """Return a call of hybrid attention, with changes on the last rank."""
    return lambda mesh, here: attention(mesh, sp.hybrid_attention, **(changes if here else {}))


def call(name: str, x: Any, **named: Any) -> Any:
    return lambda mesh, here: getattr(sp, name)(x, comm=comm_of(mesh), **named)


def either(name: str, other: str, *shape: int) -> Any:
    """Return a call of collective `name`, and of `other` on the last rank."""
    return lambda mesh, here: getattr(sp, other if here else name)(
        torch.ones(shape or 2), comm=comm_of(mesh)
    )


@later
def linear(
    kind: Any, mesh: sp.Mesh, here: bool, *, x: Tensor | None = None, **changes: Any
) -> object:
    """Call a parallel layer with changed arguments, on the last rank with tokens x."""
    tokens = sp.Sharding.contiguous(3 * mesh.size, mesh.size)
    made = kind.from_linear(
        nn.Linear(4, 6), **{"comm": comm_of(mesh), "sharding": tokens} | changes
    )
    return made(x if here else torch.ones(1, 3, 4))


EVERYWHERE: Table = {
    "ring": {
        "heads that do not divide": (sp.ShapeError, "heads", scheme(heads=5)),
        "a mask for another length": (
            sp.ShapeError,
            "13",
            scheme(mask=sp.Mask(documents=(0, 5, 13))),
        ),
        **{
            f"attention with {wrong}": (TypeError, text, scheme(sp.ulysses_attention, **wrong))
            for text, wrong in (
                ("return_lse='no'", {"return_lse": "no"}),
                ("inner=3", {"inner": 3}),
                ("a Mask is needed", {"mask": True}),
            )
        },
        "a K/V sharding of another type": (
            TypeError,
            "kv_sharding='even' was given",
            scheme(kv_sharding="even"),
        ),
        "a sharding for another length": (
            sp.ShapeError,
            "12",
            lambda mesh, here: attention(mesh, seq=S + 2 * mesh.size),
        ),
        "integers": (
            sp.DtypeError,
            "int64",
            lambda mesh, here: sp.ring_attention(
                *(torch.ones(1, 2, 1, 4).long() for _ in "qkv"),
                comm=comm_of(mesh),
                sharding=sp.Sharding.contiguous(2 * mesh.size, mesh.size),
            ),
        ),
        "a DTensor": (
            sp.DtypeError,
            "to_local",
            call("all_gather", torch.ones(2).as_subclass(type("DTensor", (Tensor,), {}))),
        ),
        "a layer that is none": (
            TypeError,
            "Pass the whole layer",
            lambda mesh, here: sp.ColumnParallelLinear.from_linear(
                nn.Conv1d(4, 6, 1),  # type: ignore[arg-type]
                comm=comm_of(mesh),
            ),
        ),
        "an error of any other kind": (
            sp.RankError,
            "rank 0: KeyError: 'lost'",
            lambda mesh, here: comm_of(mesh).agree_on(lambda: str(vars(mesh)["lost"])),
        ),
        "a dim that is not there": (
            sp.ShapeError,
            "dim 1 was given",
            call("all_gather", torch.ones(2), dim=1),
        ),
        "a dim of a single number": (
            sp.ShapeError,
            "dim -1",
            call("all_gather", torch.ones(()), dim=-1),
        ),
        "a complex sum": (
            sp.DtypeError,
            "complex64",
            call("all_reduce", torch.ones(2, dtype=torch.complex64)),
        ),
        "a sum of bools": (sp.DtypeError, "bool", call("all_reduce", torch.ones(2) > 0)),
        "an unknown reduction": (ValueError, "prod", call("all_reduce", torch.ones(2), op="prod")),
        "a gradient of max": (
            ValueError,
            "max",
            call("all_reduce", torch.ones(2, requires_grad=True), op="max"),
        ),
        "a root that is not there": (
            sp.ShapeError,
            "root=",
            lambda mesh, here: sp.broadcast(
                torch.ones(2), comm=comm_of(mesh), root=comm_of(mesh).size
            ),
        ),
        "a root before the first rank": (
            sp.ShapeError,
            "root=-1",
            call("reduce", torch.ones(2), root=-1),
        ),
        "one dim twice": (
            sp.ShapeError,
            "different",
            call("all_to_all", torch.ones(4, 4), split_dim=0, concat_dim=-2),
        ),
        "an algorithm of another collective": (
            ValueError,
            "bruck",
            call("all_gather", torch.ones(2), algorithm="rabenseifner"),
        ),
        "no algorithm for a shift": (
            ValueError,
            "there are",
            call("shift", torch.ones(2), algorithm="ring"),
        ),
        "an order that is not of the ranks": (
            ValueError,
            "deterministic",
            call("all_reduce", torch.ones(2), algorithm="ring", deterministic=True),
        ),
        "the library is not deterministic": (
            ValueError,
            "deterministic",
            call("reduce_scatter", torch.ones(2), algorithm="mpi", deterministic=True),
        ),
        "a gradient in place": (
            ValueError,
            "gradient",
            call("all_reduce_", torch.ones(2, requires_grad=True)),
        ),
        "shared elements in place": (
            sp.ShapeError,
            "share memory",
            call("all_reduce_", torch.ones(1).expand(3)),
        ),
        "overlapping rows in place": (
            sp.ShapeError,
            "share memory",
            call("all_reduce_", torch.ones(4).unfold(0, 2, 1)),
        ),
        "overlapping planes in place": (
            sp.ShapeError,
            "share memory",
            call("all_reduce_", torch.ones(7).as_strided((2, 2, 2), (3, 2, 1))),
        ),
        "no such plan": (
            ValueError,
            "a plan of 'all_swap' was asked for; there are",
            lambda mesh, here: sp.plan("all_swap", torch.ones(1), comm=comm_of(mesh)),
        ),
        "a plan without its dims": (
            ValueError,
            "needs ['concat_dim', 'split_dim']",
            lambda mesh, here: sp.plan("all_to_all", torch.ones(2, 2), comm=comm_of(mesh)),
        ),
        "an axis that is not there": (sp.ShapeError, "axes", lambda mesh, here: mesh["c"]),
        "an axis twice": (sp.ShapeError, "axes", lambda mesh, here: mesh["ring", "ring"]),
        "heads of a layer": (
            sp.ShapeError,
            "num_heads=5",
            lambda mesh, here: sp.SelfAttention(16, 5, comm=comm_of(mesh)),
        ),
        "an unknown norm": (
            ValueError,
            "batch",
            lambda mesh, here: sp.TransformerBlock(16, 4, norm="batch", comm=comm_of(mesh)),
        ),
        "features that do not add up": (
            sp.ShapeError,
            "add up to 6",
            linear(sp.ColumnParallelLinear, sizes=[4, *[3] * 3]),
        ),
        "a layer for more ranks": (
            sp.ShapeError,
            "ranks",
            linear(sp.RowParallelLinear, sharding=sp.Sharding.contiguous(6, 5)),
        ),
    }
}
"""Calls that are wrong on every rank."""

ON_ONE_RANK: Table = {
    "ring": {
        **{
            f"{other} for {name}": (sp.CollectiveMismatch, other, either(name, other))
            for name, other in (
                ("all_reduce", "copy_to_group"),
                ("all_reduce", "reduce_from_group"),
                ("all_gather", "gather_replicated"),
                ("all_gather", "all_gather_start"),
                ("all_gather", "reduce_scatter"),
            )
        },
        "another scheme": (
            sp.CollectiveMismatch,
            "ring_attention",
            lambda mesh, here: attention(
                mesh, sp.ring_attention if here else sp.allgather_kv_attention
            ),
        ),
        "a softcap": (
            sp.CollectiveMismatch,
            "softcap",
            lambda mesh, here: attention(mesh, softcap=2.0 if here else 1.0),
        ),
        "sinks": (
            sp.CollectiveMismatch,
            "sinks None",
            lambda mesh, here: attention(mesh, sinks=torch.ones(2 * K) if here else None),
        ),
        "sinks of another shape": (
            sp.ShapeError,
            "sinks (1,)",
            lambda mesh, here: attention(mesh, sinks=torch.ones(1) if here else None),
        ),
        "ALiBi slopes": (
            sp.CollectiveMismatch,
            "alibi=(0.5, 0.25, 0.125, 0.0625)",
            lambda mesh, here: attention(
                mesh, alibi=[2.0 ** -(head + 1 + here) for head in range(2 * K)]
            ),
        ),
        "ALiBi slopes of this rank's heads": (
            sp.ShapeError,
            "1 ALiBi slopes given, needed 4",
            lambda mesh, here: attention(mesh, alibi=torch.ones(1 if here else 2 * K)),
        ),
        "ALiBi slopes that learn": (
            ValueError,
            "they are constants",
            lambda mesh, here: attention(mesh, alibi=torch.ones(2 * K, requires_grad=here)),
        ),
        "a term that there is not": (
            TypeError,
            "softcup",
            lambda mesh, here: attention(mesh, **({"softcup": 1.0} if here else {})),
        ),
        "heads of q": (
            sp.CollectiveMismatch,
            "rank",
            lambda mesh, here: attention(mesh, heads=4 * K if here else 2 * K),
        ),
        "other sizes": (
            sp.CollectiveMismatch,
            "sizes",
            lambda mesh, here: sp.reduce_scatter(
                torch.ones(4), comm=comm_of(mesh), sizes=[1, 3] if here else [2, 2]
            ),
        ),
        "the number of tensors": (
            sp.CollectiveMismatch,
            "copy_all_to_group",
            lambda mesh, here: sp.copy_all_to_group(
                [torch.ones(2)] * (1 + here), comm=comm_of(mesh)
            ),
        ),
        "another algorithm": (
            sp.CollectiveMismatch,
            "disagree",
            lambda mesh, here: sp.all_reduce(
                torch.ones(2), comm=comm_of(mesh), algorithm="ring" if here else "rabenseifner"
            ),
        ),
        "a layer of another shape": (
            sp.CollectiveMismatch,
            "from_linear",
            lambda mesh, here: sp.ColumnParallelLinear.from_linear(
                nn.Linear(4, 6 + here), comm=comm_of(mesh), sharding=sp.Sharding.contiguous(6, 2)
            ),
        ),
        "features of a layer that are no integers": (
            TypeError,
            "sizes=",
            lambda mesh, here: sp.ColumnParallelLinear.from_linear(
                nn.Linear(4, 6),
                comm=comm_of(mesh),
                sizes=[6.0] + [0.0] * (mesh.size - 1),  # type: ignore[arg-type]
            ),
        ),
        "tokens of a layer": (
            sp.ShapeError,
            "is needed on rank",
            linear(sp.ColumnParallelLinear, x=torch.ones(1, 4, 4)),
        ),
        "the length of a layer's input": (
            sp.CollectiveMismatch,
            "ColumnParallelLinear",
            linear(sp.ColumnParallelLinear, x=torch.ones(1, 4, 4), sharding=None),
        ),
        "a counter of one rank": (
            sp.CollectiveMismatch,
            "counter() on mesh['ring']",
            lambda mesh, here: (
                comm_of(mesh).counter() if here else sp.all_reduce(torch.ones(1), comm=mesh["ring"])
            ),
        ),
    },
    "ring ulysses": {
        **{
            f"the axes {axes!r}": (sp.ShapeError, "axes", hybrid(axes=axes))
            for axes in (
                ("ring", "tp"),
                ("ring", "ring"),
                ("ring", ["ulysses"]),
                ("ring", "ulysses", 1),
            )
        },
        "another axis of the exchange": (
            sp.CollectiveMismatch,
            "'ulysses'), ring]",
            hybrid(ulysses="ring"),
        ),
        "another communicator of a hybrid": (
            sp.ShapeError,
            "comm is mesh",
            lambda mesh, here: attention(
                mesh, sp.hybrid_attention, comm=mesh["ring"] if here else comm_of(mesh)
            ),
        ),
        **{
            f"the log-sum-exp of {name}": (
                sp.CollectiveMismatch,
                "return_lse=True",
                lambda mesh, here, scheme=scheme: attention(  # type: ignore[misc]
                    mesh, scheme, return_lse=here
                ),
            )
            for name, scheme in {**SCHEMES, "hybrid": sp.hybrid_attention}.items()
        },
        "a product in another order": (
            sp.CollectiveMismatch,
            "mesh['ulysses', 'ring']",
            lambda mesh, here: sp.all_reduce(
                torch.ones(2), comm=mesh["ulysses", "ring"] if here else mesh["ring", "ulysses"]
            ),
        ),
    },
}
"""Calls that are wrong on the last rank only, or wrong only with several ranks."""
