"""Which ranks see which blocks, and how far a block travels, against the definition of the mask."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given, strategies as st
from oracle.strategies import SHARDINGS, masks

from sp_core import Mask, Sharding
from sp_core.schemes.reach import _Owners, hops, seen_blocks

pytestmark = pytest.mark.mpi_skip


@st.composite
def shardings(draw: st.DrawFn, length: int, size: int) -> Sharding:
    """Any layout, and stripes of more ranks in groups, as after an exchange of heads."""
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


def defined(queries: Sharding, keys: Sharding, mask: Mask) -> list[list[bool]]:
    """Return for each rank and block whether any query sees any key."""
    ranks = range(queries.size)
    q, k = ([sharding.positions(rank) for rank in ranks] for sharding in (queries, keys))
    return [[bool(mask.allowed(q[r], k[b]).any()) for b in ranks] for r in ranks]


def check(queries: Sharding, keys: Sharding, mask: Mask) -> None:
    """Compare what is seen with the definition, and how far a block travels with who sees it."""
    seen = defined(queries, keys, mask)
    ranks = range(len(seen))
    assert [[*seen_blocks(queries, keys, mask, rank)] for rank in ranks] == seen
    expected = [
        max((s for s in ranks if seen[(block + s) % len(seen)][block]), default=0)
        for block in ranks
    ]
    assert [*hops(queries, keys, mask)] == expected, (queries, keys, mask)


@given(cases())
def test_a_block_travels_to_the_last_rank_that_sees_it(
    case: tuple[Sharding, Sharding, Mask],
) -> None:
    check(*case)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_documents_over_stripes_are_seen_as_others(size: int) -> None:
    """They are counted in another way: short ones, some of more than three turns, and both."""
    stripes = [Sharding.striped(17, size), Sharding.striped(17, size, 5)]
    stripes.append(stripes[1].group([[rank] for rank in reversed(range(size))]))
    cuts: list[tuple[int, ...]] = [(), (1,), (5,), (2, 3), (1, 2, 4, 9), (8, 16)]
    cuts += [tuple(range(1, 17, step)) for step in (1, 2, 3)]
    for sharding, inner in product(stripes, cuts):
        documents = (0, *inner, sharding.end)
        for causal, window in product((False, True), (None, 1, 2, 5)):
            check(sharding, sharding, Mask(causal, window, documents))


@pytest.mark.parametrize("documents", [None, 2000])
@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "striped"])
def test_the_work_grows_with_runs_and_not_with_pairs_of_ranks(
    layout: str, documents: int | None
) -> None:
    """A million tokens on 1024 ranks: pairs of ranks, or of documents, would take minutes."""
    length = 1 << 20
    bounds = documents and tuple(range(0, length, length // documents))
    mask = Mask(causal=True, documents=(*bounds, length) if bounds else None)
    sharding = SHARDINGS[layout](length, 1024, 0)
    assert len(_Owners(sharding).owner) <= 2 * 1024
    assert len(hops(sharding, sharding, mask)) == 1024
    assert seen_blocks(sharding, sharding, mask, 0)[0]
