"""Choose which heads a rank computes, and concatenate heads of q, k and v for one message.

`head_groups` is for AllGather-KV and the ring. `split_heads` divides heads among Ulysses ranks, or
among the tensor ranks of a model. `side_by_side` is for Ulysses. A key/value head is read by H / K
query heads. Shapes: B batch, S sequence, H heads, K key/value heads, D head dim.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from sp_core.attention import accumulation_dtype
from sp_core.compiling import EagerFunction
from sp_core.sharding import split_ranges

HeadRange = tuple[int, range]
"""(index of a tensor in a list of tensors, range of its heads)."""


Group = tuple[slice, slice]
"""(query heads, key/value heads that they read)."""

GROUPS = 4
"""The greatest number of groups of heads. Communication makes progress between two groups."""


def head_groups(num_heads: int, num_kv_heads: int) -> list[Group]:
    """Divide the heads into groups that are computed one after the other.

    Return min(GROUPS, num_kv_heads) groups, but at least one.
    """
    readers = num_heads // max(num_kv_heads, 1)  # a rank of a hybrid may have no heads at all
    return [
        (slice(part.start * readers, part.stop * readers), slice(part.start, part.stop))
        for part in split_ranges(num_kv_heads, max(min(GROUPS, num_kv_heads), 1))
    ]


def split_heads(
    num_heads: int, num_kv_heads: int, size: int
) -> tuple[tuple[range, ...], tuple[tuple[int, ...], ...]]:
    """Divide heads among the ranks of Ulysses, or among tensor ranks.

    If each rank can have a key/value head, a rank gets whole key/value heads with all query heads
    that read them. No key or value is then sent twice. Otherwise query heads are divided evenly. A
    rank then receives the key/value heads that its query heads read, if needed repeatedly.

    Args:
        num_heads: H, the number of query heads.
        num_kv_heads: K, the number of key/value heads, which divides H.
        size: the number of ranks.

    Returns:
        For each rank the range of its query heads; for each rank the key/value heads that it
        receives, in order. A head may be in the lists of several ranks, or several times in a list.
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
    """Return the key/value heads that a rank receives, from those that each query head reads.

    If all these heads are read equally often, each is listed once. Otherwise the list has one
    entry for each query head, because attention needs K to divide H.
    """
    distinct = sorted(set(kv_of_head))
    is_equal = len({kv_of_head.count(head) for head in distinct}) == 1
    return tuple(distinct if is_equal else kv_of_head)


class _SideBySide(EagerFunction):
    """Autograd function of `side_by_side`.

    The backward sums the gradients of a head that was taken more than once, in the order of
    `parts`, in float32 or wider.
    """

    @staticmethod
    def forward(ctx: Any, parts: Sequence[HeadRange], *tensors: Tensor) -> Tensor:
        ctx.parts, ctx.heads = parts, [x.shape[2] for x in tensors]
        return torch.cat(
            [
                tensors[0][:, :, :0],
                *(tensors[i][:, :, heads.start : heads.stop] for i, heads in parts),
            ],
            2,
        )

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        pieces = grad.split([len(heads) for _, heads in ctx.parts], 2)
        found: list[list[tuple[range, Tensor]]] = [[] for _ in ctx.heads]
        for (i, heads), piece in zip(ctx.parts, pieces, strict=True):
            found[i].append((heads, piece))
        empty = grad[:, :, :0]
        wanted = zip(found, ctx.heads, ctx.needs_input_grad[1:], strict=True)
        return None, *(
            _summed(own, number, empty) if needed else None for own, number, needed in wanted
        )


side_by_side: Callable[..., Tensor] = _SideBySide.apply
"""A function of parts and tensors that concatenates the heads named by the parts, from the tensors
(B, S, *, D), to (B, S, heads, D).

A part is (number of a tensor, range of heads). Differentiable: if a head is taken more than once,
the gradients of all its copies are summed."""


def _summed(pieces: list[tuple[range, Tensor]], number: int, empty: Tensor) -> Tensor:
    """Sum the gradients of ranges of heads to the gradient (B, S, number, D) of a whole tensor.

    Args:
        pieces: (range of heads, gradient (B, S, heads, D)); ranges may overlap or leave gaps.
        number: the number of heads of the tensor.
        empty: a tensor (B, S, 0, D) that gives the dtype and the other sizes.
    """
    ordered = sorted(pieces, key=lambda piece: piece[0].start)
    if [head for heads, _ in ordered for head in heads] == list(range(number)):
        return torch.cat([empty, *(grad for _, grad in ordered)], 2)
    batch, length, _, head_dim = empty.shape
    sums = empty.new_zeros((batch, length, number, head_dim), dtype=accumulation_dtype(empty.dtype))
    for heads, grad in pieces:
        sums[:, :, heads.start : heads.stop] += grad
    return sums.to(empty.dtype)
