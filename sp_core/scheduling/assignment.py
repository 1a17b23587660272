"""Plan which ranks compute which sequences of unequal length.

`Work` says how many operations a sequence costs. A policy is a function that makes an `Assignment`
from the lengths. `balanced` and `dynamic` give all ranks about the same work; `contiguous`,
`round_robin` and `padded` ignore the lengths, and are for comparison. A load is the number of
operations of a rank. Everything is local and deterministic: equal arguments give equal results.
"""

import heapq
import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from sp_core.arguments import check, check_type, plain
from sp_core.errors import ShapeError
from sp_core.sharding import Sharding, split_ranges


@dataclass(frozen=True)
class Work:
    """Count the floating-point operations of a causal sequence of S tokens.

    Their number is per_token * S + per_pair * S (S + 1) / 2.

    Args:
        per_token: operations for each token: 2 for each element of a matrix that it is multiplied
            with, in all layers.
        per_pair: operations for each pair of a token and a token that it sees, which may be itself:
            4 * head_dim for each query head, in all layers.

    Raises:
        ShapeError: a number that is negative or not finite, or zero for both.
        TypeError: no number.
    """

    per_token: int
    per_pair: int

    def __post_init__(self) -> None:
        check("p", **vars(self))
        vars(self).update({name: plain(x) for name, x in vars(self).items()})
        numbers = self.per_token, self.per_pair
        if not (_are_finite(numbers) and any(numbers)):
            raise ShapeError(
                f"per_token={self.per_token} and per_pair={self.per_pair} were given; pass "
                f"finite numbers >= 0, one above 0."
            )

    def of(self, length: int) -> int:
        """Return how many floating-point operations a sequence of `length` tokens costs."""
        return self.between(0, length)

    def between(self, start: int, stop: int) -> int:
        """Return how many floating-point operations tokens start to stop - 1 of a sequence cost."""
        start, stop = plain(start), plain(stop)
        pairs = (stop * (stop + 1) - start * (start + 1)) // 2
        return self.per_token * (stop - start) + self.per_pair * pairs

    def shares(self, length: int, size: int) -> tuple[int, ...]:
        """Return for each of `size` ranks how many operations its zigzag shard costs."""
        segments = Sharding.zigzag(length, size).segments
        return tuple(sum(self.between(s.start, s.stop) for s in owned) for owned in segments)


@dataclass(frozen=True)
class Assignment:
    """Assign each sequence to all ranks, to one rank, or to the rank that is free first.

    A sequence is named by its index in the caller's list.

    Args:
        lengths: number of tokens of each sequence, whole numbers.
        sharded: the sequences that all ranks compute together, before all others.
        packed: for each rank the sequences that it computes alone, in order.
        waiting: sequences that are not assigned yet: a rank that has finished its own
            sequences takes the next waiting one.
        padded_to: number of tokens to which each sequence is padded; None for no padding.

    Raises:
        ShapeError: a negative length, no rank, a sequence that is missing or assigned twice, or a
            sequence longer than `padded_to`.
        TypeError: an argument of another type.
    """

    lengths: tuple[int, ...]
    sharded: tuple[int, ...]
    packed: tuple[tuple[int, ...], ...]
    waiting: tuple[int, ...] = ()
    padded_to: int | None = None

    def __post_init__(self) -> None:
        check(**vars(self))
        vars(self).update(
            lengths=plain(tuple(self.lengths)),
            sharded=plain(self.sharded),
            packed=tuple(plain(tuple(numbers)) for numbers in self.packed),
            waiting=plain(self.waiting),
            padded_to=plain(self.padded_to),
        )
        placed = [
            *self.sharded,
            *self.waiting,
            *(number for numbers in self.packed for number in numbers),
        ]
        if (
            not self.packed
            or not _are_finite(self.lengths)
            or sorted(placed) != list(range(len(self.lengths)))
        ):
            raise ShapeError(
                f"an assignment of {len(self.lengths)} sequences and {len(self.packed)} ranks "
                f"places {len(placed)}; needed are at least "
                "1 rank, lengths >= 0, and every sequence exactly once."
            )
        longest = max(self.lengths, default=0)
        if self.padded_to is not None and self.padded_to < longest:
            raise ShapeError(
                f"padded_to={self.padded_to} is less than the longest sequence has, {longest}."
            )

    @property
    def size(self) -> int:
        """Return the number of ranks."""
        return len(self.packed)

    def tokens(self, number: int) -> int:
        """Return the number of tokens of sequence `number`, padding included."""
        return self.lengths[number] if self.padded_to is None else self.padded_to

    def loads(self, work: Work) -> tuple[int, ...]:
        """Return the expected floating-point operations of each rank, padding included.

        A waiting sequence is counted for the rank with the fewest operations so far.
        """
        loads = [
            load + sum(work.of(self.tokens(number)) for number in numbers)
            for load, numbers in zip(
                _shared_loads(map(self.tokens, self.sharded), self.size, work),
                self.packed,
                strict=True,
            )
        ]
        costs = [work.of(self.tokens(number)) for number in self.waiting]
        for rank, cost in zip(deal(costs, loads), costs, strict=True):
            loads[rank] += cost
        return tuple(loads)

    def useful(self, work: Work) -> int:
        """Return the floating-point operations of all sequences together, without padding."""
        return sum(map(work.of, self.lengths))


