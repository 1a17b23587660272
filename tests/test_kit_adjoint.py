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


def shards(*sizes: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(n, dtype=dtype, generator=generator).requires_grad_() for n in sizes]


@pytest.mark.parametrize(
    ("sizes", "dtype"),
    [((2,), torch.float64), ((2, 2), torch.float64), ((2, 0, 1), torch.complex128)],
)
def test_a_right_gradient_passes_to_second_order(
    sizes: tuple[int, ...], dtype: torch.dtype
) -> None:
    """Shards may have different lengths, and may be empty or whole numbers without a gradient."""

    def picked(comm: Any, x: Tensor, y: Tensor, at: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return (x * y)[at] * right(comm, x.abs().sum().reshape(1)) ** 2, y.sin(), at

    drawn = iter(shards(*(n for n in sizes for _ in "xy"), dtype=dtype))
    inputs = [x for n in sizes for x in (next(drawn), next(drawn), torch.arange(n).flip(0))]
    mapped = global_map(picked, len(sizes))

    def with_gradient(*given: Tensor) -> list[Tensor]:
        return [x for x in mapped(*given) if x.requires_grad]

    assert [*map(Tensor.tolist, mapped(*inputs)[2::3])] == [*map(Tensor.tolist, inputs[2::3])]
    assert gradcheck(with_gradient, inputs)
    assert gradgradcheck(with_gradient, inputs)


@pytest.mark.parametrize("wrong", [halved, of_rank_only])
def test_a_wrong_gradient_is_found(wrong: Call) -> None:
    with pytest.raises(RuntimeError, match="Jacobian mismatch"):
        gradcheck(global_map(wrong, 2), shards(2, 2))


def test_outputs_that_do_not_depend_on_an_input_have_zero_gradient() -> None:
    x, y = shards(2, 2)
    outputs = global_map(
        lambda comm, x: x * 3 if comm.rank else torch.ones(1, dtype=torch.float64), 2
    )(x, y)
    assert torch.equal(torch.cat(outputs), torch.cat([torch.ones(1), 3 * y]))
    grads = torch.autograd.grad([output.sum() for output in outputs], (x, y))
    assert [grad.tolist() for grad in grads] == [[0.0, 0.0], [3.0, 3.0]]


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
        (summed, lambda comm, y: summed(comm, y) * (1 + 2**-40), "^not adjoint"),
        (lambda comm, x: x * torch.nan, None, "<A x, y> = nan, <x, A.T y> = nan"),
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
