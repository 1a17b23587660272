"""Test that a program under `torch.compile` computes what it computes without."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from llama_cases import Case
from torch import Tensor

import sp_core as sp
from sp_core.testing import run_threads

TOKENS, HEADS, HEAD_DIM = 6, 2, 4
pytestmark = pytest.mark.filterwarnings("ignore")  # the compiler warns of what it does itself


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


def test_a_compiled_dropout_drops_the_same_elements() -> None:
    """The default backend, unlike the others, computes another hash from the same operations."""
    x = torch.ones(1, 4096, 4)

    def drop(x: Tensor) -> Tensor:
        return sp.dropout(x, 0.5, seed=3, positions=range(x.shape[1]))

    assert torch.equal(torch.compile(drop)(x), drop(x))


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
