"""Copies of layers, and what dropout drops; what layers compute is judged in `domains/`."""

from __future__ import annotations

import copy
import pickle
from contextlib import nullcontext
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from domains.numeric import uniform
from torch.nn import functional as F

import sp_core as sp
from sp_core.llama import LlamaConfig, create
from sp_core.nn.gradients import reduce_gradients
from sp_core.schemes.tp_sp import gather_linears
from sp_core.testing import device, spmd
from sp_core.testing.tolerance import unit_roundoff

pytestmark = pytest.mark.usefixtures("short_slots")


def grid(comm: Any) -> sp.Mesh:
    """A mesh for any scheme, with an axis of two ranks where that divides."""
    fast = 2 - comm.size % 2
    return sp.Mesh(comm, device=device(), ring=comm.size // fast, ulysses=fast)


@spmd(1, 2, 4)
def test_weights_that_no_rank_splits_need_no_placement_to_sum_their_gradients(comm: Any) -> None:
    with grid(comm) as mesh:
        tokens = mesh["ring", "ulysses"]
        scale = torch.nn.Parameter(torch.ones((), device=device()))
        weights = [scale, *sp.TransformerBlock(8, 2, comm=tokens).to(device()).parameters()]
        for number, weight in enumerate(weights):
            weight.grad = torch.full_like(weight, number + comm.rank)
        # of one number, which is in memory once
        one = torch.full((), len(weights) - 1.0 + comm.rank, device=device())
        weights[-1].grad = one.expand_as(weights[-1])
        reduce_gradients(weights, data=tokens)
        for number, weight in enumerate(weights):
            total = comm.size * number + sum(range(comm.size))
            assert weight.grad is not None
            assert weight.grad.eq(total).all()
        split = sp.ColumnParallelLinear.from_linear(torch.nn.Linear(8, 8), comm=tokens)
        with nullcontext() if comm.size == 1 else pytest.raises(sp.ShapeError, match="as `tensor`"):
            reduce_gradients(split.parameters(), data=tokens)
        elsewhere = torch.nn.Parameter(torch.ones(1, device="meta"))
        mixed = [scale, elsewhere] if comm.rank == 0 else [scale]
        with pytest.raises(sp.DeviceError, match="a parameter is on meta"):
            reduce_gradients(mixed, data=tokens)


@pytest.mark.parametrize("kind", ["block", "hybrid", "column", "llama"])
@spmd(1, 2, 4)
def test_a_copy_of_a_layer_is_another_layer_over_the_same_ranks(comm: Any, kind: str) -> None:
    sharding = sp.Sharding.contiguous(8, comm.size)
    with grid(comm) as mesh:
        tokens = mesh["ring", "ulysses"]
        block = partial(sp.TransformerBlock, 8, 2, num_kv_heads=1, rope=sp.Rope(4), comm=tokens)
        if kind == "column":
            layer: Any = sp.ColumnParallelLinear.from_linear(
                torch.nn.Linear(8, 8), comm=tokens, sharding=sharding
            )
        elif kind == "llama":
            layer = create(LlamaConfig(9, 8, 8, 1, 2, 1, 4), mesh)
        elif kind == "block":
            layer = block(attention=sp.ring_attention)
        else:
            layer = block(attention=partial(sp.hybrid_attention, mesh=mesh))
        x = (
            torch.full((1, 8 // comm.size), 3)
            if kind == "llama"
            else torch.ones(1, 8 // comm.size, 8)
        ).to(mesh.device)
        layer.to(mesh.device)
        call = layer if kind == "column" else partial(layer, sharding=sharding)
        other = copy.deepcopy(layer)
        before = call(x)
        assert torch.equal(
            (other if kind == "column" else partial(other, sharding=sharding))(x), before
        )
        assert all(
            vars(a).get("placement") == vars(b).get("placement") for a, b in pairs(layer, other)
        )
        for parameter in other.parameters():
            parameter.data.zero_()
        assert torch.equal(call(x), before)
        with pytest.raises(TypeError, match="state_dict"):
            pickle.dumps(layer)
        other.load_state_dict(layer.state_dict())
        assert all(torch.equal(a, b) for a, b in pairs(layer, other))


def pairs(
    layer: torch.nn.Module, other: torch.nn.Module
) -> list[tuple[torch.nn.Parameter, torch.nn.Parameter]]:
    return list(zip(layer.parameters(), other.parameters(), strict=True))


@spmd(2)
def test_layers_that_share_an_input_give_the_gradients_that_are_needed(comm: Any) -> None:
    """And gather or sum only for these."""
    shapes = [(1, 3, 4), (2, 4), (2,), (5, 4), (5,)]
    with sp.Mesh(comm, sp=2) as mesh:
        for needs in [*product((False, True), repeat=5)][1:]:
            x, w, b, v, c = leaves = [
                torch.rand(shape).requires_grad_(y) for shape, y in zip(shapes, needs, strict=True)
            ]
            outs = gather_linears(x, [(w, b), (v, c)], comm=mesh["sp"], lengths=(3, 3))
            mesh["sp"].counters.reset()
            torch.autograd.grad(torch.cat(outs, 2).sum(), [x for x in leaves if x.requires_grad])
            calls = [mesh["sp"].counters[op].calls for op in ("reduce_scatter", "all_gather")]
            assert calls == [3 * needs[0], 3 * (needs[1] or needs[3])]  # a token in each


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_layer_norm_adds_tokens_in_the_dtype_of_its_weights(dtype: torch.dtype) -> None:
    """A sum of n tokens rounds n times, where one that is wider inside rounds once."""
    tokens, hidden = 1000, 8
    bias = torch.zeros(hidden, dtype=dtype, requires_grad=True)
    upstream = torch.full((tokens, hidden), 0.09, dtype=dtype)
    x = torch.arange(tokens * hidden, dtype=dtype).view(tokens, hidden) % 7
    F.layer_norm(x, (hidden,), torch.ones(hidden, dtype=dtype), bias).backward(upstream)
    exact, u = upstream.double().sum(0), unit_roundoff(dtype)
    assert bias.grad is not None
    error = (bias.grad.double() - exact).abs()
    assert (20 * u * exact < error).all()
    assert (error <= tokens * u * exact).all()


def test_attention_to_equal_keys_is_off_by_their_number() -> None:
    """Their mean is one of them; the roundings of all partial sums have one sign."""
    keys, u = 1000, unit_roundoff(torch.float64)
    v = torch.linspace(1, 2, 16, dtype=torch.float64).expand(1, 1, keys, 16)
    out = F.scaled_dot_product_attention(torch.zeros_like(v), torch.zeros_like(v), v)
    error = ((out - v) / v).abs().max()
    assert 20 * u < error <= keys * u


@pytest.mark.parametrize(
    "offset", [(1, 0, 0, 0), (0, 1, 0, 0), (0, 0, 1, 0), (0, 0, 0, 1), (0, 0, 1, -1), (1, -1, 0, 0)]
)
def test_neighbours_have_nothing_in_common(offset: tuple[int, int, int, int]) -> None:
    """Seeds, sequences, tokens and features that differ by one are dropped independently."""
    by_seed = [
        sp.dropout(torch.ones(8, 256, 64), 0.5, seed=seed, positions=range(256)) == 0
        for seed in range(8)
    ]
    dropped = torch.stack(by_seed).double() - 0.5
    shifted = dropped.roll(offset, dims=(0, 1, 2, 3))
    assert abs((dropped * shifted).mean() * 4) < 5 / dropped.numel() ** 0.5


def test_an_element_stays_whose_number_is_the_chance() -> None:
    """Numbers are in [0, 1): as many are below p as p says."""
    number = float(uniform(5, [[0], [3], [0]]))
    assert sp.dropout(torch.ones(1, 1, 1), number, seed=5, positions=[3]).all()
