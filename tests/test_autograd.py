"""Test the derivatives of every collective, as a map from all shards to all outputs."""

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from kit.meshed import meshed
from refusals.kinds import LEARNING, USES, attended, kept as of_inference_mode
from torch import Tensor

import sp_core as sp
from sp_core.schemes import SCHEMES
from sp_core.testing import global_map, spmd

DIFFERENTIABLE: dict[str, Callable[[Tensor, sp.Communicator], Tensor]] = {
    "all_gather": lambda x, comm: sp.all_gather(x, comm=comm, dim=1),
    "reduce_scatter": lambda x, comm: sp.reduce_scatter(x, comm=comm, dim=1),
    "all_reduce": lambda x, comm: sp.all_reduce(x, comm=comm),
    "all_to_all": lambda x, comm: sp.all_to_all(x, comm=comm, split_dim=1, concat_dim=0),
    "shift": lambda x, comm: sp.shift(x, comm=comm, offset=2),
    "broadcast": lambda x, comm: sp.broadcast(x, comm=comm, root=comm.size - 1),
    "reduce": lambda x, comm: sp.reduce(x, comm=comm, root=comm.size - 1),
}


@pytest.mark.parametrize("name", sorted(DIFFERENTIABLE))
def test_the_global_map_has_right_first_and_second_derivatives(name: str) -> None:
    """The map takes all shards to all outputs, and is checked along one random direction.

    A check of each rank alone would be wrong, because all ranks perturb their shards at once.
    """
    size = 3

    def kept(comm: Any, x: Tensor) -> Tensor:
        mesh = sp.Mesh(comm, sp=comm.size)  # not closed, because the backward needs it
        return DIFFERENTIABLE[name](x**3, mesh["sp"])

    random = torch.Generator().manual_seed(size)
    shards = [
        torch.randn(2, 3, generator=random, dtype=torch.float64, requires_grad=True)
        for _ in range(size)
    ]
    assert torch.autograd.gradcheck(global_map(kept, size), shards, fast_mode=True)
    assert torch.autograd.gradgradcheck(global_map(kept, size), shards, fast_mode=True)


@pytest.mark.parametrize("name", sorted(DIFFERENTIABLE))
@spmd(1, 3)
@meshed()
def test_a_result_may_be_changed_in_place(mesh: sp.Mesh, name: str) -> None:
    x = torch.ones(2, 3, requires_grad=True)
    plain = DIFFERENTIABLE[name](x, mesh["sp"])
    doubled = DIFFERENTIABLE[name](x, mesh["sp"]).mul_(2)
    assert torch.equal(doubled, 2 * plain)
    (once,), (twice,) = (torch.autograd.grad(y.sum(), x) for y in (plain, doubled))
    assert torch.equal(twice, 2 * once)


@pytest.mark.parametrize(("op", "how"), [("broadcast", {}), ("all_reduce", {"op": "max"})])
@spmd(1, 2)
@meshed()
def test_a_second_wait_does_not_write_the_result_again(
    mesh: sp.Mesh, op: str, how: dict[str, Any]
) -> None:
    x = torch.ones(3)
    begun = getattr(sp, f"{op}_start")(x, comm=mesh["sp"], algorithm="mpi", **how)
    begun.wait().mul_(2)
    x.fill_(5)
    assert begun.wait().tolist() == [2.0] * 3


COUNTED_ONCE: dict[str, Callable[[Tensor, sp.Communicator], Tensor]] = {
    "copy_to_group": lambda x, comm: sp.copy_to_group(x, comm=comm),
    "copy_all_to_group": lambda x, comm: sum(sp.copy_all_to_group([x, x], comm=comm), x * 0),
    "copy_all_to_group of one": lambda x, comm: sp.copy_all_to_group([x], comm=comm)[0],
    "reduce_from_group": lambda x, comm: sp.reduce_from_group(x, comm=comm),
    "gather_replicated": lambda x, comm: sp.gather_replicated(x, comm=comm, dim=1),
    "gather_replicated of rows": lambda x, comm: sp.gather_replicated(x, comm=comm, dim=0),
}
"""Functions that mark where a value begins or ends that counts once in the loss."""


