"""Ranges of global positions, and the cut of a length into nearly equal parts."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise, starmap

import torch
from torch import Tensor

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


# Positions are kept. Made under inference mode they could never take part in training.
@torch.inference_mode(False)
def concatenated(segments: Sequence[Segment]) -> Tensor:
    """Return all positions of some segments, int64."""
    pieces = [torch.arange(s.start, max(s.start, s.stop), s.step) for s in segments]
    return torch.cat(pieces) if pieces else torch.empty(0, dtype=torch.int64)


def moved(piece: range, start: int) -> range:
    """Return a range moved by `start` positions."""
    return range(piece.start + start, piece.stop + start)
