"""The loss of the next token over split tokens and vocabulary, and gradients over a mesh."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
from domains.collectives import MEMORIES, in_memory
from hypothesis import strategies as st
from oracle.strategies import seeds
from torch import Tensor, nn

import sp_core as sp
from sp_core.nn.gradients import (
    Placement,
    clip_gradient_norm,
    place,
    placement_of,
    reduce_gradients,
)
from sp_core.nn.loss import IGNORED, next_token_labels, next_token_loss
from sp_core.testing import given, spmd


@spmd(1, 2, 4)
def test_the_mean_is_of_all_tokens_and_not_of_ranks(comm: Any) -> None:
    """One valid token on the last rank, all on the others.

    A mean of the ranks' means would be another number.
    """
    logits = torch.tensor([0.0, 1.0, 4.0]).double()
    mine = torch.full((1, 3), 2 if comm.rank else 0)
    if comm.rank:
        mine[0, 1:] = IGNORED
    with sp.Mesh(comm, dp=comm.size, tp=1) as mesh:
        call = partial(next_token_loss, tensor=mesh["tp"], data=mesh["dp"])
        loss = call(logits.expand(1, 3, 3), mine)
        with torch.no_grad():
            assert torch.equal(call(logits.expand(1, 3, 3), mine), loss), (
                "evaluation is not training"
            )
    every = -logits.log_softmax(-1)
    torch.testing.assert_close(loss, (3 * every[0] + (comm.size - 1) * every[2]) / (comm.size + 2))


WRONG: dict[str, tuple[type[Exception], str, Any]] = {
    "a label beyond the vocabulary": (ValueError, "vocabulary has 0..3", lambda x, y: (x, y + 4)),
    "labels of another shape": (sp.ShapeError, r"needed \(\.\.\., V/T", lambda x, y: (x, y[:, 1:])),
    "labels of another dtype": (sp.DtypeError, "int64", lambda x, y: (x, y.int())),
    "no valid label": (
        ValueError,
        "none of the labels",
        lambda x, y: (x, torch.full_like(y, IGNORED)),
    ),
}


@pytest.mark.parametrize("wrong", sorted(WRONG))
@spmd(1, 2, 4)
def test_bad_input_is_refused_on_every_rank(comm: Any, wrong: str) -> None:
    kind, text, change = WRONG[wrong]
    with sp.Mesh(comm, ring=max(comm.size // 2, 1), tp=min(comm.size, 2)) as mesh:
        tp, ring = mesh["tp"], mesh["ring"]
        good = torch.ones(1, 3, 4 // tp.size), torch.zeros(1, 3, dtype=torch.int64)
        bad = change(*good) if ring.rank == ring.size - 1 or wrong == "no valid label" else good
        with pytest.raises(kind, match=text):
            next_token_loss(*bad, tensor=tp, data=ring)
        assert next_token_loss(*good, tensor=tp, data=ring).isfinite()
        with pytest.raises(sp.ShapeError, match="own shard"):
            next_token_labels(
                good[1], comm=ring, sharding=sp.Sharding.contiguous(3 * ring.size + 1, ring.size)
            )


"""Numbers whose small multiples each dtype has, and no lower one."""


@st.composite
def placements(draw: st.DrawFn) -> Placement:
    """Any ranges of a small tensor, on 2 ranks; each slice on at least one."""
    length = draw(st.integers(1, 5))
    dim = draw(st.integers(0, 1))
    cut = draw(st.integers(0, length))
    other = draw(st.integers(0, cut))
    return Placement(
        (length, 3) if dim == 0 else (3, length),
        dim,
        ((range(cut),), (range(other, length),)),
        partial=True,
    )


UNITS = {torch.float64: 1 + 2**-40, torch.float32: 1 + 2**-16, torch.bfloat16: 1.0}
"""Numbers whose small multiples each dtype has, and no lower one."""
DTYPES = st.lists(st.sampled_from(list(UNITS)), min_size=3, max_size=3)


@given(
    nprocs=st.just(4),
    max_examples=40,
    placement=placements(),
    seed=seeds(),
    max_norm=st.sampled_from([0.5, 1e9]),
    dtypes=DTYPES,
    memory=st.sampled_from(MEMORIES),
)
def test_a_gradient_is_the_sum_over_those_who_have_a_part(
    comm: Any,
    placement: Placement,
    seed: int,
    max_norm: float,
    dtypes: list[torch.dtype],
    memory: str,
) -> None:
    """Multiples of a unit, whose sums are exact.

    Partial slices on two tensor ranks, complete ones beside them, two data ranks.
    """
    random = torch.Generator().manual_seed(seed)
    whole, norm = (
        torch.randint(-4, 5, shape, generator=random).double() * UNITS[dtype]
        for shape, dtype in (((4, *placement.shape), dtypes[0]), ((2, 3), dtypes[1]))
    )
    with sp.Mesh(comm, dp=2, tp=2) as mesh:
        data, tensor = mesh["dp"], mesh["tp"]
        local = [in_memory(placement.take(whole[rank], rank % 2), memory) for rank in range(4)]
        shared = place(
            nn.Parameter(torch.zeros(local[comm.rank].shape, dtype=dtypes[0])), placement
        )
        shared.grad = in_memory(local[comm.rank].clone().to(dtypes[0]), memory)
        alike = place(nn.Parameter(torch.zeros(3, dtype=dtypes[1])), Placement.replicated((3,), 2))
        alike.grad = norm[data.rank].clone().to(dtypes[1])
        idle = place(nn.Parameter(torch.zeros(1, dtype=dtypes[2])), Placement.replicated((1,), 2))
        reduce_gradients([shared, alike, idle], data=data, tensor=tensor)
        parts = sum(placement.spread(part, rank % 2) for rank, part in enumerate(local))
        assert isinstance(parts, Tensor)
        assert torch.equal(shared.grad, placement.take(parts, tensor.rank).to(dtypes[0]))
        assert torch.equal(alike.grad, norm.sum(0).to(dtypes[1]))
        assert torch.equal(idle.grad, torch.zeros(1, dtype=dtypes[2]))
        norms = (parts.square().sum() + norm.sum(0).square().sum()).sqrt()
        found = clip_gradient_norm([shared, alike, idle], max_norm, tensor=tensor)
        assert math.isclose(found, float(norms), rel_tol=1e-14)
        factor = min(1.0, max_norm / max(found, 1e-300))
        torch.testing.assert_close(
            shared.grad, (placement.take(parts, tensor.rank) * factor).to(dtypes[0])
        )
        torch.testing.assert_close(alike.grad, (norm.sum(0) * factor).to(dtypes[1]))


@spmd(2)
def test_a_norm_that_is_not_finite_and_a_parameter_without_placement_are_refused(comm: Any) -> None:
    parameter = nn.Parameter(torch.ones(2))
    with pytest.raises(sp.ShapeError, match="carries no placement"):
        placement_of(parameter)
    place(parameter, Placement.split((4,), 0, 2)).grad = torch.tensor(
        [1.0, torch.inf if comm.rank else 1.0]
    )
    with sp.Mesh(comm, tp=2) as mesh:
        with pytest.raises(ValueError, match="norm of the gradients is inf"):
            clip_gradient_norm([parameter], 1.0, tensor=mesh["tp"])
        with pytest.raises(ValueError, match="above 0"):
            clip_gradient_norm([parameter], 0.0, tensor=mesh["tp"])
