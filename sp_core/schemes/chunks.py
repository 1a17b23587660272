"""Cut a sequence into chunks that are sent one after the other.

Shapes: B batch, S sequence, P ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from sp_core.communicator import Communicator
from sp_core.sharding import split_ranges

CHUNKS = 4

Chunk = tuple[tuple[range, ...], tuple[int, ...]]
"""For each rank, the range of its tokens in a chunk, and the lengths of these ranges."""


@dataclass(frozen=True)
class Tokens:
    """The number of tokens of each rank, and the number of chunks in which they are sent."""

    comm: Communicator
    lengths: tuple[int, ...]
    chunks: int = CHUNKS

    def __iter__(self) -> Iterator[Chunk]:
        cuts = [split_ranges(length, self.chunks) for length in self.lengths]
        for number in range(self.chunks):
            ranges = tuple(cut[number] for cut in cuts)
            if number == 0 or any(ranges):
                yield ranges, tuple(map(len, ranges))

    def own(self, x: Tensor, chunk: Chunk) -> Tensor:
        """Return this rank's tokens of a chunk, from (B, S/P, *)."""
        mine = chunk[0][self.comm.rank]
        return x[:, mine.start : mine.stop]

    def take(self, x: Tensor, chunk: Chunk) -> Tensor:
        """Return all ranks' tokens of a chunk, from (B, S, *)."""
        return torch.cat([x[:, rows] for rows in self._rows(chunk)], 1)

    def put(self, x: Tensor, chunk: Chunk, part: Tensor) -> None:
        """Write all ranks' tokens of a chunk into (B, S, *)."""
        for rows, piece in zip(self._rows(chunk), part.split(list(chunk[1]), 1), strict=True):
            x[:, rows] = piece

    def _rows(self, chunk: Chunk) -> list[slice]:
        starts = accumulate(self.lengths[:-1], initial=0)
        return [slice(start + r.start, start + r.stop) for start, r in zip(starts, chunk[0], strict=True)]
