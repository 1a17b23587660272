"""Choose the heads that each rank computes, and join heads of several tensors in one message.

Shapes: B batch, S sequence, H heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from sp_core.attention import accumulation_dtype
from sp_core.communicator import Communicator
from sp_core.sharding import split_ranges

Part = tuple[int, range]
"""Consecutive heads of one of several tensors: (index of the tensor, heads)."""


Group = tuple[slice, slice]
"""Query heads, and the key/value heads that they read."""

GROUPS = 4
"""The number of pieces of a computation. Communication makes progress between them."""


def head_groups(num_heads: int, num_kv_heads: int, comm: Communicator) -> list[Group]:
    """Return the query heads and key/value heads of each group. One rank has one group."""
    readers = num_heads // max(num_kv_heads, 1)  # a rank of a hybrid may have no heads at all
    parts = split_ranges(num_kv_heads, max(min(GROUPS, num_kv_heads), 1) if comm.size > 1 else 1)
    return [
        (slice(part.start * readers, part.stop * readers), slice(part.start, part.stop))
        for part in parts
    ]


def split_heads(
    num_heads: int, num_kv_heads: int, size: int
) -> tuple[tuple[range, ...], tuple[tuple[int, ...], ...]]:
    """Divide heads among ranks.

    With at least one key/value head per rank, whole groups are dealt out and no key or value
    travels twice. With fewer, query heads are dealt out evenly. A rank receives one key/value head
    for each of its query heads, or a single one if these all read the same.

    Returns:
        The query heads of each rank, and for each rank the key/value head of each of its key/value
        slots.
    """
    group = num_heads // max(num_kv_heads, 1)
    if num_kv_heads >= size:
        kv = split_ranges(num_kv_heads, size)
        return tuple(range(part.start * group, part.stop * group) for part in kv), tuple(
            tuple(part) for part in kv
        )
    heads = split_ranges(num_heads, size)
    return heads, tuple(_slots([head // group for head in part]) for part in heads)


def _slots(kv_of_head: list[int]) -> tuple[int, ...]:
    """Return one slot if all heads read the same key/value head, else one for each of them."""
    distinct = sorted(set(kv_of_head))
    equal = {kv_of_head.count(head) for head in distinct}
    return tuple(distinct) if len(equal) == 1 else tuple(kv_of_head)


def parts_of(tensor: int, heads: Sequence[int]) -> list[Part]:
    """Group head numbers into ranges of consecutive ones."""
    cuts = [0, *(i + 1 for i, (a, b) in enumerate(pairwise(heads)) if b != a + 1), len(heads)]
    return [(tensor, range(heads[a], heads[b - 1] + 1)) for a, b in pairwise(cuts) if a < b]


def side_by_side(tensors: Sequence[Tensor], parts: Sequence[Part]) -> Tensor:
    """Concatenate heads of tensors (B, S, *, D) to (B, S, heads, D).

    A head may be taken more than once.
    """
    apply: Any = _SideBySide.apply
    joined: Tensor = apply(parts, *tensors)
    return joined


class _SideBySide(torch.autograd.Function):
    """Concatenate heads.

    The backward sums the gradients of a head taken more than once, in float32 or wider, in order.
    """

    @staticmethod
    def forward(ctx: Any, parts: Sequence[Part], *tensors: Tensor) -> Tensor:
        ctx.parts, ctx.heads = parts, [x.shape[2] for x in tensors]
        return torch.cat(
            [
                tensors[0][:, :, :0],
                *(tensors[i][:, :, heads.start : heads.stop] for i, heads in parts),
            ],
            2,
        )

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        pieces = grads[0].split([len(heads) for _, heads in ctx.parts], 2) if ctx.parts else ()
        found: list[list[tuple[range, Tensor]]] = [[] for _ in ctx.heads]
        for (i, heads), piece in zip(ctx.parts, pieces, strict=True):
            found[i].append((heads, piece))
        empty = grads[0][:, :, :0]
        wanted = zip(found, ctx.heads, ctx.needs_input_grad[1:], strict=True)
        return None, *(
            _summed(own, number, empty) if needed else None for own, number, needed in wanted
        )


def _summed(pieces: list[tuple[range, Tensor]], number: int, empty: Tensor) -> Tensor:
    """Return the gradient of `number` heads from (heads, gradient) pieces."""
    ordered = sorted(pieces, key=lambda piece: piece[0].start)
    if [head for heads, _ in ordered for head in heads] == list(range(number)):
        return torch.cat([empty, *(grad for _, grad in ordered)], 2)
    batch, length, _, head_dim = empty.shape
    sums = empty.new_zeros((batch, length, number, head_dim), dtype=accumulation_dtype(empty.dtype))
    for heads, grad in pieces:
        sums[:, :, heads.start : heads.stop] += grad
    return sums.to(empty.dtype)
