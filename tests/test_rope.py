"""Laws of the rotary embedding: positions alone decide, and scores depend on their difference."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from sp_core.errors import DtypeError, ShapeError
from sp_core.nn.rope import Rope

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def test_position_zero_is_the_identity_and_dims_turn_in_halves() -> None:
    x = torch.randn(1, 1, 1, 4)
    assert torch.equal(Rope(4).apply(x, [0]), x)
    unit = torch.tensor([1.0, 0.0, 0.0, 0.0]).view(1, 1, 1, 4)
    turned = Rope(4).apply(unit, [1]).flatten()
    torch.testing.assert_close(turned, torch.tensor([math.cos(1), 0.0, math.sin(1), 0.0]))


def test_llama3_scaling_is_the_published_case_analysis() -> None:
    """By wave length: short ones stay, long ones are divided, the ones between are blended."""
    frequencies = Rope(128, 500000.0, LLAMA3)._frequencies.tolist()
    kinds = set()
    for i, got in enumerate(frequencies):
        plain = 500000.0 ** (-2 * i / 128)
        wave_length = 2 * math.pi / plain
        smooth = (8192 / wave_length - 1.0) / (4.0 - 1.0)
        kind = (
            "short" if wave_length < 8192 / 4 else "long" if wave_length > 8192 / 1 else "between"
        )
        expected = {
            "short": plain,
            "long": plain / 8,
            "between": (1 - smooth) * plain / 8 + smooth * plain,
        }[kind]
        assert got == pytest.approx(expected, rel=1e-13)
        kinds.add(kind)
    assert kinds == {"short", "long", "between"}


@pytest.mark.parametrize(("head_dim", "error"), [(3, ShapeError), (0, ShapeError)])
def test_an_odd_head_dim_is_refused(head_dim: int, error: type[Exception]) -> None:
    with pytest.raises(error, match="even"):
        Rope(head_dim)


@pytest.mark.parametrize(
    "scaling", [{"rope_type": "yarn", "factor": 2.0}, {"rope_type": "linear"}, {"factor": 2.0}]
)
def test_a_scaling_that_is_not_understood_is_refused(scaling: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="rope_type"):
        Rope(4, scaling=scaling)
    with pytest.raises(ValueError, match="base"):
        Rope(4, base=0.0)


def test_tensors_that_do_not_fit_are_refused() -> None:
    for x in (torch.randn(1, 3, 2, 6), torch.randn(1, 4, 2, 4), torch.randn(3, 2, 4)):
        with pytest.raises(ShapeError, match="needed"):
            Rope(4).apply(x, range(3))
    with pytest.raises(DtypeError, match="floating"):
        Rope(4).apply(torch.ones(1, 3, 2, 4, dtype=torch.int64), range(3))
