"""A transformer block over all ranks' tokens gives the results and gradients of one device."""

from __future__ import annotations

import copy
import pickle
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from oracle import reference
from oracle.once import contents, once
from oracle.strategies import DRAWN, masks, seeds
from torch import Tensor

import sp_core as sp
from sp_core.llama import LlamaConfig, create
from sp_core.schemes import SCHEMES
from sp_core.testing import device, given, record_ratio, spmd
from sp_core.testing.tolerance import bound, check_close

pytestmark = pytest.mark.usefixtures("short_slots")
BASE = 100.0


@dataclass(frozen=True)
class BlockProblem:
    """A block with random weights on random tokens."""

    batch: int
    seq_len: int
    kv_heads: int
    group: int
    head_dim: int
    ffn_hidden: int
    norm: str
    gated: bool
    bias: bool
    rope: bool
    mask: sp.Mask
    layout: str
    dtype: str
    seed: int

    @property
    def hidden(self) -> int:
        return self.kv_heads * self.group * self.head_dim

    def block(self, scheme: Any, comm: sp.Communicator) -> sp.TransformerBlock:
        torch.manual_seed(self.seed)
        block = sp.TransformerBlock(
            self.hidden,
            self.kv_heads * self.group,
            num_kv_heads=self.kv_heads,
            ffn_hidden=self.ffn_hidden,
            gated=self.gated,
            norm=self.norm,
            attention=SCHEMES.get(scheme, scheme),
            rope=sp.Rope(self.head_dim, BASE) if self.rope else None,
            bias=self.bias,
            comm=comm,
            dtype=getattr(torch, self.dtype),
        )
        generator = torch.Generator().manual_seed(self.seed)
        for parameter in block.parameters():
            parameter.data = (
                torch.randn(parameter.shape, generator=generator, dtype=torch.float64).to(parameter)
                * 0.5
            )
        return block.to(comm.device)

    def tokens(self) -> tuple[Tensor, Tensor]:
        """Input and upstream gradient of the whole sequence."""
        generator = torch.Generator().manual_seed(self.seed + 1)
        x, grad = (
            torch.randn(
                self.batch, self.seq_len, self.hidden, generator=generator, dtype=torch.float64
            )
            for _ in range(2)
        )
        return x.to(getattr(torch, self.dtype)), grad.to(getattr(torch, self.dtype))

    def expected(
        self, x: Tensor, grad: Tensor, weights: dict[str, Tensor]
    ) -> reference.BlockReference:
        mask = self.mask
        compute = partial(
            reference.transformer_block_grads,
            *(x, weights, grad),
            num_heads=self.kv_heads * self.group,
            norm=self.norm,
            rope_base=BASE if self.rope else None,
            causal=mask.causal,
            window=mask.window,
            documents=mask.documents,
        )
        return once(("block", self, contents(x, grad, *weights.values())), compute)


@st.composite
def block_problems(draw: st.DrawFn) -> BlockProblem:
    seq_len = draw(st.integers(1, 17))
    kv_heads, group = draw(st.integers(1, 2)), draw(st.integers(1, 3))
    # A layer norm over two elements gives 1 and -1 whatever they are: its gradient is nothing but
    # rounding.
    head_dim = 4 if kv_heads * group == 1 else draw(st.sampled_from([2, 4]))
    return BlockProblem(
        batch=draw(st.integers(1, 2)),
        seq_len=seq_len,
        kv_heads=kv_heads,
        group=group,
        head_dim=head_dim,
        ffn_hidden=draw(st.integers(1, 9)),
        norm=draw(st.sampled_from(["layer", "rms"])),
        gated=draw(st.booleans()),
        bias=draw(st.booleans()),
        rope=draw(st.booleans()),
        mask=draw(masks(seq_len, seq_len)),
        layout=draw(st.sampled_from(sorted(DRAWN))),
        dtype=draw(st.sampled_from(["float64", "float32"])),
        seed=draw(seeds()),
    )


def grid(comm: Any) -> sp.Mesh:
    """A mesh for any scheme, with an axis of two ranks where that divides."""
    fast = 2 - comm.size % 2
    return sp.Mesh(comm, device=device(), ring=comm.size // fast, ulysses=fast)


@pytest.mark.parametrize("scheme", [*sorted(SCHEMES), "hybrid"])
@given(max_examples=25, problem=block_problems())
def test_a_block_is_that_of_one_device(comm: Any, scheme: str, problem: BlockProblem) -> None:
    sharding = DRAWN[problem.layout](problem.seq_len, comm.size)
    whole, grad = problem.tokens()
    with grid(comm) as mesh:
        block = problem.block(
            partial(sp.hybrid_attention, mesh=mesh) if scheme == "hybrid" else scheme,
            mesh["ring", "ulysses"],
        )
        x = sharding.shard(whole, comm.rank, 1).clone().to(mesh.device).requires_grad_()
        out = block(x, sharding=sharding, mask=problem.mask)
        out.backward(sharding.shard(grad, comm.rank, 1).to(out))
        weights = {name: p.detach().cpu() for name, p in block.named_parameters()}
        want = problem.expected(whole, grad, weights)
        results = {
            "out": out,
            "x": x.grad,
            **{name: p.grad for name, p in block.named_parameters()},
        }
        for name, actual in results.items():
            value, scale = want.values[name], want.scales[name]
            if name in ("out", "x"):
                value, scale = (sharding.shard(t, comm.rank, 1) for t in (value, scale))
            assert actual is not None
            kind = name if name in ("out", "x") else "weights"
            ratio = check_close(name, actual.detach().cpu(), value, bound(scale, whole.dtype))
            record_ratio(f"block {scheme} {kind}", ratio)


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
        )
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


@spmd(1)
def test_a_layer_that_cannot_be(comm: Any) -> None:
    with sp.Mesh(comm, sp=1) as mesh:
        with pytest.raises(sp.ShapeError, match="num_heads=5"):
            sp.SelfAttention(16, 5, comm=mesh["sp"])
        with pytest.raises(ValueError, match="batch"):
            sp.TransformerBlock(16, 4, norm="batch", comm=mesh["sp"])
