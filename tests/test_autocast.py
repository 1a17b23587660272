"""Test models under autocast to a half type, and beside other default dtypes of torch."""

from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from kit.meshed import meshed
from llama_cases import Case
from torch import Tensor

import sp_core as sp
from sp_core.attention import kernels
from sp_core.llama import Decoder, Llama, create
from sp_core.llama.train import backward, train_step
from sp_core.llama.unequal import prefill_unequal, work_of
from sp_core.scheduling import balanced
from sp_core.testing import spmd

CASE = Case((6, 3), vocab=31, dtype="float32")
TEXTS = [[1, 2, 3], [4, 5]]
lowered = partial(torch.autocast, "cpu", torch.bfloat16)


def whole_step(model: Llama, sgd: torch.optim.Optimizer) -> float:
    return train_step(model, sgd, TEXTS, max_norm=1.0).loss


def own_step(model: Llama, sgd: torch.optim.Optimizer) -> float:
    loss = backward(model, TEXTS)
    sgd.step()
    return loss


def decoded(model: Llama, sgd: torch.optim.Optimizer) -> Tensor:
    return Decoder(model, [3, 2]).prefill(TEXTS)


def continued(model: Llama, sgd: torch.optim.Optimizer) -> Tensor:
    """Take a step between two calls of a decoder, and return the logits of both."""
    decoder = Decoder(model, [4, 3])
    first = decoder.decode(TEXTS)
    own_step(model, torch.optim.AdamW(model.parameters(), lr=1.0, fused=True))
    return torch.stack((first, decoder.decode([[6], [7]])))


def prefilled(model: Llama, sgd: torch.optim.Optimizer) -> Tensor:
    plan = balanced([*map(len, TEXTS)], model.grid.sequence.size, work_of(model.config))
    return prefill_unequal(model, TEXTS, plan)


@pytest.mark.parametrize("tp_sp", [False, True])
@spmd(2)
def test_calls_in_one_block_of_autocast_use_the_weights_of_their_time(
    comm: Any, tp_sp: bool
) -> None:
    """Autocast keeps the weights that it has converted until the outermost block ends.

    A fused optimizer does not change the version of a weight.
    """
    found = []
    calls = (
        *(whole_step, own_step, decoded, own_step, prefilled, whole_step, decoded),
        *(own_step, continued),
    )
    with sp.Mesh(comm, tp=comm.size) as mesh:
        for outer in (nullcontext, lowered):
            model = CASE.model(mesh, tp_sp=tp_sp)
            sgd = torch.optim.SGD(model.parameters(), lr=1.0)
            with outer():
                for call in calls:
                    with lowered():
                        found.append(call(model, sgd))
    torch.testing.assert_close(found[len(calls) :], found[: len(calls)], rtol=0, atol=0)


@spmd(1)
def test_decoding_computes_scores_in_the_dtype_of_the_model(comm: Any) -> None:
    """On a GPU the kernel of torch operations computes them if no fused kernel fits."""
    dtypes, matmul = set[torch.dtype](), torch.matmul

    def product(*given: Tensor) -> Tensor:
        out = matmul(*given)
        dtypes.add(out.dtype)
        return out

    with sp.Mesh(comm, ring=1) as mesh, pytest.MonkeyPatch.context() as patch:
        decoder = Decoder(CASE.model(mesh), [4])
        decoder.prefill([[1, 2]])
        patch.setattr(kernels, "backend_for", lambda *_: "plain")
        patch.setattr(torch, "matmul", product)
        with lowered():
            decoder.decode([[3]])
    assert dtypes == {torch.float32}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@spmd(1)
@meshed("ring")
def test_the_default_dtype_of_torch_changes_nothing(mesh: sp.Mesh, dtype: str) -> None:
    case, found = Case((6, 3), scaling="yarn", vocab=31, dtype=dtype), list[tuple[Tensor, ...]]()
    for default in (torch.float32, torch.float64, torch.bfloat16):
        torch.set_default_dtype(default)
        try:
            model = create(case.config, mesh, dtype=getattr(torch, dtype))
            sgd = torch.optim.SGD(model.parameters(), lr=1.0)
            own_step(model, sgd)
            found.append((*model.parameters(), decoded(model, sgd), prefilled(model, sgd)))
        finally:
            torch.set_default_dtype(torch.float32)
    assert all(torch.equal(*pair) for one in found for pair in zip(one, found[0], strict=True))
