"""Cut large blocks of attention into tiles on which torch's CPU kernels are faster.

A block is some queries against some keys; a tile is a smaller block of the same kind of work. The
kernels compute up to 512 keys at a time, in a causal block also hidden keys beyond the diagonal. So
a causal block is cut into small causal tiles (c) on the diagonal and full tiles (f) below:

    c
    f c
    f f c
    f f f c

`halves` is for the forward. It joins full tiles to squares, so each row of out is merged only a few
times. `strips` is for the backward, where gradients are summed in place. It makes more tiles, tall
and narrow ones, whose few keys stay in the cache. It cuts full blocks, too. `rows` cuts full blocks
of the forward, for communication between tiles.
"""

from collections.abc import Callable, Iterable, Iterator

from torch import Tensor

from sp_core.mask import Block

Cut = Callable[[Block], Iterator[Block]]
"""A function that cuts a block into tiles: `halves`, `rows` or `strips`."""

HALVES_TILE = 256
"""The greatest number of queries of a causal tile made by `halves`."""
STRIP_WIDTHS = (384, 192)
"""The number of keys of a strip, and of the smaller strips of its causal tile.

These values and HALVES_TILE were the fastest of 64 to 512, for 4 and 8 heads of 64 elements and 512
to 8192 tokens, on one core with AVX-512.
"""

POLLED_ROWS = 768
"""The number of queries of a tile made by `rows`: the least for which torch's kernel still takes
256 queries at a time."""


def tiled(blocks: Iterable[Block], cut: Cut, like: Tensor) -> tuple[Block, ...]:
    """Cut blocks of queries and keys into tiles, so that fewer hidden pairs are computed.

    `cut` is the function `halves`, `rows` or `strips`. Blocks are cut only if `like` (any of q, k
    and v) is on a CPU in float32 or float64. Of half types each tile would round the output once
    more.
    """
    if not on_cpu(like):
        return tuple(blocks)
    return tuple(tile for block in blocks for tile in cut(block))


def on_cpu(like: Tensor) -> bool:
    """Return whether `like` is on a CPU in float32 or float64, so that tiles add no rounding."""
    return like.device.type == "cpu" and like.itemsize >= 4


def halves(block: Block) -> Iterator[Block]:
    """Cut a causal block into two causal halves, and the full square below the diagonal.

    The halves are cut again, to at most HALVES_TILE queries. Tiles come in the order of their
    queries. A full, partial or small block is yielded uncut.
    """
    size = block.q_stop - block.q_start
    if block.kind != "causal" or size <= HALVES_TILE:
        yield block
        return
    yield from halves(_diagonal(block, 0, size // 2))
    yield _below(block, size // 2, 0, size // 2)
    yield from halves(_diagonal(block, size // 2, size))


def rows(block: Block) -> Iterator[Block]:
    """Cut a full block into tiles of POLLED_ROWS queries. Yield other blocks uncut.

    Communication can make progress between two tiles.
    """
    if block.kind != "full":
        yield block
        return
    for start in range(block.q_start, block.q_stop, POLLED_ROWS):
        stop = min(start + POLLED_ROWS, block.q_stop)
        yield block._replace(q_start=start, q_stop=stop)


def strips(block: Block) -> Iterator[Block]:
    """Cut a full or causal block into strips: ranges of keys with all queries that see them.

    In a causal block each strip is a causal tile, cut again into narrower strips, and the full tile
    of the later queries. A partial block is yielded uncut.
    """
    if block.kind == "full":
        yield from (
            _below(block, 0, keys.start, keys.stop) for keys in _cuts(block, STRIP_WIDTHS[0])
        )
    elif block.kind == "causal":
        yield from _causal_strips(block, *STRIP_WIDTHS)
    else:
        yield block


def _causal_strips(block: Block, width: int, *finer: int) -> Iterator[Block]:
    """Cut a causal block into strips of `width` keys, and each causal tile again by `finer`."""
    size = block.q_stop - block.q_start
    for keys in _cuts(block, width):
        tile = _diagonal(block, keys.start, keys.stop)
        yield from _causal_strips(tile, *finer) if finer else (tile,)
        if keys.stop < size:
            yield _below(block, keys.stop, keys.start, keys.stop)


def _cuts(block: Block, width: int) -> Iterator[range]:
    """Yield the keys of a block in ranges of at most `width`; the block's first key is 0."""
    size = block.kv_stop - block.kv_start
    yield from (range(start, min(start + width, size)) for start in range(0, size, width))


def _diagonal(block: Block, start: int, stop: int) -> Block:
    """Return the square causal tile of queries and keys start to stop - 1 of a causal block.

    Index 0 is the block's first query, and its first key.
    """
    q, kv = block.q_start, block.kv_start
    return Block(q + start, q + stop, kv + start, kv + stop, "causal")


def _below(block: Block, q_start: int, kv_start: int, kv_stop: int) -> Block:
    """Return the tile of the queries from q_start on with the keys kv_start to kv_stop - 1.

    Index 0 is the block's first query, and its first key. The tile is full, it needs no mask: the
    caller makes sure that each of these queries sees all these keys.
    """
    q, kv = block.q_start, block.kv_start
    return Block(q + q_start, block.q_stop, kv + kv_start, kv + kv_stop, "full")
