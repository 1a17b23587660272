"""Decide from global positions which query sees which key, and plan the blocks of attention work.

`Mask` is for users. `plan_blocks` divides the visible pairs of two shards into blocks, each some
queries against some keys.

A shard's positions are a few runs: ranges of a constant step. Between two runs of equal step every
mask of this library is a band of indices, lo <= i - j <= hi for query i and key j. So blocks are
found for pairs of runs (rectangles, triangles, thin tiles along the diagonal), not for each token.
"""

from sp_core.mask.blocks import (
    Block as Block,
    band_mask as band_mask,
    plan_blocks as plan_blocks,
    runs as runs,
)
from sp_core.mask.definition import (
    FAR64 as FAR64,
    HashedOnce as HashedOnce,
    Mask as Mask,
    Positions as Positions,
    count_visible as count_visible,
    document_positions as document_positions,
    limits as limits,
    position_tensor as position_tensor,
)
