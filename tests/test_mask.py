"""Test laws of the mask.

The blocks of a plan hold exactly the pairs that the mask's definition allows, each pair once.
"""

import math
from collections.abc import Sequence
from itertools import chain
from time import process_time
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings, strategies as st
from oracle import strategies
from oracle.strategies import DRAWN
from torch import Tensor

from sp_core.mask import Block, Mask, blocks as plans, plan_blocks
from sp_core.mask.blocks import runs
from sp_core.mask.definition import count_visible, position_tensor
from sp_core.segments import Joined
from sp_core.sharding import Sharding

SCRAMBLED = [17 * n % 41 for n in range(41)]
"""The positions 0 to 40 in an order without long runs."""
SPREAD = [*range(4), *range(12, 21)]


@st.composite
def masks(draw: st.DrawFn, length: int, kv_length: int) -> Mask:
    """Draw any mask for sequences of these lengths.

    Empty documents at the beginning give the other documents large numbers.
    """
    mask, empty = draw(strategies.masks(length, kv_length)), draw(st.sampled_from((0, 64, 300)))
    both = (mask.documents, mask.kv_documents)
    return Mask(mask.causal, mask.window, *(ends and ((0,) * empty + ends) for ends in both))


@st.composite
def shards(draw: st.DrawFn, length: int) -> list[int]:
    """Draw the positions of one rank or of all ranks in any layout, any permutation, or none."""
    layout = draw(st.sampled_from(["any", "nothing", *sorted(DRAWN)]))
    if layout == "any":
        return draw(st.permutations(range(length)))
    if layout == "nothing":
        return []
    sharding = DRAWN[layout](length, draw(st.integers(1, 4)))
    ranks = range(sharding.size)
    chosen = draw(st.sampled_from([*[[rank] for rank in ranks], ranks]))
    return [position for rank in chosen for position in sharding.positions(rank).tolist()]


@st.composite
def problems(draw: st.DrawFn) -> tuple[list[int], list[int], Mask]:
    """Draw query positions, key positions and a mask."""
    length = draw(st.integers(0, 40))
    kv_length = draw(st.just(length) | st.integers(0, 40))
    return draw(shards(length)), draw(shards(kv_length)), draw(masks(length, kv_length))


@st.composite
def regular_problems(draw: st.DrawFn) -> tuple[list[int], list[int], Mask]:
    """Draw queries and keys, each at a regular distance, and a mask without documents."""
    begin, end, step = st.integers(-40, 12), st.integers(13, 60), st.integers(1, 6)
    q, kv = (list(range(draw(begin), draw(end), draw(step))) for _ in range(2))
    return q, kv, Mask(draw(st.booleans()), draw(st.none() | st.integers(1, 70)))


@given(st.data(), st.integers(0, 40), st.integers(0, 40), st.integers(0, 9))
def test_the_count_of_visible_keys_is_the_definition(
    data: st.DataObject, length: int, kv_length: int, start: int
) -> None:
    mask = data.draw(masks(length, kv_length))
    queries, keys = range(min(start, length), length), range(min(start, kv_length), kv_length)
    expected = mask.allowed(queries, keys).sum(1).tolist()
    assert count_visible(mask, queries, keys).tolist() == expected


def visible_in(
    block: Block, mask: Mask, q_positions: Sequence[int], kv_positions: Sequence[int]
) -> Tensor:
    """Return the pairs of a block that a kernel computes, by the definition of the block's kind."""
    rows, columns = block.shape
    if block.kind == "full":
        return torch.ones(rows, columns, dtype=torch.bool)
    if block.kind == "causal":
        assert rows == columns, "kernels disagree on causal blocks that are not square"
        return torch.arange(columns)[None, :] <= torch.arange(rows)[:, None]
    if block.band is not None:
        return plans.band_mask(rows, columns, *block.band)
    return mask.allowed(list(q_positions)[block.queries], list(kv_positions)[block.keys])


def pairs_in(blocks: Sequence[Block], mask: Mask, tokens: Sequence[int]) -> int:
    """Return how many pairs kernels compute for blocks whose queries and keys are `tokens`."""
    return sum(int(visible_in(block, mask, tokens, tokens).sum()) for block in blocks)


