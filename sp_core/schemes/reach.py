"""Find which ranks see which blocks of keys, from shardings and mask. No communication.

`hops`, `seen_blocks` and `shown_keys` are for the ring, `next_owner_distances` for labels of next
tokens. Block j is the keys of rank j. A rank sees a key if any of its queries sees that key under
the mask. A run is a range of positions with a constant step that one rank owns. The time is O(n log
n) for n runs.

The keys that a query sees are one interval of positions, and so are the queries that see a key. So
a run of keys is seen by the owners of one range in the sorted list of query runs. Which of these
owners comes last around the ring is a range predecessor query, answered by a wavelet matrix.

Source: Claude, Navarro and Ordonez 2015, The wavelet matrix, Information Systems 47.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sp_core.mask import FAR64, Mask, limits
from sp_core.segments import Segment
from sp_core.sharding import Sharding

Ints = npt.NDArray[np.int64]


@lru_cache(maxsize=64)
def hops(sharding: Sharding, kv_sharding: Sharding, mask: Mask) -> tuple[int, ...]:
    """Return for each block how many times a ring must pass it on, in order of the owning rank.

    The ring passes a block from rank r to rank r + 1 modulo P, starting at its owner. It may stop
    at the last rank, in this order, that sees any key of the block.

    Args:
        sharding: the positions of each rank's queries.
        kv_sharding: the positions of each rank's keys.
        mask: which keys a query sees.

    Returns:
        P numbers from 0 to P - 1.
    """
    least, greatest = limits(mask, FAR64)
    queries = _Owners(sharding)
    alike = sharding == kv_sharding and mask.documents == mask.key_documents
    if queries.period and mask.documents and alike:
        low, high, block = queries.arcs(mask, least, greatest)
    else:
        keys = _runs(kv_sharding.segments, _longest_step(mask))
        low, high, keys = _visible(keys, least, greatest, mask.key_documents, mask.documents)
        block = keys[:, 3]
    begin, end = queries.between(low, high)
    met = begin < end
    begin, end, block = begin[met], end[met], block[met]
    last = _last(queries.owner, begin, end, block, sharding.size)
    steps = np.zeros(sharding.size, np.int64)
    np.maximum.at(steps, block, (last - block) % sharding.size)
    return tuple(steps.tolist())


@lru_cache(maxsize=64)
def seen_blocks(
    sharding: Sharding, kv_sharding: Sharding, mask: Mask, rank: int
) -> tuple[bool, ...]:
    """Return for each rank's block of keys whether any query of `rank` sees any key of the block.

    Args:
        sharding: the positions of each rank's queries.
        kv_sharding: the positions of each rank's keys.
        mask: which keys a query sees.
        rank: the rank that holds the queries.

    Returns:
        P values in the order of the ranks that own the blocks.
    """
    least, greatest = limits(mask, FAR64)
    queries = _runs([sharding.segments[rank]], _longest_step(mask))
    low, high, _ = _visible(queries, -greatest, -least, mask.documents, mask.key_documents)
    blocks = _Owners(kv_sharding)
    begin, end = blocks.between(low, high)
    covered = np.zeros(len(blocks.owner) + 1, np.int64)
    np.add.at(covered, begin, 1)
    np.add.at(covered, end, -1)
    seen = np.zeros(sharding.size, bool)
    seen[blocks.owner[covered[:-1].cumsum() > 0]] = True
    return tuple(seen.tolist())


@dataclass(frozen=True)
class Shown:
    """Name the keys of each rank that a ring sends, as ranges of indices in the rank's shard.

    Args:
        lengths: the number of these keys, by rank.
        starts, stops: the ranges, sorted by rank and index.
        first: for each rank the index of its first range in `starts`. The last item is the number
            of ranges.
    """

    lengths: tuple[int, ...]
    starts: Ints
    stops: Ints
    first: Ints

    def of(self, rank: int, device: str | torch.device = "cpu") -> slice | Tensor:
        """Return the indices of these keys of `rank`: a slice, or int64 on `device` for gaps."""
        ranges = slice(self.first[rank], self.first[rank + 1])
        starts, stops = self.starts[ranges], self.stops[ranges]
        if not len(starts):
            return slice(0, 0)
        if stops[-1] - starts[0] == self.lengths[rank]:
            return slice(int(starts[0]), int(stops[-1]))
        return torch.from_numpy(np.concatenate([*map(np.arange, starts, stops)])).to(device)


@lru_cache(maxsize=64)
def shown_keys(sharding: Sharding, kv_sharding: Sharding, mask: Mask) -> Shown:
    """Find the keys of each rank that queries of other ranks see.

    For each run of keys in a document, return all keys between the first and the last one that
    another rank sees. Return all keys of each block that another rank sees if a segment has a step
    above 1, as in a striped sharding. Do the same if one segment holds all queries.

    Args:
        sharding: the positions of each rank's queries.
        kv_sharding: the positions of each rank's keys.
        mask: which keys a query sees.
    """
    size, queries = sharding.size, _Owners(sharding)
    segments = (*sharding.gathered_segments, *kv_sharding.gathered_segments)
    if queries.period or any(len(s) > 1 and s.step > 1 for s in segments):
        stops = np.where(np.array(hops(sharding, kv_sharding, mask)) > 0, kv_sharding.lengths, 0)
        return Shown(tuple(stops.tolist()), np.zeros_like(stops), stops, np.arange(size + 1))
    least, greatest = limits(mask, FAR64)
    keys = _runs(kv_sharding.segments, 1)
    low, high, keys = _visible(keys, least, greatest, mask.key_documents, mask.documents)
    begin, end = queries.others(*queries.between(low, high), keys[:, 3])
    met = begin < end
    low, high, begin, end = low[met], high[met], begin[met], end[met]
    first, last, _, rank, index = keys[met].T
    start = index + (queries.first[begin].clip(low) - greatest - first).clip(0)
    stop = index + (queries.last[end - 1].clip(max=high) - least - first).clip(max=last - first) + 1
    order = np.lexsort((start, rank))
    start, stop, rank = start[order], stop[order], rank[order]
    lengths = np.bincount(rank, stop - start, size).astype(np.int64)
    first = np.searchsorted(rank, np.arange(size + 1))
    return Shown(tuple(lengths.tolist()), start, stop, first)


@lru_cache(maxsize=64)
def next_owner_distances(sharding: Sharding) -> tuple[int, ...]:
    """Return all distances (owner of position p + 1) - (owner of p) that occur, modulo P.

    Distances are in ascending order, without 0. A rank receives the tokens after its own from the
    ranks at these distances.
    """
    runs = _Owners(sharding)
    adjacent = runs.last[:-1] + 1 == runs.first[1:]
    distances = (runs.owner[1:] - runs.owner[:-1])[adjacent] % sharding.size
    return tuple(np.unique(distances[distances > 0]).tolist())


def _longest_step(mask: Mask) -> int:
    """Return the greatest step with which `_runs` keeps a range of positions as one run.

    A run whose step is at most the window's width sees a single interval in each document. A run
    whose step is at most about the mean length of a document is cut at documents into few pieces.
    The smaller of both lengths is returned.
    """
    least, greatest = limits(mask, FAR64)
    bounds = mask.documents or (FAR64,)
    return min(greatest - least + 1, bounds[-1] // len(bounds))


def _runs(shards: Sequence[Sequence[Segment]], longest_step: int) -> Ints:
    """Return the runs of all shards as an int64 array of rows (first, last, step, rank, index).

    A run is a range of positions with a constant step that one rank owns. `index` is that of its
    first position in the shard.

    Args:
        shards: for each rank its segments, ranges of positions.
        longest_step: segments of a greater step are cut into single positions.
    """
    owned = [
        (s, rank, stop - len(s))
        for rank, shard in enumerate(shards)
        for s, stop in zip(shard, accumulate(map(len, shard)), strict=True)
        if len(s)
    ]
    whole = [(s[0], s[-1], s.step, *at) for s, *at in owned if s.step <= longest_step]
    rows = [np.array(whole, np.int64).reshape(len(whole), 5)]
    for segment, rank, index in owned:
        if segment.step > longest_step:
            positions = np.arange(segment.start, segment.stop, segment.step)
            ones, owner = np.ones_like(positions), np.full_like(positions, rank)
            rows.append(
                np.stack(
                    [positions, positions, ones, owner, index + np.arange(len(positions))], axis=1
                )
            )
    return np.concatenate(rows)


def _visible(
    runs: Ints,
    least: int,
    greatest: int,
    documents: tuple[int, ...] | None,
    others: tuple[int, ...] | None,
) -> tuple[Ints, Ints, Ints]:
    """Cut runs at documents, and find the positions on the other side that each piece sees.

    The runs are of queries and the other side holds keys, or the other way round.

    Args:
        runs: rows (first, last, step, rank, index).
        least, greatest: limits of (position on the other side) - (own position), in one document.
        documents: boundaries of the documents of the runs; None without documents.
        others: boundaries of the documents of the other side.

    Returns:
        The first position that each piece sees; the last position that it sees; the pieces, as
        rows like those of `runs`.
    """
    first, last, *_ = runs.T
    if documents is None:
        return first + least, last + greatest, runs
    bounds, far = np.array(documents), np.array(others)
    document = np.searchsorted(bounds, first, "right") - 1
    count = np.searchsorted(bounds, last, "right") - document
    first, last, step, rank, index = np.repeat(runs, count, axis=0).T
    inside = np.arange(len(rank)) - np.repeat(count.cumsum() - count, count)
    document = np.repeat(document, count) + inside
    late, early = (bounds[document] - first).clip(0), (last - bounds[document + 1] + 1).clip(0)
    skipped = -(-late // step)
    first, last = first + skipped * step, last + (-early // step) * step
    low = (first + least).clip(far[document])
    high = (last + greatest).clip(max=far[document + 1] - 1)
    kept = first <= last
    pieces = np.stack([first, last, step, rank, index + skipped], axis=1)
    return low[kept], high[kept], pieces[kept]


class _Owners:
    """Store which rank owns which positions, as runs of consecutive positions in ascending order.

    Run i covers positions first[i] to last[i], and rank owner[i] owns them. In a striped sharding
    the owners repeat after `period` positions. Then only the first two periods are stored, one
    position in each run: the owner of a later position follows from them. Otherwise `period` is 0.
    """

    def __init__(self, sharding: Sharding) -> None:
        self._begin, self._end = sharding.end - sharding.seq_len, sharding.end - 1
        owned = [(s, rank) for rank, shard in enumerate(sharding.segments) for s in shard]
        self.period = period = len(owned)
        table = {s.start - self._begin: rank for s, rank in owned if s.step == period}
        if sharding.seq_len > period and sorted(table) == [*range(period)]:
            self.first = self.last = np.arange(2 * period)
            self.owner = np.array([table[place % period] for place in range(2 * period)], np.int64)
        else:
            self.period = 0
            runs = _runs(sharding.segments, 1)
            self.first, self.last, _, self.owner, _ = runs[runs[:, 0].argsort()].T

    def arcs(self, mask: Mask, least: int, greatest: int) -> tuple[Ints, Ints, Ints]:
        """Return for some keys the first and last query that sees the key, and the key's owner.

        This replaces `_visible` if the owners repeat with a period, the mask has documents, and the
        same ranks own keys and queries.

        Only a few documents are examined. Modulo the period P, a document is an arc of a circle.
        A rank sees in an arc at least what it sees in any shorter arc inside. Arcs are cut at two
        periods, which show as much as a longer document. A key in the first period has P positions
        after it. The same rank's key in the second period has P positions before it.

        Args:
            mask: the mask, with documents.
            least, greatest: limits of (query position) - (key position).
        """
        period, begin = self.period, self._begin
        bounds = (np.array(mask.documents) - begin).clip(0)
        length = np.diff(bounds)
        longest = np.zeros(period, np.int64)
        np.maximum.at(longest, bounds[:-1] % period, length.clip(max=2 * period))
        reach = np.tile(longest, 3) + np.arange(-2 * period, period)
        covered = np.maximum.accumulate(reach)[2 * period - 1 : -1]
        start = np.flatnonzero(reach[2 * period :] > covered)
        size = longest[start]
        first, last = np.repeat(start, size), np.repeat(start + size - 1, size)
        key = first + np.arange(len(first)) - np.repeat(size.cumsum() - size, size)
        low, high = (key + least).clip(first), (key + greatest).clip(max=last)
        return low + begin, high + begin, self.owner[key % period]

    def between(self, low: Ints, high: Ints) -> tuple[Ints, Ints]:
        """Return arrays (begin, end): owner[begin[i]:end[i]] own positions low[i] to high[i].

        begin[i] == end[i] if no rank owns any of these positions.
        """
        if self.period:
            low, high = low.clip(self._begin), high.clip(max=self._end)
            turns = (low - self._begin) // self.period * self.period + self._begin
            low, high = low - turns, high - turns
        begin, end = np.searchsorted(self.last, low), np.searchsorted(self.first, high, "right")
        return begin, np.where(low <= high, end, begin)

    def others(self, begin: Ints, end: Ints, rank: Ints) -> tuple[Ints, Ints]:
        """Drop the runs of rank[i] at both ends of the range of runs begin[i] to end[i] - 1.

        Return begin and end of the shorter ranges; begin[i] >= end[i] if no run is left. There must
        be no period.
        """
        changes = np.flatnonzero(np.diff(self.owner))  # the next run has a different owner
        owner, count = np.append(self.owner, -1), len(self.owner)
        after, before = np.append(changes + 1, count), np.insert(changes, 0, -1)
        is_own = owner[begin] == rank, owner[end - 1] == rank
        first = np.where(is_own[0], after[np.searchsorted(changes, begin)], begin)
        last = np.where(is_own[1], before[np.searchsorted(changes, end - 1)], end - 1)
        return first, last + 1


def _last(owner: Ints, begin: Ints, end: Ints, block: Ints, size: int) -> Ints:
    """Return the last owner around the ring in each range of runs, as seen from rank block[i].

    That is the greatest owner below block[i], which its keys reach after rank P-1; if there is
    none, the greatest owner. The wavelet matrix has a level for each bit of the owners, the highest
    bit first. From level to level the owners are stably partitioned by the bit of the level, 0
    before 1.

    Args:
        owner: for each run its rank, below `size`.
        begin, end: ranges of runs, owner[begin[i]:end[i]]; none is empty.
        block: for each range a rank.
        size: the number of ranks.
    """
    levels: list[tuple[int, Ints]] = []
    for shift in reversed(range(size.bit_length())):
        low = (owner >> shift) & 1 == 0
        levels.append((shift, np.concatenate([[0], low.cumsum()])))
        owner = np.concatenate([owner[low], owner[~low]])
    below, left, right = np.zeros_like(begin), begin, end  # count the owners below block[i]
    for shift, zeros in levels:
        high = (block >> shift) & 1 == 1
        below += np.where(high, zeros[right] - zeros[left], 0)
        left, right = _descend(zeros, left, high), _descend(zeros, right, high)
    # find the k-th smallest owner
    k, found = np.where(below > 0, below, end - begin) - 1, np.zeros_like(begin)
    for shift, zeros in levels:
        count = zeros[end] - zeros[begin]
        high = k >= count
        k = np.where(high, k - count, k)
        found |= high.astype(np.int64) << shift
        begin, end = _descend(zeros, begin, high), _descend(zeros, end, high)
    return found


def _descend(zeros: Ints, place: Ints, high: npt.NDArray[np.bool_]) -> Ints:
    """Convert indices of a level of the wavelet matrix to indices of the next level.

    Args:
        zeros: how many of the first i numbers of the level have bit 0, for each i.
        place: indices in the level.
        high: for each index, whether to follow the numbers with bit 1, which come after the others.
    """
    return np.where(high, zeros[-1] + place - zeros[place], zeros[place])
