"""Compute dense float64 attention, transformer block and LLaMA from definitions alone.

It imports torch only and shares no code with the rest of the library. Beside each tensor it returns
a scale, which is what rounding errors are proportional to (see `sp_core.testing.tolerance`).
"""

from .block import (
    BlockReference,
    feed_forward,
    layer_norm,
    rms_norm,
    rotate,
    self_attention,
    sensitivity,
    transformer_block,
    transformer_block_grads,
)
from .dense import (
    AttentionReference,
    GradientReference,
    attention,
    attention_grads,
    visible,
)
from .llama import llama, llama_frequencies, next_token_loss

__all__ = [
    "AttentionReference",
    "BlockReference",
    "GradientReference",
    "attention",
    "attention_grads",
    "feed_forward",
    "layer_norm",
    "llama",
    "llama_frequencies",
    "next_token_loss",
    "rms_norm",
    "rotate",
    "self_attention",
    "sensitivity",
    "transformer_block",
    "transformer_block_grads",
    "visible",
]