def coverage(
    blocks: Sequence[Block], mask: Mask, q_positions: Sequence[int], kv_positions: Sequence[int]
) -> Tensor:
    """Count for each pair of a query and a key how many blocks of a plan hold it."""
    count = torch.zeros(len(q_positions), len(kv_positions), dtype=torch.int64)
    for block in blocks:
        visible = visible_in(block, mask, q_positions, kv_positions)
        assert visible.any()
        assert block.band is None or (visible.any(0).all() and visible.any(1).all())
        count[block.queries, block.keys] += visible
    return count


@settings(deadline=None)
@given(
    problem=problems() | regular_problems(),
    tile=st.sampled_from([(1, 3), (2, 8), plans.TILE]),
    chunk=st.sampled_from([3, 16, plans.CHUNK]),
)
@example(problem=([0, 3, 6, 9], [1, 4, 7], Mask(window=1)), tile=plans.TILE, chunk=plans.CHUNK)
@example(problem=([], SCRAMBLED, Mask(True)), tile=plans.TILE, chunk=plans.CHUNK)
@example(problem=(SCRAMBLED, [], Mask(True)), tile=plans.TILE, chunk=plans.CHUNK)
@example(problem=(SPREAD[4:], SPREAD, Mask(True, 3)), tile=(2, 8), chunk=plans.CHUNK)
@example(problem=(SPREAD, SPREAD[4:], Mask(window=3)), tile=(2, 8), chunk=plans.CHUNK)
@example(problem=(SCRAMBLED, SCRAMBLED, Mask(documents=(0, 20, 41))), tile=plans.TILE, chunk=3)
@example(problem=([*range(-40, 0, 3)], [*range(-40, 0, 2)], Mask(True)), tile=plans.TILE, chunk=3)
@example(
    problem=(list(range(0, 40, 3)), list(range(1, 40, 2)), Mask(True, 7)), tile=plans.TILE, chunk=3
)
@example(problem=([10, 12, 14, 16], [0, 3, 6, 9], Mask(True, 2)), tile=plans.TILE, chunk=3)
@example(problem=([0, 2, 4, 6], [6, 9, 12, 15], Mask(True)), tile=plans.TILE, chunk=3)
@example(problem=([3, 7, 11, 15], [0, 4, 8, 12], Mask(True, 2)), tile=plans.TILE, chunk=3)
@example(problem=([8, 9], [0, 4, 8, 1, 5, 9, 2, 6, 3, 7], Mask(True, 2)), tile=plans.TILE, chunk=3)
def test_blocks_hold_each_visible_pair_once(
    problem: tuple[list[int], list[int], Mask], tile: tuple[int, int], chunk: int
) -> None:
    q, kv, mask = problem
    aligned = plans.ALIGNED if tile == plans.TILE else 1
    sizes: Any = {"TILE": tile, "CHUNK": chunk, "ALIGNED": aligned}
    with patch.multiple(plans, **sizes):
        # the cut sizes are constants of the program, so they are not part of the cache's key
        plans._plan.cache_clear()
        blocks = plan_blocks(q, kv, mask)
    plans._plan.cache_clear()
    assert torch.equal(coverage(blocks, mask, q, kv), mask.allowed(q, kv).long())
    assert list(blocks) == sorted(blocks)


@settings(deadline=None)
@given(
    positions=st.lists(st.integers(-3, 30), max_size=30)
    | problems().map(lambda problem: problem[0])
    | st.builds(range, st.integers(0, 9), st.integers(0, 30), st.integers(-9, 9).filter(bool)),
    first=st.integers(0, 9),
    stop=st.integers(0, 30),
)
def test_runs_are_the_positions_in_order_whatever_their_container(
    positions: Sequence[int], first: int, stop: int
) -> None:
    cut = runs(positions)
    assert [*chain(*cut)] == [*positions]
    assert all(run.step >= 1 and run for run in cut)
    # they are keys of caches, so they must be equal
    assert cut == runs(torch.tensor(positions, dtype=torch.int32)) == runs(tuple(positions))
    part = Joined(tuple(cut), range(len(positions)))[first:][: max(stop - first, 0)]
    assert len(part) == len(position_tensor(part))
    assert position_tensor(part).tolist() == [*positions][first:stop]
    assert runs(part) == runs([*positions][first:stop])


