"""Plans for unequal sequences and for pipelines, as plain integers.

Every law holds without a message being sent.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from random import Random

import pytest
from hypothesis import example, given, strategies as st

import sp_core as sp
from sp_core.scheduling import (
    POLICIES,
    Plan,
    Work,
    balanced,
    dynamic,
    gpipe,
    timeline,
)
from sp_core.scheduling.pipeline import Slot
from sp_core.scheduling.plan import imbalance, passes

LENGTHS = st.lists(st.one_of(st.integers(0, 12), st.integers(0, 5000)), max_size=40)
SIZES = st.integers(1, 8)
WORKS = st.builds(Work, st.integers(1, 100), st.integers(0, 10))


@example(lengths=[], size=3, work=Work(1, 1), tolerance=0.02)
@example(lengths=[1], size=4, work=Work(1, 1), tolerance=0.02)
@example(lengths=[7] * 8, size=4, work=Work(1, 1), tolerance=0.02)
@example(lengths=[100_000, *[10] * 30], size=4, work=Work(100, 1), tolerance=0.02)
@given(lengths=LENGTHS, size=SIZES, work=WORKS, tolerance=st.sampled_from([0.01, 0.02, 0.2]))
def test_a_balanced_plan_keeps_its_promise(
    lengths: list[int], size: int, work: Work, tolerance: float
) -> None:
    """No load exceeds the mean by more than the tolerance, unless sharing all is no better."""
    plan = balanced(lengths, size, work, tolerance)
    loads = plan.loads(work)
    mean = sum(loads) / size

    def shared(numbers: Iterable[int]) -> list[int]:
        return [
            sum(shares)
            for shares in zip(
                [0] * size, *(work.shares(lengths[number], size) for number in numbers), strict=True
            )
        ]

    assert max(loads) <= max((1 + tolerance) * mean, max(shared(range(len(lengths))))) * (1 + 1e-12)
    sharded = shared(plan.sharded)
    longest = max(
        (work.of(lengths[number]) for numbers in plan.packed for number in numbers), default=0
    )
    assert max(loads) <= max(mean + (1 - 1 / size) * longest, max(sharded)) * (1 + 1e-12)
    whole = [lengths[number] for numbers in plan.packed for number in numbers]
    assert (
        not plan.sharded
        or not whole
        or min(lengths[number] for number in plan.sharded) >= max(whole)
    )


@given(lengths=LENGTHS, size=SIZES, work=WORKS, tolerance=st.sampled_from([0.02, 0.5]))
def test_no_sequence_is_shared_where_balance_needs_none(
    lengths: list[int], size: int, work: Work, tolerance: float
) -> None:
    """Where longest first alone keeps the promise, as with equal work for every rank."""
    whole = balanced(lengths, size, work, 2.0 * size)
    assert not whole.sharded
    if imbalance(whole.loads(work)) > 1 + tolerance:
        return
    plan = balanced(lengths, size, work, tolerance)
    assert imbalance(plan.loads(work)) <= 1 + tolerance
    equal = balanced([9] * (3 * size), size, work)
    assert not equal.sharded
    assert len(set(equal.loads(work))) == 1


@given(lengths=LENGTHS, size=SIZES, work=WORKS, order=st.randoms(use_true_random=False))
def test_the_order_of_the_caller_changes_nothing(
    lengths: list[int], size: int, work: Work, order: Random
) -> None:
    def kinds(plan: Plan) -> list[list[int]]:
        return [
            [plan.lengths[n] for n in numbers]
            for numbers in (plan.sharded, plan.waiting, *plan.packed)
        ]

    shuffled = order.sample(lengths, len(lengths))
    for policy in (balanced, dynamic):
        assert kinds(policy(lengths, size, work)) == kinds(policy(shuffled, size, work))


@given(lengths=LENGTHS, size=SIZES, most=st.integers(1, 200))
def test_passes_keep_the_order_and_their_limit(lengths: list[int], size: int, most: int) -> None:
    plan = POLICIES["contiguous"](lengths, size, Work(1, 1))
    for numbers in plan.packed:
        cut = list(passes(plan, numbers, most))
        assert [number for part in cut for number in part] == list(numbers)
        assert all(len(part) == 1 or sum(map(plan.tokens, part)) <= most for part in cut)
        assert all(sum(map(plan.tokens, (*a, b[0]))) > most for a, b in pairwise(cut))


def test_a_plan_that_cannot_be_is_refused() -> None:
    work = Work(1, 1)
    for lengths, size in (([1], 0), ([-1], 2)):
        for policy in POLICIES.values():
            with pytest.raises(sp.ShapeError, match="size >= 1"):
                policy(lengths, size, work)
    with pytest.raises(sp.ShapeError, match="exactly once"):
        Plan((3, 4), (0,), ((), (0, 1)))
    with pytest.raises(sp.ShapeError, match="less than the longest"):
        Plan((3,), (), ((0,),), padded_to=2)
    with pytest.raises(sp.ShapeError, match="tolerance"):
        balanced([1], 1, work, 0.0)
    with pytest.raises(sp.ShapeError, match="one above 0"):
        Work(0, 0)


def test_orders_that_wait_for_each_other_are_refused() -> None:
    with pytest.raises(sp.ShapeError, match="for ever after 1 slots"):
        timeline([(Slot("F", 0), Slot("B", 0)), (Slot("B", 0), Slot("F", 0))])
    with pytest.raises(sp.ShapeError, match="micro-batches"):
        gpipe(2, 0)
