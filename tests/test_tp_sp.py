"""Column- and row-parallel layers are the ordinary layers, exactly.

Small integers, which no order of summation rounds.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Any, cast

import pytest
import torch
from hypothesis import strategies as st
from oracle.strategies import DRAWN, seeds
from oracle.ways import Way, ways
from torch import Tensor, nn

import sp_core as sp
from sp_core.testing import device, features, given

pytestmark = pytest.mark.usefixtures("short_slots")


@dataclass(frozen=True)
class Pair:
    """A column-parallel layer and the row-parallel one after it."""

    batch: int
    seq_len: int
    hidden: int
    inner: int
    layout: str | None
    bias: bool
    uneven: bool
    frozen: int
    dtype: str
    seed: int

    def sizes(self, size: int) -> list[int] | None:
        if not self.uneven:
            return None
        random = Random(self.seed)
        cuts = sorted(random.randint(0, self.inner) for _ in range(size - 1))
        return [b - a for a, b in zip([0, *cuts], [*cuts, self.inner], strict=True)]

    def whole(self) -> tuple[Tensor, Tensor, nn.Linear, nn.Linear]:
        """Input, upstream gradient and the two layers, of small integers."""
        random = torch.Generator().manual_seed(self.seed)
        dtype = getattr(torch, self.dtype)

        def integers(*shape: int) -> Tensor:
            return torch.randint(-3, 4, shape, generator=random).to(dtype)

        up, down = (
            nn.Linear(self.hidden, self.inner, self.bias, dtype=dtype),
            nn.Linear(self.inner, self.hidden, self.bias, dtype=dtype),
        )
        for parameter in (*up.parameters(), *down.parameters()):
            parameter.data = integers(*parameter.shape)
        frozen = (
            [up.weight, down.weight, up.bias, down.bias][self.frozen % 4]
            if self.frozen < 4
            else None
        )
        if frozen is not None:
            frozen.requires_grad_(False)
        shape = (self.batch, self.seq_len, self.hidden)
        return integers(*shape).requires_grad_(), integers(*shape), up, down


@st.composite
def pairs(draw: st.DrawFn) -> Pair:
    return Pair(
        batch=draw(st.integers(1, 3)),
        seq_len=draw(st.integers(0, 19)),
        hidden=draw(st.integers(1, 5)),
        inner=draw(st.integers(1, 9)),
        layout=draw(st.sampled_from([None, *sorted(DRAWN)])),
        bias=draw(st.booleans()),
        uneven=draw(st.booleans()),
        frozen=draw(st.integers(0, 7)),
        dtype=draw(st.sampled_from(["float64", "float32"])),
        seed=draw(seeds()),
    )


def check_parameters(parallel: Any, linear: nn.Linear, dim: int, rank: int) -> None:
    """Compare gradients with slices of the ordinary layer's, and joined weights with its own."""
    for name, expected in linear.named_parameters():
        actual = getattr(parallel, name)
        assert (actual.grad is None) == (expected.grad is None)
        if expected.grad is not None:
            split = name == "weight" or dim == 0
            parts = expected.grad.split(list(parallel.sizes), dim) if split else ()
            assert torch.equal(actual.grad.cpu(), parts[rank] if split else expected.grad)
    pairs = zip(parallel.to_linear().parameters(), linear.parameters(), strict=True)
    assert all(torch.equal(joined.cpu(), whole) for joined, whole in pairs)


@pytest.mark.explore
@given(pair=pairs(), way=ways())
def test_a_pair_of_parallel_layers_is_the_pair_of_ordinary_ones(
    comm: Any, pair: Pair, way: Way
) -> None:
    rank, size = comm.rank, comm.size
    features({"scheme": "tp_sp"})
    sharding = None if pair.layout is None else DRAWN[pair.layout](pair.seq_len, size)

    def own(whole: Tensor) -> Tensor:
        return whole if sharding is None else sharding.shard(whole, rank, 1)

    x, grad, up, down = pair.whole()
    sizes = pair.sizes(size)
    with sp.Mesh(comm, device=device(), **way, sp=size) as mesh:
        group = mesh["sp"]
        column = sp.ColumnParallelLinear.from_linear(up, comm=group, sharding=sharding, sizes=sizes)
        row = sp.RowParallelLinear.from_linear(down, comm=group, sharding=sharding, sizes=sizes)
        mine = own(x.detach()).clone().to(group.device).requires_grad_()
        inner = column(mine)
        out = row(inner)
        out.backward(own(grad).to(out))
        whole_inner = up(x)
        whole = down(whole_inner)
        whole.backward(grad)

        order = (
            torch.arange(pair.seq_len)
            if sharding is None
            else sharding.group([range(size)]).positions(0)
        )
        assert torch.equal(
            inner.detach().cpu(), whole_inner[:, order].split(list(column.sizes), 2)[rank]
        )
        assert torch.equal(out.detach().cpu(), own(whole))
        assert torch.equal(cast("Tensor", mine.grad).cpu(), own(cast("Tensor", x.grad)))
        check_parameters(column, up, 0, rank)
        check_parameters(row, down, 1, rank)
