"""Sequence-parallel and tensor-parallel Transformers over MPI. Importing this package does not start MPI.

Tokens are owned (`Sharding`), bytes move (`Mesh`, `all_gather`, ...), attention is computed (`allgather_kv_attention`,
`local_attention`), layers are built of these (`TransformerBlock`); `sp_core.testing` proves them.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sp_core.attention import attention as local_attention
    from sp_core.attention import merge
    from sp_core.collectives.api import (
        all_gather,
        all_gather_start,
        all_reduce,
        all_reduce_start,
        all_to_all,
        all_to_all_start,
        broadcast,
        broadcast_start,
        reduce,
        reduce_scatter,
        reduce_scatter_start,
        shift,
        shift_start,
    )
    from sp_core.collectives.differentiable import Pending, copy_all_to_group, copy_to_group, gather_replicated, reduce_from_group
    from sp_core.collectives.plans import Plan, all_reduce_, plan
    from sp_core.communicator import Communicator
    from sp_core.errors import CheckpointError, CollectiveMismatch, DeviceError, DtypeError, PeerFailed, RankError, ShapeError
    from sp_core.mask import Mask
    from sp_core.mesh import Mesh
    from sp_core.nn.dropout import dropout
    from sp_core.nn.layers import FeedForward, LayerNorm, RMSNorm, SelfAttention, TransformerBlock
    from sp_core.nn.parallel import ColumnParallelLinear, RowParallelLinear
    from sp_core.nn.rope import Rope
    from sp_core.schemes import allgather_kv_attention, hybrid_attention, ring_attention, ulysses_attention
    from sp_core.sharding import Sharding
    from sp_core.shared_tensors import fence, peer, shared_empty

__all__ = [
    "CheckpointError",
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
    "Plan",
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
    "all_reduce_",
    "all_reduce_start",
    "all_to_all",
    "all_to_all_start",
    "allgather_kv_attention",
    "broadcast",
    "broadcast_start",
    "copy_all_to_group",
    "copy_to_group",
    "dropout",
    "fence",
    "gather_replicated",
    "hybrid_attention",
    "local_attention",
    "merge",
    "peer",
    "plan",
    "reduce",
    "reduce_from_group",
    "reduce_scatter",
    "reduce_scatter_start",
    "ring_attention",
    "shared_empty",
    "shift",
    "shift_start",
    "ulysses_attention",
]

# Nothing is imported before it is used: the launcher and the pytest plugin live in this package and need no torch.
_HOMES = {
    "sp_core.attention": (
        "local_attention",
        "merge",
    ),
    "sp_core.collectives.api": (
        "all_gather",
        "all_gather_start",
        "all_reduce",
        "all_reduce_start",
        "all_to_all",
        "all_to_all_start",
        "broadcast",
        "broadcast_start",
        "reduce",
        "reduce_scatter",
        "reduce_scatter_start",
        "shift",
        "shift_start",
    ),
    "sp_core.collectives.differentiable": (
        "Pending",
        "copy_all_to_group",
        "copy_to_group",
        "gather_replicated",
        "reduce_from_group",
    ),
    "sp_core.collectives.plans": (
        "Plan",
        "all_reduce_",
        "plan",
    ),
    "sp_core.communicator": ("Communicator",),
    "sp_core.errors": (
        "CheckpointError",
        "CollectiveMismatch",
        "DeviceError",
        "DtypeError",
        "PeerFailed",
        "RankError",
        "ShapeError",
    ),
    "sp_core.nn.layers": (
        "FeedForward",
        "LayerNorm",
        "RMSNorm",
        "SelfAttention",
        "TransformerBlock",
    ),
    "sp_core.mask": ("Mask",),
    "sp_core.mesh": ("Mesh",),
    "sp_core.nn.parallel": (
        "ColumnParallelLinear",
        "RowParallelLinear",
    ),
    "sp_core.nn.dropout": ("dropout",),
    "sp_core.nn.rope": ("Rope",),
    "sp_core.schemes": (
        "allgather_kv_attention",
        "hybrid_attention",
        "ring_attention",
        "ulysses_attention",
    ),
    "sp_core.shared_tensors": ("fence", "peer", "shared_empty"),
    "sp_core.sharding": ("Sharding",),
}
_MODULES = {name: module for module, names in _HOMES.items() for name in names}
_OTHER_NAMES = {"local_attention": "attention"}  # in its module, which already has the name here


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), _OTHER_NAMES.get(name, name))
