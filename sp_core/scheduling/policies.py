"""Policies that assign sequences to ranks: two that balance, and naive ones for comparison."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import replace

from sp_core.errors import ShapeError
from sp_core.scheduling.plan import Plan, Work, deal, imbalance
from sp_core.segments import split_ranges

Policy = Callable[[Sequence[int], int, Work], Plan]
TOLERANCE = 0.02
"""The greatest load of a balanced plan may be so much above the mean."""


def balanced(lengths: Sequence[int], size: int, work: Work, tolerance: float = TOLERANCE) -> Plan:
    """Share the longest sequences among all ranks.

    Give the others, longest first, to the rank with the least work.

    The greatest load is at most (1 + tolerance) times the mean, unless it were greater still if
    every sequence was shared, as with few short ones. How many are shared is found by bisection,
    and is 0 wherever that is enough.

    Args:
        lengths: tokens of each sequence.
        size: number of ranks.
        work: what a sequence costs.
        tolerance: above 0; smaller lets more sequences be shared, which costs communication.

    Raises:
        ShapeError: a negative length, no rank, or a tolerance that is not above 0.

    Source: Graham 1969, Bounds on Multiprocessing Timing Anomalies, SIAM J. Appl. Math. 17(2):
    longest processing time first.
    """
    _check(lengths, size)
    if not tolerance > 0:
        raise ShapeError(f"tolerance={tolerance} was given; pass a number above 0.")
    order = sorted(range(len(lengths)), key=lambda number: (-lengths[number], number))
    # then the last one placed cannot end too late
    allowed = tolerance * sum(map(work.of, lengths)) / max(size - 1, 1)
    most = sum(work.of(lengths[number]) > allowed for number in order)
    tried: dict[int, Plan] = {}

    def is_enough(count: int) -> bool:
        tried[count] = _longest_first(lengths, size, work, order, count)
        return imbalance(tried[count].loads(work)) <= 1 + tolerance

    if not is_enough(0):
        bisect_left(range(most), True, lo=1, key=is_enough)
        is_enough(most)
    return min(
        tried.values(),
        key=lambda plan: (max(1 + tolerance, imbalance(plan.loads(work))), len(plan.sharded)),
    )


def dynamic(lengths: Sequence[int], size: int, work: Work, tolerance: float = TOLERANCE) -> Plan:
    """Share the sequences that `balanced` shares.

    Ranks take the others as they finish, longest first.

    Args, raises: as `balanced`.
    """
    plan = balanced(lengths, size, work, tolerance)
    waiting = sorted(
        (number for numbers in plan.packed for number in numbers),
        key=lambda number: (-lengths[number], number),
    )
    return replace(plan, packed=((),) * size, waiting=tuple(waiting))


def contiguous(lengths: Sequence[int], size: int, work: Work) -> Plan:
    """Assign the same number of sequences to each rank, in the caller's order. Naive."""
    _check(lengths, size)
    return Plan(tuple(lengths), (), tuple(map(tuple, split_ranges(len(lengths), size))))


def round_robin(lengths: Sequence[int], size: int, work: Work) -> Plan:
    """Assign the sequences r, r + size, ... to rank r. Naive."""
    _check(lengths, size)
    return Plan(
        tuple(lengths), (), tuple(tuple(range(rank, len(lengths), size)) for rank in range(size))
    )


def padded(lengths: Sequence[int], size: int, work: Work) -> Plan:
    """Assign as `round_robin`, with every sequence padded to the longest. Naive."""
    return replace(round_robin(lengths, size, work), padded_to=max(lengths, default=0))


POLICIES: dict[str, Policy] = {
    "balanced": balanced,
    "dynamic": dynamic,
    "round_robin": round_robin,
    "contiguous": contiguous,
    "padded": padded,
}


def _longest_first(
    lengths: Sequence[int], size: int, work: Work, order: Sequence[int], count: int
) -> Plan:
    """Share the `count` longest sequences. Place the others, longest first."""
    shared, rest = order[:count], order[count:]
    loads = [0] * size
    for number in shared:
        loads = [
            load + share
            for load, share in zip(loads, work.shares(lengths[number], size), strict=True)
        ]
    packed: list[list[int]] = [[] for _ in range(size)]
    for number, rank in zip(
        rest, deal([work.of(lengths[number]) for number in rest], loads), strict=True
    ):
        packed[rank].append(number)
    return Plan(tuple(lengths), tuple(shared), tuple(map(tuple, packed)))


def _check(lengths: Sequence[int], size: int) -> None:
    if size < 1 or min(lengths, default=0) < 0:
        raise ShapeError(
            f"lengths from {min(lengths, default=0)} on {size} ranks were given; needed lengths "
            f">= 0 and size >= 1."
        )
