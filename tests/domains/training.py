"""Declare the domain of training: pipelines and whole steps, compared with one device."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import torch
from llama_cases import Case
from oracle import reference
from oracle.attention_check import ascending
from oracle.once import contents
from oracle.strategies import LAYOUTS
from torch import Tensor
from torch.nn.functional import cross_entropy

import sp_core as sp
from domains import losses, models
from domains.declared import Call, Parts, Values, spans, values
from domains.masks import boundaries
from domains.models import (
    FEW_CALLS,
    ONE_CALL,
    SMALL,
    Expected,
    architecture,
    meshes,
    on_model,
)
from domains.pipelines import one_by_one
from domains.situations import CALLS, on_mesh
from sp_core.llama import Llama
from sp_core.llama.pipeline import MicroBatch, loss_and_gradients, sum_tied_gradients
from sp_core.llama.train import backward, load_training, save_training, train_step
from sp_core.nn.gradients import clip_gradient_norm, reduce_gradients
from sp_core.nn.loss import IGNORED
from sp_core.scheduling import gpipe, one_forward_one_backward
from sp_core.segments import split_ranges
from sp_core.testing import device, run_threads

Whole = tuple[Tensor, Tensor, sp.Sharding, sp.Mask]
"""Tokens and labels (B, S) of all replicas and ranks, with their sharding and their mask."""


LENGTHS: Parts = {
    "unequal": lambda c, v: [c.randint(2, 9) for _ in range(models.aspect(v, "count"))],
    "equal": lambda c, v: [4] * models.aspect(v, "count"),
    "one token": lambda c, v: [5] + [1] * (models.aspect(v, "count") - 1),
    "long": lambda c, v: [c.randint(20, 33) for _ in range(models.aspect(v, "count"))],
}
SAVING: dict[str, Parts] = {
    "recompute": values(False, True),
    "offload": values(False, True),
    "chunk": values(None) | spans((1, 1), (2, 5), (100, 200)),
}

PIPELINE: dict[str, Parts] = {
    "tp_sp": values(False, True),
    "batches.count": spans((3, 3), (1, 1), (2, 2), (4, 6)),
    "tokens.batch": spans((2, 2), (1, 1), (3, 3)),
    "tokens.lengths": LENGTHS,
    "labels": values("of every token", "some ignored", "none in one micro-batch"),
    "sharding.layout": values(*LAYOUTS),
    "mask.documents": {"none": lambda c, v: 1, "2 to 6": lambda c, v: c.randint(2, 6)},
    "ordering": {
        "1f1b": lambda c, v: one_forward_one_backward,
        "gpipe": lambda c, v: gpipe,
        "own": lambda c, v: one_by_one,
    },
} | SAVING


def micro_batches(case: Case, drawn: Values) -> list[Whole]:
    """Return all micro-batches; in the first one at least one label is not ignored."""
    chance, found = Random(drawn["seed"]), list[Whole]()
    size = models.sequence_ranks(drawn)
    for number, length in enumerate(drawn["tokens.lengths"]):
        ends = boundaries(chance, drawn["mask.documents"], 0, length)
        mask = sp.Mask(causal=True, documents=ends if len(ends) > 2 else None)
        tokens = (case.tokens(drawn["tokens.batch"], length) + number) % case.vocab
        labels = losses.labelled(tokens, range(length), mask.documents)
        if drawn["labels"] == "some ignored":
            labels[:, chance.randrange(length)] = IGNORED
        if not number:
            labels[:, 0] = tokens[:, -1]
        if drawn["labels"] == "none in one micro-batch" and number:
            labels[:] = IGNORED
        found.append((tokens, labels, LAYOUTS[drawn["sharding.layout"]](length, size), mask))
    return found


def mean_loss(
    case: Case, batches: Sequence[Whole], rounding: Any, leaves: dict[str, Tensor]
) -> Tensor:
    """Return the mean loss of whole micro-batches, over all labels that are not ignored."""
    total, number = torch.zeros((), dtype=torch.float64), 0
    for tokens, labels, sharding, mask in batches:
        logits = reference.llama(
            tokens,
            leaves,
            **case.options(),
            documents=mask.documents,
            window=mask.window,
            positions=ascending(sharding),
            rounding=rounding,
        )
        total = total + cross_entropy(
            logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum"
        )
        number += int((labels != IGNORED).sum())
    return total / number


def trained(
    case: Case,
    batches: Sequence[Whole],
    *,
    factor: int = 1,
    steps: int = 1,
    optimizer: Any = None,
    max_norm: float = torch.inf,
    milestones: Sequence[int] = (),
) -> Expected:
    """Return loss and norm of the last step, and the weights or, with no optimizer, gradients.

    Args:
        case: the model before the first step.
        batches: the micro-batches, the same in every step.
        factor: the factor of the loss that is differentiated.
        steps: the number of steps.
        optimizer: makes an optimizer for parameters, or None.
        max_norm: the norm to which gradients are clipped.
        milestones: steps after which the learning rate falls.
    """

    def run(rounding: Any, weights: dict[str, Tensor]) -> tuple[None, dict[str, Tensor]]:
        leaves = {name: x.detach().clone().requires_grad_() for name, x in weights.items()}
        made = optimizer(leaves.values()) if optimizer else torch.optim.SGD(leaves.values(), lr=0)
        scheduler = torch.optim.lr_scheduler.MultiStepLR(made, milestones)
        for _ in range(steps):
            loss = mean_loss(case, batches, rounding, leaves)
            grads = torch.autograd.grad(loss * factor, list(leaves.values()))
            norm = torch.cat([x.flatten() for x in grads]).norm()
            for x, grad in zip(leaves.values(), grads, strict=True):
                x.grad = grad * min(1.0, float(max_norm / norm))
            made.step()
            scheduler.step()
        after = leaves if optimizer else dict(zip(leaves, grads, strict=True))
        return None, {"loss": loss.reshape(1), "norm": norm.reshape(1), **after}

    key = [(contents(tokens, labels), repr(mask)) for tokens, labels, _, mask in batches]
    settings = (factor, steps, str(optimizer), max_norm, milestones)
    longest = max(tokens.shape[1] for tokens, *_ in batches)
    return Expected("llama training", case, run, repr((key, settings)), tokens=longest)


def pipelined(case: Case, model: Llama, drawn: Values) -> Call:
    """Return the call of `loss_and_gradients` with this rank's part of each micro-batch."""
    wholes = micro_batches(case, drawn)

    def own(x: Tensor, sharding: sp.Sharding) -> Tensor:
        return models.own(model, sharding, x).contiguous().to(device())

    batches = [MicroBatch(own(x, s), own(y, s), s, m) for x, y, s, m in wholes]
    given = {"model": model, "batches": batches} | {x: drawn[x] for x in ("ordering", *SAVING)}
    judge = partial(judge_pipelined, case, model, wholes, CALLS[drawn["(call)"]])
    return Call(loss_and_gradients, given, judge)


