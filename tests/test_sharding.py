"""Laws of ownership: every token has one owner, and shard and unshard are inverses."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sp_core.errors import ShapeError
from sp_core.sharding import Sharding, split_sizes

LAYOUTS = {
    "contiguous": Sharding.contiguous,
    "zigzag": Sharding.zigzag,
    "striped": Sharding.striped,
}


@st.composite
def shardings(draw: st.DrawFn, max_len: int = 70) -> Sharding:
    """Any layout, any length from 0, any size from 1, any start; or a random deal of random tokens."""
    size = draw(st.integers(1, 9))
    if draw(st.booleans()):
        layout = draw(st.sampled_from(sorted(LAYOUTS)))
        return LAYOUTS[layout](
            draw(st.integers(0, max_len)), size, draw(st.sampled_from([0, 0, 1, 17]))
        )
    tokens = draw(st.lists(st.integers(0, max_len), unique=True))
    owners = draw(st.lists(st.integers(0, size - 1), min_size=len(tokens), max_size=len(tokens)))
    return Sharding.from_positions(
        [[t for t, o in zip(tokens, owners, strict=True) if o == r] for r in range(size)]
    )


@given(shardings())
def test_every_token_has_exactly_one_owner(sharding: Sharding) -> None:
    owned = [
        position for rank in range(sharding.size) for position in sharding.positions(rank).tolist()
    ]
    assert len(owned) == len(set(owned)) == sharding.seq_len
    assert sharding.lengths == tuple(len(sharding.positions(rank)) for rank in range(sharding.size))
    assert sharding.end == max(owned, default=-1) + 1


@given(shardings(), st.integers(0, 2))
def test_unshard_inverts_shard(sharding: Sharding, dim: int) -> None:
    shape = [2, 3, 2]
    shape[dim] = sharding.seq_len
    x = torch.arange(torch.Size(shape).numel()).reshape(shape)
    shards = [sharding.shard(x, rank, dim) for rank in range(sharding.size)]
    assert torch.equal(sharding.unshard(shards, dim), x)


@given(shardings())
def test_shard_takes_the_tokens_at_its_positions(sharding: Sharding) -> None:
    ascending = torch.cat([sharding.positions(rank) for rank in range(sharding.size)]).sort().values
    for rank in range(sharding.size):
        assert torch.equal(sharding.shard(ascending, rank, 0), sharding.positions(rank))


@given(st.integers(0, 70), st.integers(1, 9), st.sampled_from([0, 17]))
def test_consecutive_tokens_are_a_view(seq_len: int, size: int, start: int) -> None:
    """Not a copy: that of a long sequence is what this library exists to avoid."""
    sharding, x = Sharding.contiguous(seq_len, size, start), torch.empty(2, seq_len)
    for rank, length in enumerate(sharding.lengths):
        shard = sharding.shard(x, rank, 1)
        assert not length or shard.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()


@given(shardings())
def test_segments_are_sorted_and_brought_back(sharding: Sharding) -> None:
    gathered = torch.cat([sharding.positions(rank) for rank in range(sharding.size)])
    in_order = sharding.sort_segments(gathered, 0)
    assert torch.equal(in_order, sharding.sorted_positions)
    assert torch.equal(sharding.unsort_segments(in_order, 0), gathered)


@given(st.integers(0, 200), st.integers(1, 9))
def test_split_sizes_differ_by_one_at_most_and_the_first_are_longer(
    length: int, parts: int
) -> None:
    sizes = split_sizes(length, parts)
    assert sum(sizes) == length
    assert list(sizes) == sorted(sizes, reverse=True)
    assert max(sizes) - min(sizes) <= 1


@given(st.integers(0, 90), st.integers(1, 9), st.sampled_from(sorted(LAYOUTS)))
def test_causal_work_adds_up(seq_len: int, size: int, layout: str) -> None:
    sharding = LAYOUTS[layout](seq_len, size)
    expected = [sum(p + 1 for p in sharding.positions(rank).tolist()) for rank in range(size)]
    assert [sharding.causal_work(rank) for rank in range(size)] == expected


@given(st.integers(1, 40), st.integers(1, 9))
def test_zigzag_balances_causal_work_exactly_and_contiguous_does_not(chunk: int, size: int) -> None:
    zigzag = Sharding.zigzag(2 * size * chunk, size)
    assert len({zigzag.causal_work(rank) for rank in range(size)}) == 1
    contiguous = Sharding.contiguous(2 * size * chunk, size)
    assert len({contiguous.causal_work(rank) for rank in range(size)}) == size


def test_layouts_are_those_of_the_field() -> None:
    assert [s.tolist() for s in map(Sharding.contiguous(7, 3).positions, range(3))] == [
        [0, 1, 2],
        [3, 4],
        [5, 6],
    ]
    assert [s.tolist() for s in map(Sharding.zigzag(10, 2).positions, range(2))] == [
        [0, 1, 2, 8, 9],
        [3, 4, 5, 6, 7],
    ]
    assert [s.tolist() for s in map(Sharding.striped(7, 3).positions, range(3))] == [
        [0, 3, 6],
        [1, 4],
        [2, 5],
    ]


@given(shardings(), st.randoms(use_true_random=False))
def test_a_group_holds_what_its_ranks_held(sharding: Sharding, random: Random) -> None:
    ranks = list(range(sharding.size))
    random.shuffle(ranks)
    cut = len(ranks) // 2
    groups = [ranks[:cut], ranks[cut:]]
    grouped = sharding.group(groups)
    for number, group in enumerate(groups):
        held = [position for rank in group for position in sharding.positions(rank).tolist()]
        assert grouped.positions(number).tolist() == held


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
