"""Compute dense float64 attention, transformer block and LLaMA from definitions alone.

It imports torch only and shares no code with the rest of the library. Beside each tensor it returns
a scale, to which its rounding errors are proportional (see `sp_core.testing.tolerance`).
"""

from .block import (
    feed_forward,
    layer_norm,
    rms_norm,
    rotate,
    self_attention,
    sensitivity,
    transformer_block,
)
from .dense import (
    Reference,
    attention,
    visible,
)
from .llama import llama, llama_amplitude, llama_frequencies

__all__ = [
    "Reference",
    "attention",
    "feed_forward",
    "layer_norm",
    "llama",
    "llama_amplitude",
    "llama_frequencies",
    "rms_norm",
    "rotate",
    "self_attention",
    "sensitivity",
    "transformer_block",
    "visible",
]
