"""Ranges of global positions, and the cut of a length into parts equal in length or in work."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, groupby, pairwise, starmap

import torch
from torch import Tensor
from torch.nn.functional import pad

Segment = range
"""The global positions of consecutive local tokens. The step is P for a striped shard."""


def split_sizes(length: int, parts: int) -> tuple[int, ...]:
    """Cut `length` into `parts` nearly equal sizes.

    The first `length % parts` sizes are one longer.
    """
    quotient, remainder = divmod(length, parts)
    return tuple(quotient + (part < remainder) for part in range(parts))


def split_ranges(length: int, parts: int) -> tuple[range, ...]:
    """Return the consecutive ranges whose lengths are `split_sizes`."""
    return tuple(starmap(range, pairwise(accumulate(split_sizes(length, parts), initial=0))))


def deal_chunks(work: Tensor, size: int, chunk: int) -> tuple[list[list[int]], bool]:
    """Deal chunks of tokens to ranks in rounds. The heaviest goes to the rank with least work.

    Heavy chunks are dealt first. The spread of work over the ranks never exceeds that of a round.

    Args:
        work: of all tokens up to each one, int64 (seq_len,).

    Returns:
        The numbers of the chunks of each rank, and whether their work is even.
    """
    stops = range(chunk, len(work) + chunk, chunk)
    costs = pad(work[[min(stop, len(work)) - 1 for stop in stops]], (1, 0)).diff()
    whole = costs[: len(work) // chunk].argsort(descending=True, stable=True)
    order = torch.cat([whole, torch.arange(len(whole), len(costs))])  # the shorter chunk is last
    loads = torch.zeros(size, dtype=torch.int64)
    hands: list[list[int]] = [[] for _ in range(size)]
    for dealt in order.split(size):
        heavy_first = dealt[costs[dealt].argsort(descending=True, stable=True)]
        ranks = loads.argsort(stable=True)[: len(dealt)]
        loads[ranks] += costs[heavy_first]
        for rank, number in zip(ranks.tolist(), heavy_first.tolist(), strict=True):
            hands[rank].append(number)
    return hands, 100 * int(loads.max()) * size <= 102 * int(loads.sum())


def chunk_slices(hand: list[int], chunk: int) -> Iterator[slice]:
    """Yield the tokens of some chunks in ascending order. Neighbours are one slice."""
    for _, group in groupby(enumerate(sorted(hand)), lambda pair: pair[1] - pair[0]):
        numbers = [number for _, number in group]
        yield slice(numbers[0] * chunk, (numbers[-1] + 1) * chunk)


# Positions are kept. Made under inference mode they could never take part in training.
@torch.inference_mode(False)
def concatenated(segments: Sequence[Segment]) -> Tensor:
    """Return all positions of some segments, int64."""
    pieces = [torch.arange(s.start, max(s.start, s.stop), s.step) for s in segments]
    return torch.cat(pieces) if pieces else torch.empty(0, dtype=torch.int64)


def moved(piece: range, start: int) -> range:
    """Return a range moved by `start` positions."""
    return range(piece.start + start, piece.stop + start)