@pytest.mark.parametrize(
    ("positions", "expected"),
    [
        (range(5, 9), [range(5, 9)]),
        (range(2, 20, 4), [range(2, 20, 4)]),
        (range(3), [range(3)]),
        (range(3, 3), []),
        (range(3, 1, -1), [range(3, 4), range(2, 3)]),
        ([0, 1, 2, 9, 10, 11], [range(3), range(9, 12)]),  # zigzag
        ([0, 9, 10, 11], [range(1), range(9, 12)]),  # a lone position does not cut the next run
        ([0, 1, 4, 9, 10, 11], [range(2), range(4, 5), range(9, 12)]),
        ([4, 4], [range(4, 5), range(4, 5)]),
        ([0, 5, 5, 5], [range(0, 6, 5), range(5, 6), range(5, 6)]),
        ([0, 1, 2, 9, 20, 21, 22], [range(3), range(9, 10), range(20, 23)]),
    ],
)
def test_runs_are_maximal(positions: Sequence[int], expected: list[range]) -> None:
    assert runs(positions) == expected


@pytest.mark.parametrize(
    "layout", [range(4096), range(3, 4096, 4), [*range(512), *range(3584, 4096)]]
)
def test_causal_shards_need_no_dense_mask(layout: Sequence[int]) -> None:
    assert {block.kind for block in plan_blocks(layout, layout, Mask(causal=True))} <= {
        "full",
        "causal",
    }


def test_whole_numbers_of_any_type_make_one_mask() -> None:
    """Ranks agree on a mask by its text, so equal masks, and only these, must have equal texts."""
    tensor, array = torch.tensor([0, 3, 8]), np.array([0, 3, 8])
    mask, same = Mask(True, np.int64(3), tensor, array), Mask(True, 3, (0, 3, 8), (0, 3, 8))  # type: ignore[arg-type]
    assert (mask, repr(mask)) == (same, repr(same))
    ends = [(*range(place), *range(place + 1, 999)) for place in (1, 500, 997)]
    assert (
        len({repr(Mask(documents=one, kv_documents=other)) for one in ends for other in ends}) == 9
    )


def test_the_hash_of_a_mask_is_computed_once_in_each_process() -> None:
    """Caches look up masks in every step of a ring. A mask may have many documents."""
    mask = Mask(documents=tuple(range(10**5)))
    hash(mask)
    start = process_time()
    assert len({hash(mask) for _ in range(1000)}) == 1
    assert process_time() - start < 0.05  # with the documents it takes ten times as long


def test_positions_of_small_dtypes_are_subtracted_in_int64() -> None:
    for dtype, positions in ((torch.uint8, [0, 1, 255]), (torch.int8, [-100, 0, 100])):
        places = torch.tensor(positions, dtype=dtype)
        assert torch.equal(Mask(True).allowed(places, places), torch.ones(3, 3).tril().bool())


def test_positions_and_windows_are_exact_up_to_2_to_the_62() -> None:
    far = 2**62
    made = Sharding.contiguous(2, 2, start=far - 2)
    assert made == Sharding.from_positions([[far - 2], [far - 1]])
    for window, sees in ((far - 1, False), (far, True), (far + 1, True), (2**64, True)):
        assert Mask(True, window).allowed([far - 1], [0]).item() is sees
        assert Mask(False, window).allowed([0], [far - 1]).item() is sees
    assert Mask().allowed([far - 1], [1 - far]).item()
    assert Mask().allowed(range(far - 1, far), range(1 - far, -far, -1)).item()
    assert Mask(documents=(0, 1, far)).allowed([0, 1], [far - 1]).tolist() == [[False], [True]]
    for q, kv in ((far - 1, 1 - far), (1 - far, far - 1)):
        assert plan_blocks(range(q, q + 1), range(kv, kv + 1)) == (Block(0, 1, 0, 1, "full"),)


GATHERED = [p for r in range(4) for p in (*range(8 * r, 8 * r + 8), *range(56 - 8 * r, 64 - 8 * r))]
"""The positions of four zigzag shards, one rank after the other."""


@pytest.mark.parametrize(
    ("q", "kv", "causal", "block"),
    [
        (GATHERED, GATHERED, False, (0, 64, 0, 64, "full")),
        (range(9), range(9), True, (0, 9, 0, 9, "causal")),
        (range(5), range(5, 9), True, None),
        ([7], range(0, 40, 4), True, (0, 1, 0, 2, "full")),
        (range(0, 40, 4), [7], True, (2, 10, 0, 1, "full")),
        (range(4, 8), range(5), True, (0, 4, 0, 5, "full")),
    ],
)
def test_one_block_is_enough_where_one_is(
    q: Sequence[int], kv: Sequence[int], causal: bool, block: tuple[Any, ...] | None
) -> None:
    assert plan_blocks(q, kv, Mask(causal)) == (() if block is None else (Block(*block),))


