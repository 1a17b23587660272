"""Test layers whose weights or parts were replaced, by a program or by torch itself."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, cast
from unittest.mock import patch

import pytest
import torch
from domains.declared import normal
from kit.meshed import meshed
from llama_cases import Case
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils.parametrizations import weight_norm
from torch.nn.utils.parametrize import register_parametrization
from torch.utils.checkpoint import checkpoint

import sp_core as sp
from sp_core.nn.gradients import reduce_gradients
from sp_core.testing import spmd


class Negative(nn.Module):
    """A parametrization of which a module stores the weight with the other sign."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the weight."""
        return -x

    right_inverse = forward


def parametrized(part: nn.Module, name: str, weight: Tensor) -> Tensor:
    """Let a module compute its weight from another, which has the other sign; return that one."""
    register_parametrization(part, name, Negative())
    return weight


def replaced_by(hold: Callable[..., None], part: nn.Module, name: str, weight: Tensor) -> Tensor:
    """Let a module hold a copy of its weight that is no parameter; return the copy."""
    copy = weight.detach().clone().requires_grad_(weight.requires_grad)
    delattr(part, name)
    hold(part, name, copy)
    return copy


HOLD: dict[str, Callable[[nn.Module, str, Tensor], Tensor]] = {
    "a buffer": partial(replaced_by, nn.Module.register_buffer),
    "a plain tensor": partial(replaced_by, setattr),
    "a parametrization": parametrized,
}
"""How to hold a weight other than as a parameter. Each returns the tensor that learns."""
CHANGE: dict[str, Callable[[nn.Linear], AbstractContextManager[Any]]] = {
    "unchanged": nullcontext,
    "a hook": lambda part: part.register_forward_hook(lambda *_: None),
    "a global hook": lambda _: nn.modules.module.register_module_forward_hook(lambda *_: None),
    "a forward": lambda part: patch.object(part, "forward", part.forward),
}
"""How to change a sub-layer for a while, so that its layer calls it."""
PARALLEL = (sp.ColumnParallelLinear, sp.RowParallelLinear)


@pytest.mark.parametrize("change", CHANGE)
@pytest.mark.parametrize("learns", [False, True])
@pytest.mark.parametrize("norm", ["layer", "rms"])
@pytest.mark.parametrize("how", HOLD)
@spmd(1, 2)
@meshed()
def test_a_weight_that_is_no_parameter_computes_and_learns_as_one(
    mesh: sp.Mesh, how: str, norm: str, learns: bool, change: str
) -> None:
    block = sp.TransformerBlock(4, 2, comm=mesh["sp"], norm=norm, sinks=True)
    x, sharding = (
        normal(99, (2, 3, 4), "float32"),
        sp.Sharding.contiguous(3 * mesh.size, mesh.size),
    )
    held = [*enumerate(block.named_parameters())]
    for n, (_, weight) in held:
        weight.data = normal(n, weight.shape, "float32")
    before = block(x, sharding=sharding)
    wanted = torch.autograd.grad(before.square().sum(), [weight for _, (_, weight) in held])
    tensors = []
    for _, (name, weight) in held:
        owner, _, last = name.rpartition(".")
        part = block.get_submodule(owner)
        tensors.append(HOLD[how](part, last, weight.requires_grad_(learns)))
    with CHANGE[change](block.attention.q_proj):
        after = block(x, sharding=sharding)
    assert torch.equal(after, before)
    if learns:
        found = torch.autograd.grad(after.square().sum(), tensors)
        sign = -1 if how == "a parametrization" else 1
        torch.testing.assert_close(found, tuple(sign * x for x in wanted))


@spmd(1, 2)
@meshed()
def test_sinks_may_have_another_dtype_than_the_projections(mesh: sp.Mesh) -> None:
    layer = sp.SelfAttention(4, 2, comm=mesh["sp"], sinks=True, dtype=torch.bfloat16)
    assert layer.sinks.tolist() == [0, 0]
    call = partial(layer, sharding=sp.Sharding.contiguous(2 * mesh.size, mesh.size))
    x = normal(1, (1, 2, 4), "bfloat16")
    before = call(x)
    layer.sinks.data = layer.sinks.data.float()
    after = call(x)
    assert torch.equal(after, before)
    after.sum().backward()
    with pytest.raises(sp.DtypeError, match=r"bfloat16 and was given torch\.float32"):
        call(x.float())


