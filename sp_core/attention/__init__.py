"""Compute attention on one device, and merge partial results. No communication.

`local_attention` is for users. The schemes call `attend` and `attend_backward` for two shards, and
merge the results with `merge_into`. Both functions cut the work into blocks (some queries against
some keys), which `block_attention` and `block_attention_backward` give to a kernel. A partial
result is (out, lse): the attention over some of the keys, and the log-sum-exp of their scores.

Shapes: B batch, S sequence (Sq queries, Sk keys), H heads, K key/value heads, D head dim. H is a
multiple of K, and query head h reads key/value head h // (H / K). Tensors are (B, H, S, D), but
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
