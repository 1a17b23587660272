"""Cut lengths and positions into ranges, of equal length or of equal work."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, groupby, pairwise, starmap
from typing import Self, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import pad

Item = TypeVar("Item")
Segment = range
"""The global positions of consecutive tokens of a shard. The step is P for a striped shard."""


def split_sizes(length: int, parts: int) -> tuple[int, ...]:
    """Return `parts` sizes that add up to `length`; the first `length % parts` are one larger."""
    quotient, remainder = divmod(length, parts)
    return tuple(quotient + (part < remainder) for part in range(parts))


def split_ranges(length: int, parts: int) -> tuple[range, ...]:
    """Return consecutive ranges from 0 to `length`, of the lengths `split_sizes(length, parts)`."""
    return tuple(starmap(range, pairwise(accumulate(split_sizes(length, parts), initial=0))))


def deal_chunks(work: Tensor, size: int, chunk: int) -> tuple[list[list[int]], bool]:
    """Deal chunks of consecutive tokens to ranks, so that ranks have nearly equal work.

    Each round deals `size` chunks, one to each rank. Heavier chunks are dealt in earlier rounds, a
    chunk shorter than the others last. In a round the rank with least work so far gets the heaviest
    chunk. The work of two ranks differs by at most the greatest difference between two chunks of
    one round. A rank that gets no chunk in the last round counts as getting a chunk of no work.

    Args:
        work: int64 (seq_len,), cumulative: for each token the work of all tokens up to it.
        size: number of ranks.
        chunk: tokens of a chunk; the last chunk may be shorter.

    Returns:
        For each rank the numbers of its chunks; True if no rank has more than 1.02 times the mean
        work.
    """
    stops = range(chunk, len(work) + chunk, chunk)
    costs = pad(work[[min(stop, len(work)) - 1 for stop in stops]], (1, 0)).diff()
    whole = costs[: len(work) // chunk].argsort(descending=True, stable=True)
    shorter = torch.arange(len(whole), len(costs), device="cpu")  # this chunk is dealt last
    order = torch.cat([whole, shorter])
    loads = torch.zeros(size, dtype=torch.int64, device="cpu")
    hands: list[list[int]] = [[] for _ in range(size)]
    for dealt in order.split(size):
        heavy_first = dealt[costs[dealt].argsort(descending=True, stable=True)]
        ranks = loads.argsort(stable=True)[: len(dealt)]
        loads[ranks] += costs[heavy_first]
        for rank, number in zip(ranks.tolist(), heavy_first.tolist(), strict=True):
            hands[rank].append(number)
    return hands, 100 * int(loads.max()) * size <= 102 * int(loads.sum())


def consecutive(numbers: Iterable[int]) -> Iterator[range]:
    """Cut numbers into ranges of consecutive ones, in the given order."""
    for _, group in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0]):
        found = [number for _, number in group]
        yield range(found[0], found[-1] + 1)


def grouped(
    items: Iterable[Item], size: Callable[[Item], float], most: float
) -> Iterator[tuple[Item, ...]]:
    """Yield groups of consecutive items whose sizes add up to at most `most`.

    A larger item is a group of its own.
    """
    together: list[Item] = []
    total = 0.0
    for item in items:
        if together and total + size(item) > most:
            yield tuple(together)
            together, total = [], 0.0
        together.append(item)
        total += size(item)
    if together:
        yield tuple(together)


@dataclass(frozen=True)
class Joined:
    """Hold the positions of segments, one segment after the other, without making a tensor.

    Args:
        segments: the segments.
        tokens: which of their positions, by index; a range of step 1.
    """

    segments: tuple[Segment, ...]
    tokens: range

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, tokens: slice) -> Self:
        """Return the positions at a slice of step 1."""
        return replace(self, tokens=self.tokens[tokens])

    def tensor(self) -> Tensor:
        """Return the positions, int64 (tokens,)."""
        return concatenated(self.segments)[self.tokens.start : self.tokens.stop]


def positions_of(segments: tuple[Segment, ...]) -> Segment | Joined:
    """Return the positions of segments: the range itself if there is one."""
    if len(segments) == 1:
        return segments[0]
    return Joined(segments, range(sum(map(len, segments))))


# Callers keep the result. A tensor of inference mode could not take part in training.
@torch.inference_mode(False)
def concatenated(segments: Sequence[Segment]) -> Tensor:
    """Return all positions of some segments, one segment after the other, int64 (positions,)."""
    pieces = [torch.arange(s.start, max(s.start, s.stop), s.step, device="cpu") for s in segments]
    return torch.cat(pieces) if pieces else torch.empty(0, dtype=torch.int64, device="cpu")


def within(indices: Tensor, own: range) -> tuple[Tensor, Tensor]:
    """Return the place of each index in the range `own`, 0 if outside, and which are inside."""
    here = (indices >= own.start) & (indices < own.stop)
    return (indices - own.start) * here, here


def moved(piece: range, start: int) -> range:
    """Return a range of step 1 moved by `start`."""
    return range(piece.start + start, piece.stop + start)
