"""Plan blocks of attention work from positions and a mask.

`plan_blocks` is the entry point. Most blocks are full or causal, for fused kernels. Partial blocks,
which need a mask, are kept thin. A run is a non-empty range of positions with a constant step of
at least 1. A shard of 10^6 tokens usually has a few runs. An index is the place of a token in its
shard: i of a query, j of a key. A band lo <= i - j <= hi is the visible pairs between two runs of
equal step. The rows and columns of a `Block` are counted from its first query and key instead.
"""

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from sp_core.mask.definition import (
    Mask,
    Positions,
    check_inside,
    document_of,
    limits,
    position_tensor,
)
from sp_core.segments import Joined, concatenated

Kind = Literal["full", "causal", "partial"]

CHUNK = 128  # blocks of at most this many queries and keys: visible pairs are counted one by one
# limits of a window tile's queries: few need many calls, many compute many hidden pairs
TILE = (48, 256)
# a tile's number of keys is a multiple of this: with one less, kernels are a sixth slower
ALIGNED = 16


class Block(NamedTuple):
    """Describe one unit of attention work: some queries of a shard against some keys of another.

    Args:
        q_start, q_stop: indices of the queries, q_start to q_stop - 1.
        kv_start, kv_stop: indices of the keys, kv_start to kv_stop - 1.
        kind: "full": every pair is visible. "causal": as many keys as queries, and row r sees
            column c if c <= r. "partial": some pairs are visible.
        band: (lo, hi) of a partial block in which row r sees column c if lo <= r - c <= hi; each
            query then sees a key, and each key is seen. None for full and causal blocks, and for
            partial blocks whose visible pairs must be computed from the positions.
    """

    q_start: int
    q_stop: int
    kv_start: int
    kv_stop: int
    kind: Kind
    band: tuple[int, int] | None = None

    @property
    def queries(self) -> slice:
        """Return the indices of the queries in their shard."""
        return slice(self.q_start, self.q_stop)

    @property
    def keys(self) -> slice:
        """Return the indices of the keys in their shard."""
        return slice(self.kv_start, self.kv_stop)

    @property
    def shape(self) -> tuple[int, int]:
        """Return (number of queries, number of keys)."""
        return self.q_stop - self.q_start, self.kv_stop - self.kv_start


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


def plan_blocks(
    q_positions: Positions, kv_positions: Positions, mask: Mask | None = None
) -> tuple[Block, ...]:
    """Plan blocks for the visible pairs of two shards. Each visible pair lies in exactly one block.

    Args:
        q_positions: Sq global positions of the queries (range, ints, or 1-D integer tensor).
        kv_positions: Sk global positions of the keys.
        mask: which keys a query sees; all keys if None.

    Returns:
        Blocks in ascending order of their first query. Queries that see no key may be in no block.

    Raises:
        ShapeError: a position outside the mask's documents.
    """
    return _plan(tuple(runs(q_positions)), tuple(runs(kv_positions)), mask or Mask())


def band_mask(rows: int, columns: int, lo: int, hi: int) -> Tensor:
    """Return a bool tensor (rows, columns), True at row i and column j if lo <= i - j <= hi."""
    visible = torch.ones(rows, columns, dtype=torch.bool, device="cpu")
    return visible.tril_(max(-lo, -rows)).triu_(min(max(-hi, -rows), columns))


@lru_cache(maxsize=256)
def _plan(q_shard: tuple[range, ...], kv_shard: tuple[range, ...], mask: Mask) -> tuple[Block, ...]:
    """Plan blocks as `plan_blocks`, from shards given as ranges of positions. Plans are cached."""
    if _irregular(q_shard) or _irregular(kv_shard):
        q, kv = _numbered(q_shard, mask.documents), _numbered(kv_shard, mask.key_documents)
        blocks = _halved(range(q.shape[1]), range(kv.shape[1]), q, kv, mask)
    else:
        blocks = _run_blocks(cut(q_shard, mask.documents), cut(kv_shard, mask.key_documents), mask)
    return tuple(sorted(_joined(blocks)))


def runs(positions: Positions) -> list[range]:
    """Cut positions into few runs, in the given order.

    Args:
        positions: S global positions: a range, a sequence of ints, or a 1-D integer tensor.

    Returns:
        Non-empty ranges whose concatenation is `positions`.
    """
    if isinstance(positions, range) and positions.step >= 1:
        return [positions] if positions else []
    if isinstance(positions, Joined):
        return list(_runs_of(positions))
    return list(_greedy(position_tensor(positions).cpu()))