@pytest.mark.parametrize("name", sorted(DIFFERENTIABLE | COUNTED_ONCE))
@spmd(1, 3)
@meshed()
def test_the_gradient_of_a_leaf_has_memory_of_its_own(mesh: sp.Mesh, name: str) -> None:
    """Torch adds later gradients to it in place, and so may the caller."""
    call = (DIFFERENTIABLE | COUNTED_ONCE)[name]
    a, b, c = leaves = [torch.ones(2, 3, requires_grad=True) for _ in range(3)]
    upstream = torch.ones_like(call(a, mesh["sp"]))
    (one,) = torch.autograd.grad(call(a, mesh["sp"]), a, upstream)
    call(c, mesh["sp"]).backward(upstream)
    for number in (1, 2, 3):
        (call(a, mesh["sp"]) + call(b, mesh["sp"])).backward(upstream)
        found = [cast("Tensor", leaf.grad) for leaf in leaves]
        assert torch.equal(torch.stack(found), torch.stack([number * one, number * one, one]))
    for grad in found:
        grad.add_(1)
    assert torch.equal(torch.stack(found), torch.stack([3 * one, 3 * one, one]) + 1)
    again = upstream.clone().requires_grad_()
    (grad,) = torch.autograd.grad(call(a, mesh["sp"]), a, again, create_graph=True)
    (one,) = torch.autograd.grad(grad, again, later := torch.ones_like(grad), retain_graph=True)
    for _ in range(3):
        grad.backward(later, retain_graph=True)
    assert upstream.eq(1).all()
    assert later.eq(1).all()
    assert torch.equal(cast("Tensor", again.grad), 3 * one)


@spmd(1, 2, 3)
@meshed()
def test_copies_of_many_tensors_have_all_derivatives_of_copies_of_one(mesh: sp.Mesh) -> None:
    leaves = [
        torch.arange(2.0, dtype=dtype).requires_grad_()
        for dtype in (torch.float64, torch.float32, torch.float64)
    ]
    found = []
    for copies in (
        sp.copy_all_to_group(leaves, comm=mesh["sp"]),
        [sp.copy_to_group(x, comm=mesh["sp"]) for x in leaves],
    ):
        total = torch.cat([*copies]).pow(3).sum() * (1 + mesh.rank)
        for _ in range(3):
            found.append(torch.cat(torch.autograd.grad(total, leaves, create_graph=True)))
            total = found[-1].square().sum()
    assert all(x.any() for x in found)
    assert torch.equal(torch.stack(found[:3]), torch.stack(found[3:]))


@pytest.mark.parametrize("name", ["local", *SCHEMES, "ColumnParallelLinear", "RowParallelLinear"])
@spmd(2)
@meshed()
def test_a_second_derivative_is_refused(mesh: sp.Mesh, name: str) -> None:
    x = torch.ones(1, 2, 2, 4, requires_grad=True)
    if name in SCHEMES:
        out = attended(name, x, mesh)[0]
    else:
        out = sp.local_attention(x, x, x)[0] if name == "local" else USES[name](x, mesh)
    upstream = torch.ones_like(out).requires_grad_()
    (grad,) = torch.autograd.grad(out, x, upstream, create_graph=True)
    for cause in (x, upstream):
        with pytest.raises(RuntimeError, match="differentiable once"):
            torch.autograd.grad(grad.sum(), cause, retain_graph=True)


@pytest.mark.parametrize("name", LEARNING)
@spmd(2)
def test_a_tensor_of_inference_mode_is_taken_where_nothing_is_recorded(
    comm: Any, name: str
) -> None:
    with sp.Mesh(comm, sp=comm.size) as mesh, torch.no_grad():
        LEARNING[name](of_inference_mode(torch.ones(1, 2, 2, 4)), mesh)
