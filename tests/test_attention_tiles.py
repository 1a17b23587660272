"""Causal blocks in tiles.

Every visible pair once, in an order that the merging relies on, and the same attention.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from test_attention import Problem, check_problem, problems

from sp_core.attention import Logits, attend, attend_backward, tiles
from sp_core.attention.tiles import Cut, halves, rows, strips, tiled
from sp_core.mask import Block

EVERY_CUT = pytest.mark.parametrize("cut", [halves, strips])


@pytest.fixture
def small_tiles() -> Iterator[None]:
    """Tiles so small that short sequences have many."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiles, "HALVES_TILE", 3)
        patch.setattr(tiles, "STRIP_WIDTHS", (4, 2))
        patch.setattr(tiles, "POLLED_ROWS", 4)
        yield


def causal(size: int, q_start: int = 0, kv_start: int = 0) -> Block:
    return Block(
        q_start, q_start + size, kv_start, kv_start + size, "causal", size * (size + 1) // 2
    )


def coverage(blocks: tuple[Block, ...], rows: int, columns: int) -> torch.Tensor:
    """How many blocks show each pair."""
    count = torch.zeros(rows, columns, dtype=torch.int64)
    for block in blocks:
        part = torch.ones(block.shape, dtype=torch.int64)
        count[block.queries, block.keys] += part.tril() if block.kind == "causal" else part
    return count


@pytest.mark.parametrize("cut", [halves, rows, strips])
@settings(deadline=None)
@given(
    size=st.integers(1, 40) | st.integers(150, 1100),
    columns=st.integers(1, 1000),
    start=st.tuples(st.integers(0, 5), st.integers(0, 5)),
    kind=st.sampled_from(["causal", "full"]),
    small=st.booleans(),
)
def test_tiles_show_each_visible_pair_once(
    cut: Cut, size: int, columns: int, start: tuple[int, int], kind: str, small: bool
) -> None:
    q, kv = start
    block = (
        causal(size, q, kv)
        if kind == "causal"
        else Block(q, q + size, kv, kv + columns, "full", size * columns)
    )
    with pytest.MonkeyPatch.context() as patch:
        if small:
            patch.setattr(tiles, "HALVES_TILE", 3)
            patch.setattr(tiles, "STRIP_WIDTHS", (4, 2))
            patch.setattr(tiles, "POLLED_ROWS", 4)
        blocks = tiled([block], cut, torch.empty(0))
    whole = coverage((block,), block.q_stop, block.kv_stop)
    assert torch.equal(coverage(blocks, *whole.shape), whole)
    assert [tile.pairs for tile in blocks] == [
        int(coverage((tile,), *whole.shape).sum()) for tile in blocks
    ]
    assert all(tile.kind == "full" or tile.shape[0] == tile.shape[1] for tile in blocks)


@given(size=st.integers(1, 1500))
def test_halves_never_go_back_to_rows_that_they_passed_over(size: int) -> None:
    """`attend` takes a block that starts below all rows written so far for their first."""
    written = 0
    for block in halves(causal(size)):
        assert block.q_start >= written or block.q_stop <= written
        written = max(written, block.q_stop)


@EVERY_CUT
def test_only_wide_types_on_a_cpu_are_cut(cut: Cut) -> None:
    assert len(tiled([causal(1000)], cut, torch.empty(0))) > 1
    for whole in (torch.empty(0).half(), torch.empty(0, device="meta")):
        assert tiled([causal(1000)], cut, whole) == (causal(1000),)


@EVERY_CUT
def test_partial_blocks_stay_whole(cut: Cut) -> None:
    blocks = (causal(1000)._replace(kind="partial"),)
    assert tiled(blocks, cut, torch.empty(0)) == blocks


@pytest.mark.usefixtures("small_tiles")
@settings(deadline=None)
@given(
    problem=problems(),
    wide=st.sampled_from([torch.float64, torch.float32]),
    causal=st.booleans(),
    polled=st.booleans(),
)
def test_tiles_are_the_reference(
    problem: Problem, wide: torch.dtype, causal: bool, polled: bool
) -> None:
    check_problem(
        problem._replace(dtype=wide, mask={**problem.mask, "causal": causal}),
        between=list if polled else None,
    )


@pytest.mark.usefixtures("small_tiles")
def test_something_else_has_its_turn_after_every_part() -> None:
    q, k = torch.ones(1, 2, 10, 4), torch.ones(1, 2, 9, 4)
    turns: list[int] = []
    call: dict[str, Any] = {
        "q_positions": range(10),
        "kv_positions": range(9),
        "logits": Logits(1.0),
        "between": lambda: turns.append(len(turns)),
    }
    out, lse = attend(q, k, k, **call)
    assert len(turns) == 3  # of 4, 4 and 2 queries
    attend_backward(out, q, k, k, out, lse, **call)
    assert len(turns) == 3 + 3  # of 4, 4 and 1 keys


@settings(deadline=None, max_examples=5)
@given(problem=problems(), length=st.integers(500, 600))
def test_tiles_of_their_real_size_are_the_reference(problem: Problem, length: int) -> None:
    positions, mask = list(range(length)), {"causal": True}
    check_problem(
        problem._replace(
            dtype=torch.float64, q_positions=positions, kv_positions=positions, mask=mask
        )
    )
