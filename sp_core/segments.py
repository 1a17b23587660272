"""Ranges of global positions, and the cut of a length into nearly equal parts."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

Segment = range
"""The global positions of consecutive local tokens. The step is P for a striped shard."""


def split_sizes(length: int, parts: int) -> tuple[int, ...]:
    """Cut `length` into `parts` nearly equal sizes. The first `length % parts` sizes are one longer."""
    quotient, remainder = divmod(length, parts)
    return tuple(quotient + (part < remainder) for part in range(parts))


def split_ranges(length: int, parts: int) -> tuple[range, ...]:
    """Return the consecutive ranges whose lengths are `split_sizes`."""
    ranges, start = [], 0
    for size in split_sizes(length, parts):
        ranges.append(range(start, start + size))
        start += size
    return tuple(ranges)


def first(segment: Segment) -> int:
    """Return the first position of a segment, or its start if it is empty."""
    return segment.start


@torch.inference_mode(
    False
)  # positions are kept: made under inference mode they could never take part in training
def concatenated(segments: Sequence[Segment]) -> Tensor:
    """Return all positions of some segments, int64."""
    pieces = [torch.arange(s.start, max(s.start, s.stop), s.step) for s in segments]
    return torch.cat(pieces) if pieces else torch.empty(0, dtype=torch.int64)


def moved(piece: range, start: int) -> range:
    """Return a range moved by `start` positions."""
    return range(piece.start + start, piece.stop + start)


def arithmetic_segments(positions: list[int]) -> list[range]:
    """Cut a list of positions into maximal ascending arithmetic ranges."""
    segments: list[range] = []
    begin = 0
    while begin < len(positions):
        end = begin + 1
        step = positions[end] - positions[begin] if end < len(positions) else 1
        if step < 1:
            step = 1
        while end < len(positions) and positions[end] - positions[end - 1] == step:
            end += 1
        segments.append(range(positions[begin], positions[end - 1] + 1, step))
        begin = end
    return segments
