"""Call yunchang's LongContextAttention, a ring of Ulysses groups.

If P is even and above 2, a Ulysses group has two ranks; otherwise each rank is its own group. The
calls are those of its README: `set_seq_parallel_pg`, tokens chosen by its `EXTRACT_FUNC_DICT`, then
`LongContextAttention(ring_impl_type=..., attn_type=...)`. A variant names both, such as "zigzag
FA"; with FA the kernels are a stand-in for those of flash-attn. Of its torch kernels, its README
names TORCH_EFFICIENT; TORCH_MATH is the one that a CPU can run.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def prepare(comm: Any, variant: str) -> None:
    """Make yunchang's process groups over all ranks."""
    size = dist.get_world_size()
    ulysses, ring = degrees(size)
    importlib.import_module("yunchang").set_seq_parallel_pg(ulysses, ring, dist.get_rank(), size)


def degrees(size: int) -> tuple[int, int]:
    """Return the number of ranks of a Ulysses group, and of a ring, for `size` ranks."""
    return (2, size // 2) if size > 2 and size % 2 == 0 else (1, size)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    variant: str,
    causal: bool,
    window: int | None,
    softmax_scale: float | None,
    shards: Any,
    **rest: Any,
) -> Tensor:
    """Return the library's attention, (B, S/P, H, D).

    The tokens must be those that the library chooses for this rank. Its window is flash-attn's:
    how many tokens are seen to the left, and how many to the right.
    """
    ring, kernel = variant.split()
    _check_tokens(ring, shards)
    kernels = importlib.import_module("yunchang.kernels").AttnType
    module = importlib.import_module("yunchang").LongContextAttention(
        ring_impl_type=ring, attn_type=kernels[kernel]
    )
    window_size = (-1, -1) if window is None else (window - 1, 0)
    return module(q, k, v, causal=causal, softmax_scale=softmax_scale, window_size=window_size)


def _check_tokens(ring: str, shards: Any) -> None:
    size, rank = dist.get_world_size(), dist.get_rank()
    ulysses, rings = degrees(size)
    tokens = torch.arange(sum(map(len, shards))).view(1, -1, 1)
    taken = importlib.import_module("yunchang").EXTRACT_FUNC_DICT[ring](
        tokens, rank, world_size=size, rd=rings, ud=ulysses
    )
    if taken.flatten().tolist() != list(shards[rank]):
        raise RuntimeError(
            f"EXTRACT_FUNC_DICT gives this rank the tokens {taken.flatten().tolist()}"
        )
