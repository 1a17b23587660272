"""The helpers for gradients of collectives find what is wrong with a gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from kit.failing import failure_of
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

from sp_core.testing import check_adjoint, global_map, spmd


def all_reduce(comm: Any, x: Tensor) -> Tensor:
    """The sum over ranks, without a gradient."""
    total = torch.empty_like(x)
    comm.Allreduce(x.detach().numpy().reshape(-1), total.numpy().reshape(-1))
    return total


def function(backward: Callable[[Any, Tensor], Tensor]) -> Callable[[Any, Tensor], Tensor]:
    """A sum over ranks with a given backward pass.

    By default both are differentiable through one another.
    """

    class Sum(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, comm: Any, x: Tensor) -> Tensor:
            ctx.comm = comm
            return all_reduce(comm, x)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:
            return None, backward(ctx.comm, grad.contiguous())

    return Sum.apply


def right(comm: Any, x: Tensor) -> Tensor:
    """A sum over ranks; its adjoint is itself."""
    return function(right)(comm, x)


def halved(comm: Any, x: Tensor) -> Tensor:
    """Its backward pass forgets half."""
    return function(lambda c, grad: all_reduce(c, grad) / 2)(comm, x)


def of_rank_only(comm: Any, x: Tensor) -> Tensor:
    """Its backward pass forgets the other ranks."""
    return function(lambda c, grad: grad)(comm, x)


def shards(*sizes: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(n, dtype=torch.float64, generator=generator).requires_grad_() for n in sizes
    ]


pytestmark = pytest.mark.mpi_skip


@pytest.mark.parametrize("sizes", [(2,), (2, 2), (2, 0, 1)])
def test_a_right_gradient_passes_to_second_order(sizes: tuple[int, ...]) -> None:
    """Shards may differ, and be empty."""

    def squared(comm: Any, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return x * right(comm, (x * y).sum().reshape(1)) ** 2, y.sin()

    inputs = shards(*(n for n in sizes for _ in "xy"))
    assert gradcheck(global_map(squared, len(sizes)), inputs)
    assert gradgradcheck(global_map(squared, len(sizes)), inputs)


@pytest.mark.parametrize("wrong", [halved, of_rank_only])
def test_a_wrong_gradient_is_found(wrong: Callable[[Any, Tensor], Tensor]) -> None:
    with pytest.raises(RuntimeError, match="Jacobian mismatch"):
        gradcheck(global_map(wrong, 2), shards(2, 2))


def test_outputs_that_do_not_depend_on_an_input_have_zero_gradient() -> None:
    x, y = shards(2, 2)
    outputs = global_map(
        lambda comm, x: x * 3 if comm.rank else torch.ones(1, dtype=torch.float64), 2
    )(x, y)
    grads = torch.autograd.grad([output.sum() for output in outputs], (x, y))
    assert [grad.tolist() for grad in grads] == [[0.0, 0.0], [3.0, 3.0]]


def test_a_number_of_shards_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="3 tensors cannot be the shards of 2 ranks"):
        global_map(right, 2)(*shards(1, 1, 1))


def integers(seed: int, n: int) -> Tensor:
    return torch.randint(-8, 9, (n,), generator=torch.Generator().manual_seed(seed)).double()


@pytest.mark.parametrize("explicit", [True, False])
def test_adjointness_is_exact(explicit: bool) -> None:
    @spmd(1, 2, 3)
    def body(comm: Any) -> None:
        adjoint = (lambda y: all_reduce(comm, y)) if explicit else None
        check_adjoint(
            comm,
            lambda x: right(comm, x),
            adjoint,
            integers(comm.rank, 4),
            integers(9 + comm.rank, 4),
        )

    body()


@pytest.mark.parametrize("wrong", [halved, of_rank_only])
def test_what_is_not_adjoint_fails_on_every_rank(wrong: Callable[[Any, Tensor], Tensor]) -> None:
    @spmd(2)
    def body(comm: Any) -> None:
        with pytest.raises(AssertionError, match="not adjoint"):
            check_adjoint(
                comm,
                lambda x: wrong(comm, x),
                None,
                integers(comm.rank, 4),
                integers(9 + comm.rank, 4),
            )
        raise LookupError("reached on both")

    assert "LookupError on rank 0 of 2" in failure_of(body)


def test_a_gradient_of_another_shape_is_refused() -> None:
    @spmd(1)
    def body(comm: Any) -> None:
        with pytest.raises(AssertionError, match="shape"):
            check_adjoint(comm, lambda x: x, lambda y: y[:2], integers(0, 4), integers(1, 4))

    body()
