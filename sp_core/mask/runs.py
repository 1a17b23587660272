"""Positions as arithmetic runs: a shard of 10^6 tokens is stored as a few integers."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from sp_core.mask.definition import Positions, check_inside, document_number, position_tensor


class Run(NamedTuple):
    """Positions start, start + step, ..., `length` of them. A run of one token has step 1."""

    start: int
    step: int
    length: int

    @property
    def last(self) -> int:
        """The greatest position."""
        return self.start + self.step * (self.length - 1)


class Piece(NamedTuple):
    """A part of a shard in one document: indices offset to offset + run.length of the shard, and their positions."""

    offset: int
    run: Run
    document: int

    @property
    def indices(self) -> range:
        """The range of indices in the shard."""
        return range(self.offset, self.offset + self.run.length)


def runs(positions: Positions) -> list[Run]:
    """Cut positions into maximal arithmetic runs of step at least 1, in the given order.

    Args:
        positions: S global positions: a range, a sequence of ints, or a 1-D integer tensor.

    Returns:
        Runs whose concatenation is `positions`.
    """
    if isinstance(positions, range) and positions.step >= 1:
        return [_run(positions.start, positions.step, len(positions))] if positions else []
    values = position_tensor(positions).cpu()
    return list(_greedy(values)) if values.numel() else []


def _run(start: int, step: int, length: int) -> Run:
    """Make a run. Equal positions give equal runs, because runs are cache keys."""
    return Run(start, step if length > 1 else 1, length)


def _greedy(values: Tensor) -> Iterator[Run]:
    """Yield runs from stretches of equal differences. The time grows with stretches, not with tokens."""
    steps, counts = torch.unique_consecutive(values.diff(), return_counts=True)
    first = 0  # index of the first token that no run holds yet
    stop = 0  # index of the last token of the current stretch
    stretches = list(zip(steps.tolist(), counts.tolist(), strict=True))
    for number, (step, count) in enumerate(stretches):
        stop += count
        longer_follows = (
            number + 1 < len(stretches)
            and stretches[number + 1][0] >= 1
            and stretches[number + 1][1] > 1
        )
        if step < 1 or (stop - first == 1 and longer_follows):
            yield from (_run(int(values[i]), 1, 1) for i in range(first, stop))
            first = stop
        elif stop > first:
            yield _run(int(values[first]), step, stop + 1 - first)
            first = stop + 1
    if first < values.numel():
        yield _run(int(values[first]), 1, 1)


def cut(shard: tuple[Run, ...], boundaries: tuple[int, ...] | None) -> list[Piece]:
    """Cut the runs of a shard at the boundaries of documents.

    Raises:
        ShapeError: a position outside the documents.
    """
    pieces: list[Piece] = []
    index = 0
    for run in shard:
        pieces.extend(_cut_run(index, run, boundaries))
        index += run.length
    return pieces


def _cut_run(index: int, run: Run, boundaries: tuple[int, ...] | None) -> Iterator[Piece]:
    """Yield the pieces of one run. Each document is found by bisection."""
    if boundaries is None:
        yield Piece(index, run, 0)
        return
    check_inside(run.start, run.last, boundaries)
    done = 0
    while done < run.length:
        position = run.start + run.step * done
        document = document_number(position, boundaries)
        count = min(run.length - done, -(-(boundaries[document + 1] - position) // run.step))
        yield Piece(index + done, _run(position, run.step, count), document)
        done += count


def chunk(shard: tuple[Run, ...], size: int) -> list[tuple[range, int, int]]:
    """Cut a shard into chunks of `size` tokens: (local indices, least position, greatest position) of each."""
    stops: list[int] = []
    for run in shard:
        stops.append((stops[-1] if stops else 0) + run.length)
    total = stops[-1] if stops else 0
    return [_chunk(shard, stops, range(a, min(a + size, total))) for a in range(0, total, size)]


def _chunk(shard: tuple[Run, ...], stops: list[int], indices: range) -> tuple[range, int, int]:
    """Return the bounds of one chunk from the runs that it touches."""
    lows, highs = [], []
    number = bisect_left(stops, indices.start + 1)
    begin = indices.start
    while begin < indices.stop:
        run, offset = shard[number], begin - (stops[number] - shard[number].length)
        end = min(indices.stop, stops[number])
        lows.append(run.start + run.step * offset)
        highs.append(run.start + run.step * (offset + end - begin - 1))
        begin, number = end, number + 1
    return indices, min(lows), max(highs)
