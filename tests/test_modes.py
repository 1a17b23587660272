"""Test programs under `torch.compile`, models under autocast, and other default dtypes of torch.

A compiled program computes what it computes without the compiler.
"""

from collections.abc import Callable
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
from sp_core.testing import run_threads, spmd

TOKENS, HEADS, HEAD_DIM = 6, 2, 4
compiled = pytest.mark.filterwarnings("ignore")  # the compiler warns of what it does itself


Program = tuple[Callable[[Tensor], Tensor], list[Tensor]]
"""A function of this rank's tokens x (1, S/P, E), and the weights that it uses."""


def programs(mesh: sp.Mesh) -> dict[str, Program]:
    """Return programs that communicate."""
    comm = mesh["tp"]
    sharding = sp.Sharding.contiguous(TOKENS, comm.size)
    block = sp.TransformerBlock(
        HEADS * HEAD_DIM, HEADS, comm=comm, attention=sp.ring_attention, mask=sp.Mask(causal=True)
    )
    changed = sp.FeedForward(HEADS * HEAD_DIM, comm=comm)
    changed.set_submodule("up", torch.nn.Sequential(changed.up, torch.nn.Tanh()))
    plan = sp.plan("all_reduce", torch.ones(3), comm=comm)
    case = Case((4, 2), layers=1)
    llama, tokens = case.model(mesh, tp_sp=True), case.tokens(1, TOKENS)

    def overlapped(x: Tensor) -> Tensor:
        pending = sp.all_gather_start(x * 2, comm=comm, dim=1)
        x = x.cos()
        comm.poll()
        return pending.wait().sum() * x

    def in_place(x: Tensor) -> Tensor:
        return x * sp.all_reduce_(x.detach() * 2, comm=comm) * plan.run().sum()

    def differentiated(x: Tensor) -> Tensor:
        inner = x.detach().requires_grad_()
        sp.all_reduce(inner * 2, comm=comm).square().sum().backward()
        assert inner.grad is not None
        return x * inner.grad

    def modelled(x: Tensor) -> Tensor:
        logits: Tensor = llama(tokens, sharding=sp.Sharding.contiguous(TOKENS, 1))
        return x.sum() * logits.square()

    return {
        "block": (lambda x: block(x * 2, sharding=sharding).sin(), [*block.parameters()]),
        "a layer with a changed part": (lambda x: changed(x * 2).sin(), [*changed.parameters()]),
        "overlapped": (overlapped, []),
        "in place": (in_place, []),
        "differentiated inside": (differentiated, []),
        "llama": (modelled, [*llama.parameters()]),
    }


@compiled
def test_compiled_programs_give_what_they_give_uncompiled() -> None:
    def body(comm: Any) -> None:
        with sp.Mesh(comm, tp=comm.size) as mesh:
            torch.manual_seed(0)
            whole = torch.randn(1, TOKENS, HEADS * HEAD_DIM)
            mine = sp.Sharding.contiguous(TOKENS, comm.size).shard(whole, comm.rank, 1)
            for name, (program, weights) in programs(mesh).items():
                found = []
                for run in (program, torch.compile(program, backend="eager")):
                    x = mine.clone().requires_grad_()
                    out = run(x)
                    found.append((out, *torch.autograd.grad(out.sum(), [x, *weights])))
                torch.testing.assert_close(found[1], found[0], rtol=0, atol=0, msg=name)

    run_threads(2, body, timeout=300)
    torch.compiler.reset()  # its caches hold communicators


@compiled
def test_a_compiled_dropout_drops_the_same_elements() -> None:
    """The default backend, unlike the others, computes another hash from the same operations."""
    x = torch.ones(1, 4096, 4)

    def drop(x: Tensor) -> Tensor:
        return sp.dropout(x, 0.5, seed=3, positions=range(x.shape[1]))

    assert torch.equal(torch.compile(drop)(x), drop(x))


@compiled
@pytest.mark.parametrize(
    "mask",
    [
        sp.Mask(),
        sp.Mask(causal=True),
        sp.Mask(True, 100),
        sp.Mask(documents=tuple(range(0, 601, 8))),
    ],
    ids=["full", "causal", "window", "documents"],
)
def test_attention_on_one_device_gives_the_shape_of_a_tensor_without_values(mask: sp.Mask) -> None:
    """Tools that trace a program, such as `torch.export`, run it with FakeTensors.

    A later call has real values, although plans are cached.
    """
    from torch._subclasses import FakeTensorMode  # takes a second

    with FakeTensorMode():
        q = torch.ones(1, 600, 2, 4, requires_grad=True)
        out: Any = sp.local_attention(q, q, q, mask=mask)
        assert out.shape == q.shape
        assert torch.autograd.grad(out.sum(), q)[0].shape == q.shape
    q = torch.ones(1, 600, 2, 4)
    torch.testing.assert_close(sp.local_attention(q, q, q, mask=mask), q)


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
