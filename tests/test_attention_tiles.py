"""Test that attention is the same after large blocks are cut into tiles, or small ones packed.

Together the tiles cover every visible pair of query and key once. Masks and indices are copied
to a GPU as rarely as possible: such tensors are on the meta device here.
"""

from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from itertools import accumulate, pairwise
from typing import Any
from unittest.mock import patch

import pytest
import torch
from domains import masks
from domains.declared import Row
from domains.numeric import attended
from hypothesis import example, given, settings, strategies as st
from oracle.dispatched import Calls
from test_attention import LOCAL, SCALED, judge, ran, rows as drawn_rows, there_and_back
from test_mask import coverage

from sp_core.attention import Logits, attend, attend_backward, cuda, function, kernels, packs, tiles
from sp_core.attention.tiles import Cut, halves, rows, strips, tiled
from sp_core.mask import Block, Mask, plan_blocks

__all__ = ["ran"]  # a fixture
EVERY_CUT = pytest.mark.parametrize("cut", [halves, strips])


SMALL: dict[str, Any] = {"HALVES_TILE": 3, "STRIP_WIDTHS": (4, 2), "POLLED_ROWS": 4}
"""Tile sizes so small that short sequences have many tiles."""


@pytest.fixture
def small_tiles() -> Iterator[None]:
    with patch.multiple(tiles, **SMALL):
        yield


def causal(size: int, q_start: int = 0, kv_start: int = 0) -> Block:
    return Block(q_start, q_start + size, kv_start, kv_start + size, "causal")


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
        causal(size, q, kv) if kind == "causal" else Block(q, q + size, kv, kv + columns, "full")
    )
    with patch.multiple(tiles, **SMALL) if small else nullcontext():
        blocks = tiled([block], cut, torch.empty(0))
    shards = range(block.q_stop), range(block.kv_stop)
    assert torch.equal(coverage(blocks, Mask(), *shards), coverage([block], Mask(), *shards))


@EVERY_CUT
def test_only_wide_types_on_a_cpu_are_cut_and_no_partial_block(cut: Cut) -> None:
    block, like = causal(1000), torch.empty(0)
    assert len(tiled([block], cut, like)) > 1
    for kept, other in (
        (block, like.half()),
        (block, torch.empty(0, device="meta")),
        (block._replace(kind="partial"), like),
    ):
        assert tiled([kept], cut, other) == (kept,)


WIDE = {"q.dtype": ("float64", "float32")}


@pytest.mark.usefixtures("small_tiles")
@settings(deadline=None)
@given(row=drawn_rows(**WIDE), seed=st.integers(0, 99), polled=st.booleans())
def test_tiles_are_the_reference(row: Row, seed: int, polled: bool) -> None:
    between = list if polled else None
    with patch.multiple(
        function,
        attend=partial(attend, between=between),
        attend_backward=partial(attend_backward, between=between),
    ):
        judge(attended(LOCAL.draw(row, seed)))


@settings(deadline=None)
@example(row=SCALED | {"softcap": "0.5"}, seed=0)
@given(row=drawn_rows(softcap=("0.5", "50.0")), seed=st.integers(0, 99))
def test_strips_of_the_plain_kernel_are_the_reference(row: Row, seed: int) -> None:
    """It cuts blocks of more than a million scores."""
    with patch.object(kernels, "CPU_SCORES", 64):
        judge(attended(LOCAL.draw(row, seed)))


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
    there_and_back(q, q, k, k, **call)
    assert len(turns) == 3 + 3  # parts of 4, 4 and 2 queries; of 4, 4 and 1 keys


@pytest.fixture
def packing() -> Iterator[None]:
    """Pack every small block, into packs so small that short sequences have many of them."""
    with patch.multiple(packs, SIDES=(2, 4, 9), LEAST_BLOCKS=1, ELEMENTS=64):
        packs._packed.cache_clear()
        yield
    packs._packed.cache_clear()


MANY_SHORT = {
    "mask": ("given",),
    "window": ("none",),
    "documents": ("7 to 64", "65 to 300"),
    "q_positions": ("left out", "range"),
    "kv_positions": ("left out", "range"),
}


@pytest.mark.usefixtures("packing")
@settings(deadline=None)
@given(row=drawn_rows(**WIDE, **MANY_SHORT) | drawn_rows(), seed=st.integers(0, 99))
def test_any_problem_with_packs_is_the_reference(row: Row, seed: int) -> None:
    judge(attended(LOCAL.draw(row, seed)))


