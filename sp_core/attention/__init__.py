"""Compute attention on one device, and merge partial results. No communication.

`local_attention` is for users. The schemes call `attend` and `attend_backward` for two shards, and
merge the results with `merge_into`. Both functions cut the work into blocks (some queries against
some keys), which `block_attention` and `block_attention_backward` give to a kernel. A partial
result is (out, lse): the attention over some of the keys, and the log-sum-exp of their scores.

Shapes: B batch, S sequence (Sq queries, Sk keys), H heads, K key/value heads, D head dim. H is a
multiple of K, and query head h reads key/value head h // (H / K). Tensors are (B, H, S, D), but
`local_attention`, like the schemes, takes (B, S, H, D).
"""

from sp_core.attention.function import (
    Saved as Saved,
    check_qkv as check_qkv,
    differentiable_once as differentiable_once,
    local_attention as local_attention,
    without_autocast as without_autocast,
)
from sp_core.attention.kernels import (
    FLOATS as FLOATS,
    backend_for as backend_for,
    block_attention as block_attention,
    block_attention_backward as block_attention_backward,
)
from sp_core.attention.logits import Logits as Logits, Terms as Terms
from sp_core.attention.merge import (
    accumulation_dtype as accumulation_dtype,
    add_sinks as add_sinks,
    merge as merge,
    merge_into as merge_into,
    sinks_gradient as sinks_gradient,
)
from sp_core.attention.shards import attend as attend, attend_backward as attend_backward
