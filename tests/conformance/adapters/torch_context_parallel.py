"""Call attention in torch's public context manager `context_parallel`.

The context replaces `scaled_dot_product_attention`. The call is that of its docstring: a buffer
that depends on the sequence (here the positions) is sharded on entry, and attention inside is
computed over all ranks. The backward must run inside too, so the context stays open until the next
call.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental import context_parallel

_mesh: Any = None
_open = contextlib.ExitStack()


def prepare(comm: Any, variant: str) -> None:
    """Close the context of an earlier group, and make a mesh over the new process group."""
    global _mesh
    _open.close()
    _mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool,
    softmax_scale: float | None,
    shards: Any,
    **rest: Any,
) -> Tensor:
    """Return the attention of this rank's tokens, (B, S/P, H, D).

    Raise RuntimeError if the context gives this rank other positions than `shards`.
    """
    _open.close()
    positions = torch.arange(sum(map(len, shards)))
    _open.enter_context(context_parallel(_mesh, buffers=[positions], buffer_seq_dims=[0]))
    if positions.tolist() != list(shards[torch.distributed.get_rank()]):
        raise RuntimeError(f"context_parallel gives this rank the positions {positions.tolist()}")
    heads_first = (x.transpose(1, 2) for x in (q, k, v))
    grouped = q.shape[2] != k.shape[2]
    out = F.scaled_dot_product_attention(
        *heads_first, is_causal=causal, scale=softmax_scale, enable_gqa=grouped
    )
    return out.transpose(1, 2)
