"""Find which ranks see which blocks of keys, from runs of positions: O(n log n) time for n runs.

The keys that a query sees are one interval of positions, and so are the queries that see a key. So
a run of keys is seen by the owners of one range in the sorted list of query runs. Which of these
owners is the last around the ring is a range predecessor query, answered by a wavelet matrix.

Source: Claude, Navarro and Ordonez 2015, The wavelet matrix, Information Systems 47.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from sp_core.mask import Mask
from sp_core.mask.blocks import FAR64, limits
from sp_core.segments import Segment
from sp_core.sharding import Sharding

Ints = npt.NDArray[np.int64]


@lru_cache(maxsize=64)
def hops(sharding: Sharding, kv_sharding: Sharding, mask: Mask) -> tuple[int, ...]:
    """Return how often each block is passed on, until the last rank that sees any of its keys."""
    least, greatest = limits(mask, FAR64)
    queries = _Owners(sharding)
    if sharding == kv_sharding and mask.documents == mask.key_documents and queries.repeats(mask):
        low, high, block = queries.arcs(mask, least, greatest)
    else:
        keys = _runs(kv_sharding.segments, _longest_step(mask))
        low, high, block = _visible(keys, least, greatest, mask.key_documents, mask.documents)
    begin, end = queries.between(low, high)
    begin, end, block = _widest(begin, end, block, len(queries.owner))
    order = _Wavelet(queries.owner, sharding.size)
    below = order.count_below(begin, end, block)  # owners that the block reaches after rank P-1
    last = order.smallest(begin, end, np.where(below > 0, below, end - begin) - 1)
    steps = np.zeros(sharding.size, np.int64)
    np.maximum.at(steps, block, (last - block) % sharding.size)
    return tuple(steps.tolist())


@lru_cache(maxsize=64)
def seen_blocks(
    sharding: Sharding, kv_sharding: Sharding, mask: Mask, rank: int
) -> tuple[bool, ...]:
    """Return for each block whether the queries of `rank` see any of its keys."""
    least, greatest = limits(mask, FAR64)
    queries = _runs([sharding.segments[rank]], _longest_step(mask))
    low, high, _ = _visible(queries, -greatest, -least, mask.documents, mask.key_documents)
    blocks = _Owners(kv_sharding)
    begin, end = blocks.between(low, high)
    covered = np.zeros(len(blocks.owner) + 1, np.int64)
    np.add.at(covered, begin, 1)
    np.add.at(covered, np.maximum(begin, end), -1)
    seen = np.zeros(sharding.size, bool)
    seen[blocks.owner[covered[:-1].cumsum() > 0]] = True
    return tuple(seen.tolist())


@lru_cache(maxsize=64)
def next_owner_distances(sharding: Sharding) -> tuple[int, ...]:
    """Return by how many ranks the owners of a position and of the next one can differ, but 0."""
    runs = _Owners(sharding)
    adjacent = runs.last[:-1] + 1 == runs.first[1:]
    distances = (runs.owner[1:] - runs.owner[:-1])[adjacent] % sharding.size
    return tuple(np.unique(distances[distances > 0]).tolist())


def _longest_step(mask: Mask) -> int:
    """Return the longest step of runs that see an interval in each document and skip few."""
    least, greatest = limits(mask, FAR64)
    bounds = mask.documents or (0, FAR64)
    return min(greatest - least + 1, max(bounds[-1] // max(len(bounds) - 1, 1), 1))


def _runs(shards: Sequence[Sequence[Segment]], longest_step: int) -> Ints:
    """Return rows (first, last, step, rank). Runs of longer steps become single positions."""
    owned = [(s, rank) for rank, shard in enumerate(shards) for s in shard if len(s)]
    whole = [(s[0], s[-1], s.step, rank) for s, rank in owned if s.step <= longest_step]
    rows = [np.array(whole, np.int64).reshape(-1, 4)]
    for segment, rank in owned:
        if segment.step > longest_step:
            positions = np.arange(segment.start, segment.stop, segment.step)
            ones = np.ones_like(positions)
            rows.append(np.stack([positions, positions, ones, rank * ones], axis=1))
    return np.concatenate(rows)


def _visible(
    runs: Ints,
    least: int,
    greatest: int,
    documents: tuple[int, ...] | None,
    others: tuple[int, ...] | None,
) -> tuple[Ints, Ints, Ints]:
    """Cut runs at their documents.

    Return for each piece the interval that it sees on the other side, and its rank.
    """
    first, last, step, rank = runs.T
    if documents is None or others is None:
        return first + least, last + greatest, rank
    bounds, far = np.array(documents), np.array(others)
    document = np.searchsorted(bounds, first, "right") - 1
    count = np.searchsorted(bounds, last, "right") - document
    first, last, step, rank = np.repeat(runs, count, axis=0).T
    inside = np.arange(len(rank)) - np.repeat(count.cumsum() - count, count)
    document = np.repeat(document, count) + inside
    late, early = (
        np.maximum(bounds[document] - first, 0),
        np.maximum(last - bounds[document + 1] + 1, 0),
    )
    first, last = first - (-late // step) * step, last + (-early // step) * step
    low = np.maximum(first + least, far[document])
    high = np.minimum(last + greatest, far[document + 1] - 1)
    kept = first <= last
    return low[kept], high[kept], rank[kept]


def _widest(begin: Ints, end: Ints, block: Ints, places: int) -> tuple[Ints, Ints, Ints]:
    """Of the ranges of one block that begin alike, keep the longest. Leave out empty ones."""
    met = begin < end
    key, end = (block * places + begin)[met], end[met]
    order = key.argsort(kind="stable")
    key, starts = np.unique(key[order], return_index=True)
    longest = np.maximum.reduceat(end[order], starts) if len(starts) else end
    return key % places, longest, key // places


class _Owners:
    """The ranks that own positions, as sorted runs.

    Of a pattern that repeats, two periods are kept.
    """

    def __init__(self, sharding: Sharding) -> None:
        segments = {
            s: rank for rank, owned in enumerate(sharding.segments) for s in owned if len(s)
        }
        self._begin = begin = min((s.start for s in segments), default=0)
        self._end = max((s[-1] for s in segments), default=-1)
        self._period = period = len(segments)
        table = {s.start - begin: rank for s, rank in segments.items() if s.step == period > 1}
        complete = all(s[-1] + period > self._end for s in segments)
        if complete and sorted(table) == [*range(period)]:
            self.first = self.last = np.arange(2 * period)
            self.owner = np.array([table[place % period] for place in range(2 * period)], np.int64)
        else:
            self._period = 0
            runs = _runs(sharding.segments, 1)
            self.first, self.last, _, self.owner = runs[runs[:, 0].argsort()].T

    def repeats(self, mask: Mask) -> bool:
        """Return whether the owners are a pattern that repeats, with documents in it."""
        return bool(self._period) and mask.documents is not None

    def arcs(self, mask: Mask, least: int, greatest: int) -> tuple[Ints, Ints, Ints]:
        """Return as `_visible`, for keys that the same ranks own, from few of the documents.

        Seen modulo the period P, documents are arcs of a circle. What ranks see in an arc, they see
        in any arc that covers it. An arc of two periods shows all that a longer document does: a
        key in its first half has P positions after it, and the same rank's in the second P before.
        """
        period, begin = self._period, self._begin
        bounds = np.clip(np.array(mask.documents), begin, self._end + 1) - begin
        length = np.diff(bounds)
        longest = np.zeros(period, np.int64)
        np.maximum.at(longest, bounds[:-1] % period, np.minimum(length, 2 * period))
        reach = np.tile(longest, 3) + np.arange(-2 * period, period)
        covered = np.maximum.accumulate(reach)[2 * period - 1 : -1]
        start = np.flatnonzero(reach[2 * period :] > covered)
        size = longest[start]
        first, last = np.repeat(start, size), np.repeat(start + size - 1, size)
        key = first + np.arange(len(first)) - np.repeat(size.cumsum() - size, size)
        low, high = np.maximum(key + least, first), np.minimum(key + greatest, last)
        self._end = FAR64  # arcs may be longer than the sequence
        return low + begin, high + begin, self.owner[key % period]

    def between(self, low: Ints, high: Ints) -> tuple[Ints, Ints]:
        """Return the ranges of `owner` of the positions low..high; begin >= end for none."""
        low, high = np.maximum(low, self._begin), np.minimum(high, self._end)
        if self._period:
            place = (low - self._begin) % self._period
            high = np.where(low > high, -1, place + np.minimum(high - low, self._period - 1))
            low = place
        high = np.where(low > high, -1, high)
        return np.searchsorted(self.last, low), np.searchsorted(self.first, high, "right")


class _Wavelet:
    """Answer about ranges of numbers how many are below a limit, and which is the k-th.

    Args:
        values: from 0 to limit - 1.
        limit: the greatest limit that is asked for.
    """

    def __init__(self, values: Ints, limit: int) -> None:
        self._levels: list[tuple[int, Ints]] = []
        for shift in reversed(range(limit.bit_length())):
            low = (values >> shift) & 1 == 0
            self._levels.append((shift, np.concatenate([[0], low.cumsum()])))
            values = np.concatenate([values[low], values[~low]])

    def count_below(self, begin: Ints, end: Ints, limit: Ints) -> Ints:
        """Count the numbers below `limit` in each range."""
        count = np.zeros_like(begin)
        for shift, zeros in self._levels:
            high = (limit >> shift) & 1 == 1
            count += np.where(high, zeros[end] - zeros[begin], 0)
            begin, end = _descend(zeros, begin, high), _descend(zeros, end, high)
        return count

    def smallest(self, begin: Ints, end: Ints, k: Ints) -> Ints:
        """Return the k-th smallest number of each range; 0 asks for the smallest."""
        value = np.zeros_like(begin)
        for shift, zeros in self._levels:
            low = zeros[end] - zeros[begin]
            high = k >= low
            k = np.where(high, k - low, k)
            value |= high.astype(np.int64) << shift
            begin, end = _descend(zeros, begin, high), _descend(zeros, end, high)
        return value


def _descend(zeros: Ints, place: Ints, high: npt.NDArray[np.bool_]) -> Ints:
    """Move places to the next level: numbers with a zero bit lie first there."""
    return np.where(high, zeros[-1] + place - zeros[place], zeros[place])
