"""Test layers whose weights or parts were replaced, by a program or by torch itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from llama_cases import Case
from torch import nn
from torch.func import functional_call
from torch.nn.utils.parametrizations import weight_norm

import sp_core as sp
from sp_core.testing import spmd

PARALLEL = (sp.ColumnParallelLinear, sp.RowParallelLinear)


@pytest.mark.parametrize("kind", PARALLEL)
@spmd(1, 2)
def test_a_parallel_layer_keeps_its_placements_when_torch_makes_new_weights(
    comm: Any, kind: type[sp.ColumnParallelLinear]
) -> None:
    with sp.Mesh(comm, tp=comm.size) as mesh:
        layer = kind.from_linear(nn.Linear(4, 6), comm=mesh["tp"])
        wanted = dict(layer.placements)
        layer.to("meta").to_empty(device="cpu")
        assert {name: vars(x)["placement"] for name, x in layer.named_parameters()} == wanted
        x = torch.ones(2, layer.weight.shape[1])
        before = weight_norm(layer)(x)
        layer.load_state_dict(layer.state_dict())
        torch.testing.assert_close(layer(x), before, equal_nan=True)


@spmd(1, 2)
def test_a_model_computes_with_weights_that_functional_call_gives_it(comm: Any) -> None:
    with sp.Mesh(comm, tp=comm.size) as mesh:
        model, tokens = Case((4, 2)).model(mesh), Case((4, 2)).tokens(1, 3)
        weights = {name: x.detach().clone() for name, x in model.named_parameters()}
        sharding = sp.Sharding.contiguous(3, 1)
        found = functional_call(model, weights, (tokens,), {"sharding": sharding})
        assert torch.equal(found, model(tokens, sharding=sharding))
