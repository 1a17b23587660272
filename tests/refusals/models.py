"""List wrong calls of models, losses, gradients and pipelines, with the error of each."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from llama_cases import Case
from refusals.calls import Table, Wrong, comm_of, later
from refusals.kinds import sending
from torch import Tensor, nn

import sp_core as sp
from sp_core.llama import Grid, Llama, create
from sp_core.llama.pipeline import MicroBatch, loss_and_gradients
from sp_core.nn.gradients import Placement, clip_gradient_norm, place, reduce_gradients
from sp_core.nn.loss import IGNORED, next_token_labels, next_token_loss
from sp_core.scheduling import Slot, gpipe, prefill_only

CASE, MIDDLE = Case((4, 2), layers=2), torch.tensor([150])
NONE: Any = None


def reduced(
    mesh: sp.Mesh,
    *,
    without: bool = False,
    shape: tuple[int, ...] = (4, 2),
    sparse: bool = False,
    wide: bool = False,
) -> None:
    dtype = torch.float64 if wide else torch.float32
    parameters = [nn.Parameter(torch.ones(4, 2, dtype=dtype)), nn.Parameter(torch.ones(4, 2))]
    parameters[1].grad = torch.ones(4, 2).to_sparse() if sparse else None
    for parameter in parameters[without:]:
        place(parameter, Placement.replicated(shape, mesh["ulysses"].size, partial=True))
    reduce_gradients(parameters, data=mesh["ring"], tensor=mesh["ulysses"])


def clipped(mesh: sp.Mesh, max_norm: Any = 1.0, *, grad: Any = 1.0, placed: bool = True) -> float:
    grad = grad if isinstance(grad, Tensor) else torch.full((4,), grad)
    parameter = nn.Parameter(torch.ones(4, dtype=grad.dtype))
    parameter.grad = grad
    if placed:
        place(parameter, Placement.replicated((4,), mesh["ulysses"].size))
    return clip_gradient_norm([parameter], max_norm, tensor=mesh["ulysses"], stages=mesh["ring"])


@later
def others(
    call: Callable[[list[nn.Parameter], sp.Mesh], object], mesh: sp.Mesh, here: bool
) -> object:
    """Make a call for two weights of equal shape, of which the last rank trains the other."""
    weights = [nn.Parameter(torch.ones(4, 2), requires_grad=here == (n > 0)) for n in range(2)]
    for weight in weights:
        place(weight, Placement.replicated((4, 2), mesh["ulysses"].size))
    weights[here].grad = torch.ones(4, 2)
    return call(weights, mesh)


@later
def loss(change: Callable[..., Any], mesh: sp.Mesh, here: bool, *, everywhere: bool) -> Tensor:
    tensor, data = mesh["ulysses"], mesh["ring"]
    good = torch.ones(1, 3, 4 // tensor.size), torch.zeros(1, 3, dtype=torch.int64)
    bad = change(*good) if everywhere or data.rank == data.size - 1 else good
    named: Any = dict(zip(("head", "count"), bad[2:], strict=False))
    return next_token_loss(*bad[:2], tensor=tensor, data=data, **named)


def logits(change: Callable[[Tensor], Tensor]) -> Any:
    """Return a call of a model, whose tokens are changed on the last rank."""
    return lambda mesh, here: CASE.model(mesh)(
        change(CASE.tokens(1, 3)) if here else CASE.tokens(1, 3),
        sharding=sp.Sharding.contiguous(3 * mesh.size, mesh.size),
    )


def labelled(*wrong: int) -> Any:
    """Return a call of `next_token_labels`, with wrong documents on the last rank."""
    return lambda mesh, here: next_token_labels(
        CASE.tokens(1, 2),
        comm=comm_of(mesh),
        sharding=sp.Sharding.contiguous(4, 2),
        mask=sp.Mask(documents=wrong if here else (0, 2, 4), kv_documents=(0, 1, 9)),
    )


@later
def micro_batches(
    change: Callable[[MicroBatch], list[MicroBatch]],
    mesh: sp.Mesh,
    here: bool,
    *,
    everywhere: bool,
    **named: Any,
) -> Tensor:
    model = CASE.model(mesh)
    sharding = sp.Sharding.contiguous(4, 1)
    tokens = CASE.tokens(300, 4)  # torch shows not all of them
    labels = next_token_labels(tokens, comm=model.grid.sequence, sharding=sharding)
    good = MicroBatch(tokens, labels, sharding)
    return loss_and_gradients(model, change(good) if here or everywhere else [good], **named)


def in_order(*texts: str) -> Any:
    """Return an ordering whose stages compute the slots of texts such as "F0 B0 F1 B1"."""
    made = tuple(tuple(Slot(x[0], int(x[1:])) for x in text.split()) for text in texts)  # type: ignore[arg-type]
    return lambda stages, batches: made


def created(dtype: Any) -> Wrong:
    return lambda mesh, here: create(CASE.config, mesh, dtype=dtype)


EVERYWHERE: Table = {
    "ring": {
        "labels of another shard": (
            sp.ShapeError,
            "own shard",
            lambda mesh, here: next_token_labels(
                torch.zeros(1, 3, dtype=torch.int64),
                comm=comm_of(mesh),
                sharding=sp.Sharding.contiguous(3 * mesh.size + 1, mesh.size),
            ),
        ),
        "a scheme without its axes": (
            ValueError,
            "scheme 'hybrid' was given on a mesh",
            lambda mesh, here: Grid.of(mesh, "hybrid"),
        ),
        **{
            f"a model of {dtype}": (
                sp.DtypeError,
                f"dtype={dtype!r} was given; pass one of (torch.float64, ",
                created(dtype),
            )
            for dtype in (torch.int64, torch.complex64, torch.float8_e4m3fn, "float32")
        },
    },
    "sp": {
        "a LLaMA over an axis that it does not know": (
            sp.ShapeError,
            "a LLaMA can use",
            lambda mesh, here: Grid.of(mesh),
        ),
    },
}
"""Calls that are wrong on every rank."""

ON_ONE_RANK: Table = {
    "ring": {
        "a token beyond the vocabulary": (ValueError, "has 0..12", logits(lambda x: x + 13)),
        "tokens of another dtype": (sp.DtypeError, "int64", logits(lambda x: x.int())),
        "another shard": (sp.ShapeError, "own shard", logits(lambda x: x[:, 1:])),
        "labels of other documents": (sp.CollectiveMismatch, "(0, 1, 4)", labelled(0, 1, 4)),
        "labels of longer documents": (sp.ShapeError, "documents end at 5", labelled(0, 2, 5)),
    },
    "tp": {
        **{
            f"too many tensor ranks for {name}": (
                sp.ShapeError,
                f"2 tensor ranks are too many for {name}=1",
                lambda mesh, here, case=case: Llama(case.config, Grid.of(mesh)),  # type: ignore[misc]
            )
            for name, case in (
                ("num_attention_heads", Case((1, 1))),
                ("intermediate_size", Case((4, 2), ffn=1)),
                ("vocab_size", Case((4, 2), vocab=1)),
            )
        },
    },
    "pp": {
        "a call of one stage": (
            sp.ShapeError,
            "Use Decoder",
            lambda mesh, here: CASE.model(mesh)(
                CASE.tokens(1, 4), sharding=sp.Sharding.contiguous(4, 1)
            ),
        ),
        "more stages than layers": (
            sp.ShapeError,
            "Use pp <= 1",
            lambda mesh, here: Llama(Case((4, 2), layers=1).config, Grid.of(mesh)),
        ),
        "more micro-batches": (
            sp.CollectiveMismatch,
            "2 micro-batches",
            micro_batches(lambda good: [good] * 2, everywhere=False),
        ),
        **{
            f"other {name}": (
                sp.CollectiveMismatch,
                "loss_and_gradients",
                micro_batches(change, everywhere=False),
            )
            for name, change in (
                ("labels", lambda good: [replace(good, labels=good.labels.flip(1))]),
                ("lines", lambda x: [replace(x, labels=x.labels.index_fill(0, MIDDLE, 1))]),
                ("masks", lambda good: [replace(good, mask=sp.Mask(causal=True, window=2))]),
            )
        },
        **{
            f"an ordering with {what}": (
                sp.ShapeError if made(2, 2) else TypeError,
                text,
                micro_batches(lambda good: [good] * 2, everywhere=True, ordering=made),
            )
            for text, orderings in {
                "an order for each of 2 stages": {
                    "one stage": lambda _, count: gpipe(1, count),
                    "three stages": lambda _, count: gpipe(3, count),
                    "no stage": lambda *sizes: [()],
                    "no backwards": prefill_only,
                    "another slot": in_order(*["F0 F1 B0 B1 F2"] * 2),
                    "a slot twice": in_order(*["F0 F1 B0 B1 B0"] * 2),
                    "other slots": in_order(*["F0 F1 B0 X1"] * 2),
                    "numbers": lambda *sizes: ((1, 2), (1, 2)),
                    "other backwards": in_order("F0 F1 B1 B0", "F0 B0 F1 B1"),
                    "other forwards": in_order("F0 F1 B0 B1", "F1 F0 B0 B1"),
                },
                "result of ordering=None was given": {"no result": lambda *sizes: None},
                "wait for each other for ever": {
                    "a backward before its forward": in_order(*["F0 B0 B1 F1"] * 2),
                    "stages that wait": in_order("F0 B0 F1 B1", "F0 F1 B0 B1"),
                },
            }.items()
            for what, made in orderings.items()
        },
        "no valid label": (
            ValueError,
            "no label of any rank is valid",
            micro_batches(
                lambda good: [replace(good, labels=torch.full_like(good.labels, IGNORED))],
                everywhere=True,
            ),
        ),
        **{
            f"{name} on {'every' if everywhere else 'one'} rank": (
                kind,
                text,
                micro_batches(change, everywhere=everywhere),
            )
            for everywhere in (False, True)
            for name, kind, text, change in (
                ("no micro-batch", sp.ShapeError, "no micro-batch", lambda good: []),
                (
                    "a token beyond the vocabulary",
                    ValueError,
                    "vocabulary has 0..12",
                    lambda good: [replace(good, tokens=good.tokens + 13)],
                ),
                (
                    "no labels",
                    sp.DtypeError,
                    "labels must be a tensor, NoneType was given",
                    lambda good: [replace(good, labels=NONE)],
                ),
                (
                    "labels of fewer tokens",
                    sp.ShapeError,
                    "needed as many",
                    lambda good: [replace(good, labels=good.labels[:, 1:])],
                ),
                (
                    "labels of another dtype",
                    sp.ShapeError,
                    "needed as many, of int64",
                    lambda good: [replace(good, labels=good.labels.double())],
                ),
                (
                    "a label beyond the vocabulary",
                    ValueError,
                    "vocabulary has 0..12",
                    lambda good: [replace(good, labels=good.labels + 13)],
                ),
                (
                    "documents for another length",
                    sp.ShapeError,
                    "documents",
                    lambda good: [replace(good, mask=sp.Mask(documents=(0, 3)))],
                ),
            )
        },
    },
    "ring ulysses": {
        "a missing placement": (
            sp.ShapeError,
            "no placement",
            lambda mesh, here: reduced(mesh, without=here),
        ),
        "a placement of another shape": (
            sp.ShapeError,
            "not how rank",
            lambda mesh, here: reduced(mesh, shape=(5, 2) if here else (4, 2)),
        ),
        "a sparse gradient": (
            sp.ShapeError,
            "a gradient has layout torch.sparse_coo",
            lambda mesh, here: reduced(mesh, sparse=here),
        ),
        "a gradient of another dtype": (
            sp.CollectiveMismatch,
            "number 0 (4, 2) torch.float64",
            lambda mesh, here: reduced(mesh, wide=here),
        ),
        "gradients of the other weight": (
            sp.CollectiveMismatch,
            "number 1 (4, 2)",
            others(lambda x, mesh: reduce_gradients(x, data=mesh["ring"], tensor=mesh["ulysses"])),
        ),
        "a norm of the other weight": (
            sp.CollectiveMismatch,
            "number 1 (4, 2)",
            others(
                lambda x, mesh: clip_gradient_norm(
                    x, 1, tensor=mesh["ulysses"], stages=mesh["ring"]
                )
            ),
        ),
        "a sparse gradient in a norm": (
            sp.ShapeError,
            "a gradient has layout torch.sparse_coo",
            lambda mesh, here: clipped(mesh, grad=torch.ones(4).to_sparse() if here else 1.0),
        ),
        "a complex gradient in a norm": (
            sp.DtypeError,
            "a gradient has dtype torch.complex64; needed is one of",
            lambda mesh, here: clipped(mesh, grad=torch.full((4,), 3j if here else 3.0)),
        ),
        "a placement missing for the norm": (
            sp.ShapeError,
            "no placement",
            lambda mesh, here: clipped(mesh, placed=not here),
        ),
        **{
            f"a norm that is {wrong} because of one stage": (
                ValueError,
                f"norm of the gradients is {wrong}",
                sending(
                    lambda mesh, here, wrong=wrong: clipped(
                        mesh, grad=wrong if mesh["ring"].rank else 1.0
                    )
                ),
            )
            for wrong in (torch.inf, torch.nan)
        },
        "another norm": (
            sp.CollectiveMismatch,
            "max_norm=2.0",
            lambda mesh, here: clipped(mesh, 2.0 if here else 1.0),
        ),
        **{
            f"a norm of {wrong}": (
                ValueError,
                f"max_norm={wrong!r}",
                lambda mesh, here, wrong=wrong: clipped(  # type: ignore[misc]
                    mesh, wrong if here else 1.0
                ),
            )
            for wrong in (0.0, -1.0, torch.nan, True)
        },
        **{
            f"a loss of {what}": (error, text, loss(change, everywhere=False))
            for what, error, text, change in (
                ("labels too great", ValueError, "has 0..3", lambda x, y: (x, y + 4)),
                ("labels below 0", ValueError, "label -1", lambda x, y: (x, y - 1)),
                ("shorter labels", sp.ShapeError, "labels (1, 2)", lambda x, y: (x, y[:, 1:])),
                ("labels of int32", sp.DtypeError, "of torch.int32", lambda x, y: (x, y.int())),
                ("whole numbers", sp.DtypeError, "[torch.int32]", lambda x, y: (x.int(), y)),
                ("no numbers", sp.ShapeError, "(1, 3, 0)", lambda x, y: (x[..., :0], y)),
                ("one number", sp.ShapeError, "[()]", lambda x, y: (x[0, 0, 0], y[0, 0])),
                ("a double head", sp.DtypeError, "float64]", lambda x, y: (x, y, x[0].double())),
                ("a head for others", sp.ShapeError, "(3, 1)", lambda x, y: (x, y, x[0, :, :-1])),
                ("a head of 3 dims", sp.ShapeError, "(1, 3, 2)]", lambda x, y: (x, y, x)),
                ("a head without rows", sp.ShapeError, "(0, 2)", lambda x, y: (x, y, x[0, :0])),
                ("no tokens", ValueError, "count=0 was given", lambda x, y: (x, y, None, 0)),
                ("-1 tokens", ValueError, "count=-1 was given", lambda x, y: (x, y, None, -1)),
            )
        },
        **{
            f"labels {other} on a tensor rank, elsewhere [1, 1, 1]": (
                sp.CollectiveMismatch,
                "labels",
                lambda mesh, here, other=other: next_token_loss(  # type: ignore[misc]
                    torch.ones(1, 3, 4 // mesh["ulysses"].size),
                    torch.tensor([other if here else [1, 1, 1]]),
                    tensor=mesh["ulysses"],
                    data=mesh["ring"],
                ),
            )
            for other in ([1, 1, 2], [0, 1, 2], [0, 3, 0])  # with the same sum, or sums by place
        },
        "no valid label": (
            ValueError,
            "no label of any rank is valid",
            loss(lambda x, y: (x, torch.full_like(y, IGNORED)), everywhere=True),
        ),
    },
}
"""Calls that are wrong on the last rank only, or wrong only with several ranks."""
