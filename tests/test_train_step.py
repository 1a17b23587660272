"""Test how a training step deals sequences and recomputes, samples between steps, and saving.

A training that cannot be saved, or whose record fits no other, is refused on every rank.
"""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import permutations, product
from pathlib import Path
from typing import Any
from unittest.mock import Mock, call

import numpy as np
import pytest
import torch
from kit.meshed import meshed
from llama_cases import SCALINGS, Case, mesh_of
from test_llama_checkpoint import shared
from test_resume import Training
from torch import Tensor
from torch.nn import Dropout, Linear, Module, Parameter, Sequential
from torch.nn.modules.module import register_module_forward_hook
from torch.nn.utils.parametrizations import spectral_norm

import sp_core as sp
from sp_core.llama import Llama, create, generate
from sp_core.llama.record import settings_of
from sp_core.llama.train import backward, load_training, save_training, train_step
from sp_core.testing import spmd

CASE = Case((6, 3), layers=1)


@spmd(2, 4)
def test_each_replica_takes_some_of_the_sequences(comm: Any) -> None:
    axes = {"dp": comm.size // 2, "ring": 2}
    with sp.Mesh(comm, **axes) as mesh:
        model, layout = CASE.model(mesh), Mock(side_effect=sp.Sharding.zigzag)
        backward(model, [[1, 2, 3], [4, 5]], layout=layout)
        dealt = [call(5, 2)] if comm.size == 2 else [call(3, 2), call(2, 2)]
        assert layout.call_args_list == dealt
        own = [3] if mesh["dp"].rank else [1, 2]
        assert backward(model, [own], own=True) == backward(model, [[1, 2], [3]][: axes["dp"]])


def drop(module: Any, given: Any, out: Tensor) -> Any:
    return torch.nn.functional.dropout(out)


def with_part(make: Callable[[], Module], model: Llama) -> Any:
    norm = model.layers[0].get_submodule("input_layernorm")
    model.layers[0].input_layernorm = Sequential(norm, make().double().requires_grad_(False))
    return nullcontext()


DRAWING: dict[str, Callable[[Llama], Any]] = {
    "a hook on a layer": lambda model: model.layers[0].register_forward_hook(drop),
    "a hook on all modules": lambda model: register_module_forward_hook(drop),
    "a new part of a layer": partial(with_part, Dropout),
    "a new part with buffers": partial(with_part, lambda: spectral_norm(Linear(10, 10))),
}


@spmd(1)
@meshed("tp")
def test_a_rate_of_a_short_dtype_is_compared(mesh: sp.Mesh) -> None:
    model = CASE.model(mesh)
    rate: Any = np.float32(0.5)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    assert "'lr': 0.5" in settings_of(optimizer, model)


@pytest.mark.parametrize("saving", [{"recompute": True}, {"offload": True}])
@pytest.mark.parametrize("change", DRAWING)
@spmd(1)
@meshed("tp")
def test_a_layer_draws_its_random_numbers_again_in_the_backward(
    mesh: sp.Mesh, change: str, saving: dict[str, Any]
) -> None:
    found = []
    for how in (dict[str, Any](), saving):
        model = CASE.model(mesh)
        torch.manual_seed(1)
        with DRAWING[change](model):
            backward(model, [[1, 2, 3, 4]], **how)
        found.append([*(x.grad for x in model.parameters()), *model.buffers()])
    torch.testing.assert_close(*found)


@spmd(1, 2)
@meshed("tp")
def test_a_weight_that_is_frozen_after_a_step_stays_as_it_is(mesh: sp.Mesh) -> None:
    model = CASE.model(mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    train_step(model, optimizer, [[1, 2]], max_norm=1.0)
    first, *_, last = model.parameters()
    kept, trained = first.requires_grad_(False).clone(), last.detach().clone()
    train_step(model, optimizer, [[1, 2]], max_norm=1.0)
    assert torch.equal(first, kept)
    assert not torch.equal(last, trained)


@spmd(1, 2)
@meshed("tp")
def test_a_step_without_a_gradient_decays_the_weights(mesh: sp.Mesh) -> None:
    model = CASE.model(mesh)
    for x in model.parameters():
        x.requires_grad_(x is model.embed_tokens.weight)
    torch.nn.init.zeros_(model.norm.weight)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=1.0)
    before = model.embed_tokens.weight.detach().clone()
    assert train_step(model, optimizer, [[1, 2]], max_norm=1.0).norm == 0
    torch.testing.assert_close(model.embed_tokens.weight.detach(), 0.9 * before)


@pytest.mark.parametrize("pad", [0, 5, -1])
@spmd(1, 2, 3)
@meshed("tp")
def test_the_vector_of_the_padding_gets_no_gradient(mesh: sp.Mesh, pad: int) -> None:
    model = CASE.model(mesh)
    model.config = replace(model.config, pad_token_id=pad)
    pad %= CASE.vocab
    backward(model, [[1, pad, 2, pad, 3]])
    (own,) = model.embed_tokens.placements["weight"].held[mesh.rank]
    grad: Any = model.embed_tokens.weight.grad
    learnt = {own[row] for row in grad.any(1).nonzero()[:, 0].tolist()}
    assert learnt == {1, 2} & {*own} - {pad}


@spmd(2, 3)
@meshed("tp")
def test_tensor_ranks_with_unequal_numbers_of_tokens_take_as_many_chunks(mesh: sp.Mesh) -> None:
    """With chunks, backward repeats the all-reduce of the feed-forward over all tokens."""
    losses, sent = list[float](), list[int]()
    for tp_sp, chunk in product((True, False), (None, 1)):
        mesh["tp"].counters.reset()
        losses.append(backward(CASE.model(mesh, tp_sp=tp_sp), [[1, 2, 3, 4, 5]], chunk=chunk))
        sent.append(mesh["tp"].counters["all_reduce"].bytes_sent)
    torch.testing.assert_close(losses, losses[:1] * 4)
    assert sent[3] - sent[2] == 5 * CASE.hidden * 8


@spmd(1, 2)
@meshed("ring")
def test_training_takes_longer_sequences_than_generation(mesh: sp.Mesh) -> None:
    model, sequence = CASE.model(mesh), [*range(1, 9)]
    loss = backward(model, [sequence])
    model.config = replace(model.config, max_position_embeddings=4)
    assert backward(model, [sequence]) == loss
    with pytest.raises(ValueError, match="exceeds the model's 4 positions"):
        generate(model, [sequence], max_tokens=1)


TORCHS = {
    name: kind
    for name, kind in vars(torch.optim).items()
    if isinstance(kind, type) and torch.optim.Optimizer in kind.__mro__[1:]
}
"""The optimizers of torch by name."""


def updated(kind: Any, weight: Tensor, grad: Tensor) -> Tensor:
    """Return a weight after two steps of an optimizer with the same gradient."""
    x = Parameter(weight.clone())
    x.grad = grad.to_sparse() if kind is torch.optim.SparseAdam else grad
    optimizer = kind([x], lr=0.1)
    for _ in range(2):
        optimizer.step(lambda: (x.detach() * grad).sum())
    return x.detach()


@spmd(1, 2)
def test_optimizers_of_torch_that_couple_elements_need_whole_weights(
    comm: Any, tmp_path: Path
) -> None:
    """Refused are those, and only those, that update two halves of a weight in another way."""
    folder, refused = shared(comm, tmp_path), set[str]()
    x = torch.linspace(1, 2, 32, dtype=torch.float64).view(8, 4)
    halves = [*zip(x.split(4), x.cos().split(4), strict=True)]
    with sp.Mesh(comm, tp=comm.size) as mesh:
        model = CASE.model(mesh)
        weights = [x for x in model.parameters() if x.dim() == 2]
        for name, kind in TORCHS.items():
            apart = torch.cat([updated(kind, *half) for half in halves])
            couples = not torch.allclose(updated(kind, x, x.cos()), apart, rtol=1e-9, atol=0)
            save = partial(save_training, model, folder / name, optimizer=kind(weights), step=0)
            if couples and comm.size > 1:
                refused.add(name)
                with pytest.raises(sp.CheckpointError, match=rf"{name} computes .*such as AdamW"):
                    save()
            else:
                save()
        norms = [x for x in model.parameters() if x.dim() == 1]
        before = norms[0].detach().clone()
        train_step(model, torch.optim.Adafactor(norms), [[1, 2]], max_norm=1.0)
        assert not torch.equal(norms[0], before)
    assert refused >= {"Adafactor", "LBFGS", "Muon"} or comm.size == 1


def sample(model: Llama) -> None:
    """Generate a token. Weights that learn are then contiguous."""
    generate(model, [[1, 2]], max_tokens=1)
    assert all(x.is_contiguous() or not x.requires_grad for x in model.parameters())


def frozen_sample(model: Llama) -> None:
    """Freeze a model to generate a token."""
    sample(model.requires_grad_(False))
    model.requires_grad_()


def validate(model: Llama) -> None:
    """Compute logits after a frozen sample, which has laid out the weights anew."""
    frozen_sample(model)
    with torch.inference_mode():
        model(torch.tensor([[1, 2]]), sharding=sp.Sharding.contiguous(2, 1))


LOOKS = (sample, frozen_sample, validate, *map(torch.inference_mode(), (sample, frozen_sample)))
"""Uses of a model between steps of its training."""


@pytest.mark.parametrize(
    "make",
    [torch.optim.AdamW, partial(torch.optim.SGD, momentum=0.9), torch.optim.Adagrad],
    ids=["AdamW", "SGD", "Adagrad"],
)
@spmd(1, 2)
def test_samples_between_steps_change_no_weight(comm: Any, make: Any) -> None:
    """Fused optimizers on a CPU read weights, gradients and state in the order of memory."""

    def trained(look: Callable[[Llama], None]) -> list[Tensor]:
        with sp.Mesh(comm, tp=comm.size) as mesh:
            model = Case((6, 3), layers=1, seed=0).model(mesh)
            optimizer = make(model.parameters(), lr=0.01, fused=True)
            for _ in range(3):
                train_step(model, optimizer, [[1, 2, 3, 4]], max_norm=1.0)
                look(model)
            backward(model, [[4, 3]])
            optimizer.step()
            assert all(x.is_contiguous() for x in model.parameters())
            return [x.detach() for x in model.parameters()]

    alone, *others = (trained(look) for look in (lambda _: None, *LOOKS))
    for found in others:
        assert all(map(torch.equal, found, alone))


@spmd(1)
@pytest.mark.parametrize("rates", [(1, 0.5), (0.5, 1), (0.5, torch.tensor(1.0))])
def test_a_rate_that_was_saved_replaces_one_of_another_type(
    comm: Any, rates: tuple[object, object], tmp_path: Path
) -> None:
    with sp.Mesh(comm, tp=1) as mesh:
        before, after = (Training(CASE.model(mesh), "AdamW", "none") for _ in rates)
        for each, rate in zip((before, after), rates, strict=True):
            each.optimizer.param_groups[0].update(lr=rate)
        folder = shared(comm, tmp_path) / "saved"
        before.save(folder)
        after.load(folder)
        assert after.optimizer.param_groups[0]["lr"] == rates[0]


SCHEDULES = torch.optim.lr_scheduler
DROPS = lambda sgd: SCHEDULES.StepLR(sgd, 2), lambda sgd: SCHEDULES.MultiStepLR(sgd, [2])


def warmed(then: Callable[[Any], Any], sgd: Any) -> Any:
    """Return a scheduler of two parts, the second of which `then` makes."""
    return SCHEDULES.SequentialLR(sgd, [SCHEDULES.LinearLR(sgd, 0.1), then(sgd)], [2])


PARTS: dict[str, tuple[Callable[[Any], Any], ...]] = {
    "optimizer": (lambda sgd: sgd, lambda sgd: torch.optim.AdamW(sgd.param_groups[0]["params"])),
    "scheduler": (lambda sgd: None, *DROPS, *(partial(warmed, then) for then in DROPS)),
    "generator": (lambda sgd: None, lambda sgd: torch.Generator()),
}
"""Parts of different trainings, by the name of the argument."""


@pytest.mark.parametrize("name", PARTS)
@spmd(1, 2)
def test_a_training_with_other_parts_is_refused_by_their_name(
    comm: Any, name: str, tmp_path: Path
) -> None:
    """The file is not broken, and another copy of it would not help. The error tells both parts."""
    with sp.Mesh(comm, tp=comm.size) as mesh:
        model, folder = CASE.model(mesh), shared(comm, tmp_path)
        for number, makers in enumerate(permutations(PARTS[name], 2)):
            sgd = torch.optim.SGD(model.parameters(), lr=0.1)
            old, new = ({"optimizer": sgd, name: make(sgd)} for make in makers)
            save_training(model, folder / str(number), step=1, **old)
            told = rf"json is of another training: {name} (.*), now (?!\1\.)"
            with pytest.raises(sp.CheckpointError, match=told):
                load_training(model, folder / str(number), **new)


@spmd(1)
def test_a_training_is_the_same_if_its_configuration_is_written_otherwise(
    comm: Any, tmp_path: Path
) -> None:
    """Neither the text of numbers counts, nor the order of entries, nor what ends a text."""
    scaling: Any = SCALINGS["llama3"]
    before = replace(CASE.config, rope_theta=100, rope_scaling=scaling)
    after = replace(before, rope_theta=100.0, rope_scaling=dict(reversed(scaling.items())))
    with sp.Mesh(comm, tp=1) as mesh:
        folder = shared(comm, tmp_path) / "a"
        for config, call in ((before, partial(save_training, step=4)), (after, load_training)):
            model = create(config, mesh)
            found = call(model, folder, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
            (folder / "generation_config.json").write_text('{"eos_token_id": 5}')
        assert found == 4


def with_rate(rate: object) -> Callable[[Training], object]:
    return lambda x: x.optimizer.param_groups[0].update(lr=rate)


def with_state(**values: object) -> Callable[[Training], object]:
    return lambda x: x.optimizer.state[next(x.model.parameters())].update(values)


def with_milestones(key: Any) -> Callable[[Training], object]:
    return lambda x: setattr(x, "scheduler", SCHEDULES.MultiStepLR(x.optimizer, [1, key, 2]))


OTHERS: dict[str, tuple[type[Exception], str, Callable[[Training], object]]] = {
    "parameters that are not the model's": (
        sp.CheckpointError,
        "that the model lacks",
        lambda x: setattr(x, "optimizer", torch.optim.AdamW([Parameter(torch.ones(2))])),
    ),
    "a state of another shape": (
        sp.CheckpointError,
        r"rows of .* is torch.float32 of shape \(3,\)",
        with_state(rows=torch.ones(3)),
    ),
    "a rate in a tensor": (
        sp.CheckpointError,
        r"lr of the optimizer or the scheduler is torch.float32 of shape \(\).*such as float\(lr\)",
        with_rate(torch.tensor(0.1)),
    ),
    "a set of rates": (sp.CheckpointError, r"lr of .* is \{0\.1\}", with_rate({0.1})),
    "a set in a list": (sp.CheckpointError, r"an entry of .* is \{0\.1\}", with_rate([{0.1}])),
    **{
        f"a state with the key {key!r}": (
            sp.CheckpointError,
            r"own of .* is \[\{.*dicts with texts as key",
            with_state(own=[{key: 1}]),
        )
        for key in (0, "")
    },
    **{
        f"milestones with the key {key!r}": (
            sp.CheckpointError,
            r"milestones of .* is Counter.*may be Python's numbers",
            with_milestones(key),
        )
        for key in (np.int64(3), "10", None)
    },
    "a step below 0": (
        ValueError,
        "step=-1 was given; pass at least 0",
        lambda x: setattr(x, "step", -1),
    ),
    "another rate": (sp.CollectiveMismatch, "groups #", with_rate(0.3)),
    "another random state": (
        sp.CollectiveMismatch,
        "random #",
        lambda x: x.generator.manual_seed(1),
    ),
    "no optimizer": (TypeError, "model.parameters()", lambda x: setattr(x, "optimizer", None)),
    "no scheduler": (TypeError, "a scheduler of", lambda x: setattr(x, "scheduler", 3)),
    "no step": (TypeError, "a whole number", lambda x: setattr(x, "step", None)),
}


@pytest.mark.parametrize("what", sorted(OTHERS))
@spmd(3)
def test_a_training_that_cannot_be_saved_is_refused(comm: Any, what: str, tmp_path: Path) -> None:
    """Only the last rank's training is wrong, but all ranks raise the error."""
    kind, text, change = OTHERS[what]
    folder = shared(comm, tmp_path)
    with mesh_of(comm, 0) as mesh:
        training = Training(CASE.model(mesh), "AdamW", "none")
        training.go(1)
        if comm.rank == comm.size - 1:
            change(training)
        with pytest.raises(kind, match=text):
            training.save(folder / "model")
        assert list(folder.iterdir()) == []
