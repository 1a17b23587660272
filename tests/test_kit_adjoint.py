"""Test that the kit's helpers for gradients of collectives find wrong gradients."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

from sp_core.testing import check_adjoint, global_map, spmd

Call = Callable[[Any, Tensor], Tensor]


def summed(comm: Any, x: Tensor) -> Tensor:
    """Return the sum over ranks, without a gradient."""
    total = torch.empty_like(x)
    comm.Allreduce(x.detach().numpy().reshape(-1), total.numpy().reshape(-1))
    return total


class Sum(torch.autograd.Function):
    """A sum over ranks with a given backward pass."""

    @staticmethod
    def forward(ctx: Any, comm: Any, x: Tensor, backward: Call) -> Tensor:
        ctx.call = partial(backward, comm)
        return summed(comm, x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor, None]:
        return None, ctx.call(grad.contiguous()), None


apply: Callable[..., Tensor] = Sum.apply


def right(comm: Any, x: Tensor) -> Tensor:
    """Return the sum over ranks, with its own adjoint as backward: the sum."""
    return apply(comm, x, right)


def halved(comm: Any, x: Tensor) -> Tensor:
    """Return the sum over ranks, with half of the gradient in backward."""
    return apply(comm, x, lambda comm, grad: summed(comm, grad) / 2)


def of_rank_only(comm: Any, x: Tensor) -> Tensor:
    """Return the sum over ranks, with a backward that ignores the other ranks."""
    return apply(comm, x, lambda comm, grad: grad)


def shards(*sizes: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(n, dtype=torch.float64, generator=generator).requires_grad_() for n in sizes
    ]


pytestmark = pytest.mark.mpi_skip


@pytest.mark.parametrize("sizes", [(2,), (2, 2), (2, 0, 1)])
def test_a_right_gradient_passes_to_second_order(sizes: tuple[int, ...]) -> None:
    """Shards may have different lengths, and may be empty."""

    def squared(comm: Any, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return x * right(comm, (x * y).sum().reshape(1)) ** 2, y.sin()

    inputs = shards(*(n for n in sizes for _ in "xy"))
    assert gradcheck(global_map(squared, len(sizes)), inputs)
    assert gradgradcheck(global_map(squared, len(sizes)), inputs)


@pytest.mark.parametrize("wrong", [halved, of_rank_only])
def test_a_wrong_gradient_is_found(wrong: Call) -> None:
    with pytest.raises(RuntimeError, match="Jacobian mismatch"):
        gradcheck(global_map(wrong, 2), shards(2, 2))


def test_outputs_that_do_not_depend_on_an_input_have_zero_gradient() -> None:
    x, y = shards(2, 2)
    outputs = global_map(
        lambda comm, x: x * 3 if comm.rank else torch.ones(1, dtype=torch.float64), 2
    )(x, y)
    grads = torch.autograd.grad([output.sum() for output in outputs], (x, y))
    assert [grad.tolist() for grad in grads] == [[0.0, 0.0], [3.0, 3.0]]


def test_whole_numbers_are_passed_on_without_a_gradient() -> None:
    x, places = shards(3, 3), [torch.tensor([2, 0]), torch.tensor([1, 1])]
    given = [each for pair in zip(x, places, strict=True) for each in pair]
    outputs = global_map(lambda comm, x, at: (x[at] * (1 + comm.rank), at), 2)(*given)
    assert torch.equal(torch.cat(outputs[::2]), torch.cat([x[0][[2, 0]], 2 * x[1][[1, 1]]]))
    assert [output.tolist() for output in outputs[1::2]] == [[2, 0], [1, 1]]


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
def test_the_gradient_beside_whole_numbers_is_right_to_second_order(dtype: torch.dtype) -> None:
    """Outputs may be whole numbers, too."""

    def picked(comm: Any, x: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
        return x[at] * right(comm, x.abs().sum().reshape(1)) ** 2, at

    inputs: list[Tensor] = []
    for x, at in zip(shards(3, 3), ([2, 0], [1, 1]), strict=True):
        inputs += [x.detach().to(dtype).requires_grad_(), torch.tensor(at)]
    mapped = global_map(picked, 2)
    assert gradcheck(lambda *given: mapped(*given)[::2], inputs)
    assert gradgradcheck(lambda *given: mapped(*given)[::2], inputs)


def test_a_number_of_shards_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="3 tensors cannot be the shards of 2 ranks"):
        global_map(right, 2)(*shards(1, 1, 1))


def checked(comm: Any, forward: Call, adjoint: Call | None) -> None:
    """Check a pair of maps with integers."""
    chance = torch.Generator().manual_seed(comm.rank)
    x, y = (torch.randint(-8, 9, (4,), generator=chance).double() for _ in "xy")
    check_adjoint(comm, partial(forward, comm), adjoint and partial(adjoint, comm), x, y)


@pytest.mark.parametrize("adjoint", [None, summed])
@spmd(1, 2, 3)
def test_adjointness_is_exact(comm: Any, adjoint: Call | None) -> None:
    checked(comm, right, adjoint)


SUMS = r"^not adjoint: <A x, y> = -?\d+\.0, <x, A\^T y> = -?\d+\.[05], summed over 2 ranks$"


@pytest.mark.parametrize(
    ("forward", "adjoint", "said"),
    [
        (halved, None, SUMS),
        (of_rank_only, None, SUMS),
        (summed, lambda comm, y: y[:2], r"A\^T y has shape \(2,\), x has \(4,\)$"),
        (lambda comm, x: x[:2], None, r"A x has shape \(2,\), y has \(4,\)$"),
    ],
)
@spmd(2)
def test_what_is_not_adjoint_fails_on_every_rank(
    comm: Any, forward: Call, adjoint: Call | None, said: str
) -> None:
    with pytest.raises(AssertionError, match=said):
        checked(comm, forward, adjoint)
