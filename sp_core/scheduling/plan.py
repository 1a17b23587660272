"""Sequences of unequal length: what each costs, and plans of which ranks compute it.

Two policies make plans that balance, and naive ones plans for comparison.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from sp_core.errors import ShapeError
from sp_core.segments import split_ranges
from sp_core.sharding import Sharding


@dataclass(frozen=True)
class Work:
    """Floating-point operations of one causal sequence: per_token * S + per_pair * S (S + 1) / 2.

    Args:
        per_token: operations for each token, whatever it sees.
        per_pair: operations for each pair of a token and one that it sees, itself included.

    Raises:
        ShapeError: a negative number, or two zeros, with which nothing costs anything.
    """

    per_token: int
    per_pair: int

    def __post_init__(self) -> None:
        if min(self.per_token, self.per_pair) < 0 or self.per_token + self.per_pair == 0:
            raise ShapeError(
                f"per_token={self.per_token} and per_pair={self.per_pair} were given; pass "
                f"numbers >= 0, one above 0."
            )

    def of(self, length: int) -> int:
        """Return the operations of a whole sequence."""
        return self.between(0, length)

    def between(self, start: int, stop: int) -> int:
        """Return the operations of tokens start to stop - 1 of a sequence."""
        pairs = (stop * (stop + 1) - start * (start + 1)) // 2
        return self.per_token * (stop - start) + self.per_pair * pairs

    def shares(self, length: int, size: int) -> tuple[int, ...]:
        """Return how many operations each rank has if `size` ranks share a sequence in zigzag."""
        segments = Sharding.zigzag(length, size).segments
        return tuple(sum(self.between(s.start, s.stop) for s in owned) for owned in segments)


@dataclass(frozen=True)
class Plan:
    """Every sequence, by its place in the caller's list, exactly once.

    Args:
        lengths: tokens of each sequence.
        sharded: sequences that all ranks share, computed first.
        packed: for each rank the sequences that it computes alone, in this order.
        waiting: sequences that ranks take one after the other, whenever they have nothing else to
            do.
        padded_to: tokens to which each sequence is filled up; None for none.

    Raises:
        ShapeError: a negative length, no rank, a sequence that is not there exactly once, or one
            longer than `padded_to`.
    """

    lengths: tuple[int, ...]
    sharded: tuple[int, ...]
    packed: tuple[tuple[int, ...], ...]
    waiting: tuple[int, ...] = ()
    padded_to: int | None = None

    def __post_init__(self) -> None:
        placed = [
            *self.sharded,
            *self.waiting,
            *(number for numbers in self.packed for number in numbers),
        ]
        if (
            not self.packed
            or min(self.lengths, default=0) < 0
            or sorted(placed) != list(range(len(self.lengths)))
        ):
            raise ShapeError(
                f"a plan for {len(self.lengths)} sequences and {len(self.packed)} ranks places "
                f"{len(placed)}; needed are at least "
                "1 rank, lengths >= 0, and every sequence exactly once."
            )
        if self.padded_to is not None and self.padded_to < max(self.lengths, default=0):
            raise ShapeError(
                f"padded_to={self.padded_to} is less than the longest sequence has, "
                f"{max(self.lengths)}."
            )

    @property
    def size(self) -> int:
        """The number of ranks."""
        return len(self.packed)

    def tokens(self, number: int) -> int:
        """Return the tokens of a sequence as it is computed, padding included."""
        return self.lengths[number] if self.padded_to is None else self.padded_to

    def loads(self, work: Work) -> tuple[int, ...]:
        """Return the operations of each rank.

        A waiting sequence goes to the rank with the least load so far.
        """
        loads = [sum(work.of(self.tokens(number)) for number in numbers) for numbers in self.packed]
        for number in self.sharded:
            loads = [
                load + share
                for load, share in zip(
                    loads, work.shares(self.tokens(number), self.size), strict=True
                )
            ]
        taken = deal([work.of(self.tokens(number)) for number in self.waiting], loads)
        for place, number in enumerate(self.waiting):
            loads[taken[place]] += work.of(self.tokens(number))
        return tuple(loads)

    def useful(self, work: Work) -> int:
        """Return the number of operations without padding."""
        return sum(map(work.of, self.lengths))


def imbalance(loads: Sequence[float]) -> float:
    """Return the greatest load over the mean. Return 1 if there is nothing to do."""
    total = sum(loads)
    return max(loads) * len(loads) / total if total else 1.0


def deal(costs: Iterable[int], loads: Sequence[int]) -> list[int]:
    """Return the rank of each cost in turn.

    The one with the least load so far, the lowest of equal ones.

    Source: Graham 1969, Bounds on Multiprocessing Timing Anomalies, SIAM J. Appl. Math. 17(2), list
    scheduling.
    """
    heap = [(load, rank) for rank, load in enumerate(loads)]
    heapq.heapify(heap)
    taken = []
    for cost in costs:
        load, rank = heap[0]
        heapq.heapreplace(heap, (load + cost, rank))
        taken.append(rank)
    return taken


def passes(plan: Plan, numbers: Sequence[int], max_tokens: int) -> Iterator[tuple[int, ...]]:
    """Cut sequences into consecutive runs of at most `max_tokens` tokens.

    A longer sequence is a run of its own.
    """
    together: list[int] = []
    total = 0
    for number in numbers:
        if together and total + plan.tokens(number) > max_tokens:
            yield tuple(together)
            together, total = [], 0
        together.append(number)
        total += plan.tokens(number)
    if together:
        yield tuple(together)


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