class Checkpointed(nn.Module):
    """A linear layer that a checkpoint computes again in the backward."""

    def __init__(self, part: nn.Linear, reentrant: bool) -> None:
        super().__init__()
        self.part, self.reentrant = part, reentrant

    def forward(self, x: Tensor) -> Tensor:
        """Compute the layer in a checkpoint, and more."""
        return cast("Tensor", checkpoint(self.part, x, use_reentrant=self.reentrant)).tanh() + x


@pytest.mark.parametrize("chunk", [None, 1])
@spmd(1, 2)
@meshed()
def test_a_checkpoint_inside_a_part_is_refused_only_if_it_would_lose_gradients(
    mesh: sp.Mesh, chunk: int | None
) -> None:
    """A reentrant one runs the part again with weights of which the layer sums no gradients."""

    def gradient(group: sp.Communicator, x: Tensor, *, reentrant: bool) -> Tensor:
        layer = sp.FeedForward(4, 4, comm=group, chunk=chunk)
        for n, weight in enumerate(layer.parameters()):
            weight.data = normal(n, weight.shape, "float32")
        held = layer.up.weight
        layer.set_submodule("up", Checkpointed(layer.up, reentrant))
        layer(x.requires_grad_()).square().sum().backward()
        return cast("Tensor", held.grad)

    sharding = sp.Sharding.contiguous(2 * mesh.size, mesh.size)
    whole = normal(99, (1, 2 * mesh.size, 4), "float32")
    own = sharding.shard(whole, mesh.rank, 1)
    found = gradient(mesh["sp"], own.clone(), reentrant=False)
    torch.testing.assert_close(found, gradient(mesh[()], whole.clone(), reentrant=False))
    with pytest.raises(ValueError, match=r"FeedForward\.up calls .* Pass use_reentrant=False"):
        gradient(mesh["sp"], own.clone(), reentrant=True)


@spmd(1, 2)
@meshed()
def test_a_replaced_part_of_a_block_may_be_frozen_or_hold_layers_that_sum(mesh: sp.Mesh) -> None:
    block = sp.TransformerBlock(4, 2, comm=mesh["sp"])
    x, sharding = (
        normal(99, (2, 3, 4), "float32"),
        sp.Sharding.contiguous(3 * mesh.size, mesh.size),
    )
    wanted = block(x, sharding=sharding)
    block.set_submodule("norm1", nn.LayerNorm(4))
    with torch.no_grad():
        assert torch.equal(block(x, sharding=sharding), wanted)
    with pytest.raises(TypeError, match=r"norm1 is a torch\.nn\..*\.LayerNorm with trainable"):
        block(x, sharding=sharding)
    block.norm1.requires_grad_(requires_grad=False)
    block.set_submodule("feed_forward", nn.Sequential(block.feed_forward, nn.Identity()))
    assert torch.equal(block(x, sharding=sharding), wanted)


def pair(comm: sp.Communicator, sharding: sp.Sharding | None) -> nn.Module:
    """Return a feed-forward that is split over ranks. With a sharding each has its own tokens."""
    column, row = (
        kind.from_linear(nn.Linear(*sizes), comm=comm, sharding=sharding)
        for kind, sizes in zip(PARALLEL, ((4, 8), (8, 4)), strict=True)
    )
    return nn.Sequential(column, nn.GELU(), row)


def norm(comm: sp.Communicator, _: sp.Sharding | None) -> nn.Module:
    """Return a layer whose weights every rank holds whole."""
    return sp.RMSNorm(4, comm=comm)


