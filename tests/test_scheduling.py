"""Passes over unequal sequences, as plain integers. Plans are judged in `domains/scheduling.py`."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given, strategies as st

from sp_core.scheduling import (
    POLICIES,
    Work,
)
from sp_core.scheduling.plan import passes

LENGTHS = st.lists(st.one_of(st.integers(0, 12), st.integers(0, 5000)), max_size=40)
SIZES = st.integers(1, 8)


@given(lengths=LENGTHS, size=SIZES, most=st.integers(1, 200))
def test_passes_keep_the_order_and_their_limit(lengths: list[int], size: int, most: int) -> None:
    plan = POLICIES["contiguous"](lengths, size, Work(1, 1))
    for numbers in plan.packed:
        cut = list(passes(plan, numbers, most))
        assert [number for part in cut for number in part] == list(numbers)
        assert all(len(part) == 1 or sum(map(plan.tokens, part)) <= most for part in cut)
        assert all(sum(map(plan.tokens, (*a, b[0]))) > most for a, b in pairwise(cut))
