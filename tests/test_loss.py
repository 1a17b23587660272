"""The loss of the next token over tokens and vocabulary that are split over ranks, and what becomes of gradients over a mesh."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import sp_core as sp
from sp_core.nn.gradients import (
    Placement,
    clip_gradient_norm,
    place,
    placement_of,
)
from sp_core.nn.loss import IGNORED, next_token_labels, next_token_loss
from sp_core.testing import spmd

"""Sequence ranks and tensor ranks, by the number of all."""


@spmd(1, 2, 4)
def test_the_mean_is_of_all_tokens_and_not_of_ranks(comm: Any) -> None:
    """One valid token on the last rank, all on the others: a mean of the ranks' means would be another number."""
    logits = torch.tensor([0.0, 1.0, 4.0]).double()
    mine = torch.full((1, 3), 2 if comm.rank else 0)
    if comm.rank:
        mine[0, 1:] = IGNORED
    with sp.Mesh(comm, dp=comm.size, tp=1) as mesh:
        loss = next_token_loss(logits.expand(1, 3, 3), mine, tensor=mesh["tp"], data=mesh["dp"])
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
