"""Check that the backward pass of a collective is the adjoint of its forward pass.

`check_adjoint` compares inner products exactly. With `global_map` torch's `gradcheck` compares
derivatives of any order with finite differences.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.functional import vjp

from sp_core.testing.run import run_threads

RankFunction = Callable[..., Tensor | tuple[Tensor, ...]]


def global_map(f: RankFunction, size: int) -> Callable[..., tuple[Tensor, ...]]:
    """Return one function from all shards to all outputs, so that `gradcheck` sees every rank.

    A check on each rank alone is wrong for a collective, because all ranks would perturb their
    inputs together.

    Args:
        f: `f(comm, *locals) -> tensor or tensors`; runs on each rank with that rank's shards.
        size: number of ranks, which are threads.

    Returns:
        A function of rank 0's shards, then rank 1's, and so on. It returns a tuple of rank 0's
        outputs, then rank 1's, and so on, and is differentiable as often as `f` is. It raises
        ValueError for a number of shards that is no multiple of `size`.
    """

    def mapped(*shards: Tensor) -> tuple[Tensor, ...]:
        if len(shards) % size:
            raise ValueError(
                f"{len(shards)} tensors cannot be the shards of {size} ranks. Pass as many for "
                "each rank."
            )
        return cast("Callable[..., tuple[Tensor, ...]]", _GlobalMap.apply)(f, size, *shards)

    return mapped


class _GlobalMap(torch.autograd.Function):
    """Run `f` on `size` ranks that are threads, for `global_map`; differentiable in the shards.

    Arguments f and size are those of `global_map`; then come the shards of all ranks. The backward
    maps the shards and the outputs' gradients to the shards' gradients, again on `size` ranks.
    """

    @staticmethod
    def forward(ctx: Any, f: RankFunction, size: int, *shards: Tensor) -> tuple[Tensor, ...]:
        ctx.f, ctx.size = f, size
        ctx.save_for_backward(*shards)

        def body(comm: Any) -> tuple[Tensor, ...]:
            mine = (
                x.detach().requires_grad_(_has_gradient(x))
                for x in _of_rank(shards, comm.rank, size)
            )
            with torch.enable_grad():
                outputs = f(comm, *mine)
            several = (outputs,) if isinstance(outputs, Tensor) else outputs
            return tuple(output.detach() for output in several)

        return tuple(itertools.chain(*run_threads(size, body)))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        shards, size = ctx.saved_tensors, ctx.size
        local = len(shards) // size

        def pullback(comm: Any, *tensors: Tensor) -> Any:
            inputs, grads = [*tensors[:local]], tensors[local:]
            places = [place for place, x in enumerate(inputs) if _has_gradient(x)]

            def f(*changed: Tensor) -> Tensor | tuple[Tensor, ...]:
                for place, x in zip(places, changed, strict=True):
                    inputs[place] = x
                return cast("Tensor | tuple[Tensor, ...]", ctx.f(comm, *inputs))

            found = vjp(f, tuple(inputs[i] for i in places), grads, create_graph=True)[1]
            of_place = dict(zip(places, found, strict=True))
            return tuple(of_place.get(i, torch.zeros_like(x)) for i, x in enumerate(inputs))

        both = [
            t
            for rank in range(size)
            for t in (*_of_rank(shards, rank, size), *_of_rank(grads, rank, size))
        ]
        return (None, None, *global_map(pullback, size)(*both))


def _has_gradient(x: Tensor) -> bool:
    return x.is_floating_point() or x.is_complex()


def _of_rank(values: Sequence[Any], rank: int, size: int) -> Sequence[Any]:
    count = len(values) // size
    return values[rank * count : (rank + 1) * count]


def check_adjoint(
    comm: Any,
    forward: Callable[[Tensor], Tensor],
    adjoint: Callable[[Tensor], Tensor] | None,
    x: Tensor,
    y: Tensor,
) -> None:
    """Check <A x, y> == <x, A^T y>, summed over the ranks, exactly. Every rank calls this.

    Args:
        comm: an mpi4py communicator or one that a test body gets; not an `sp_core.Communicator`.
        forward: A, linear; called on every rank.
        adjoint: A^T; None takes the backward pass of `forward`.
        x: float64 with small integers, so that every product and sum is exact.
        y: float64 with small integers, of the shape of A x.

    Communication:
        The messages of A and A^T, and one all-gather of two numbers.

    Raises:
        AssertionError: on every rank if the sums differ; only on this rank if A x and y differ in
            shape, or A^T y and x.
    """
    x = x.detach().requires_grad_(adjoint is None)
    ax = forward(x)
    if ax.shape != y.shape:
        raise AssertionError(f"A x has shape {tuple(ax.shape)}, y has {tuple(y.shape)}")
    aty = adjoint(y) if adjoint is not None else torch.autograd.grad(ax, x, y)[0]
    if aty.shape != x.shape:
        raise AssertionError(f"A^T y has shape {tuple(aty.shape)}, x has {tuple(x.shape)}")
    mine = float((ax.detach() * y).sum()), float((x.detach() * aty).sum())
    left, right = map(sum, zip(*comm.allgather(mine), strict=True))
    if left != right:
        raise AssertionError(
            f"not adjoint: <A x, y> = {left}, <x, A^T y> = {right}, summed over {comm.size} ranks"
        )