@pytest.mark.parametrize(
    ("make", "whole", "own", "split", "fits"),
    [
        (norm, ("ring", "tp"), "ring", False, False),
        (norm, ("ring", "tp"), ("ring", "tp"), False, True),
        (pair, "ring", "tp", False, False),
        (pair, "ring", "ring", False, False),
        (pair, "ring", "ring", True, True),
        (pair, (), "tp", False, True),
    ],
)
@spmd(4)
@meshed(axes={"ring": 2, "tp": 2})
def test_a_part_of_a_block_must_sum_over_the_ranks_of_the_block(
    mesh: sp.Mesh, make: Callable[..., nn.Module], whole: Any, own: Any, split: bool, fits: bool
) -> None:
    block = sp.TransformerBlock(4, 2, comm=mesh[whole])
    sharding = sp.Sharding.contiguous(8, mesh[whole].size)
    block.set_submodule("feed_forward", make(mesh[own], sharding if split else None))
    error = pytest.raises(TypeError, match="Pass layers with the same comm")
    with nullcontext() if fits else error:
        block(torch.ones(1, 8 // mesh[whole].size, 4), sharding=sharding)


@pytest.mark.parametrize("kind", PARALLEL)
@spmd(1, 2)
@meshed("tp")
def test_a_parallel_layer_keeps_its_placements_when_torch_makes_new_weights(
    mesh: sp.Mesh, kind: type[sp.ColumnParallelLinear]
) -> None:
    layer = kind.from_linear(nn.Linear(4, 6), comm=mesh["tp"])
    wanted = dict(layer.placements)
    layer.to("meta").to_empty(device="cpu")
    assert {name: vars(x)["placement"] for name, x in layer.named_parameters()} == wanted
    x = torch.ones(2, layer.weight.shape[1])
    before = weight_norm(layer)(x)
    layer.load_state_dict(layer.state_dict())
    torch.testing.assert_close(layer(x), before, equal_nan=True)


@pytest.mark.parametrize("kind", PARALLEL)
@spmd(1, 2)
@meshed("tp")
def test_a_parallel_layer_shares_no_memory_with_whole_layers(
    mesh: sp.Mesh, kind: type[sp.ColumnParallelLinear]
) -> None:
    """Neither with the one that it was made of, nor with the one that it gives."""
    given = nn.Linear(4, 6)
    layer = kind.from_linear(given, comm=mesh["tp"])
    joined = layer.to_linear()
    for part in layer.parameters():
        part.data.zero_()
    assert all(weight.all() for whole in (given, joined) for weight in whole.parameters())


@spmd(1, 2)
@meshed("tp")
def test_a_model_computes_with_weights_that_functional_call_gives_it(mesh: sp.Mesh) -> None:
    model, tokens = Case((4, 2)).model(mesh), Case((4, 2)).tokens(1, 3)
    weights = {name: x.detach().clone() for name, x in model.named_parameters()}
    sharding = sp.Sharding.contiguous(3, 1)
    found = functional_call(model, weights, (tokens,), {"sharding": sharding})
    assert torch.equal(found, model(tokens, sharding=sharding))


@spmd(4)
@meshed(axes={"dp": 2, "ring": 2})
def test_blocks_of_replicas_learn_as_on_one_device_after_a_sum_over_the_replicas(
    mesh: sp.Mesh,
) -> None:
    """The backward sums over the ranks of a sequence, `reduce_gradients` over the replicas."""
    rows, sharding = normal(99, (2, 8, 4), "float64"), sp.Sharding.zigzag(8, 2)
    ring, dp = mesh["ring"], mesh["dp"]
    block, alone = (
        sp.TransformerBlock(4, 2, comm=each, dtype=torch.float64) for each in (ring, mesh[()])
    )
    pairs = [*zip(block.parameters(), alone.parameters(), strict=True)]
    for n, pair in enumerate(pairs):
        for weight in pair:
            weight.data = normal(n, weight.shape, "float64")
    own = sharding.shard(rows[[dp.rank]], ring.rank, 1)
    block(own, sharding=sharding).square().sum().backward()
    alone(rows, sharding=sp.Sharding.contiguous(8, 1)).square().sum().backward()
    reduce_gradients(block.parameters(), data=dp)
    torch.testing.assert_close(*zip(*((a.grad, b.grad) for a, b in pairs), strict=True))
