"""Convert the positions of a shard to a few runs, and cut the runs at documents.

A run is a non-empty range of positions with a constant step of at least 1. A shard of 10^6 tokens
usually has a few runs. An index is the place of a token in its shard, from 0 on.
"""

from bisect import bisect_right
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from sp_core.mask.definition import Positions, check_inside, position_tensor


class Piece(NamedTuple):
    """Hold tokens of a shard that follow each other there and lie in one document.

    Args:
        offset: index of the first of these tokens in the shard.
        run: their global positions, which have a constant step.
        document: the number of the document; 0 without documents.
    """

    offset: int
    run: range
    document: int

    @property
    def indices(self) -> range:
        """Return where these tokens lie in the rank's shard: indices, not positions."""
        return range(self.offset, self.offset + len(self.run))


def runs(positions: Positions) -> list[range]:
    """Cut positions into few runs, in the given order.

    Args:
        positions: S global positions: a range, a sequence of ints, or a 1-D integer tensor.

    Returns:
        Non-empty ranges whose concatenation is `positions`.
    """
    if isinstance(positions, range) and positions.step >= 1:
        return [positions] if positions else []
    return list(_greedy(position_tensor(positions).cpu()))


def _greedy(values: Tensor) -> Iterator[range]:
    """Yield the runs of an int64 tensor (S,), found from stretches of equal differences.

    The loop has an iteration for each stretch, not for each token.
    """
    steps, counts = torch.unique_consecutive(values.diff(), return_counts=True)
    first = 0  # index of the first token that is in no run yet
    stop = 0  # index of the last token of the current stretch
    longer = ((steps >= 1) & (counts > 1)).tolist()
    follows = [*longer, False][1:]
    for step, count, longer_follows in zip(steps.tolist(), counts.tolist(), follows, strict=True):
        stop += count
        if step < 1 or (stop - first == 1 and longer_follows):
            yield from _single(values[first:stop])
            first = stop
        elif stop > first:
            yield range(int(values[first]), int(values[stop]) + 1, step)
            first = stop + 1
    yield from _single(values[first:])


def _single(values: Tensor) -> Iterator[range]:
    """Yield a run of length 1 for each value."""
    yield from (range(position, position + 1) for position in values.tolist())


def cut(shard: tuple[range, ...], boundaries: tuple[int, ...] | None) -> Iterator[Piece]:
    """Cut the runs of a shard at the boundaries of documents, and yield the pieces in order.

    Args:
        shard: the runs of positions of one rank.
        boundaries: the boundaries of the documents, as in `Mask`; None for no documents.

    Raises:
        ShapeError: a position outside the documents.
    """
    offset = 0
    for run in shard:
        if boundaries is not None:
            check_inside(run[0], run[-1], boundaries)
        while run:
            document, count = 0, len(run)
            if boundaries is not None:
                document = bisect_right(boundaries, run[0]) - 1
                count = -(-(boundaries[document + 1] - run[0]) // run.step)
            yield Piece(offset, run[:count], document)
            offset += len(run[:count])
            run = run[count:]
