"""Laws of ownership: every token has one owner, and shard and unshard are inverses."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, strategies as st

from sp_core.errors import ShapeError
from sp_core.sharding import Sharding, split_sizes

LAYOUTS = {
    "contiguous": Sharding.contiguous,
    "zigzag": Sharding.zigzag,
    "striped": Sharding.striped,
}


@given(st.integers(0, 70), st.integers(1, 9), st.sampled_from([0, 17]))
def test_consecutive_tokens_are_a_view(seq_len: int, size: int, start: int) -> None:
    """Not a copy: that of a long sequence is what this library exists to avoid."""
    sharding, x = Sharding.contiguous(seq_len, size, start), torch.empty(2, seq_len)
    for rank, length in enumerate(sharding.lengths):
        shard = sharding.shard(x, rank, 1)
        assert not length or shard.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()


@given(st.integers(0, 200), st.integers(1, 9))
def test_split_sizes_differ_by_one_at_most_and_the_first_are_longer(
    length: int, parts: int
) -> None:
    sizes = split_sizes(length, parts)
    assert sum(sizes) == length
    assert list(sizes) == sorted(sizes, reverse=True)
    assert max(sizes) - min(sizes) <= 1


@given(st.integers(1, 40), st.integers(1, 9))
def test_zigzag_balances_causal_work_exactly_and_contiguous_does_not(chunk: int, size: int) -> None:
    zigzag = Sharding.zigzag(2 * size * chunk, size)
    assert len({zigzag.causal_work(rank) for rank in range(size)}) == 1
    contiguous = Sharding.contiguous(2 * size * chunk, size)
    assert len({contiguous.causal_work(rank) for rank in range(size)}) == size


def test_fingerprints_tell_shardings_apart() -> None:
    different = [layout(24, 3) for layout in LAYOUTS.values()] + [
        Sharding.contiguous(25, 3),
        Sharding.contiguous(24, 3, 1),
    ]
    assert len({sharding.fingerprint for sharding in different}) == len(different)
    assert Sharding.zigzag(24, 3).fingerprint == Sharding.zigzag(24, 3).fingerprint


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: Sharding.contiguous(-1, 2),
        lambda: Sharding.zigzag(4, 0),
        lambda: Sharding.striped(4, 2, -1),
        lambda: Sharding.from_positions([]),
        lambda: Sharding.from_positions([[0, 1], [1]]),
        lambda: Sharding.from_positions([[-1]]),
        lambda: Sharding.contiguous(4, 2).shard(torch.zeros(5), 0, 0),
        lambda: Sharding.contiguous(4, 2).unshard([torch.zeros(1), torch.zeros(3)], 0),
        lambda: Sharding.contiguous(4, 2).group([[0], [0, 1]]),
    ],
)
def test_bad_input_is_a_shape_error(wrong: Callable[[], object]) -> None:
    with pytest.raises(ShapeError):
        wrong()
