"""Neighbours drop independently, and what makes no sense is refused."""

from __future__ import annotations

from typing import Any

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