@pytest.mark.parametrize(
    ("window", "causal", "rows"),
    [(1, True, 48), (16, False, 50), (600, True, 89), (600, False, 162), (9000, True, 265)],
)
def test_a_window_costs_its_width_and_an_eighth_more(window: int, causal: bool, rows: int) -> None:
    """Tiles have at least 48 rows, since many small calls are slow, and a multiple of 16 keys."""
    tokens, mask = range(20_000), Mask(causal, window)
    blocks = plan_blocks(tokens, tokens, mask)
    assert pairs_in(blocks, mask, tokens) == count_visible(mask, tokens, tokens).sum()
    tiles = [block for block in blocks if block.kind == "partial"]
    assert min(tile.q_start for tile in tiles) == window
    assert max(tile.shape for tile in tiles)[0] == rows
    assert all(tile.shape[1] % 16 == 0 for tile in tiles if tile.kv_stop < len(tokens))
    hidden = sum(math.prod(tile.shape) for tile in tiles) - pairs_in(tiles, mask, tokens)
    assert hidden <= len(tokens) * rows
    assert len(tiles) <= len(tokens) // rows + 1


def test_equal_lengths_of_runs_are_not_equal_plans() -> None:
    """A cache keyed by lengths alone would return the plan of a different offset, step or mask."""
    plan_blocks(range(8), range(8), Mask(causal=True))
    for q, kv, mask in [
        (range(1, 9), range(8), Mask(causal=True)),
        (range(0, 16, 2), range(8), Mask(causal=True)),
        (range(8), range(8), Mask(causal=True, window=3)),
        (range(8), range(8), Mask(causal=True, documents=(0, 4, 8))),
        (range(8), range(8), Mask(documents=(0, 4, 8), kv_documents=(0, 5, 8))),
    ]:
        assert torch.equal(
            coverage(plan_blocks(q, kv, mask), mask, q, kv), mask.allowed(q, kv).long()
        )


@pytest.mark.parametrize(
    "mask", [Mask(True), Mask(True, 512), Mask(True, documents=tuple(range(0, 10**6 + 1, 1000)))]
)
def test_a_million_positions_are_planned_from_their_runs(mask: Mask) -> None:
    positions = torch.cat([torch.arange(250_000), torch.arange(750_000, 10**6)])
    # a loop over chunks of positions would give 15 million blocks
    assert 0 < len(plan_blocks(positions, positions, mask)) <= len(positions) // plans.TILE[0] + 2


@pytest.mark.parametrize("document", [128, 2**12])
def test_chunks_of_different_documents_are_not_compared(document: int) -> None:
    """Nor are chunks of one document."""
    length, mask = 2**12, Mask(documents=tuple(range(0, 2**12 + 1, document)))
    order = torch.arange(length).view(-1, 64, 2).flip(1).flatten()  # documents stay in order
    with patch.object(Mask, "allowed", autospec=True, side_effect=Mask.allowed) as allowed:
        blocks = plan_blocks(order, order, mask)
    assert pairs_in(blocks, mask, order.tolist()) == length * document
    assert not allowed.called


@pytest.mark.parametrize("causal", [False, True])
def test_runs_that_a_window_hides_are_not_compared(causal: bool) -> None:
    order = torch.arange(2**12).view(64, 4, 16).transpose(0, 1).flatten()  # of four ranks
    mask = Mask(causal, window=16)
    with patch.object(plans, "_pair_blocks", wraps=plans._pair_blocks) as compared:
        blocks = plan_blocks(order, order, mask)
    visible = count_visible(mask, range(2**12), range(2**12)).sum()
    assert pairs_in(blocks, mask, order.tolist()) == visible
    assert compared.call_count <= 3 * len(order) // 16


def test_positions_without_structure_stay_dense_chunks() -> None:
    positions = torch.randperm(1000, generator=torch.Generator().manual_seed(0))
    ordered, mask = torch.arange(1000), Mask(causal=True)
    for q, k, most in (
        (positions, positions[:100], 8),
        (positions, ordered, 64),
        (ordered, positions, 64),
    ):
        blocks = plan_blocks(q, k, mask)
        assert len(blocks) <= most
        assert all(max(block.shape) <= 128 for block in blocks if block.kind == "partial")
        count = coverage(blocks, mask, q.tolist(), k.tolist())
        assert torch.equal(count, mask.allowed(q, k).long())
