"""Test the rotary embedding: frequencies and amplitudes of every scaling are the oracle's."""

import math
from typing import Any

import pytest
import torch
from domains.numeric import SCALINGS, YARN
from oracle import reference

import sp_core as sp

MORE = {
    "yarn, the usual turns": YARN | {"original_max_position_embeddings": 32768, "factor": 40.0},
    "yarn, one weight": YARN | {"mscale": 0.7},
    "yarn, not rounded because of a null": YARN | {"truncate": None},
    "yarn, shorter": YARN | {"factor": 0.25},
    "yarn, no pair between": YARN | {"original_max_position_embeddings": 7},
    "yarn, the first pair": YARN | {"original_max_position_embeddings": 2 * math.pi},
}
TABLE = {name: x for name, x in SCALINGS.items() if x and "rope_type" in x and len(x) > 1} | MORE


@pytest.mark.parametrize("base", [1e4, 5e5])
@pytest.mark.parametrize("head_dim", [2, 6, 64, 128, 256])
@pytest.mark.parametrize("name", sorted(TABLE))
def test_the_frequencies_and_the_length_are_those_of_the_scaling(
    name: str, head_dim: int, base: float
) -> None:
    scaling: dict[str, Any] = TABLE[name]
    made = sp.Rope(head_dim, base, scaling)
    wanted = reference.llama_frequencies(head_dim, base, scaling)
    torch.testing.assert_close(
        made.frequencies, torch.tensor(wanted, dtype=torch.float64), rtol=1e-12, atol=0
    )
    assert made.amplitude == pytest.approx(reference.llama_amplitude(scaling), rel=1e-14)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_types_are_rotated_in_float32(dtype: torch.dtype) -> None:
    x, rope = torch.randn(1, 9, 2, 8, generator=torch.Generator().manual_seed(0)), sp.Rope(8)
    wanted = rope.apply(x.to(dtype).float(), range(9)).to(dtype)
    assert torch.equal(rope.apply(x.to(dtype), range(9)), wanted)
