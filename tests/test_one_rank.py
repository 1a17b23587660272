"""A call that is wrong on one rank only is the same error on all ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import sp_core as sp
from sp_core.nn.gradients import Placement, clip_gradient_norm, place, reduce_gradients
from sp_core.testing import spmd

Call = Callable[[sp.Mesh, bool], object]
"""A call over a mesh with the axes "ring" and "ulysses"; the flag says whether this rank is the one
that differs."""


def attention(mesh: sp.Mesh, scheme: Any = sp.hybrid_attention, **changes: Any) -> object:
    where = {"mesh": mesh} if scheme is sp.hybrid_attention else {"comm": mesh["ring", "ulysses"]}
    q = torch.ones(1, 2, 2, 4)
    return scheme(
        q, q, q, sharding=sp.Sharding.contiguous(2 * mesh.size, mesh.size), **(where | changes)
    )


def hybrid(**changes: Any) -> Call:
    return lambda mesh, here: attention(mesh, **(changes if here else {}))


def reduced(mesh: sp.Mesh, *, without: bool = False, shape: tuple[int, ...] = (4, 2)) -> None:
    parameters = [nn.Parameter(torch.ones(4, 2)), nn.Parameter(torch.ones(4, 2))]
    for parameter in parameters[without:]:
        place(parameter, Placement.replicated(shape, mesh["ulysses"].size, partial=True))
    reduce_gradients(parameters, data=mesh["ring"], tensor=mesh["ulysses"])


def clipped(mesh: sp.Mesh, max_norm: Any = 1.0, *, without: bool = False) -> float:
    parameter = nn.Parameter(torch.ones(4))
    parameter.grad = torch.ones(4)
    if not without:
        place(parameter, Placement.replicated((4,), mesh["ulysses"].size))
    return clip_gradient_norm([parameter], max_norm, tensor=mesh["ulysses"], stages=mesh["ring"])


ON_ONE_RANK: dict[str, tuple[type[Exception], str, Call]] = {
    "an unknown axis": (sp.ShapeError, "Name two axes", hybrid(axes=("ring", "tp"))),
    "an axis twice": (sp.ShapeError, "Name two axes", hybrid(axes=("ring", "ring"))),
    "no axes": (sp.ShapeError, "axes=None", hybrid(axes=None)),
    "an axis that is no name": (sp.ShapeError, "Name two axes", hybrid(axes=("ring", ["ulysses"]))),
    "three axes": (sp.ShapeError, "Name two axes", hybrid(axes=("ring", "ulysses", 1))),
    "axes in another order": (
        sp.CollectiveMismatch,
        "mesh['ulysses', 'ring']",
        hybrid(axes=("ulysses", "ring")),
    ),
    "another axis of the exchange": (
        sp.CollectiveMismatch,
        "'ulysses'), ring]",
        hybrid(ulysses="ring"),
    ),
    "another communicator of a hybrid": (
        sp.ShapeError,
        "comm is mesh",
        lambda mesh, here: attention(mesh, comm=mesh["ring"] if here else mesh["ring", "ulysses"]),
    ),
    "an unknown axis of the exchange": (sp.ShapeError, "ulysses='tp'", hybrid(ulysses="tp")),
    "the log-sum-exp of a hybrid": (
        sp.CollectiveMismatch,
        "return_lse=True",
        hybrid(return_lse=True),
    ),
    **{
        f"the log-sum-exp of {scheme.__name__}": (
            sp.CollectiveMismatch,
            "return_lse=True",
            lambda mesh, here, scheme=scheme: attention(mesh, scheme, return_lse=here),
        )
        for scheme in (sp.ulysses_attention, sp.ring_attention, sp.allgather_kv_attention)
    },
    "a product in another order": (
        sp.CollectiveMismatch,
        "mesh['ulysses', 'ring']",
        lambda mesh, here: sp.all_reduce(
            torch.ones(2), comm=mesh["ulysses", "ring"] if here else mesh["ring", "ulysses"]
        ),
    ),
    "a missing placement": (
        sp.ShapeError,
        "no placement",
        lambda mesh, here: reduced(mesh, without=here),
    ),
    "a placement of another shape": (
        sp.ShapeError,
        "does not hold that shape",
        lambda mesh, here: reduced(mesh, shape=(5, 2) if here else (4, 2)),
    ),
    "a placement missing for the norm": (
        sp.ShapeError,
        "no placement",
        lambda mesh, here: clipped(mesh, without=here),
    ),
    "another norm": (
        sp.CollectiveMismatch,
        "max_norm=2.0",
        lambda mesh, here: clipped(mesh, 2.0 if here else 1.0),
    ),
    **{
        f"a norm of {wrong}": (
            ValueError,
            f"max_norm={wrong!r}",
            lambda mesh, here, wrong=wrong: clipped(mesh, wrong if here else 1.0),
        )
        for wrong in (0.0, -1.0, float("nan"), None, "1", True)
    },
}


@pytest.mark.parametrize("case", sorted(ON_ONE_RANK))
@spmd(4)
def test_what_one_rank_does_differently_is_an_error_on_all(comm: Any, case: str) -> None:
    kind, text, call = ON_ONE_RANK[case]
    with sp.Mesh(comm, ring=2, ulysses=2) as mesh:
        here = comm.rank == comm.size - 1
        with pytest.raises(kind) as caught:
            call(mesh, here)
        assert text in str(caught.value)
        assert set(comm.allgather(f"{type(caught.value)} {caught.value}")) == {
            f"{kind} {caught.value}"
        }
        assert sp.all_reduce(torch.ones(1), comm=mesh["ring", "ulysses"]).item() == comm.size


@pytest.mark.parametrize("others", ["call", "leave"])
@spmd(2, 3, 4)
def test_an_error_that_leaves_a_mesh_on_one_rank_reaches_all(comm: Any, others: str) -> None:
    """Of the caller's own code; the others are inside a collective, or leave the mesh as usual."""
    here = comm.rank == comm.size - 1

    def work() -> None:
        with sp.Mesh(comm, data=1, ring=comm.size) as mesh:
            if here:
                raise KeyError("mine")
            if others == "call":
                sp.all_reduce(torch.ones(1), comm=mesh["ring"])

    with pytest.raises(KeyError if here else sp.PeerFailed) as caught:
        work()
    assert here or f"rank {comm.size - 1} has left" in str(caught.value)
    assert (
        here
        or f"rank 0: {'all_reduce(tensor' if others == 'call' else 'free() of mesh'}"
        in str(caught.value)
    )
    with sp.Mesh(comm, ring=comm.size) as mesh:
        assert sp.all_reduce(torch.ones(1), comm=mesh["ring"]).item() == comm.size


