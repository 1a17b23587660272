"""Cutting a causal block into tiles, because torch's CPU kernels compute more of its square than the half that is visible.

They take up to 512 keys at a time, also beyond the diagonal. Tiles on the diagonal keep that small; what is left are full blocks.

    forward: halves       backward: strips

    c                     c
    f c                   f c         Each result row is merged a few times only (halves), or summed into place (strips, whose
    f f c                 f f c       tall blocks the kernel is fastest at).
    f f f c               f f f c
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from torch import Tensor

from sp_core.mask import Block

Cut = Callable[[Block], Iterator[Block]]

HALVES_TILE = 256
STRIPS_TILE = 192
"""The fastest edges of 64 ... 512, for 4 and 8 heads of 64 elements and 512 ... 4096 tokens, on one core with AVX-512."""


def tiled(blocks: Iterable[Block], cut: Cut, like: Tensor) -> tuple[Block, ...]:
    """The blocks with the causal ones cut, where that gains something: on a CPU, and not for half types, whose results the kernel
    would round once more for each tile."""
    if like.device.type != "cpu" or like.itemsize < 4:
        return tuple(blocks)
    return tuple(tile for block in blocks for tile in (cut(block) if block.kind == "causal" else (block,)))


def halves(block: Block) -> Iterator[Block]:
    """The causal halves of a causal block, each cut likewise, and the full square between them; in order of their queries."""
    size = block.q_stop - block.q_start
    if size <= HALVES_TILE:
        yield block
        return
    yield from halves(_diagonal(block, 0, size // 2))
    yield _below(block, size // 2, 0, size // 2)
    yield from halves(_diagonal(block, size // 2, size))


def strips(block: Block) -> Iterator[Block]:
    """Tiles of keys, each with its causal queries and then with all later ones."""
    size = block.q_stop - block.q_start
    if size <= STRIPS_TILE:
        yield block
        return
    for start in range(0, size, STRIPS_TILE):
        stop = min(start + STRIPS_TILE, size)
        yield _diagonal(block, start, stop)
        if stop < size:
            yield _below(block, stop, start, stop)


def _diagonal(block: Block, start: int, stop: int) -> Block:
    """Tokens start .. stop of a causal block among themselves."""
    q, kv, size = block.q_start, block.kv_start, stop - start
    return Block(q + start, q + stop, kv + start, kv + stop, "causal", size * (size + 1) // 2)


def _below(block: Block, q_start: int, kv_start: int, kv_stop: int) -> Block:
    """The queries from q_start on with keys that all of them see."""
    q, kv = block.q_start, block.kv_start
    pairs = (block.q_stop - q - q_start) * (kv_stop - kv_start)
    return Block(q + q_start, block.q_stop, kv + kv_start, kv + kv_stop, "full", pairs)