def _shared_loads(lengths: Iterable[int], size: int, work: Work) -> list[int]:
    """Return the operations of each rank for sequences that all ranks share."""
    shares = [work.shares(length, size) for length in lengths]
    return [sum(share[rank] for share in shares) for rank in range(size)]


def imbalance(loads: Sequence[float]) -> float:
    """Return the greatest load (operations of a rank) over the mean load; 1 if all are 0."""
    total = sum(loads)
    return max(loads) * len(loads) / total if total else 1.0


def deal(costs: Iterable[int], loads: Sequence[int]) -> list[int]:
    """Assign each cost in turn to the rank with the least load so far. Return the ranks.

    Of equally loaded ranks the lowest gets the cost.

    Args:
        costs: operations of each sequence.
        loads: operations that each rank already has; not changed.

    Returns:
        For each cost the number of its rank.

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


TOLERANCE = 0.02
"""The share by which the greatest load of `balanced` may exceed the mean load."""


def balanced(
    lengths: Sequence[int], size: int, work: Work, tolerance: float = TOLERANCE
) -> Assignment:
    """Plan with even loads: all ranks share the longest sequences, each other one goes to one rank.

    Sequences that are not shared are assigned longest first, each to the rank with the least load.
    The greatest load is at most (1 + tolerance) times the mean. Uneven shares of few short
    sequences can miss this bound. Then the load is at most that of sharing every sequence. No
    sequence is shared if the first bound holds without sharing. Otherwise bisection finds how many
    are shared.

    Args:
        lengths: number of tokens of each sequence, whole numbers.
        size: number of ranks.
        work: the cost of a sequence.
        tolerance: fraction by which the greatest load may exceed the mean; above 0. With a smaller
            one, ranks share more sequences, which costs communication.

    Returns:
        The assignment, without waiting sequences.

    Raises:
        ShapeError: a negative length, size below 1, or a tolerance that is not above 0.
        TypeError: an argument of another type.

    Source: Graham 1969, Bounds on Multiprocessing Timing Anomalies, SIAM J. Appl. Math. 17(2):
    longest processing time first.
    """
    lengths, size = _checked(lengths, size)
    check(tolerance=tolerance)
    tolerance = plain(tolerance)
    check_type("work", work, Work, "Pass Work(per_token, per_pair).")
    order = sorted(range(len(lengths)), key=lambda number: (-lengths[number], number))
    # the greatest load exceeds the mean by less than the longest unshared sequence
    allowed = tolerance * sum(map(work.of, lengths)) / size
    most = sum(work.of(lengths[number]) > allowed for number in order)
    tried: dict[int, Assignment] = {}

    def is_enough(count: int) -> bool:
        tried[count] = _longest_first(lengths, size, work, order, count)
        return imbalance(tried[count].loads(work)) <= 1 + tolerance

    if not is_enough(0):
        bisect_left(range(most), True, key=is_enough)
        is_enough(most)
    return min(
        tried.values(),
        key=lambda plan: (max(1 + tolerance, imbalance(plan.loads(work))), len(plan.sharded)),
    )


def dynamic(
    lengths: Sequence[int], size: int, work: Work, tolerance: float = TOLERANCE
) -> Assignment:
    """Plan that all ranks share the sequences that `balanced` shares; the others wait.

    The others are `Assignment.waiting`, longest first: a rank with nothing to do takes the next.
    Arguments and errors are those of `balanced`.
    """
    plan = balanced(lengths, size, work, tolerance)
    waiting = sorted(
        (number for numbers in plan.packed for number in numbers),
        key=lambda number: (-plan.lengths[number], number),
    )
    return replace(plan, packed=((),) * plan.size, waiting=tuple(waiting))


def contiguous(lengths: Sequence[int], size: int, work: Work) -> Assignment:
    """Give each rank equally many consecutive sequences.

    Lengths and `work` have no effect. The first ranks get one more if the number does not divide.

    Raises:
        ShapeError: a negative length, or size below 1.
        TypeError: lengths or size of another type.
    """
    lengths, size = _checked(lengths, size)
    return Assignment(tuple(lengths), (), tuple(map(tuple, split_ranges(len(lengths), size))))


def round_robin(lengths: Sequence[int], size: int, work: Work) -> Assignment:
    """Plan that rank r computes the sequences r, r + size, ..., whatever their lengths and `work`.

    Raises:
        ShapeError: a negative length, or size below 1.
        TypeError: lengths or size of another type.
    """
    lengths, size = _checked(lengths, size)
    return Assignment(
        tuple(lengths), (), tuple(tuple(range(rank, len(lengths), size)) for rank in range(size))
    )


def padded(lengths: Sequence[int], size: int, work: Work) -> Assignment:
    """Assign as `round_robin`, with every sequence padded to the length of the longest.

    Raises:
        ShapeError: a negative length, or size below 1.
        TypeError: lengths or size of another type.
    """
    return replace(round_robin(lengths, size, work), padded_to=max(lengths, default=0))


POLICIES: dict[str, Callable[[Sequence[int], int, Work], Assignment]] = {
    "balanced": balanced,
    "dynamic": dynamic,
    "round_robin": round_robin,
    "contiguous": contiguous,
    "padded": padded,
}
"""Name of each policy -> function of (lengths, number of ranks, cost) that makes an Assignment."""


def _longest_first(
    lengths: Sequence[int], size: int, work: Work, order: Sequence[int], count: int
) -> Assignment:
    """Return the assignment of `balanced` if the first `count` sequences of `order` are shared.

    `order` lists all sequences as indices, longest first.
    """
    shared, rest = order[:count], order[count:]
    loads = _shared_loads((lengths[number] for number in shared), size, work)
    packed: list[list[int]] = [[] for _ in range(size)]
    for number, rank in zip(
        rest, deal([work.of(lengths[number]) for number in rest], loads), strict=True
    ):
        packed[rank].append(number)
    return Assignment(tuple(lengths), tuple(shared), tuple(map(tuple, packed)))


def _checked(lengths: Sequence[int], size: int) -> tuple[Sequence[int], int]:
    """Return the arguments of a policy, whole numbers as ints.

    Raise ShapeError if a length is negative or `size` is below 1; TypeError for arguments of
    another type.
    """
    check(lengths=lengths, size=size)
    lengths, size = plain(tuple(lengths)), plain(size)
    if size < 1 or not _are_finite(lengths):
        raise ShapeError(
            f"lengths={list(lengths)!s:.80} on {size} ranks were given; needed lengths >= 0 and "
            "size >= 1."
        )
    return lengths, size


def _are_finite(numbers: Iterable[float]) -> bool:
    """Return whether all numbers are finite and at least 0."""
    return all(0 <= x < math.inf for x in numbers)
