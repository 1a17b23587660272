"""Sequence-parallel and tensor-parallel Transformers over MPI. Importing this package does not start MPI.

Tokens are owned (`Sharding`), bytes move (`Mesh`, `all_gather`, ...), attention is computed (`allgather_kv_attention`,
`attention`), layers are built of these (`TransformerBlock`); `sp_core.testing` proves them.
"""

from sp_core.attention import attention, merge
from sp_core.autograd import (
    Pending,
    all_gather,
    all_gather_start,
    all_reduce,
    all_reduce_start,
    all_to_all,
    all_to_all_start,
    broadcast,
    broadcast_start,
    copy_all_to_group,
    copy_to_group,
    gather_replicated,
    reduce,
    reduce_from_group,
    reduce_scatter,
    reduce_scatter_start,
    shift,
    shift_start,
)
from sp_core.communicator import Communicator
from sp_core.errors import CollectiveMismatch, DeviceError, DtypeError, PeerFailed, RankError, ShapeError
from sp_core.layers import FeedForward, LayerNorm, RMSNorm, SelfAttention, TransformerBlock
from sp_core.mask import Mask
from sp_core.mesh import Mesh
from sp_core.parallel_linear import ColumnParallelLinear, RowParallelLinear
from sp_core.rope import Rope
from sp_core.schemes import allgather_kv_attention, hybrid_attention, ring_attention, ulysses_attention
from sp_core.sharding import Sharding

__all__ = [
    "CollectiveMismatch",
    "ColumnParallelLinear",
    "Communicator",
    "DeviceError",
    "DtypeError",
    "FeedForward",
    "LayerNorm",
    "Mask",
    "Mesh",
    "PeerFailed",
    "Pending",
    "RMSNorm",
    "RankError",
    "Rope",
    "RowParallelLinear",
    "SelfAttention",
    "ShapeError",
    "Sharding",
    "TransformerBlock",
    "all_gather",
    "all_gather_start",
    "all_reduce",
    "all_reduce_start",
    "all_to_all",
    "all_to_all_start",
    "allgather_kv_attention",
    "attention",
    "broadcast",
    "broadcast_start",
    "copy_all_to_group",
    "copy_to_group",
    "gather_replicated",
    "hybrid_attention",
    "merge",
    "reduce",
    "reduce_from_group",
    "reduce_scatter",
    "reduce_scatter_start",
    "ring_attention",
    "shift",
    "shift_start",
    "ulysses_attention",
]