def judge_pipelined(
    case: Case, model: Llama, wholes: Sequence[Whole], calls: int, loss: Tensor
) -> None:
    """Compare the loss, the sums of the gradients of all calls, and their norm."""
    wanted, grid = trained(case, wholes, factor=calls), model.grid
    wanted.check("loss", loss.reshape(1))
    reduce_gradients(model.parameters(), data=grid.data, tensor=grid.tensor)
    sum_tied_gradients(model)
    wanted.check_weights(model, gradients=True)
    norm = clip_gradient_norm(model.parameters(), 1e-3, tensor=grid.tensor, stages=grid.stages)
    wanted.check("norm", torch.tensor([norm], dtype=torch.float64))


OPTIMIZERS: Parts = {
    "SGD": lambda c, v: partial(torch.optim.SGD, lr=0.1),
    "momentum": lambda c, v: partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "AdamW": lambda c, v: partial(torch.optim.AdamW, lr=0.01, eps=0.1),
}
TRAINING: dict[str, Parts] = {
    "tp_sp": values(False, True),
    "own": values(False, True),
    "window": values(None) | spans((1, 1), (2, 9), (100, 200)),
    "sequences.count": spans((3, 5), (1, 1), (7, 12)),
    "sequences.lengths": LENGTHS,
    "layout": {
        name: (lambda c, v, layout=layout: layout)  # type: ignore[misc]
        for name, layout in reversed(LAYOUTS.items())
    },
    **SAVING,
}
STEP: dict[str, Parts] = {
    "optimizer": OPTIMIZERS,
    "max_norm": values(1e-3, 1e6, torch.inf),
}


