"""List wrong calls of `backward`, of what it calls, and of models that one rank has converted."""

import tempfile
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from llama_cases import Case
from refusals.calls import Row, Table, later
from refusals.kinds import graded, lowered
from refusals.models import CASE
from torch import Tensor, nn
from torch.optim import lr_scheduler

import sp_core as sp
from sp_core.llama import Decoder, Llama, generate, prefill_unequal, save
from sp_core.llama.pipeline import MicroBatch, loss_and_gradients
from sp_core.llama.train import Step, backward, load_training, save_training, train_step
from sp_core.nn.gradients import Placement, place, reduce_gradients
from sp_core.nn.loss import next_token_loss
from sp_core.scheduling import Work, balanced

ROWS = (range(2),), (range(2, 4),)
OTHER_ROWS = (range(1), range(3, 4)), (range(1, 3),)
"""For each of two tensor ranks the rows of a weight that it holds."""
Use = Callable[[Llama], object]
"""A use of a model, or a change of it."""


@later
def learned(call: Use, mesh: sp.Mesh, here: bool) -> object:
    """Call a model with a gradient from before, which the call does not change."""
    model = CASE.model(mesh)
    model.norm.weight.grad = before = torch.ones(10, dtype=torch.float64)
    try:
        return call(model)
    finally:
        assert model.norm.weight.grad is before


@later
def held(dim: int, ranks: tuple[tuple[range, ...], ...], mesh: sp.Mesh, here: bool) -> None:
    """Sum the gradients of a weight; the last rank says that ranks hold other rows or columns."""
    placement = Placement((4, 4), dim, ranks) if here else Placement((4, 4), 0, ROWS)
    weight = nn.Parameter(torch.ones(placement.local_shape(mesh["ulysses"].rank)))
    reduce_gradients([place(weight, placement)], data=mesh["ring"], tensor=mesh["ulysses"])


def lost(mesh: sp.Mesh, here: bool, head: Tensor | None = None) -> Tensor:
    """Compute the loss of logits that require a gradient, or of ones and a head."""
    x, labels = torch.ones(1, 3, 2), torch.zeros(1, 3, dtype=torch.int64)
    x.requires_grad_(head is None)
    return next_token_loss(x, labels, tensor=mesh["ulysses"], data=mesh["ring"], head=head)


def short(number: int, size: int) -> sp.Sharding:
    """Return a layout of 5 tokens for any number of tokens."""
    return sp.Sharding.zigzag(5, size)


def trained(model: Llama) -> Tensor:
    size = model.grid.sequence.size
    sharding, tokens = sp.Sharding.contiguous(4 * size, size), CASE.tokens(1, 4)
    return loss_and_gradients(model, [MicroBatch(tokens, tokens, sharding)])


def called(model: Llama) -> object:
    size = model.grid.sequence.size
    return model(CASE.tokens(1, 3), sharding=sp.Sharding.contiguous(3 * size, size))


def planned(model: Llama) -> Tensor:
    plan = balanced([1, 1], model.grid.sequence.size, Work(1, 1))
    return prefill_unequal(model, [[1], [2]], plan)


def stored(model: Llama) -> None:
    save_training(model, FOLDER, optimizer=torch.optim.SGD(model.parameters()), step=1)


def restored(model: Llama) -> None:
    load_training(model, FOLDER, optimizer=torch.optim.SGD(model.parameters()))


def stepped(model: Llama, make: Callable[[Any], Any] = torch.optim.SGD) -> Step:
    weights = [x for x in model.parameters() if x.dim() == 2]
    return train_step(model, make(weights), TEXTS, max_norm=1.0)


TEXTS = [[1, 2], [3, 4]]
FOLDER = tempfile.gettempdir() + "/sp_core_never_written"
CALLS: dict[str, tuple[Use, str]] = {
    "a forward": (called, "ring tp"),
    "a backward": (lambda model: backward(model, TEXTS), "dp ring tp"),
    "a training step": (stepped, "dp ring tp"),
    "a pipeline": (trained, "dp pp ring tp"),
    "a generation": (lambda model: generate(model, [[1], [2]], max_tokens=1), "dp pp ring tp"),
    "a decoder": (lambda model: Decoder(model, [3]), "pp ring tp"),
    "a prefill": (planned, "ring tp"),
    "a save": (lambda model: save(model, FOLDER), "dp ring tp"),
    "a checkpoint": (stored, "dp ring tp"),
}
"""By name: a call of a model, and axes over whose ranks it compares the model."""


@later
def converted(call: Use, change: Use, mesh: sp.Mesh, here: bool, *, case: Case = CASE) -> object:
    """Call a model that the last rank has changed before."""
    model = case.model(mesh)
    if here:
        change(model)
    return call(model)


HALVES = "the model of torch.float16 was called under autocast to torch.bfloat16"


