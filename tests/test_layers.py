"""A copy of a layer is another layer over the same ranks."""

from __future__ import annotations

import copy
import pickle
from functools import partial
from typing import Any

import pytest
import torch

import sp_core as sp
from sp_core.llama import LlamaConfig, create
from sp_core.testing import device, spmd

pytestmark = pytest.mark.usefixtures("short_slots")


def grid(comm: Any) -> sp.Mesh:
    """A mesh for any scheme, with an axis of two ranks where that divides."""
    fast = 2 - comm.size % 2
    return sp.Mesh(comm, device=device(), ring=comm.size // fast, ulysses=fast)


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
