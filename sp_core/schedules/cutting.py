"""How the pieces of a vector are cut into segments, so that one travels while another is added, and scratch stays small."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sp_core.schedules.definition import spans
from sp_core.segments import moved, split_ranges


@dataclass(frozen=True)
class Cut:
    """Pieces cut into equally many segments.

    Args:
        parts: by piece, the ranges of its segments.
        depth: how many steps may be under way: 2 where there are segments to alternate between, else 1.
    """

    parts: tuple[tuple[range, ...], ...]
    depth: int

    @property
    def longest(self) -> int:
        """Elements of the longest segment."""
        return max(len(part) for piece in self.parts for part in piece)

    @property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """Numbers of the segments that go round together: as many as may be under way."""
        numbers = range(len(self.parts[0]))
        return tuple(tuple(numbers[first : first + self.depth]) for first in numbers[:: self.depth])

    @property
    def rounds(self) -> tuple[tuple[range, ...], ...]:
        """By piece, the ranges in which it goes round where nothing is added: as many as may be under way."""
        count = len(self.parts[0]) // self.depth
        starts = range(0, len(self.parts[0]), count)
        return tuple(tuple(range(piece[g].start, piece[g + count - 1].stop) for g in starts) for piece in self.parts)


def cut(counts: Sequence[int], segment: int | None = None) -> Cut:
    """Cut pieces of `counts` elements into segments of at most `segment`; into one where it is None or long enough.

    The number of segments is the same for every piece, and even where it is not one, so that they go in pairs.
    """
    longest = max(counts)
    number = 1 if segment is None or longest <= segment else 2 * -(-longest // (2 * segment))
    parts = tuple(tuple(moved(part, piece.start) for part in split_ranges(len(piece), number)) for piece in spans(counts))
    return Cut(parts, 1 if number == 1 else 2)
