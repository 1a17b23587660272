"""List wrong calls of layers with replaced parts, of attention in Ulysses, and of gradients."""

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from oracle.changed_parts import CHANGES, Scaled
from refusals.calls import Row, Table, Wrong, attention, comm_of, later
from refusals.kinds import lowered, sending
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import weight_norm

import sp_core as sp
from sp_core.nn.gradients import reduce_gradients

MISMATCH = sp.CollectiveMismatch


@later
def replaced(part: Callable[[sp.Communicator], nn.Module], mesh: sp.Mesh, here: bool) -> object:
    """Call a layer, a part of which is replaced on the last rank."""
    layer = sp.FeedForward(4, comm=comm_of(mesh))
    if here:
        layer.set_submodule("up", part(comm_of(mesh)))
    return layer(torch.ones(1, 2, 4))


def cached(mesh: sp.Mesh, here: bool) -> object:
    """Call a layer whose part is parametrized, on a rank inside of `parametrize.cached`."""
    with parametrize.cached() if here else nullcontext():
        return replaced(lambda _: weight_norm(nn.Linear(4, 16)))(mesh, here)


def scaled(_: sp.Communicator, dtype: torch.dtype) -> nn.Module:
    """Return a part of a layer that has a weight of another dtype."""
    return Scaled(nn.Linear(4, 16), dtype)


def elsewhere(_: sp.Communicator, *, learns: bool) -> nn.Module:
    """Return a part of a layer on the device meta."""
    return nn.Linear(4, 16, device="meta").requires_grad_(learns)


@later
def blocked(
    part: Callable[[sp.Communicator], nn.Module], name: str, mesh: sp.Mesh, here: bool, **given: Any
) -> object:
    """Call a block, of which the last rank has replaced a part."""
    block = sp.TransformerBlock(4, 2, comm=comm_of(mesh), **given)
    block.set_submodule(name, part(comm_of(mesh))) if here else None
    x, sharding = torch.ones(1, 1, 4), sp.Sharding.contiguous(2, 2)
    return block(x, sharding=sharding, seed=1)


@later
def changed(
    kind: Any, change: Callable[[Any], Any], use: Callable[[Any], Any], mesh: sp.Mesh, here: bool
) -> object:
    """Use a parallel layer with a sharding, which is changed on the last rank."""
    sharding = sp.Sharding.contiguous(2, 2)
    layer = kind.from_linear(nn.Linear(4, 4), comm=comm_of(mesh), sharding=sharding)
    layer.weight.requires_grad_(False)
    if here:
        change(layer)
    return use(layer)


def called(layer: Any) -> Tensor:
    """Call a parallel layer that `changed` has made."""
    tokens = 1 if type(layer) is sp.ColumnParallelLinear else 2
    made: Tensor = layer(torch.ones(1, tokens, layer.weight.shape[1], dtype=layer.weight.dtype))
    return made


def whole(layer: Any) -> object:
    """Join a parallel layer."""
    return layer.to_linear()


def unbiased(layer: Any) -> None:
    """Remove the bias of a layer."""
    layer.bias = None


def on_meta(part: nn.Module) -> nn.Module:
    """Move a module to the device meta, where tensors have no values."""
    return part.to("meta")


def wide(layer: Any) -> None:
    """Make the weight of a layer complex."""
    layer.weight = nn.Parameter(layer.weight.to(torch.complex64), requires_grad=False)


def other(name: str) -> Callable[[Any], Any]:
    """Return a function that freezes a parameter of a layer, or lets it learn if it was frozen."""
    return lambda layer: getattr(layer, name).requires_grad_(not getattr(layer, name).requires_grad)


def watched(name: str, hook: str, linear: nn.Linear) -> nn.Linear:
    """Register a hook on the gradient of a parameter of a linear layer."""
    getattr(linear.get_parameter(name), hook)(lambda grad: None)
    return linear


HOOKS = {
    f"a linear layer with a {hook} of its {name}": partial(watched, name, hook)
    for name in ("weight", "bias")
    for hook in ("register_hook", "register_post_accumulate_grad_hook")
}
"""Changes of a linear layer that only `from_linear` refuses."""


@later
def split(kind: Any, change: Callable[[Any], Any], mesh: sp.Mesh, here: bool) -> object:
    """Make a parallel layer of a linear layer that is changed on the last rank."""
    linear = nn.Linear(4, 6)
    return kind.from_linear(change(linear) if here else linear, comm=comm_of(mesh))


def laid_out(kind: Any, mesh: sp.Mesh, here: bool) -> object:
    """Return a parallel layer with another layout of the tokens on the last rank."""
    sharding = (sp.Sharding.contiguous, sp.Sharding.zigzag)[here](6, mesh.size)
    return kind.from_linear(nn.Linear(4, 6), comm=comm_of(mesh), sharding=sharding)


