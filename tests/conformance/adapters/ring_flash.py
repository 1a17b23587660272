"""Call the functions of ring-flash-attn, on a stand-in for the kernels of flash-attn.

The calls are those of its tests (test/test_ring_flash_attn_func.py and others). Rank r of P has the
r-th contiguous piece (`ring`), pieces r and 2P-1-r of 2P (`zigzag`), or every P-th token
(`stripe`). The varlen functions take packed documents without a batch dim. For `ring_varlen` and
`zigzag_varlen` a rank has such pieces of each document, and gets `cu_seqlens // P`. For `llama3` it
has a contiguous piece of the whole packed sequence.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

FUNCTIONS = {
    "ring": "ring_flash_attn_func",
    "zigzag": "zigzag_ring_flash_attn_func",
    "stripe": "stripe_flash_attn_func",
    "ring_varlen": "ring_flash_attn_varlen_func",
    "zigzag_varlen": "zigzag_ring_flash_attn_varlen_func",
    "llama3": "llama3_flash_attn_varlen_func",
}


def prepare(comm: Any, variant: str) -> None:
    """Import ring_flash_attn. It needs only the default process group.

    Its own adapter for transformers, not used here, imports a name that transformers 5 lacks. So
    this sets the name.
    """
    utils = importlib.import_module("transformers.modeling_flash_attention_utils")
    utils.is_flash_attn_greater_or_equal_2_10 = lambda: True
    importlib.import_module("ring_flash_attn")


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    variant: str,
    causal: bool,
    documents: Any,
    softmax_scale: float | None,
    shards: Any,
    **rest: Any,
) -> Tensor:
    """Return the library's attention, (B, S/P, H, D); B is 1 for the varlen functions."""
    library = importlib.import_module("ring_flash_attn")
    function = getattr(library, FUNCTIONS[variant])
    options = {"causal": causal, "softmax_scale": softmax_scale, "group": dist.group.WORLD}
    if variant in ("ring", "zigzag", "stripe"):
        return function(q, k, v, **options)
    boundaries = torch.tensor(documents or (0, sum(map(len, shards))), dtype=torch.int32)
    packed = (x.squeeze(0) for x in (q, k, v))
    if variant == "llama3":
        return _llama3(library, function, boundaries, packed, options)
    local = boundaries // dist.get_world_size()
    longest = int((local[1:] - local[:-1]).max())
    return function(*packed, local, longest, **options).unsqueeze(0)


def _llama3(
    library: Any, function: Any, boundaries: Tensor, packed: Any, options: dict[str, Any]
) -> Tensor:
    place = {"rank": dist.get_rank(), "world_size": dist.get_world_size()}
    found = library.llama3_flash_attn_prepare_cu_seqlens(
        boundaries, causal=options["causal"], **place
    )
    seqlens_q, seqlens_k, longest_q, longest_k, keys = found
    lengths = (seqlens_q, seqlens_k, longest_q, longest_k)
    return function(*packed, *lengths, heads_k_stride=1, local_k_slice=keys, **options).unsqueeze(0)
