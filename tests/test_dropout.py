"""Dropout: the same elements for any number of ranks, as many as asked for, and nothing that two places have in common."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given as draw
from hypothesis import strategies as st
from oracle.strategies import LAYOUTS, seeds
from torch.utils.checkpoint import checkpoint

import sp_core as sp
from sp_core.nn.dropout import _mixed
from sp_core.schemes import SCHEMES
from sp_core.testing import device, spmd


@draw(
    seq_len=st.integers(0, 20),
    size=st.integers(1, 8),
    layout=st.sampled_from(sorted(LAYOUTS)),
    heads=st.sampled_from([(), (3,)]),
    features=st.integers(1, 9),
    seed=seeds(),
)
def test_shards_drop_what_the_whole_drops(
    seq_len: int, size: int, layout: str, heads: tuple[int, ...], features: int, seed: int
) -> None:
    x = torch.ones(2, seq_len, *heads, features, dtype=torch.float64)
    whole = sp.dropout(x, 0.4, seed=seed, positions=range(seq_len))
    sharding = LAYOUTS[layout](seq_len, size)
    for rank in range(size):
        mine = sp.dropout(
            sharding.shard(x, rank, 1), 0.4, seed=seed, positions=sharding.positions(rank)
        )
        assert torch.equal(mine, sharding.shard(whole, rank, 1))
    cut = features // 2
    half = sp.dropout(
        x[..., cut:], 0.4, seed=seed, positions=range(seq_len), features=range(cut, features)
    )
    assert torch.equal(half, whole[..., cut:])


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("shape", [(1, 4096, 64), (64, 4096, 1), (1, 64, 64, 64)])
def test_as_many_are_dropped_as_asked_for_and_the_mean_stays(
    p: float, shape: tuple[int, ...]
) -> None:
    found = sp.dropout(
        torch.ones(shape, dtype=torch.float64), p, seed=11, positions=range(shape[1])
    )
    assert set(found.unique().tolist()) == {0.0, 1 / (1 - p)}
    deviation = (p * (1 - p) / found.numel()) ** 0.5
    assert abs((found == 0).double().mean() - p) < 5 * deviation


@pytest.mark.parametrize(
    "offset", [(1, 0, 0, 0), (0, 1, 0, 0), (0, 0, 1, 0), (0, 0, 0, 1), (0, 0, 1, -1), (1, -1, 0, 0)]
)
def test_neighbours_have_nothing_in_common(offset: tuple[int, int, int, int]) -> None:
    """Seeds, sequences of a batch, tokens and features that differ by one are dropped independently of each other."""
    by_seed = [
        sp.dropout(torch.ones(8, 256, 64), 0.5, seed=seed, positions=range(256)) == 0
        for seed in range(8)
    ]
    dropped = torch.stack(by_seed).double() - 0.5
    shifted = dropped.roll(offset, dims=(0, 1, 2, 3))
    assert abs((dropped * shifted).mean() * 4) < 5 / dropped.numel() ** 0.5


@draw(number=st.integers(0, 2**64 - 1))
def test_the_hash_is_that_of_the_source(number: int) -> None:
    """In Python's integers, which do not wrap around by themselves."""
    z = number
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
    z ^= z >> 31
    signed = torch.tensor(number - 2**64 if number >= 2**63 else number)
    assert _mixed(signed).item() % 2**64 == z


def test_gradients_are_dropped_alike() -> None:
    x = torch.randn(2, 9, 5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: sp.dropout(x, 0.3, seed=5, positions=range(9)), (x,))
    assert torch.autograd.gradgradcheck(
        lambda x: sp.dropout(x, 0.3, seed=5, positions=range(9)).square(), (x,)
    )


def test_evaluation_drops_nothing() -> None:
    x = torch.randn(1, 4, 3)
    assert sp.dropout(x, 0.5, seed=1, positions=range(4), training=False) is x


@pytest.mark.parametrize(
    ("error", "text", "arguments"),
    [
        (ValueError, "p=1.0", {"p": 1.0}),
        (ValueError, "seed=-1", {"seed": -1}),
        (sp.ShapeError, "3 positions", {"positions": range(3)}),
        (sp.ShapeError, "4 positions", {"x": torch.ones(3, 4)}),
        (sp.ShapeError, "2 features", {"features": range(2)}),
        (sp.DtypeError, "int64", {"x": torch.ones(1, 4, 3, dtype=torch.int64)}),
    ],
)
def test_what_makes_no_sense_is_refused(
    error: type[Exception], text: str, arguments: dict[str, Any]
) -> None:
    given: dict[str, Any] = {
        "x": torch.ones(1, 4, 3),
        "p": 0.5,
        "seed": 1,
        "positions": range(4),
        **arguments,
    }
    with pytest.raises(error, match=text):
        sp.dropout(given.pop("x"), given.pop("p"), **given)


@pytest.mark.parametrize("name", sorted(SCHEMES))
@spmd()
def test_a_block_drops_the_same_for_any_number_of_ranks(comm: Any, name: str) -> None:
    sharding = sp.Sharding.zigzag(11, comm.size)
    whole = torch.randn(2, 11, 16, generator=torch.Generator().manual_seed(3), dtype=torch.float64)

    def run(group: sp.Communicator, of: sp.Sharding) -> torch.Tensor:
        block = sp.TransformerBlock(
            16,
            4,
            ffn_hidden=24,
            attention=SCHEMES[name],
            comm=group,
            dropout=0.5,
            dtype=torch.float64,
            device=group.device,
        )
        generator = torch.Generator().manual_seed(
            7
        )  # torch's own is shared by ranks that are threads
        for parameter in block.parameters():
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator))
        x = of.shard(whole, group.rank, 1).to(group.device)
        out: torch.Tensor = block(x, sharding=of, seed=42)
        again: Any = checkpoint(lambda x: block(x, sharding=of, seed=42), x, use_reentrant=False)
        assert torch.equal(out, again)
        assert not torch.equal(out, block(x, sharding=of, seed=43)) or out.numel() == 0
        assert not torch.equal(out, block.eval()(x, sharding=of)) or out.numel() == 0
        return out

    with sp.Mesh(comm, device=device(), one=1, all=comm.size) as mesh:
        alone = run(mesh["one"], sp.Sharding.contiguous(11, 1))
        torch.testing.assert_close(run(mesh["all"], sharding), sharding.shard(alone, comm.rank, 1))


@spmd()
def test_a_seed_that_one_rank_lacks_is_told_by_all(comm: Any) -> None:
    with sp.Mesh(comm, device=device(), sp=comm.size) as mesh:
        block = sp.TransformerBlock(16, 4, comm=mesh["sp"], dropout=0.1, device=mesh.device)
        sharding = sp.Sharding.contiguous(comm.size, comm.size)
        x = torch.ones(1, 1, 16, device=mesh.device)
        with pytest.raises(ValueError, match="without seed="):
            block(x, sharding=sharding, seed=None if comm.rank == comm.size - 1 else 3)
        if comm.size > 1:
            with pytest.raises(sp.CollectiveMismatch):
                block(x, sharding=sharding, seed=comm.rank)
        assert block(x, sharding=sharding, seed=3).shape == x.shape