def conversions(axis: str) -> dict[str, Row]:
    """Return the calls over ranks of an axis, of which one has converted its model, or half.

    Also those that compute, under autocast on one rank.
    """
    rows: dict[str, Row] = {
        f"{name}{what} under autocast on one rank": (kind, text, lowered(converted(call, change)))
        for name, (call, axes) in CALLS.items()
        if axis in axes.split() and name not in ("a decoder", "a save", "a checkpoint")
        for what, kind, text, change in (
            ("", sp.CollectiveMismatch, "autocast=torch.bfloat16", Llama.train),
            (" of a half type", sp.DtypeError, HALVES, Llama.half),
        )
    }
    return rows | {
        f"{name} with a model {what}": (kind, text, converted(call, change))
        for name, (call, axes) in CALLS.items()
        if axis in axes.split()
        for what, kind, text, change in (
            ("converted", sp.CollectiveMismatch, "torch.float32", lambda model: model.float()),
            (
                "converted in part",
                sp.DtypeError,
                "the parameters have the dtypes ['torch.float32', 'torch.float64']",
                lambda model: model.layers[-1].float(),
            ),
        )
    }


@later
def freeze(call: Use, mesh: sp.Mesh, here: bool) -> object:
    """Call a model of which each rank has frozen another layer."""
    model = CASE.model(mesh)
    model.layers[here].requires_grad_(requires_grad=False)
    return call(model)


def frozen() -> dict[str, Row]:
    """Return calls of a model that learns elsewhere on each rank, or not at all on the last."""
    rows: dict[str, Row] = {
        f"{name} with another layer frozen": (
            sp.CollectiveMismatch,
            "weights get gradients",
            freeze(CALLS[name][0]),
        )
        for name in ("a forward", "a backward", "a training step", "a pipeline")
    }
    text, ungraded = "tp_sp=False, 0 of ", graded(lambda mesh, here: called(CASE.model(mesh)))
    return rows | {"a forward without gradients": (sp.CollectiveMismatch, text, ungraded)}


def hooked(name: str, model: Llama) -> None:
    """Register a hook on the gradient of a weight, by its method `name`."""
    getattr(model.norm.weight, name)(Tensor.neg_)


@later
def stepping(make: Any, mesh: sp.Mesh, here: bool, *, usual: Any = torch.optim.SGD) -> object:
    """Run a training step with another optimizer on the last rank. It trains nothing."""
    model = CASE.model(mesh)
    before = [x.detach().clone() for x in model.parameters()]
    try:
        return stepped(model, make if here else usual)
    finally:
        assert all(map(torch.equal, model.parameters(), before))


