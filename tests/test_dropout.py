"""Neighbours drop independently, and what makes no sense is refused."""

from __future__ import annotations

import pytest
import torch

import sp_core as sp


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