def unsplit(sequences: Sequence[Sequence[int]], window: int | None = None) -> list[Whole]:
    """Return a micro-batch on one rank for each sequence; a token sees `window` tokens."""
    rows = [torch.tensor([sequence]) for sequence in sequences]
    return [
        (
            *(x, losses.labelled(x, range(x.shape[1]), None)),
            *(sp.Sharding.contiguous(x.shape[1], 1), sp.Mask(window=window)),
        )
        for x in rows
    ]


def stepped(case: Case, model: Llama, drawn: Values) -> Call:
    """Return the call of `backward` or `train_step`; replicas take shares of the sequences."""
    sequences = models.text(case, drawn["sequences.lengths"])
    given: Values = {"model": model, "sequences": sequences}
    given |= {name: drawn[name] for name in ("layout", "own", "window", *SAVING)}
    judge = partial(judge_stepped, case, model, sequences, drawn)
    if drawn["own"]:  # this replica is given its share only
        replicas = model.grid.replicas
        share = split_ranges(len(sequences), replicas.size)[replicas.rank]
        given["sequences"] = [sequences[number] for number in share]
    if "optimizer" not in drawn:
        return Call(backward, given, judge)
    given |= {"optimizer": drawn["optimizer"](model.parameters()), "max_norm": drawn["max_norm"]}
    return Call(train_step, given, judge)


def judge_stepped(
    case: Case, model: Llama, sequences: Sequence[Sequence[int]], drawn: Values, result: Any
) -> None:
    """Compare loss and gradients, or after `train_step` loss, norm and weights."""
    wholes = unsplit(sequences, drawn["window"])
    if "optimizer" not in drawn:
        wanted = trained(case, wholes)
        wanted.check("loss", torch.tensor([result], dtype=torch.float64))
        wanted.check_weights(model, gradients=True)
        return
    options = {name: drawn[name] for name in STEP}
    wanted = trained(case, wholes, steps=CALLS[drawn["(call)"]], **options)
    for name in ("loss", "norm"):
        wanted.check(name, torch.tensor([getattr(result, name)], dtype=torch.float64))
    wanted.check_weights(model)


KEPT: dict[str, Parts] = {
    "tp_sp": values(False, True),
    "optimizer": OPTIMIZERS,
    "scheduler": values("none", "milestones"),
    "generator": values("none", "of the order"),
    "folder.type": {"Path": lambda c, v: Path, "str": lambda c, v: str},
}
SEQUENCES, MILESTONES = [[1, 2, 3, 4], [5, 6, 7]], (1, 3)


def made(model: Llama, drawn: Values) -> Values:
    """Return what a checkpoint has besides the model: optimizer, scheduler and generator.

    The scheduler and the generator are None if none was drawn.
    """
    optimizer, scheduler = (
        drawn["optimizer"](model.parameters()),
        torch.optim.lr_scheduler.MultiStepLR,
    )
    has_schedule = drawn["scheduler"] == "milestones"
    return {
        "optimizer": optimizer,
        "scheduler": scheduler(optimizer, MILESTONES) if has_schedule else None,
        "generator": torch.Generator() if drawn["generator"] != "none" else None,
    }


def gone_on(model: Llama, parts: Values) -> None:
    """Train for a step, and advance the scheduler."""
    train_step(model, parts["optimizer"], SEQUENCES, max_norm=1.0)
    if parts["scheduler"] is not None:
        parts["scheduler"].step()


def save_alone(case: Case, drawn: Values, folder: Path, comm: Any) -> None:
    """Train for a step on one rank, and save the training."""
    with sp.Mesh(comm, device=device(), tp=1) as mesh:
        model = case.model(mesh)
        parts = made(model, drawn)
        gone_on(model, parts)
        save_training(model, folder, step=1, **parts)


