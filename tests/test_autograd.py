"""The backward of every collective is its adjoint: exactly by inner products, to second order by differences of the global map."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from oracle.collective_cases import Case, cases
from torch import Tensor

import sp_core as sp
from sp_core.testing import check_adjoint, given, global_map


@pytest.mark.parametrize("check", ["agree", "off"])
@given(
    case=cases(
        ["float64"],
        [
            "all_gather",
            "reduce_scatter",
            "all_reduce",
            "all_to_all",
            "shift",
            "broadcast",
            "reduce",
        ],
    )
)
def test_backward_is_the_adjoint(comm: Any, check: Any, case: Case) -> None:
    with sp.Mesh(comm, check=check, sp=comm.size) as mesh:
        inputs = case.inputs(comm.size)
        shape = case.expected(inputs, comm.rank, comm.size).shape
        y = torch.randint(
            -4, 5, shape, generator=torch.Generator().manual_seed(case.seed + comm.rank)
        ).double()
        check_adjoint(comm, lambda x: case.call(x, mesh["sp"]), None, inputs[comm.rank], y)


@given(case=cases(["float64"], ["all_gather", "all_reduce", "gather_replicated"]))
def test_values_held_alike_are_differentiated_once(comm: Any, case: Case) -> None:
    """copy_to_group, then reduce_from_group, is multiplication by P; a gathered value counts once."""
    size = comm.size
    with sp.Mesh(comm, sp=size) as mesh:
        group = mesh["sp"]
        x = case.inputs(size)[comm.rank].clone().requires_grad_()
        if case.op == "gather_replicated":
            whole = sp.gather_replicated(x, comm=group, dim=case.dim)
            weights = torch.arange(whole.numel()).reshape(whole.shape).double()
            (grad,) = torch.autograd.grad(whole, x, weights)
            assert torch.equal(
                grad,
                weights.split(list(case.lengths(size)), case.dim)[comm.rank]
                if case.op == "gather_replicated"
                else weights,
            )
            return
        x = torch.ones(3, dtype=torch.float64, requires_grad=True)
        parts = sp.copy_to_group(x, comm=group) * (comm.rank + 1)
        whole = sp.reduce_from_group(parts, comm=group)
        (grad,) = torch.autograd.grad(whole, x, torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64))
        total = size * (size + 1) / 2
        assert torch.equal(whole.detach(), torch.full((3,), total, dtype=torch.float64))
        assert torch.equal(grad, torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64) * total)


def _gather(x: Tensor, comm: sp.Communicator) -> Tensor:
    return sp.all_gather(x, comm=comm, dim=1)


def _scatter(x: Tensor, comm: sp.Communicator) -> Tensor:
    return sp.reduce_scatter(x, comm=comm, dim=1)


def _exchange(x: Tensor, comm: sp.Communicator) -> Tensor:
    return sp.all_to_all(x, comm=comm, split_dim=1, concat_dim=0)


DIFFERENTIABLE: dict[str, Callable[[Tensor, sp.Communicator], Tensor]] = {
    "all_gather": _gather,
    "reduce_scatter": _scatter,
    "all_reduce": lambda x, comm: sp.all_reduce(x, comm=comm),
    "all_to_all": _exchange,
    "shift": lambda x, comm: sp.shift(x, comm=comm, offset=2),
    "broadcast": lambda x, comm: sp.broadcast(x, comm=comm, root=comm.size - 1),
    "reduce": lambda x, comm: sp.reduce(x, comm=comm, root=comm.size - 1),
    "all_gather_start": lambda x, comm: sp.all_gather_start(x, comm=comm, dim=1).wait(),
}


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("name", sorted(DIFFERENTIABLE))
def test_the_global_map_has_right_first_and_second_derivatives(name: str, size: int) -> None:
    """All shards to all outputs, in one check: per rank it would be wrong, because all ranks perturb at once."""

    def kept(comm: Any, x: Tensor) -> Tensor:
        mesh = sp.Mesh(comm, sp=comm.size)  # the backward needs it: it ends with the threads
        return DIFFERENTIABLE[name](x**3, mesh["sp"])

    random = torch.Generator().manual_seed(size)
    shards = [
        torch.randn(2, 3, generator=random, dtype=torch.float64, requires_grad=True)
        for _ in range(size)
    ]
    assert torch.autograd.gradcheck(global_map(kept, size), shards)
    one_direction = (
        size > 2
    )  # a random one; element by element three ranks take half of the time, and two have shown each element
    assert torch.autograd.gradgradcheck(global_map(kept, size), shards, fast_mode=one_direction)