def summed(weights: Callable[[sp.Communicator, bool], Iterable[nn.Parameter]]) -> Wrong:
    """Return a sum of the gradients of weights, as those that every rank holds whole."""
    return lambda mesh, here: reduce_gradients(weights(comm_of(mesh), here), data=comm_of(mesh))


def whole_weights(kind: Any, mesh: sp.Mesh, here: bool) -> object:
    """Call a layer whose weights every rank holds whole."""
    return kind(4, comm=comm_of(mesh))(torch.ones(1, 2, 4))


def refined(
    change: Callable[[Tensor, Tensor], Any], *, everywhere: bool, return_lse: bool
) -> Wrong:
    """Return a call of Ulysses with a changed result of `inner`, on all ranks or on the last."""

    def wrong(mesh: sp.Mesh, here: bool) -> object:
        def inner(*given: Any, **named: Any) -> Any:
            found: Any = sp.local_attention(*given, **named)
            return change(*found) if here or everywhere else found

        return attention(
            mesh, sp.ulysses_attention, inner=inner, return_lse=return_lse, learns=not everywhere
        )

    return sending(wrong)


RESULTS: dict[str, tuple[type[Exception], str, Callable[[Tensor, Tensor], Any]]] = {
    "nothing": (sp.ShapeError, "inner returned NoneType", lambda out, lse: None),
    "out alone": (sp.ShapeError, "inner returned (2, 12, ", lambda out, lse: out),
    "a list": (sp.ShapeError, "), NoneType for q (2, 12, ", lambda out, lse: [out, None]),
    "three": (sp.ShapeError, "returned (2, 12, ", lambda out, lse: (out, lse, lse)),
    "too few tokens": (
        sp.ShapeError,
        " two tensors of shapes (2, 12, ",
        lambda out, lse: (out[:, 1:], lse),
    ),
    "another layout": (sp.ShapeError, ", 12, ", lambda out, lse: (out, lse.mT)),
    "another dtype": (sp.DtypeError, "float64", lambda out, lse: (out.double(), lse)),
    "a sparse lse": (
        sp.ShapeError,
        "lse of inner has layout",
        lambda out, lse: (out, lse.to_sparse()),
    ),
    "an error": (ValueError, "no heads", lambda out, lse: int("no heads")),
}
"""Wrong results of a user's attention: the expected error, a part of its text, and the change."""
DIFFERING: dict[str, tuple[type[Exception], str, Callable[[Tensor, Tensor], Any]]] = {
    "another dtype of lse": (sp.CollectiveMismatch, "inner", lambda out, lse: (out, lse.double())),
    "no gradient": (sp.CollectiveMismatch, "inner", lambda out, lse: (out.detach(), lse)),
}
"""Results of a user's attention that are wrong only if other ranks have others."""


def results(table: Any, *, everywhere: bool) -> dict[str, Row]:
    """Return rows in which a user's attention returns a result of the table."""
    return {
        f"{name} from inner, return_lse={return_lse}": (
            kind,
            text,
            refined(change, everywhere=everywhere, return_lse=return_lse),
        )
        for name, (kind, text, change) in table.items()
        for return_lse in (False, True)
    }


def seeded(seed: Any, rates: tuple[float, float] = (0.1, 0.1)) -> Wrong:
    """Return a call of a block that has another seed, or rate of dropout, on the last rank."""
    return lambda mesh, here: sp.TransformerBlock(8, 2, comm=comm_of(mesh), dropout=rates[here])(
        torch.ones(1, 1, 8),
        sharding=sp.Sharding.contiguous(2, 2),
        seed=seed if here else 3,
    )


