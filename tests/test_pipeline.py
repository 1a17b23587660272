"""A LLaMA whose layers are split over stages: loss, gradients and tokens are those of one device."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from domains.models import Expected, with_gradients
from hypothesis import strategies as st
from llama_cases import PIPELINES, Case, cases
from oracle import reference
from oracle.once import contents
from oracle.strategies import LAYOUTS
from torch import Tensor

import sp_core as sp
from sp_core.llama import Decoder, Grid, Llama, generate, load
from sp_core.llama import model as llama_model
from sp_core.llama.model import checkpoint_name
from sp_core.llama.pipeline import MicroBatch, loss_and_gradients, sum_tied_gradients
from sp_core.nn.gradients import clip_gradient_norm, reduce_gradients
from sp_core.nn.loss import IGNORED, next_token_labels
from sp_core.scheduling import gpipe, one_forward_one_backward
from sp_core.testing import device, event, given, spmd

CASE = Case((4, 2), layers=4, vocab=31, seed=5)
Shapes = list[tuple[int, int]]
"""Sequences and tokens of each micro-batch."""


def pipelined(comm: Any, number: int, stages: int) -> sp.Mesh:
    """A mesh with several stages where that many ranks allow it, the axes of one rank left out, in either order."""
    shapes = [axes for axes in PIPELINES[comm.size] if axes["pp"] <= stages] or [{"tp": comm.size}]
    axes = {axis: size for axis, size in shapes[number % len(shapes)].items() if size > 1} or {
        "tp": 1
    }
    return sp.Mesh(
        comm, device=device(), **dict(reversed(axes.items()) if number % 2 else axes.items())
    )


def expected(case: Case, texts: list[Tensor]) -> Expected:
    """The mean loss over all texts (B, S) and its gradients on one device."""
    counts = [x.shape[0] * (x.shape[1] - 1) for x in texts]

    def run(rounding: Any, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        def outputs(leaves: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
            losses = [
                reference.next_token_loss(
                    reference.llama(x, leaves, rounding=rounding, **case.options()), x, []
                )
                * count
                for x, count in zip(texts, counts, strict=True)
                if count
            ]
            loss = torch.stack(losses).sum() / sum(counts)
            return loss, {"loss": loss.reshape(1)}

        return with_gradients(outputs, weights)

    return Expected("pipeline", case, run, contents(*texts))


@given(
    max_ranks=4,
    max_examples=8,
    case=cases(max_layers=4),
    shapes=st.lists(st.tuples(st.integers(1, 2), st.integers(2, 7)), min_size=1, max_size=4),
    layout=st.sampled_from(sorted(LAYOUTS)),
    ordering=st.sampled_from([gpipe, one_forward_one_backward]),
    mesh=st.integers(0, 19),
    tp_sp=st.booleans(),
)
def test_loss_and_gradients_are_those_of_one_device(
    comm: Any, case: Case, shapes: Shapes, layout: str, ordering: Any, mesh: int, tp_sp: bool
) -> None:
    """Micro-batches of any sizes; a replica takes every other sequence of each, so its share may be empty."""
    with pipelined(comm, mesh, case.layers) as made:
        event(str(made.axes))
        check_step(made, case, shapes, layout, ordering, tp_sp=tp_sp)


@pytest.mark.parametrize("ordering", [gpipe, one_forward_one_backward])
@spmd(4)
def test_unequal_micro_batches_pass_stages_that_are_rings(comm: Any, ordering: Any) -> None:
    with sp.Mesh(comm, device=device(), pp=2, ring=2) as mesh:
        check_step(mesh, CASE, [(1, 3), (2, 6), (1, 4)], "zigzag", ordering, tp_sp=False)


def check_step(
    mesh: sp.Mesh, case: Case, shapes: Shapes, layout: str, ordering: Any, *, tp_sp: bool
) -> None:
    """Compare the loss, the gradients and their norm with those of one device."""
    texts = [case.tokens(2 * b, s) for b, s in shapes]
    wanted = expected(case, texts)
    model = case.model(mesh, tp_sp=tp_sp)
    grid = model.grid
    batches = [micro_batch(text, layout, grid) for text in texts]
    loss = loss_and_gradients(model, batches, ordering=ordering)
    sum_tied_gradients(model)
    reduce_gradients(model.parameters(), data=grid.data, tensor=grid.tensor)

    wanted.check("loss", loss.reshape(1))
    wanted.check_gradients(model)
    wanted.check_norm(
        clip_gradient_norm(model.parameters(), 1e-3, tensor=grid.tensor, stages=grid.stages)
    )


def micro_batch(text: Tensor, layout: str, grid: Grid) -> MicroBatch:
    """This rank's part of sequences."""
    sharding = LAYOUTS[layout](text.shape[1], grid.sequence.size)
    rows = text[grid.replicas.rank :: grid.replicas.size]
    mine = sharding.shard(rows, grid.sequence.rank, 1).to(grid.everyone.device)
    return MicroBatch(
        mine, next_token_labels(mine, comm=grid.sequence, sharding=sharding), sharding
    )


PROMPTS = [[5, 1, 4], [2], [7, 7, 0, 3, 9, 30, 8], [1, 1], [12]]


@pytest.mark.parametrize("micro_batches", [2, 5])
@spmd(2, 4)
def test_tokens_do_not_depend_on_the_number_of_stages(comm: Any, micro_batches: int) -> None:
    """Logits in float64, after a prefill of unequal prompts and after steps in which some wait."""
    with (
        sp.Mesh(comm, pp=comm.size) as mesh,
        sp.Mesh(comm.Split(comm.rank, 0), tp=1, check="off") as alone,
    ):
        model, whole = CASE.model(mesh), CASE.model(alone)
        room = [len(prompt) + 2 for prompt in PROMPTS]
        decoders = [Decoder(model, room, micro_batches=micro_batches), Decoder(whole, room)]
        for tokens in (PROMPTS, [[1], [], [2], [3], [4]], [[], [9], [], [], []]):
            step = [(d.prefill if tokens is PROMPTS else d.decode)(tokens) for d in decoders]
            torch.testing.assert_close(step[0], step[1], rtol=0, atol=1e-12)
        assert generate(model, PROMPTS, max_tokens=3) == generate(whole, PROMPTS, max_tokens=3)


@spmd(1, 2, 4)
def test_each_stage_holds_and_reads_its_own_layers_only(
    comm: Any, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = str(tmp_path_factory.mktemp("model")) if comm.rank == 0 else ""
    folder = comm.bcast(folder)
    case = Case((4, 2), layers=4, tied=True, dtype="float64")
    if comm.rank == 0:
        save(case, Path(folder))
    comm.barrier()
    with sp.Mesh(comm, pp=comm.size) as mesh:
        model = load(folder, mesh)
        held = {checkpoint_name(name): p for name, p in model.named_parameters()}
        layers = [int(name.split(".")[2]) for name in held if ".layers." in name]
        first, last = comm.rank == 0, comm.rank == comm.size - 1
        assert sorted(set(layers)) == list(model.own)
        assert ("model.embed_tokens.weight" in held) == (first or last)
        assert ("model.norm.weight" in held) == last
        for name, parameter in held.items():
            assert torch.equal(parameter, case.weights()[name])
        owners = comm.allgather(list(model.own))
        assert [layer for own in owners for layer in own] == list(range(4))


def save(case: Case, folder: Path) -> None:
    import json

    from safetensors.torch import save_file

    (folder / "config.json").write_text(json.dumps(case.config.to_dict()))
    save_file(
        {name: x.contiguous() for name, x in case.weights().items()}, folder / "model.safetensors"
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
