"""accelerate's context parallelism, a wrapper of torch's `context_parallel` for models under FSDP2.

Called as its guide says (docs/source/concept_guides/context_parallelism.md): an `Accelerator` with
a `ParallelismConfig`, a model that is prepared, then `maybe_context_parallel` with a buffer that
depends on the sequence (here the positions). Backward runs inside, so the context stays open until
the next call.

It refuses the distributed type MULTI_CPU. With variant "CPU stand-in" it is told MULTI_GPU, while
everything lives on the CPU.
"""

from __future__ import annotations

import contextlib
import importlib
import os
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

_open = contextlib.ExitStack()
_accelerators: list[Any] = []


def prepare(comm: Any, variant: str) -> None:
    """Set the variables that `accelerate launch` sets, and forget an earlier process group."""
    _open.close()
    _accelerators.clear()
    rank, size = str(dist.get_rank()), str(dist.get_world_size())
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=size)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29500")
    state = importlib.import_module("accelerate.state").AcceleratorState
    state._reset_state(reset_partial_state=True)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    variant: str,
    causal: bool,
    softmax_scale: float | None,
    shards: Any,
    **rest: Any,
) -> Tensor:
    """Attend to the tokens that the context has chosen; they must be those of this rank."""
    _open.close()
    if not _accelerators:
        _accelerators.append(_accelerator(variant))
    positions = torch.arange(sum(map(len, shards)))
    buffers = {"buffers": [positions], "buffer_seq_dims": [0], "no_restore_buffers": {positions}}
    _open.enter_context(_accelerators[0].maybe_context_parallel(**buffers))
    if positions.tolist() != list(shards[dist.get_rank()]):
        raise RuntimeError(f"maybe_context_parallel gives the positions {positions.tolist()}")
    heads_first = (x.transpose(1, 2) for x in (q, k, v))
    how = {"is_causal": causal, "scale": softmax_scale, "enable_gqa": q.shape[2] != k.shape[2]}
    return F.scaled_dot_product_attention(*heads_first, **how).transpose(1, 2)


def _accelerator(variant: str) -> Any:
    """Make one with a prepared model, because preparing a model makes the context."""
    library = importlib.import_module("accelerate")
    utils = importlib.import_module("accelerate.utils")
    if variant:
        library.PartialState(cpu=True).distributed_type = utils.DistributedType.MULTI_GPU
    accelerator = library.Accelerator(
        cpu=True,
        parallelism_config=utils.ParallelismConfig(cp_size=dist.get_world_size()),
        fsdp_plugin=utils.FullyShardedDataParallelPlugin(fsdp_version=2),
    )
    model = torch.nn.Linear(1, 1)
    accelerator.prepare(model, torch.optim.SGD(model.parameters()))
    return accelerator
