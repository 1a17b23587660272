"""Dropout: as many elements as asked for, and nothing that two places have in common."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import sp_core as sp
from sp_core.testing import device, spmd


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
    """Seeds, sequences, tokens and features that differ by one are dropped independently."""
    by_seed = [
        sp.dropout(torch.ones(8, 256, 64), 0.5, seed=seed, positions=range(256)) == 0
        for seed in range(8)
    ]
    dropped = torch.stack(by_seed).double() - 0.5
    shifted = dropped.roll(offset, dims=(0, 1, 2, 3))
    assert abs((dropped * shifted).mean() * 4) < 5 / dropped.numel() ** 0.5


def test_gradients_are_dropped_alike() -> None:
    x = torch.randn(2, 9, 5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: sp.dropout(x, 0.3, seed=5, positions=range(9)), (x,))
    assert torch.autograd.gradgradcheck(
        lambda x: sp.dropout(x, 0.3, seed=5, positions=range(9)).square(), (x,)
    )


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