@pytest.mark.usefixtures("packing")
@pytest.mark.parametrize("elements", [64, packs.ELEMENTS], ids=["many packs", "many tiles"])
@pytest.mark.parametrize(
    ("batch", "q", "kv", "documents"),
    [
        (2, [*range(12)], [*range(12)], (0, 3, 5, 9, 12)),
        (1, [*range(9, 13)], [0, 1, *range(9, 13)], (0, 20)),
        (1, [*range(4, 12)], [*range(8)], (0, 3, 5, 8, 12)),
        (1, [*range(12)], [0, 1, 4, 5, 8, 9], (0, 4, 8, 12)),
    ],
)
def test_packs_of_these_positions_are_the_reference(
    elements: int, batch: int, q: list[int], kv: list[int], documents: tuple[int, ...]
) -> None:
    drawn = LOCAL.draw(LOCAL.base | {"mask": "given", "causal": "True", "q.dtype": "float32"}, 0)
    drawn |= {"q.batch": batch, "q_positions": "q", "kv_positions": "kv"}
    containers = patch.dict(masks.CONTAINERS, q=lambda _: q, kv=lambda _: kv)
    with containers, patch.object(packs, "ELEMENTS", elements):
        judge(attended(drawn | {"documents": documents, "kv_documents": documents}))


@patch.multiple(packs, SIDES=(2, 4), LEAST_BLOCKS=2)
def test_a_block_follows_the_one_before_it_in_its_tile_and_its_pack() -> None:
    """Three blocks are not packed: one is too large, one partial, one alone in its pack."""
    shapes = (
        (2, 1),
        (3, 4),
        (1, 2),
        (5, 1),
        (1, 1),
        (4, 1),
        (1, 1),
        (1, 1),
        (2, 2),
        (1, 3),
        (1, 2),
    )
    rows, columns = (pairwise(accumulate(sizes, initial=0)) for sizes in zip(*shapes, strict=True))
    blocks = [Block(*q, *kv, "full") for q, kv in zip(rows, columns, strict=True)]
    blocks[7] = blocks[7]._replace(kind="partial")
    left, made = packs._packed.__wrapped__(tuple(blocks), 6)
    assert left == (blocks[3], blocks[7], blocks[9])
    sides = [(each, len(each.source)) for pack in made for each in (pack.queries, pack.keys)]
    assert [(length, each.slots.tolist(), each.tokens.tolist()) for each, length in sides] == [
        (6, [0, 1, 2, 4, 5], [0, 1, 5, 11, 16]),
        (6, [0, 2, 3, 4, 5], [0, 5, 6, 8, 10]),
        (4, [0, 1, 2], [18, 19, 21]),
        (4, [0, 1, 2, 3], [12, 13, 17, 18]),
        (8, [0, 1, 2, 4, 5, 6, 7], [2, 3, 4, 12, 13, 14, 15]),
        (8, [0, 1, 2, 3, 4], [1, 2, 3, 4, 9]),
    ]


def test_packing_looks_a_few_times_at_each_of_many_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    looks, count = [0], 4000

    def shape(block: Block) -> tuple[int, int]:
        looks[0] += 1
        return block.q_stop - block.q_start, block.kv_stop - block.kv_start

    monkeypatch.setattr(Block, "shape", property(shape))
    left, (made,) = packs._packed.__wrapped__(tuple(causal(1, n, n) for n in range(count)), count)
    assert not left
    assert len(made.queries.tokens) == count
    assert looks[0] <= 10 * count


def call(bounds: tuple[int, ...], length: int) -> dict[str, Any]:
    mask = Mask(causal=True, documents=bounds)
    where = {"q_positions": range(length), "kv_positions": range(length)}
    return {**where, "mask": mask, "logits": Logits(0.3)}


@pytest.mark.parametrize("poisoned", [[0, 1, 2, 3], [2]])
@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_a_poisoned_document_leaves_its_neighbours_alone(
    poison: float, poisoned: list[int]
) -> None:
    """Padding that is a document of its own may hold any content, in all tensors or in v alone."""
    bounds = tuple(range(0, 65, 8))
    tensors = torch.randn(4, 1, 2, 64, 8, generator=torch.Generator().manual_seed(0))
    q, k, v, do = tensors
    blocks = plan_blocks(range(64), range(64), Mask(causal=True, documents=bounds))
    assert packs.packed(blocks, q, Logits(0.3))[1]
    do[:, :, 56:] = 0
    clean = there_and_back(do, q, k, v, **call(bounds, 64))
    tensors[poisoned, :, :, 56:] = poison
    for a, b in zip(clean, there_and_back(do, q, k, v, **call(bounds, 64)), strict=True):
        torch.testing.assert_close(b[:, :, :56], a[:, :, :56])