EVERYWHERE: Table = {"ring": results(RESULTS, everywhere=True)}
"""Results that are wrong on every rank."""
ON_ONE_RANK: Table = {
    "ring": {
        **results(RESULTS | DIFFERING, everywhere=False),
        "another dropout": (
            MISMATCH,
            "a block with dropout=0.5",
            seeded(3, (0.1, 0.5)),
        ),
        **{
            f"the seed {seed!r}": (kind, text, seeded(seed))
            for seed, kind, text in (
                (None, ValueError, "seed=None was given"),
                ("a", TypeError, "seed='a' was given; pass a whole number"),
                (1.5, TypeError, "seed=1.5 was given; pass a whole number"),
                (-1, ValueError, "seed=-1 was given; pass a number in [0, 2^61)"),
                (2**61, ValueError, f"seed={2**61} was given; pass a number in [0, 2^61)"),
            )
        },
        "no inner": (
            MISMATCH,
            "inner",
            lambda mesh, here: attention(
                mesh, sp.ulysses_attention, inner=None if here else sp.local_attention
            ),
        ),
        **{
            f"a {kind.__name__} of {change}": (
                TypeError,
                "Pass the whole layer, without hooks, parametrizations or a forward of its own",
                split(kind, made),
            )
            for kind in (sp.ColumnParallelLinear, sp.RowParallelLinear)
            for change, made in (CHANGES | HOOKS).items()
        },
        **{
            f"{'a whole' if use is whole else 'a call of a'} {kind.__name__} {change}": (
                error,
                text,
                changed(kind, made, use),
            )
            for kind in (sp.ColumnParallelLinear, sp.RowParallelLinear)
            for use, change, error, text, made in (
                (called, "whose weight learns", MISMATCH, "requires_grad=", other("weight")),
                (called, "whose bias does not", MISMATCH, "requires_grad=", other("bias")),
                (called, "in bfloat16", MISMATCH, "bfloat16", nn.Module.bfloat16),
                (called, "in complex64", sp.DtypeError, "weight has dtype torch.complex64", wide),
                (called, "on meta", sp.DeviceError, "weight is on meta", on_meta),
                (whole, "in bfloat16", MISMATCH, "bfloat16", nn.Module.bfloat16),
                (whole, "without a bias", MISMATCH, "to_linear() of {'weight': ", unbiased),
                (whole, "on meta", sp.DeviceError, "is on meta", on_meta),
            )
        },
        **{
            f"a {kind.__name__} of a layer on meta": (
                sp.DeviceError,
                "linear is on the device meta, without values. Load its weights first.",
                split(kind, on_meta),
            )
            for kind in (sp.ColumnParallelLinear, sp.RowParallelLinear)
        },
        **{
            f"another layout of the tokens of a {kind.__name__}": (
                MISMATCH,
                "from_linear",
                partial(laid_out, kind),
            )
            for kind in (sp.ColumnParallelLinear, sp.RowParallelLinear)
        },
        **{
            f"another autocast of a {kind.__name__}": (
                MISMATCH,
                "autocast=",
                lowered(changed(kind, lambda layer: layer, called)),
            )
            for kind in (sp.ColumnParallelLinear, sp.RowParallelLinear)
        },
        **{
            f"another autocast of a {kind.__name__}": (
                MISMATCH,
                "autocast=",
                lowered(partial(whole_weights, kind)),
            )
            for kind in (sp.FeedForward, sp.LayerNorm, sp.RMSNorm)
        },
        "gradients of parts of weights": (
            sp.ShapeError,
            "as `tensor`",
            summed(
                lambda comm, _: sp.ColumnParallelLinear.from_linear(
                    nn.Linear(8, 8), comm=comm
                ).parameters()
            ),
        ),
        "gradients of the parameters that an optimizer has used up": (
            ValueError,
            "an iterator that yields none",
            summed(lambda _, here: [] if not here else iter(())),
        ),
        "gradients of a weight of another shape": (
            MISMATCH,
            "(3, 2)",
            summed(lambda _, here: [nn.Parameter(torch.ones((2, 3) if here else (3, 2)))]),
        ),
        "gradients of a weight on meta": (
            sp.DeviceError,
            "a parameter is on meta",
            summed(lambda _, here: [nn.Parameter(torch.ones(1, device="meta"))] * here),
        ),
        "a part of a layer that communicates": (
            TypeError,
            "FeedForward.up.1 is a RMSNorm, which communicates; needed is",
            replaced(lambda comm: nn.Sequential(nn.Linear(4, 16), sp.RMSNorm(16, comm=comm))),
        ),
        "a part of a layer whose weight may be an old one": (
            ValueError,
            "FeedForward: up has a parametrization, and parametrize.cached() may hold",
            cached,
        ),
        **{
            f"a part of a layer with a weight of {dtype}": (
                sp.DtypeError,
                f"dtype {dtype}; needed is one of float64, float32, float16, bfloat16",
                replaced(partial(scaled, dtype=dtype)),
            )
            for dtype in (torch.complex64, torch.complex128, torch.float8_e5m2)
        },
        **{
            f"a layer with a {'frozen ' * frozen}weight on meta": (
                sp.DeviceError,
                "FeedForward.up.weight is on meta, mesh['ring'] is on cpu",
                replaced(partial(elsewhere, learns=not frozen)),
            )
            for frozen in (False, True)
        },
        **{
            f"a part {name} of a block{' with dropout' * bool(given)} from torch": (
                TypeError,
                f"TransformerBlock.{name} is a torch.nn.modules.{text} with trainable weights",
                blocked(part, name, **given),
            )
            for given in ({}, {"dropout": 0.5})
            for name, text, part in (
                ("norm1", "normalization.LayerNorm", lambda _: nn.LayerNorm(4)),
                (
                    "feed_forward",
                    "container.Sequential",
                    lambda comm: nn.Sequential(sp.RMSNorm(4, comm=comm), nn.Linear(4, 4)),
                ),
            )
        },
        "a part of a layer with other weights": (
            sp.CollectiveMismatch,
            "FeedForward",
            replaced(lambda _: nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 16))),
        ),
    },
}
"""Calls that are wrong on the last rank only."""
