"""ring-flash-attn: its batch and its varlen functions, on a stand-in for the kernels of flash-attn.

Called as its tests do (test/test_ring_flash_attn_func.py and the like): `ring` takes contiguous
pieces, `zigzag` pieces r and 2P-1-r, `stripe` every P-th token. The varlen functions take packed
documents without a batch: `ring_varlen` and `zigzag_varlen` every rank's piece of each document,
with `cu_seqlens // P`; `llama3` contiguous pieces of the packed sequence.
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
    """The default process group is all that it needs.

    Its adapter for transformers, not used here, imports a name that transformers 5 does not have.
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
    """(B, S/P, H, D), or for the varlen functions (1, S/P, H, D)."""
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
