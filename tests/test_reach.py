"""Test which ranks see which blocks, and how far a block travels, by the mask's definition."""

from collections.abc import Callable
from functools import partial
from itertools import product
from random import Random
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from oracle.strategies import SHARDINGS, masks

from sp_core import Mask, Sharding
from sp_core.mask.blocks import cut
from sp_core.mask.definition import FAR64
from sp_core.schemes.reach import (
    _longest_step,
    _Owners,
    hops,
    next_owner_distances,
    seen_blocks,
    shown_keys,
)

pytestmark = pytest.mark.mpi_skip


@st.composite
def shardings(draw: st.DrawFn, length: int, size: int) -> Sharding:
    """Draw any layout, or groups of shards of more ranks, as after Ulysses has exchanged heads."""
    inner = draw(st.sampled_from([1, 1, 2, 3]))
    layout = SHARDINGS[draw(st.sampled_from(sorted(SHARDINGS)))]
    whole = layout(length, size * inner, draw(st.sampled_from([0, 0, 5])))
    order = draw(st.permutations(range(size * inner)))
    return whole.group([order[inner * rank :][:inner] for rank in range(size)])


@st.composite
def cases(draw: st.DrawFn) -> tuple[Sharding, Sharding, Mask]:
    size = draw(st.integers(1, 9))
    queries = draw(shardings(draw(st.integers(0, 40)), size))
    keys = draw(st.just(queries) | shardings(draw(st.integers(0, 40)), size))
    return queries, keys, draw(masks(queries.end, keys.end))


Blocks = list[tuple[torch.Tensor, ...]]
"""For each rank and block, which of the rank's queries see which of the block's keys."""


def check_shown(queries: Sharding, keys: Sharding, mask: Mask, blocks: Blocks) -> None:
    """Compare the keys that are sent with those that other ranks see.

    Of a run of keys in a document, those from the first to the last such key are sent. If a
    sharding has stripes, the whole block is sent.
    """
    shown, has_stripes = shown_keys(queries, keys, mask), bool(_Owners(queries).period)
    has_stripes |= any(len(s) > 1 < s.step for x in (queries, keys) for s in x.gathered_segments)
    for rank, length in enumerate(keys.lengths):
        wanted, begin = torch.zeros(length, dtype=torch.bool), 0
        others = [row[rank].any(0) for other, row in enumerate(blocks) if other != rank]
        seen = torch.stack([wanted, *others]).any(0)
        sent = torch.arange(length)[shown.of(rank)]
        pieces = cut(tuple(s for s in keys.segments[rank] if len(s)), mask.key_documents)
        for stop in [length] if has_stripes else [piece.indices.stop for piece in pieces]:
            places = begin + seen[begin:stop].nonzero()[:, 0]
            if len(places):
                wanted[slice(begin, stop) if has_stripes else slice(places[0], places[-1] + 1)] = (
                    True
                )
            begin = stop
        assert sent.tolist() == wanted.nonzero()[:, 0].tolist(), (queries, keys, mask, rank)
        assert shown.lengths[rank] == len(sent)


def check(queries: Sharding, keys: Sharding, mask: Mask) -> None:
    """Compare seen blocks, sent keys, and how far blocks and labels of next tokens travel."""
    ranks = range(queries.size)
    q, k = (torch.cat([owned.positions(rank) for rank in ranks]) for owned in (queries, keys))
    rows = mask.allowed(q, k).split(list(queries.lengths))
    blocks = [row.split(list(keys.lengths), 1) for row in rows]
    seen = [[bool(block.any()) for block in row] for row in blocks]
    assert [[*seen_blocks(queries, keys, mask, rank)] for rank in ranks] == seen
    expected = [
        max((s for s in ranks if seen[(block + s) % len(seen)][block]), default=0)
        for block in ranks
    ]
    assert [*hops(queries, keys, mask)] == expected, (queries, keys, mask)
    check_shown(queries, keys, mask, blocks)
    owner = dict(zip(q.tolist(), np.repeat(ranks, queries.lengths).tolist(), strict=True))
    ways = {(owner[p + 1] - owner[p]) % len(seen) for p in owner if p + 1 in owner}
    assert [*next_owner_distances(queries)] == sorted(ways - {0})


