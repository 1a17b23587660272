"""Attention on one device.

Blocks that return (out, lse), their backward, and the merge of partial results. No communication.

Shape letters: B batch, S sequence (Sq queries, Sk keys), H heads, K key/value heads (H a multiple
of K; query head h reads key/value head h // (H / K)), D head dim. Inside, tensors are (B, H, S, D);
`local_attention`, like the schemes, takes (B, S, H, D).
"""

from sp_core.attention.function import check_qkv, local_attention
from sp_core.attention.kernels import (
    backend_for,
    block_attention,
    block_attention_backward,
)
from sp_core.attention.logits import Logits, Terms
from sp_core.attention.merge import (
    accumulation_dtype,
    add_sinks,
    merge,
    merge_into,
    sinks_gradient,
)
from sp_core.attention.shards import attend, attend_backward

__all__ = [
    "Logits",
    "Terms",
    "accumulation_dtype",
    "add_sinks",
    "attend",
    "attend_backward",
    "backend_for",
    "block_attention",
    "block_attention_backward",
    "check_qkv",
    "local_attention",
    "merge",
    "merge_into",
    "sinks_gradient",
]
