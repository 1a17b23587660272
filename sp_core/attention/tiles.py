"""Cut large blocks into tiles on which torch's CPU kernels are faster.

They take up to 512 keys at a time, also beyond the diagonal of a causal block. Tiles on the
diagonal keep that small; what is left are full blocks.

    forward: halves       backward: strips

    c                     c
    f c                   f c
    f f c                 f f c
    f f f c               f f f c

Each row of out is merged a few times only (halves). Gradients are summed into place, so there can
be more tiles: tall ones, whose keys stay in the cache (strips; a full block is cut into strips).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from torch import Tensor

from sp_core.mask import Block

Cut = Callable[[Block], Iterator[Block]]

HALVES_TILE = 256
STRIP_WIDTHS = (384, 192)
"""Keys of a strip, and of the parts of its causal tile.

These values and HALVES_TILE were the fastest of 64 to 512, for 4 and 8 heads of 64 elements and 512
to 8192 tokens, on one core with AVX-512.
"""

POLLED_ROWS = 768
"""Queries of a full block between two polls: the fewest for which torch's kernel still takes 256
at a time."""


def tiled(blocks: Iterable[Block], cut: Cut, like: Tensor) -> tuple[Block, ...]:
    """Cut blocks into tiles on a CPU.

    Half types are not cut, because the kernel would round once more for each tile.
    """
    if not on_cpu(like):
        return tuple(blocks)
    return tuple(tile for block in blocks for tile in cut(block))


def on_cpu(like: Tensor) -> bool:
    """Return whether tiles of torch's CPU kernel lose nothing."""
    return like.device.type == "cpu" and like.itemsize >= 4


def halves(block: Block) -> Iterator[Block]:
    """Yield two causal halves, each cut again, and the full square between them.

    They come in the order of their queries.
    """
    size = block.q_stop - block.q_start
    if block.kind != "causal" or size <= HALVES_TILE:
        yield block
        return
    yield from halves(_diagonal(block, 0, size // 2))
    yield _below(block, size // 2, 0, size // 2)
    yield from halves(_diagonal(block, size // 2, size))


def rows(block: Block) -> Iterator[Block]:
    """Cut a full block into ranges of queries, between which communication can make progress."""
    if block.kind != "full":
        yield block
        return
    keys = block.kv_stop - block.kv_start
    for start in range(block.q_start, block.q_stop, POLLED_ROWS):
        stop = min(start + POLLED_ROWS, block.q_stop)
        yield block._replace(q_start=start, q_stop=stop, pairs=(stop - start) * keys)


def strips(block: Block) -> Iterator[Block]:
    """Cut a block into strips of keys.

    The causal queries of a strip, then all queries that see all of its keys.
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
    size = block.q_stop - block.q_start
    for keys in _cuts(block, width):
        tile = _diagonal(block, keys.start, keys.stop)
        yield from _causal_strips(tile, *finer) if finer else (tile,)
        if keys.stop < size:
            yield _below(block, keys.stop, keys.start, keys.stop)


def _cuts(block: Block, width: int) -> Iterator[range]:
    """Yield the keys of a block, counted from its first one, in ranges of at most `width`."""
    size = block.kv_stop - block.kv_start
    yield from (range(start, min(start + width, size)) for start in range(0, size, width))


def _diagonal(block: Block, start: int, stop: int) -> Block:
    """Return the causal tile of tokens start to stop - 1."""
    q, kv, size = block.q_start, block.kv_start, stop - start
    return Block(q + start, q + stop, kv + start, kv + stop, "causal", size * (size + 1) // 2)


def _below(block: Block, q_start: int, kv_start: int, kv_stop: int) -> Block:
    """Return the full tile of all queries from q_start on with keys that all of them see."""
    q, kv = block.q_start, block.kv_start
    pairs = (block.q_stop - q - q_start) * (kv_stop - kv_start)
    return Block(q + q_start, block.q_stop, kv + kv_start, kv + kv_stop, "full", pairs)
