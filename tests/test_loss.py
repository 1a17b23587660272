"""Test a loss of tokens without a label, of many with one, and of logits of -infinity."""

from typing import Any

import pytest
import torch
from kit.meshed import meshed
from torch.nn import functional as F

import sp_core as sp
from sp_core.nn.loss import IGNORED, counted, next_token_loss
from sp_core.testing import spmd


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
@pytest.mark.parametrize("chunk", [None, 1, 3])
@pytest.mark.parametrize("with_head", [False, True])
@spmd(1, 2, 3)
@meshed("tensor", data=1)
def test_what_a_token_without_a_label_holds_changes_no_loss(
    mesh: sp.Mesh, with_head: bool, chunk: int | None, poison: float
) -> None:
    """Padding is computed too. If it is NaN, so are its own gradient and the head's."""
    x, head = torch.randn(2, 5, 4), torch.randn(3, 4) if with_head else None
    labels = torch.tensor([[0, 1, IGNORED, 2, IGNORED], [IGNORED, 0, 1, 2, 3 * mesh.size - 1]])
    losses = []
    for content in (0.0, poison):
        x[labels == IGNORED] = content
        groups: Any = {"tensor": mesh["tensor"], "data": mesh["data"]}
        losses.append(next_token_loss(x, labels, **groups, head=head, chunk=chunk))
    assert losses[0].isfinite()
    assert torch.equal(*losses)


@pytest.mark.parametrize("learns", [False, True])
@spmd(1, 2, 3)
@meshed("tensor", data=1)
def test_a_logit_of_minus_infinity_has_no_part_in_the_loss(mesh: sp.Mesh, learns: bool) -> None:
    """So programs mask tokens of the vocabulary: here the first one of each rank."""
    x, labels = torch.randn(4, 3), torch.tensor([1, 2, 3 * mesh.size - 1, IGNORED])
    x[:, 0] = -torch.inf
    given = x.clone().requires_grad_(learns)
    groups: Any = {"tensor": mesh["tensor"], "data": mesh["data"]}
    with torch.set_grad_enabled(learns):
        loss = next_token_loss(given, labels, **groups)
    whole = sp.all_gather(x, comm=mesh["tensor"], dim=1).requires_grad_(learns)
    wanted = F.cross_entropy(whole, labels)
    torch.testing.assert_close(loss, wanted)
    if learns:
        grads = torch.autograd.grad(loss, given) + torch.autograd.grad(wanted, whole)
        torch.testing.assert_close(grads[0], grads[1].chunk(mesh.size, 1)[mesh["tensor"].rank])


@spmd(1, 2)
@meshed("data")
def test_labels_beyond_the_whole_numbers_of_float32_are_counted(mesh: sp.Mesh) -> None:
    mine = torch.tensor(2**24 + 1)
    assert counted(mine, mesh["data"]) == (2**24 + 1) * mesh.size