def with_later_rate(rate: float, weights: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([{"params": weights[:1]}, {"params": weights[1:], "lr": rate}], lr=0.1)


def with_foreign(count: int, weights: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([*weights[:1], nn.Parameter(torch.ones(count).double())])


COUPLING = torch.optim.Adafactor, torch.optim.Muon
"""Optimizers that compute the update of an element with other elements of its weight."""
USUAL, RATED = (partial(torch.optim.AdamW, lr=lr) for lr in (0.01, torch.tensor(0.01)))
DIFFERENT: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "class": partial(torch.optim.Adam, lr=0.01),
    "rate": partial(torch.optim.AdamW, lr=0.02),
    "betas": partial(torch.optim.AdamW, lr=0.01, betas=(0.9, 0.99)),
    "maximize": partial(torch.optim.AdamW, lr=0.01, maximize=True),
    "parameters": lambda weights: torch.optim.AdamW([*weights][:-1], lr=0.01),
    "weights": lambda weights: torch.optim.AdamW([*weights][1:], lr=0.01),
    "groups": lambda weights: torch.optim.AdamW([{"params": [x]} for x in weights], lr=0.01),
    "tensor rate": partial(torch.optim.AdamW, lr=torch.tensor(0.02)),
}
"""Optimizers that differ from USUAL, or from that of OTHERS."""
OTHERS: dict[str, Any] = {"tensor rate": RATED, "weights": DIFFERENT["parameters"]}
EVERYWHERE: Table = {
    "ring": {
        "an empty sequence": (
            ValueError,
            "sequence 1 is empty",
            lambda mesh, here: backward(CASE.model(mesh), [[1, 2], []]),
        ),
        "a window of no token": (
            ValueError,
            "window=0 was given",
            lambda mesh, here: backward(CASE.model(mesh), [[1, 2]], window=0),
        ),
        "a chunk of no token": (
            ValueError,
            "chunk=0 was given",
            lambda mesh, here: backward(CASE.model(mesh), [[1, 2]], chunk=0),
        ),
        "a sequence beyond the vocabulary": (
            ValueError,
            "vocabulary",
            lambda mesh, here: backward(CASE.model(mesh), [[1, 13]]),
        ),
        "a sequence beyond whole numbers of 64 bits": (
            ValueError,
            f"token {2**70} was given; the vocabulary has 0..12",
            lambda mesh, here: backward(CASE.model(mesh), [[2**70, 1]]),
        ),
        **{
            f"{what}{' of its own' * own}": (
                ValueError,
                "no rank was given a sequence of two tokens or more",
                learned(partial(backward, sequences=texts, own=own)),
            )
            for what, texts in {"no sequence": [], "sequences without a label": [[1], [2]]}.items()
            for own in (False, True)
        },
        "a file of no byte": (
            sp.CheckpointError,
            "max_file_bytes=0 was given",
            lambda mesh, here: save(CASE.model(mesh), FOLDER, max_file_bytes=0),
        ),
        "a backward of frozen weights": (
            ValueError,
            "no weight of the model has requires_grad=True",
            learned(lambda model: backward(model.requires_grad_(requires_grad=False), TEXTS)),
        ),
        "a backward without gradients": (
            ValueError,
            "outside torch.no_grad()",
            learned(torch.no_grad()(lambda model: backward(model, TEXTS))),
        ),
    },
}
"""Calls that are wrong on every rank."""

ON_ONE_RANK: Table = {
    "dp": {
        **conversions("dp"),
        "a scheduler for an optimizer": (
            TypeError,
            "ConstantLR object at",
            stepping(lambda weights: lr_scheduler.ConstantLR(torch.optim.SGD(weights))),
        ),
        "another rate of a later group": (
            sp.CollectiveMismatch,
            "'lr': 1.5",
            stepping(partial(with_later_rate, 1.5), usual=partial(with_later_rate, 0.5)),
        ),
        "an optimizer that needs a closure": (
            TypeError,
            "whose step() needs no closure, such as AdamW",
            stepping(torch.optim.LBFGS),
        ),
        **{
            f"{what} of a weight after {name}": (
                ValueError,
                "norm.weight has a hook on its gradient, which",
                converted(CALLS[what][0], partial(hooked, name)),
            )
            for name in ("register_hook", "register_post_accumulate_grad_hook")
            for what in ("a forward", "a backward", "a pipeline")
        },
        **frozen(),
        "a layout of the tokens of one replica": (
            sp.ShapeError,
            "5 tokens over 1 ranks was made; one for 3 tokens",
            lambda mesh, here: backward(CASE.model(mesh), [[1] * 5, [2] * 3], layout=short),
        ),
        "a layout of the own tokens of one replica": (
            sp.ShapeError,
            "rank 1: ",
            lambda mesh, here: backward(
                CASE.model(mesh), [[1] * (3 if here else 5)], layout=short, own=True
            ),
        ),
        "weights that one replica has frozen": (
            ValueError,
            "rank 1: no weight of the model has requires_grad=True",
            lambda mesh, here: backward(CASE.model(mesh).requires_grad_(not here), TEXTS),
        ),
    },
    "ring": {
        **conversions("ring"),
        **frozen(),
        **{
            f"optimizers that differ in {what}": (
                sp.CollectiveMismatch,
                "train_step",
                stepping(made, usual=OTHERS.get(what, USUAL)),
            )
            for what, made in DIFFERENT.items()
        },
        **{
            f"an optimizer of a weight and of {count} foreign numbers": (
                ValueError,
                "parameters that the model lacks",
                stepping(partial(with_foreign, count)),
            )
            for count in (1, 10)
        },
    },
    "tp": {
        **conversions("tp"),
        **frozen(),
        **{
            f"parts of weights for {kind.__name__}": (
                ValueError,
                "Own computes updates from whole weights",
                stepping(type("Own", (kind,), {})),
            )
            for kind in COUPLING
        },
    },
    "pp": {
        **conversions("pp"),
        "a pipeline without gradients": (
            sp.CollectiveMismatch,
            "gradients=",
            graded(lambda mesh, here: trained(CASE.model(mesh))),
        ),
        "a training step on stages, which have different numbers of parameters": (
            sp.ShapeError,
            "split over 2 stages",
            lambda mesh, here: stepped(CASE.model(mesh)),
        ),
        **{
            f"{what} on stages": (
                sp.CheckpointError,
                "2 stages; a model is saved without pp, and a training is saved and loaded without",
                converted(call, Llama.train),
            )
            for what, call in (
                ("a model saved", CALLS["a save"][0]),
                ("a training saved", stored),
                ("a training loaded", restored),
            )
        },
    },
    "dp ring": {
        "another token in the sequences of one replica": (
            sp.CollectiveMismatch,
            "alike",
            lambda mesh, here: backward(CASE.model(mesh), [[1, 2, 3 + here]], own=True),
        ),
        "own sequences on one rank": (
            sp.CollectiveMismatch,
            "of own",
            lambda mesh, here: backward(CASE.model(mesh), [[1, 2]], own=here),
        ),
    },
    "ring ulysses": {
        **{
            f"gradients of {what}": (sp.CollectiveMismatch, text, held(*told))
            for what, text, told in (
                ("other rows", "(range(0, 1), range(3, 4))", (0, OTHER_ROWS)),
                ("columns in place of rows", "along dim 1", (1, ROWS)),
            )
        },
        **{
            f"a loss without the gradient of {what}": (
                sp.CollectiveMismatch,
                "requires_grad=(False, False)",
                graded(partial(lost, head=head)),
            )
            for what, head in (("logits", None), ("a head", torch.ones(2, 2, requires_grad=True)))
        },
        "a loss under autocast": (sp.CollectiveMismatch, "autocast=torch.bfloat16", lowered(lost)),
    },
}
"""Calls that are wrong on the last rank only."""