def test_hundreds_of_documents_take_few_kernel_calls(ran: list[Any]) -> None:
    do, q, k, v = torch.randn(4, 1, 2, 4096, 64).unbind()
    there_and_back(do, q, k, v, **call(tuple(range(0, 4097, 8)), 4096))
    assert len(ran) == 2 * q.numel() // 2**17  # a pack holds 2**17 elements of q


def copied(calls: Calls) -> int:
    """Count the elements of copies, as of conversions to another dtype."""
    copies = ("aten::_to_copy", "aten::clone")
    return sum(result.numel() for name, _, result in calls.made if name in copies)


def test_the_plain_kernel_copies_each_tensor_once_however_many_strips(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kernels, "CPU_SCORES", 1)
    do, q, k, v = torch.ones(4, 2, 32, 3, 8, dtype=torch.bfloat16).transpose(2, 3).unbind()
    with Calls() as calls:
        out, lse = kernels.block_attention(q, k, v, logits=Logits(0.3, 5.0))
        assert copied(calls) == 3 * q.numel()
        kernels.block_attention_backward(do, q, k, v, out, lse, logits=Logits(0.3, 5.0))
    assert copied(calls) == (3 + 5) * q.numel()


def test_tiles_of_a_window_are_not_searched_for_hidden_tokens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The plan cuts tiles without hidden tokens, and a search would be as slow as small tiles."""
    searched: list[str] = []
    monkeypatch.setattr(kernels, "_seen", lambda *given: searched.append(given[0]))
    q, do = torch.randn(2, 1, 1, 300, 4).unbind()
    there_and_back(do, q, q, q, **{**call((0, 300), 300), "mask": Mask(causal=True, window=20)})
    assert "partial" not in searched


@pytest.fixture
def fused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use the kernels of an H100 on the meta device, which checks schemas and shapes."""
    monkeypatch.setattr(kernels, "FUSED", {"meta"})
    monkeypatch.setattr(cuda, "capability", lambda device: (9, 0))


def uploads(calls: Calls) -> int:
    """Count copies from the host to another device, for which the host waits."""
    given = {"aten::_to_copy": 0, "aten::copy_": 1}
    return sum(
        args[given[name]].device.type == "cpu" != result.device.type
        for name, args, result in calls.made
        if name in given
    )


@pytest.mark.usefixtures("fused")
@pytest.mark.parametrize("softcap", [None, 5.0], ids=["efficient", "plain"])
def test_equal_masks_are_uploaded_once_a_pass(softcap: float | None) -> None:
    q, k = (torch.empty(2, heads, 700, 16, device="meta") for heads in (4, 2))
    mask = Mask(causal=True, window=64)
    here: dict[str, Any] = {"q_positions": range(700), "kv_positions": range(700), "mask": mask}
    logits = Logits(0.3, softcap=softcap)
    blocks = [block for block in plan_blocks(range(700), range(700), mask) if block.band]
    with Calls() as forward:
        out, lse = attend(q, k, k, **here, logits=logits)
    with Calls() as backward:
        attend_backward(q, q, k, k, out, lse, **here, logits=logits)
    different = len({(block.shape, block.band) for block in blocks})
    assert (uploads(forward), uploads(backward)) == (different, different)
    assert different < len(blocks)


@pytest.mark.usefixtures("fused")
@pytest.mark.parametrize("causal", [True, False])
def test_indices_of_packed_documents_are_uploaded_once_for_all_layers(causal: bool) -> None:
    q, k = (torch.empty(2, heads, 72, 16, device="meta").bfloat16() for heads in (4, 2))
    ends = (0, 6, 8, 21, 23, 31, 72) if causal else (0, 5, 9, 26, 29, 44, 72)
    mask = Mask(causal=causal, documents=ends)
    here: dict[str, Any] = {"q_positions": range(72), "kv_positions": range(72), "mask": mask}
    counts = []
    for _ in range(3):
        with Calls() as forward:
            out, lse = attend(q, k, k, **here, logits=Logits(0.3))
        with Calls() as backward:
            attend_backward(q, q, k, k, out, lse, **here, logits=Logits(0.3))
        counts.append((uploads(forward), uploads(backward)))
    kernels_called = [name for name, *_ in forward.made if "attention" in name]
    assert kernels_called == ["aten::_flash_attention_forward"]  # no document alone
    # the tokens of queries and of keys, and one vector of ends for both
    assert counts == [(3, 0), (0, 0), (0, 0)]
