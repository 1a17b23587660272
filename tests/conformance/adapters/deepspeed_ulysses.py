"""Call DeepSpeed's DistributedAttention around torch's attention.

The call is that of its class's documentation (deepspeed/sequence/layer.py): a local attention over
the whole sequence and some heads, between two exchanges. Tensors are (B, S, H, D), so
`scatter_idx=2`, `gather_idx=1`, and the batch is dim 0. The local attention, which applies the
mask, is written here. So a pass with window or documents only shows that the exchanges lose
nothing. The mesh is the one that `deepspeed.initialize(mesh_param=...)` makes, without a model.
"""

from __future__ import annotations

import importlib
import os
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor


def prepare(comm: Any, variant: str) -> None:
    """Wrap the default process group for DeepSpeed. Make its mesh: all ranks share a sequence."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    wrapper = importlib.import_module("deepspeed.comm")
    # otherwise DeepSpeed would compile its all-reduce through shared memory, which is not used here
    importlib.import_module("deepspeed.ops").__compatible_ops__["deepspeed_shm_comm"] = False
    wrapper.init_distributed(
        dist_backend="gloo", auto_mpi_discovery=False, verbose=False, dist_init_required=False
    )
    groups = importlib.import_module("deepspeed.utils").groups
    groups.mesh_device = wrapper.initialize_mesh_device(
        (1, dist.get_world_size()), ("data_parallel", "sequence_parallel")
    )


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool,
    window: int | None,
    documents: Any,
    softmax_scale: float | None,
    **rest: Any,
) -> Tensor:
    """Return DeepSpeed's attention, (B, S/P, H, D)."""
    layer = importlib.import_module("deepspeed.sequence.layer")

    def local(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        seen = _visible(q.shape[1], k.shape[1], causal, window, documents)
        heads_first = (x.transpose(1, 2) for x in (q, k, v))
        grouped = q.shape[2] != k.shape[2]
        out = F.scaled_dot_product_attention(
            *heads_first, attn_mask=seen, scale=softmax_scale, enable_gqa=grouped
        )
        return out.transpose(1, 2)

    return layer.DistributedAttention(local, dist.group.WORLD, scatter_idx=2, gather_idx=1)(
        q, k, v, 0
    )


def _visible(
    queries: int, keys: int, causal: bool, window: int | None, documents: Any
) -> Tensor | None:
    """Return a bool mask (queries, keys), True where visible; None if all pairs are visible."""
    if not causal:
        return None
    distance = torch.arange(queries)[:, None] - torch.arange(keys)[None, :]
    seen = distance >= 0
    if window is not None:
        seen = seen & (distance < window)
    if documents is not None:
        number = torch.bucketize(
            torch.arange(max(queries, keys)), torch.tensor(documents), right=True
        )
        seen = seen & (number[:queries, None] == number[None, :keys])
    return seen
