"""Laws of the rotary embedding: positions alone decide, and scores depend on their difference."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import reference

from sp_core.errors import DtypeError, ShapeError
from sp_core.nn.rope import Rope

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
SCALINGS = (None, {"rope_type": "linear", "factor": 4.0}, LLAMA3)


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Random numbers of a test that has no seed of its own."""
    torch.manual_seed(0)


@settings(deadline=None)
@given(
    order=st.permutations(range(13)),
    cut=st.integers(0, 13),
    start=st.integers(0, 10**6),
    scaling=st.sampled_from(SCALINGS),
    dtype=st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.float16]),
)
def test_sharding_and_rotating_commute(
    order: list[int], cut: int, start: int, scaling: dict[str, Any] | None, dtype: torch.dtype
) -> None:
    """For any shard: two calls of one length at different offsets must not share anything either."""
    x = torch.randn((2, 13, 3, 6), generator=torch.Generator().manual_seed(0)).to(dtype)
    rope = Rope(6, scaling=scaling)
    whole = rope.apply(x, range(start, start + 13))
    assert whole.dtype == dtype
    for part in (order[:cut], order[cut:]):
        positions = [start + i for i in part]
        assert torch.equal(rope.apply(x[:, part], positions), whole[:, part])
        assert torch.equal(
            rope.apply(x[:, part], torch.tensor(positions, dtype=torch.int64)), whole[:, part]
        )


@settings(deadline=None)
@given(
    a=st.integers(0, 5000),
    b=st.integers(0, 5000),
    shift=st.integers(0, 5000),
    scaling=st.sampled_from(SCALINGS),
)
def test_scores_depend_on_the_difference_of_positions(
    a: int, b: int, shift: int, scaling: dict[str, Any] | None
) -> None:
    rope = Rope(8, scaling=scaling)
    q, k = torch.randn(
        (2, 1, 1, 1, 8), generator=torch.Generator().manual_seed(0), dtype=torch.float64
    )
    here = (rope.apply(q, [a]) * rope.apply(k, [b])).sum()
    there = (rope.apply(q, [a + shift]) * rope.apply(k, [b + shift])).sum()
    torch.testing.assert_close(here, there, rtol=0, atol=1e-10)


@pytest.mark.parametrize("base", [10000.0, 500000.0])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_rope_is_the_reference(base: float, dtype: torch.dtype) -> None:
    """All sizes differ, so that no dim is taken for another; positions far out, where a float32 angle would be off by 0.06."""
    x = torch.randn(2, 5, 3, 14).to(dtype)
    positions = [0, 1, 4097, 999_999, 7]
    error = (
        (
            Rope(14, base).apply(x, positions).double()
            - reference.rotate(x.double(), positions, base)
        )
        .abs()
        .max()
    )
    assert error < 20 * torch.finfo(dtype).eps if dtype == torch.float32 else error < 1e-9


def test_position_zero_is_the_identity_and_dims_turn_in_halves() -> None:
    x = torch.randn(1, 1, 1, 4)
    assert torch.equal(Rope(4).apply(x, [0]), x)
    unit = torch.tensor([1.0, 0.0, 0.0, 0.0]).view(1, 1, 1, 4)
    turned = Rope(4).apply(unit, [1]).flatten()
    torch.testing.assert_close(turned, torch.tensor([math.cos(1), 0.0, math.sin(1), 0.0]))


def test_linear_scaling_divides_positions() -> None:
    x = torch.randn(1, 3, 1, 8, dtype=torch.float64)
    scaled = Rope(8, scaling={"type": "linear", "factor": 4.0}).apply(x, [0, 4, 400])
    torch.testing.assert_close(scaled, Rope(8).apply(x, [0, 1, 100]), rtol=0, atol=1e-12)
    assert torch.equal(
        Rope(8, scaling={"rope_type": "default"}).apply(x, [1, 2, 3]), Rope(8).apply(x, [1, 2, 3])
    )


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


def test_the_gradient_turns_back() -> None:
    x = torch.randn(1, 4, 2, 6, dtype=torch.float64, requires_grad=True)
    positions = [3, 1, 900, 2]
    assert torch.autograd.gradcheck(lambda t: Rope(6).apply(t, positions), x)


def test_no_tokens_and_no_heads() -> None:
    assert Rope(4).apply(torch.randn(2, 0, 3, 4), []).shape == (2, 0, 3, 4)
    assert Rope(4).apply(torch.randn(2, 2, 0, 4), [5, 6]).shape == (2, 2, 0, 4)


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