@given(cases())
def test_a_block_travels_to_the_last_rank_that_sees_it(
    case: tuple[Sharding, Sharding, Mask],
) -> None:
    check(*case)


def test_blocks_of_hundreds_of_ranks_travel_as_far_as_they_are_seen() -> None:
    made = Sharding.contiguous(600, 600)
    assert hops(made, made, Mask(causal=True)) == (*range(599, -1, -1),)


@pytest.mark.parametrize(
    "told", [hops, partial(seen_blocks, rank=0), lambda *given: shown_keys(*given).lengths]
)
def test_a_sharding_that_is_gone_says_nothing_about_a_later_one(told: Callable[..., Any]) -> None:
    """The later one may lie at the same address."""
    for size in (2, 3, 4) * 2:
        made = Sharding.contiguous(12, size)
        assert len(told(made, made, Mask(causal=True))) == size
        del made


def test_positions_that_are_far_apart_see_each_other() -> None:
    made = Sharding.from_positions([[0, 1], [2**40], [2**61]])
    for mask in (Mask(causal=True), Mask(window=2**50)):
        check(made, made, mask)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_documents_over_stripes_are_seen_as_others(size: int) -> None:
    """Stripes have code of their own. Documents are short, over three turns long, or both."""
    listed = [
        [[*range(rank, 17, size)] for rank in range(size)],
        [[*range(rank + 1, 23, size)][1:] for rank in reversed(range(size))],
        [[rank, size + rank] for rank in range(size)],
        [[rank, size + rank, 60 + rank] for rank in range(size)],
        [[*range(0, 17, 2)], [*range(3, 17, 4), *range(1, 17, 4)], *[[]] * (size - 2)],
        [*[[]] * (size - 2), [0], [*range(1, 17)]],
        [*[[]] * (size - 2), [0, 2, 4], [3, 5, 7]],  # equal steps, but not every position
    ]
    cuts: list[tuple[int, ...]] = [(), (1,), (5,), (22,), (1, 2, 4, 9), (1, size + 1, size + 2)]
    cuts += [*(tuple(range(by, 17, by)) for by in (1, 2, 3)), tuple(range(size + 2, 23))]
    turned = [[0], *([rank] for rank in range(size - 2, 0, -1)), [size - 1]]
    stripes = [Sharding.striped(size, size).group(turned), *map(Sharding.from_positions, listed)]
    for sharding, inner, moved in product(stripes, cuts, (0, 1)):
        end = sharding.end
        keys = Sharding.from_positions([[*range(end - 1)], *[[]] * (size - 2), [end - 1]])
        bounds = [(0, *(min(p + by, end) for p in inner), end) for by in (0, moved)]
        for causal, window in product((False, True), (None, 2)):
            mask = Mask(causal, window, *(bounds if inner else ()))
            check(sharding, sharding, mask)
            if not moved:
                check(sharding, keys, mask)


def test_long_steps_are_longer_than_the_window_or_the_mean_document() -> None:
    masks = [Mask(), Mask(True, 5), Mask(window=5), Mask(window=9, documents=(0, 7, 7, 32))]
    assert [_longest_step(mask) for mask in masks] == [FAR64, 5, 9, 8]


@pytest.mark.parametrize("documents", [0, 10_000])
@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "striped"])
def test_the_work_grows_with_runs_and_not_with_pairs_of_ranks(layout: str, documents: int) -> None:
    """For a million tokens on 1024 ranks, a loop over pairs of ranks or documents takes minutes."""
    length = 1 << 20
    cuts = sorted(Random(0).sample(range(length), documents))
    sharding = SHARDINGS[layout](length, 1024, 5)
    mask = Mask(causal=True, documents=(0, *cuts, sharding.end) if cuts else None)
    assert len(_Owners(sharding).owner) <= 2 * 1024
    with patch.object(_Owners, "between", autospec=True, side_effect=_Owners.between) as between:
        assert len(hops(sharding, sharding, mask)) == 1024
        assert seen_blocks(sharding, sharding, mask, 0)[0]
    assert all(len(call.args[1]) <= 16 * 1024 for call in between.call_args_list)
