"""Decide from global positions which query sees which key, and plan the blocks of attention work.

A shard's positions are a few arithmetic runs. Between two runs of one step every mask of this
library is a band in index space, lo <= i - j <= hi, so a pair of runs falls into rectangles,
triangles and thin diagonal tiles without looking at single tokens.
"""

from sp_core.mask.blocks import Block, plan_blocks
from sp_core.mask.definition import Mask, Positions, position_tensor

__all__ = ["Block", "Mask", "Positions", "plan_blocks", "position_tensor"]
