"""Ulysses attention of ALST: DeepSpeed's UlyssesSPAttentionHF around an attention of transformers.

Called as its tutorial says (DeepSpeed, docs/_tutorials/ulysses-alst-sequence-parallelism.md): after
`register_with_transformers` a model calls `ALL_ATTENTION_FUNCTIONS[...]` as ever, with
`position_ids` that begin again at each document. The library discards masks, so a window is given
as the argument `sliding_window`, as models of transformers give it too.

A variant names the attention of transformers. Without a GPU transformers looks for no flash-attn,
so the stand-in is put in its place.
"""

from __future__ import annotations

import contextlib
import importlib
import os
from bisect import bisect_right
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def prepare(comm: Any, variant: str) -> None:
    """Put its own wrapper around the default process group."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    wrapper = importlib.import_module("deepspeed.comm")
    # Else its all-reduce through shared memory, not used here, is compiled now.
    importlib.import_module("deepspeed.ops").__compatible_ops__["deepspeed_shm_comm"] = False
    options = {"auto_mpi_discovery": False, "verbose": False, "dist_init_required": False}
    wrapper.init_distributed(dist_backend="gloo", **options)
    if variant == "flash_attention_2":
        kernels = importlib.import_module("flash_attn")
        functions = (kernels.flash_attn_func, kernels.flash_attn_varlen_func, None, None, None)
        caller = importlib.import_module("transformers.modeling_flash_attention_utils")
        caller._lazy_imports = lambda *args, **options: functions


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    variant: str,
    causal: bool,
    window: int | None,
    documents: Any,
    softmax_scale: float | None,
    shards: Any,
    **rest: Any,
) -> Tensor:
    """Attend as a decoder layer of transformers does; return (B, S/P, H, D)."""
    config = importlib.import_module("transformers").LlamaConfig(
        num_attention_heads=q.shape[2],
        num_key_value_heads=k.shape[2],
        head_dim=q.shape[3],
        hidden_size=q.shape[2] * q.shape[3],
        num_hidden_layers=1,
        attn_implementation=variant,
    )
    layer = torch.nn.Module()
    layer.config, layer.is_causal = config, causal
    layer.num_key_value_groups = q.shape[2] // k.shape[2]
    mine = shards[dist.get_rank()]
    starts = documents or (0,)
    positions = torch.tensor([token - starts[bisect_right(starts, token) - 1] for token in mine])
    options = {
        "dropout": 0.0,
        "scaling": q.shape[3] ** -0.5 if softmax_scale is None else softmax_scale,
        "sliding_window": window,
        "position_ids": positions.expand(q.shape[0], -1).contiguous(),
    }
    mask = _block_mask(len(mine), q.shape[0]) if variant == "flex_attention" else None
    attention = _registered(config, variant, q.shape[0])
    out, _ = attention(layer, *(x.transpose(1, 2) for x in (q, k, v)), mask, **options)
    return out.unflatten(-1, q.shape[2:])


def _registered(config: Any, variant: str, batch: int) -> Any:
    """Register it anew, because it knows one batch size and one number of heads."""
    library = importlib.import_module("deepspeed.runtime.sequence_parallel.ulysses_sp")
    groups = importlib.import_module("deepspeed.runtime.sequence_parallel.parallel_state_sp")
    groups._release_sequence_parallel_groups()
    functions = importlib.import_module("transformers.modeling_utils").ALL_ATTENTION_FUNCTIONS
    with contextlib.suppress(KeyError):
        del functions[variant]  # the one of an earlier registration
    library.UlyssesSPAttentionHF.register_with_transformers(
        model_name_or_path=SimpleNamespace(config=config),
        core_attn_implementation=variant,
        sequence_parallel_size=dist.get_world_size(),
        micro_batch_size=batch,
    )
    return functions[variant]


def _block_mask(tokens: int, batch: int) -> Any:
    """Make a causal mask over this rank's tokens, as transformers does."""
    create = importlib.import_module("torch.nn.attention.flex_attention").create_block_mask
    return create(lambda b, h, q, k: q >= k, batch, None, tokens, tokens, device="cpu")
