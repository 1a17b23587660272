"""A LLaMA whose layers are split over stages.

Loss, gradients and tokens are those of one device.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from llama_cases import Case
from oracle.strategies import LAYOUTS
from torch import Tensor

import sp_core as sp
from sp_core.llama import Decoder, Grid, Llama, model as llama_model
from sp_core.llama.pipeline import MicroBatch, loss_and_gradients, sum_tied_gradients
from sp_core.nn.loss import IGNORED, next_token_labels
from sp_core.testing import spmd

CASE = Case((4, 2), layers=4, vocab=31, seed=5)


def micro_batch(text: Tensor, layout: str, grid: Grid) -> MicroBatch:
    """This rank's part of sequences."""
    sharding = LAYOUTS[layout](text.shape[1], grid.sequence.size)
    rows = text[grid.replicas.rank :: grid.replicas.size]
    mine = sharding.shard(rows, grid.sequence.rank, 1).to(grid.everyone.device)
    return MicroBatch(
        mine, next_token_labels(mine, comm=grid.sequence, sharding=sharding), sharding
    )


def test_stages_are_split_by_the_number_of_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case((6, 2), layers=3, head_dim=4, hidden=10, ffn=7, vocab=13)
    monkeypatch.setattr(
        llama_model, "split_stages", lambda costs, stages, last: (costs, stages, last)
    )
    sizes = {name: x.numel() for name, x in case.weights().items() if x.dim() == 2}
    layers = [
        sum(size for name, size in sizes.items() if f"layers.{number}." in name)
        for number in range(3)
    ]
    assert llama_model.stage_layers(case.config, 2) == (layers, 2, sizes["lm_head.weight"])


@pytest.mark.parametrize("without", ["neither", "first", "last"])
@spmd(2, 3)
def test_a_tied_weight_without_a_gradient_on_one_stage_gets_the_other_stages(
    comm: Any, without: str
) -> None:
    with sp.Mesh(comm, pp=comm.size) as mesh:
        model = Case((4, 2), layers=4, tied=True).model(mesh)
        place = "first" if model.is_first else "last"
        if (model.is_first or model.is_last) and place != without:
            weight = model.embed_tokens.weight
            weight.grad = torch.full_like(weight, 1.0 if model.is_first else 2.0)
        sum_tied_gradients(model)
        if model.is_first or model.is_last:
            wanted = {"neither": 3.0, "first": 2.0, "last": 1.0}[without]
            assert torch.equal(
                model.embed_tokens.weight.grad, torch.full_like(model.embed_tokens.weight, wanted)
            )


@spmd(2, 4)
def test_what_stages_cannot_do_is_refused_on_every_rank(comm: Any) -> None:
    with sp.Mesh(comm, pp=comm.size) as mesh:
        model = CASE.model(mesh)
        text = CASE.tokens(1, 4)
        with pytest.raises(sp.ShapeError, match="Use Decoder"):
            model(text, sharding=sp.Sharding.contiguous(4, 1))
        with pytest.raises(sp.ShapeError, match="Use pp <= 1"):
            Llama(Case((4, 2), layers=1).config, Grid.of(mesh))
        good = micro_batch(text, "contiguous", model.grid)
        bad = MicroBatch(good.tokens + 31, good.labels, good.sharding)
        for given_here, kind, words in (
            ([], sp.ShapeError, "no micro-batch"),
            ([bad], ValueError, "token .* vocabulary has 0..30"),
            ([replace(good, labels=good.labels[:, 1:])], sp.ShapeError, "needed as many"),
            (
                [replace(good, labels=good.labels.double())],
                sp.ShapeError,
                "needed as many, of int64",
            ),
            ([replace(good, labels=good.labels + 31)], ValueError, "label .* vocabulary has 0..30"),
            (
                [replace(good, mask=sp.Mask(causal=True, documents=(0, 3)))],
                sp.ShapeError,
                "documents",
            ),
        ):
            for ranks in (range(comm.size), (comm.size - 1,)):
                with pytest.raises(kind, match=words):
                    loss_and_gradients(model, given_here if comm.rank in ranks else [good])
        with pytest.raises(ValueError, match="no label of any micro-batch is valid"):
            loss_and_gradients(model, [replace(good, labels=torch.full_like(good.labels, IGNORED))])
        with pytest.raises(sp.RankError, match="2 micro-batches"):
            loss_and_gradients(model, [good] * (1 + (comm.rank == 0)))
        with pytest.raises(sp.ShapeError, match="micro_batches=0"):
            Decoder(model, [3], micro_batches=0)
        assert torch.isfinite(loss_and_gradients(model, [good]))