@pytest.mark.parametrize("wrong", [("ring", "tp"), ("ring", "missing"), ("ring",), None])
@spmd(4)
def test_wrong_axes_of_a_hybrid_on_a_mesh_with_three_are_an_error_on_all(
    comm: Any, wrong: Any
) -> None:
    """First on one rank, then on all, after which the mesh still works."""
    lengths = {"tp": 1, "ring": 2, "ulysses": 2}
    with pytest.raises((sp.ShapeError, sp.PeerFailed)) as caught, sp.Mesh(comm, **lengths) as mesh:
        hybrid(axes=wrong)(mesh, comm.rank == 0)
    assert isinstance(caught.value, sp.ShapeError) == (comm.rank == 0)
    assert "axes=" in str(caught.value) or comm.rank
    with sp.Mesh(comm, **lengths) as mesh:
        with pytest.raises(sp.ShapeError, match="Name two axes of the mesh"):
            hybrid(axes=wrong)(mesh, True)
        hybrid(axes=("ring", "ulysses"))(mesh, True)


@spmd(4, 6)
def test_a_product_in_another_order_is_asked_for_by_one_rank(comm: Any) -> None:
    """Also that of no axes. Asking sends nothing; a rank alone can use the latter."""
    with sp.Mesh(comm, a=2, b=comm.size // 2) as mesh:
        if comm.rank == 1:
            assert mesh["b", "a"].rank == mesh["b"].rank * 2 + mesh["a"].rank
            assert sp.all_reduce(torch.ones(1), comm=mesh[()]).item() == 1
        assert sp.all_reduce(torch.ones(1), comm=mesh["a", "b"]).item() == comm.size
        order = sp.all_gather(torch.tensor([comm.rank]), comm=mesh["b", "a"]).tolist()
        assert order == [rank for b in range(comm.size // 2) for rank in (b, b + comm.size // 2)]


@spmd(1, 2, 3)
def test_a_rank_that_holds_nothing_takes_part_in_the_sum(comm: Any) -> None:
    held = (*((),) * (comm.size - 1), (range(3),))
    placement = Placement((3, 2), 0, held, partial=True)
    with sp.Mesh(comm, data=1, tensor=comm.size) as mesh:
        parameter = place(nn.Parameter(torch.ones(placement.local_shape(comm.rank))), placement)
        parameter.grad = torch.full(placement.local_shape(comm.rank), 2.0)
        reduce_gradients([parameter], data=mesh["data"], tensor=mesh["tensor"])
        assert torch.equal(parameter.grad, torch.full(placement.local_shape(comm.rank), 2.0))
        assert clip_gradient_norm([parameter], torch.inf, tensor=mesh["tensor"]) == 24**0.5