def kept(function: Any, mesh: sp.Mesh, drawn: Values) -> Call:
    """Return the call that saves a training on all ranks, or loads one that one rank saved."""
    case, place = models.case_of(drawn), drawn["(folder)"] / "step"
    model = case.model(mesh, tp_sp=drawn["tp_sp"])
    parts = made(model, drawn)
    given = {"model": model, "folder": drawn["folder.type"](place), **parts}
    if function is save_training:
        gone_on(model, parts)
        given |= {"step": drawn["step"], "max_file_bytes": drawn["max_file_bytes"]}
    elif mesh.rank == 0:
        run_threads(1, partial(save_alone, case, drawn, place))
    mesh._comm.Barrier()
    return Call(function, given, partial(judge_kept, case, drawn, mesh, place, given))


def judge_kept(
    case: Case, drawn: Values, mesh: sp.Mesh, place: Path, parts: Values, step: int | None
) -> None:
    """Compare the weights after one more step with those of one device after two steps."""
    if step is None:  # the call was `save_training`
        model = case.model(mesh)
        parts = {"model": model, **made(model, drawn)}
        step = load_training(folder=place, **parts)
    assert step == drawn.get("step", 1)
    gone_on(parts["model"], parts)
    milestones = MILESTONES if drawn["scheduler"] == "milestones" else ()
    options = {"optimizer": drawn["optimizer"], "max_norm": 1.0, "milestones": milestones}
    trained(case, unsplit(SEQUENCES), steps=2, **options).check_weights(parts["model"])


MODEL = architecture("model", SMALL | {"dtype": values("float64", "float32", "bfloat16")})
AXES = ("dp, ring", "tp", "ring, ulysses", "dp", "dp, tp", "tp, dp, ring")

UNEQUAL = {"mesh.axes": "pp, ring", "tokens.lengths": "unequal"}

OWN = ({"own": "True", "mesh.axes": "dp, ring"},)
"""A row with replicas, because only they have sequences of their own."""
SUBJECTS = [
    on_model(
        "llama.pipeline.loss_and_gradients",
        MODEL
        | meshes(
            *("pp, ring", "pp", "ring, pp", "pp, tp", "dp, pp", "pp, ulysses", "pp, ring, tp", "tp")
        )
        | PIPELINE
        | FEW_CALLS,
        pipelined,
        covers=("llama.pipeline.MicroBatch", "llama.pipeline.sum_tied_gradients"),
        allowed=("chunk=far out",),
        together=(
            *({**UNEQUAL, "ordering": name} for name in PIPELINE["ordering"]),
            {
                "mesh.axes": "pp, ring, tp",
                "model.heads": "three groups",
                "model.tied": "True",
                "tokens.lengths": "unequal",
            },
        ),
    ),
    on_model(
        "llama.train.backward",
        MODEL | meshes(*AXES) | TRAINING | FEW_CALLS,
        stepped,
        covers=("llama.train.packed", "llama.Llama.loss"),
        allowed=("window=far out", "chunk=far out"),
        outside=dict.fromkeys(("hidden", "labels", "lengths", "count"), "`backward` makes it"),
        together=OWN,
    ),
    on_model(
        "llama.train.train_step",
        MODEL | meshes(*AXES) | TRAINING | STEP | FEW_CALLS,
        stepped,
        covers=("llama.train.Step",),
        allowed=("max_norm=infinity", "window=far out", "chunk=far out"),
        outside=dict.fromkeys(("loss", "norm"), "`train_step` gives it"),
        together=OWN,
    ),
    on_mesh(
        "llama.train.save_training",
        MODEL
        | meshes(*AXES)
        | KEPT
        | {"step": spans((1, 99), (0, 0)), "max_file_bytes": values(None, 1, 10**12)}
        | ONE_CALL,
        models.lengths,
        partial(kept, save_training),
        in_folder=True,
        allowed=("step=far out", "max_file_bytes=far out"),
    ),
    on_mesh(
        "llama.train.load_training",
        MODEL | meshes(*AXES) | KEPT | FEW_CALLS,
        models.lengths,
        partial(kept, load_training),
        in_folder=True,
    ),
]