@lru_cache(maxsize=64)
def _runs_of(positions: Joined) -> tuple[range, ...]:
    """Return the runs of a shard's positions. They are kept: each layer of a model needs them."""
    return tuple(_greedy(positions.tensor()))


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


def _numbered(shard: Sequence[range], boundaries: tuple[int, ...] | None) -> Tensor:
    """Return the positions of a shard, and the numbers of their documents, int64 (2, S)."""
    at = concatenated(shard)
    document = torch.zeros_like(at) if boundaries is None else document_of(at, boundaries)
    return torch.stack((at, document))


def _irregular(shard: tuple[range, ...]) -> bool:
    """Return whether a shard has so many short ranges that planning by pairs of them is slow."""
    return len(shard) > max(16, sum(map(len, shard)) // 16)


def _run_blocks(
    q_pieces: Iterable[Piece], kv_pieces: Iterable[Piece], mask: Mask
) -> Iterator[Block]:
    """Yield the blocks of each range of queries with the ranges of keys in its document and reach.

    The ranges of keys are sorted by their first position. Ranges of a step above 1 may overlap.
    """
    least, greatest = limits(mask)
    by_document: dict[int, list[Piece]] = defaultdict(list)
    ends: dict[int, list[int]] = defaultdict(list)  # the last position in this range or before
    for piece in sorted(kv_pieces, key=lambda piece: piece.run.start):
        by_document[piece.document].append(piece)
        before = ends[piece.document]
        before.append(max([piece.run[-1], *before[-1:]]))
    for q in q_pieces:
        found = by_document[q.document]
        first = bisect_left(ends[q.document], q.run[0] - greatest)
        stop = bisect_right(found, q.run[-1] - least, key=lambda piece: piece.run.start)
        for kv in found[first:stop]:
            yield from _pair_blocks(q, kv, mask)


def _pair_blocks(q: Piece, kv: Piece, mask: Mask) -> Iterator[Block]:
    """Yield the blocks in which queries of one range of tokens see keys of another.

    If both ranges have the same step, a query sees the keys of a range of indices that moves on by
    one from query to query. Otherwise the ranges are halved until blocks are full, empty or small.
    """
    step = (q if len(q.run) > 1 else kv).run.step
    if len(kv.run) == 1 or kv.run.step == step:
        yield from _band_blocks(q.indices, kv.indices, *_index_band(q, kv, step, mask))
    else:
        tokens = _numbered([q.run], None), _numbered([kv.run], None)
        yield from _halved(q.indices, kv.indices, *tokens, Mask(mask.causal, mask.window))


def _halved(rows: range, columns: range, q: Tensor, kv: Tensor, mask: Mask) -> Iterator[Block]:
    """Yield the blocks of arbitrary positions, by halving queries and keys.

    Halving ends where all pairs are visible, or none: by order, distance or documents. It also ends
    at CHUNK tokens. Blocks without a visible pair are left out.

    Args:
        rows, columns: indices of the queries and of the keys.
        q, kv: positions and documents of the tokens at these indices, as from `_numbered`.
        mask: the mask.
    """
    if not rows or not columns:
        return
    least, greatest = limits(mask)
    low, first = (q.amin(1) - kv.amax(1)).tolist()
    high, last = (q.amax(1) - kv.amin(1)).tolist()
    if low > greatest or high < least or not first <= 0 <= last:
        return
    if least <= low and high <= greatest and first == 0 == last:
        yield _full(rows, columns)
    elif max(len(rows), len(columns)) <= CHUNK:
        pairs = int(mask.allowed(q[0], kv[0]).sum())  # quicker than any() and all()
        if pairs:
            kind: Kind = "full" if pairs == len(rows) * len(columns) else "partial"
            yield Block(rows.start, rows.stop, columns.start, columns.stop, kind)
    else:
        for i in _halves(len(rows)):
            for j in _halves(len(columns)):
                yield from _halved(rows[i], columns[j], q[:, i], kv[:, j], mask)


def _halves(length: int) -> tuple[slice, slice]:
    """Return slices of both halves of `length`; if it is at most CHUNK, of all and of nothing."""
    middle = length // 2 if length > CHUNK else length
    return slice(0, middle), slice(middle, length)


def _index_band(q: Piece, kv: Piece, step: int, mask: Mask) -> tuple[int, int]:
    """Return (lo, hi): query i sees key j under the mask if lo <= i - j <= hi.

    i and j are the indices of query and key in their shards. Both pieces must have the step `step`
    or a single token, and lie in the same document.
    """
    least, greatest = limits(mask)
    offset = q.run.start - kv.run.start
    shift = q.offset - kv.offset
    return -((offset - least) // step) + shift, (greatest - offset) // step + shift


def _band_blocks(rows: range, columns: range, lo: int, hi: int) -> Iterator[Block]:
    """Yield the blocks of a band lo <= i - j <= hi, with i in `rows` and j in `columns`."""
    rows = range(max(rows.start, columns.start + lo), min(rows.stop, columns.stop + hi))
    columns = range(max(columns.start, rows.start - hi), min(columns.stop, rows.stop - lo))
    if not rows or not columns or lo > hi:  # lo > hi: a window narrower than the step
        return
    if rows[-1] - columns[0] > hi:
        yield from _window_blocks(rows, columns, lo, hi)
    elif rows[0] - columns[-1] < lo:
        yield from _causal_blocks(rows, columns, lo)
    else:
        yield _full(rows, columns)


def _causal_blocks(rows: range, columns: range, lo: int) -> Iterator[Block]:
    """Yield the blocks of the pairs with i - j >= lo: one causal square, the rest full.

    The last query must see the last key, and the first query at least one key.
    """
    corner = rows.start - lo
    size = columns.stop - corner
    if corner > columns.start:
        yield _full(rows[:size], range(columns.start, corner))
    yield Block(rows.start, rows.start + size, corner, columns.stop, "causal")
    if size < len(rows):
        yield _full(rows[size:], columns)


def _window_blocks(rows: range, columns: range, lo: int, hi: int) -> Iterator[Block]:
    """Yield the blocks of a sliding window, the pairs with lo <= i - j <= hi.

    First yield the blocks of the queries from which the window hides no early key. Then yield tiles
    along the diagonal.
    """
    uncut = min(max(hi + columns.start + 1, rows.start), rows.stop) - rows.start
    yield from _band_blocks(rows[:uncut], columns, lo, hi)
    height = min(max((hi - lo + 1) // 8, TILE[0]), TILE[1])
    height += -(height + hi - lo) % ALIGNED
    for start in range(uncut, len(rows), height):
        yield _tile(rows[start : start + height], columns, lo, hi)


def _tile(rows: range, columns: range, lo: int, hi: int) -> Block:
    """Return the block of the queries `rows` and all keys in `columns` that any of them sees.

    The window must hide a key of `columns` before the keys that the first query sees.
    """
    columns = range(rows.start - hi, min(columns.stop, rows.stop - lo))
    lo = max(lo - hi, -len(columns))
    return Block(rows.start, rows.stop, columns.start, columns.stop, "partial", (lo, 0))


def _full(rows: range, columns: range) -> Block:
    """Return the block of the queries `rows` and keys `columns`, with every pair visible."""
    return Block(rows.start, rows.stop, columns.start, columns.stop, "full")


def _joined(blocks: Iterable[Block]) -> list[Block]:
    """Join adjacent full blocks, first along the keys, then along the queries."""
    found = list(blocks)
    full = sorted(block for block in found if block.kind == "full")
    wide = _join(full, lambda a, b: a.queries == b.queries and a.kv_stop == b.kv_start)
    tall = _join(
        sorted(wide, key=lambda b: (b.kv_start, b.q_start)),
        lambda a, b: a.keys == b.keys and a.q_stop == b.q_start,
    )
    return tall + [block for block in found if block.kind != "full"]


def _join(blocks: list[Block], adjacent: Callable[[Block, Block], bool]) -> list[Block]:
    """Join each full block of a sorted list to the previous one if `adjacent` says so."""
    joined: list[Block] = []
    for block in blocks:
        if joined and adjacent(joined[-1], block):
            last = joined.pop()
            block = _full(range(last.q_start, block.q_stop), range(last.kv_start, block.kv_stop))
        joined.append(block)
    return joined
