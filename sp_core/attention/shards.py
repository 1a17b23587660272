"""Compute attention of one shard's queries to another shard's keys, forward and backward.

A shard is the tokens of one rank. `attend` and `attend_backward` plan blocks from the positions and
the mask, compute each block (many small ones in a pack, see `packs`), and merge the results. No
communication. Shapes as in `sp_core.attention`.
"""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from sp_core.attention.cuda import Triple
from sp_core.attention.kernels import block_attention, block_attention_backward
from sp_core.attention.logits import Logits
from sp_core.attention.merge import accumulation_dtype, merge_into
from sp_core.attention.packs import Packs, packed
from sp_core.attention.tiles import halves, on_cpu, rows, strips, tiled
from sp_core.errors import ShapeError
from sp_core.mask import Block, Mask, Positions, band_mask, plan_blocks, position_tensor

# columns added to each head for the gradient of lse; the CUDA kernels need multiples of 8
LSE_COLUMNS = 8
LSE_FACTORS = (1.0, 1.0, 1.0), (2.0**15, 2.0**4, 1.0, 2.0**-11, 2.0**-24)
"""The values in the new columns of out; the second tuple is for float16.

The new columns of dO hold -grad_lse in parts, each divided by the value in its column. A
float16 lies between 2^-24 and 65504, so the gradient may lie between 2^-48 and 65504 * 2^15."""

How = Callable[[Block], dict[str, Any]]
"""Function of a block that returns the keyword arguments of `block_attention` for it."""
Tensors = tuple[Tensor, ...]


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    q_positions: Positions,
    kv_positions: Positions,
    mask: Mask | None = None,
    logits: Logits,
    out_dtype: torch.dtype | None = None,
    between: Callable[[], object] | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute attention of one shard's queries to another shard's keys, masked by global positions.

    Args:
        q: (B, H, Sq, D), of any strides.
        k: (B, K, Sk, D).
        v: (B, K, Sk, D).
        q_positions: the global position of each query, Sq integers.
        kv_positions: the global position of each key, Sk integers.
        mask: which keys a query sees; all keys if None.
        logits: how the logits follow from q k^T. Attention sinks are left to the caller.
        out_dtype: dtype of out; q's if None. A caller that merges the result passes
            `accumulation_dtype(q.dtype)`.
        between: a function that is called without arguments after each block of queries and keys,
            if there are several, such as one that advances communication. If it is given, large
            blocks of float32 or float64 on a CPU in which nothing is masked are cut, so that it is
            called more often.

    Returns:
        out (B, H, Sq, D) in `out_dtype`, and lse (B, H, Sq) in float32 or wider. For queries that
        see no key, out is 0 and lse is -inf.

    Raises:
        ShapeError: the numbers of positions and of tokens differ, or a position lies outside the
            mask's documents.
    """
    planned, how = _planned(q, k, q_positions, kv_positions, mask, logits)
    for blocks, packs in (packed(planned, q, logits), (planned, ())):
        out, lse = _attend(blocks, packs, how, q, k, v, logits, between)
        # On a CPU a NaN of one block may have spread to other blocks of its tile: then compute
        # without packs. On CUDA the blocks of a pack are separate sequences.
        if not packs or not on_cpu(q) or out.sum().isfinite():
            break
    return out.to(out_dtype or q.dtype), lse


def _attend(
    blocks: tuple[Block, ...],
    packs: Packs,
    how: How,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    logits: Logits,
    between: Callable[[], object] | None,
) -> tuple[Tensor, Tensor]:
    """Compute the packs and all blocks, and merge their results.

    Return out (B, H, Sq, D) and lse (B, H, Sq), in float32 or wider. If a single block has all
    queries, out is in q's dtype.
    """
    blocks = tiled(blocks, halves, q)
    if between is not None:
        blocks = tiled(blocks, rows, q)

    def part(block: Block) -> tuple[Tensor, Tensor]:
        i, j = block.queries, block.keys
        return block_attention(q[:, :, i], k[:, :, j], v[:, :, j], **how(block))

    if not packs and len(blocks) == 1 and blocks[0].queries == slice(0, q.shape[2]):
        return part(blocks[0])
    out = _zeros(q, accumulation_dtype(q.dtype))
    lse = q.new_full(q.shape[:3], -torch.inf, dtype=out.dtype)
    fresh = np.ones(q.shape[2], dtype=bool)
    for pack in packs:
        fresh[pack.forward(q, k, v, logits, out, lse).numpy()] = False
    for block in blocks:
        part_out, part_lse = part(block)
        rows_out, rows_lse = out[:, :, block.queries], lse[:, :, block.queries]
        if fresh[block.queries].all():
            rows_out.copy_(part_out)
            rows_lse.copy_(part_lse)
        else:
            merge_into(rows_out, rows_lse, part_out, part_lse)
        fresh[block.queries] = False
        if between is not None:
            between()
    return out, lse


def attend_backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    q_positions: Positions,
    kv_positions: Positions,
    mask: Mask | None = None,
    logits: Logits,
    grad_lse: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    between: Callable[[], object] | None = None,
) -> Triple:
    """Compute the gradients of attention of one shard's queries to another shard's keys.

    Args:
        grad_out: (B, H, Sq, D), gradient of out.
        q: (B, H, Sq, D).
        k: (B, K, Sk, D).
        v: (B, K, Sk, D).
        out: (B, H, Sq, D), the attention over all keys that the queries see. k may hold only
            some of these keys.
        lse: (B, H, Sq), the log-sum-exp over the same keys as out.
        q_positions, kv_positions, mask, logits: as in `attend`.
        grad_lse: (B, H, Sq), gradient of lse; None for zero.
        out_dtype: dtype of dq, dk and dv. If None, float32, or float64 for float64 inputs, so that
            the caller can sum them before it rounds.
        between: as in `attend`.

    Returns:
        dq (B, H, Sq, D), the summand of q's gradient that comes from these keys; dk and dv
        (B, K, Sk, D), the summands of the gradients of k and v that come from these queries.

    Raises:
        ShapeError: the numbers of positions and of tokens differ, or a position lies outside the
            mask's documents.
    """
    head_dim, dtype = q.shape[-1], out_dtype or accumulation_dtype(q.dtype)
    if grad_lse is not None:
        grad_out, q, k, v, out = _with_lse_columns(grad_out, q, k, v, out, grad_lse)
    planned, how = _planned(q, k, q_positions, kv_positions, mask, logits)
    tensors = (grad_out, q, k, v, out, lse)
    for blocks, packs in (packed(planned, q, logits), (planned, ())):
        grads = _gradients(blocks, packs, how, tensors, logits, between)
        if not packs or not on_cpu(q) or all(grad.sum().isfinite() for grad in grads):
            break
    dq, dk, dv = (grad[..., :head_dim].to(dtype) for grad in grads)
    return dq, dk, dv


def _gradients(
    blocks: tuple[Block, ...],
    packs: Packs,
    how: How,
    tensors: Tensors,
    logits: Logits,
    between: Callable[[], object] | None,
) -> Sequence[Tensor]:
    """Compute the gradients of the packs and of all blocks, and sum them to (dq, dk, dv).

    `tensors` are (grad_out, q, k, v, out, lse) of the whole shards.
    """
    grad_out, q, k, v, out, lse = tensors
    blocks = tiled(blocks, strips, q)

    def part(block: Block) -> Triple:
        i, j = block.queries, block.keys
        return block_attention_backward(
            *(grad_out[:, :, i], q[:, :, i], k[:, :, j], v[:, :, j], out[:, :, i], lse[:, :, i]),
            **how(block),
        )

    if not packs and len(blocks) == 1 and blocks[0][:4] == (0, q.shape[2], 0, k.shape[2]):
        return part(blocks[0])
    grads = [_zeros(x, accumulation_dtype(x.dtype)) for x in (q, k, v)]
    for pack in packs:
        pack.backward(tensors, logits, grads)
    for block in blocks:
        places = (block.queries, block.keys, block.keys)
        for total, where, found in zip(grads, places, part(block), strict=True):
            total[:, :, where] += found
        if between is not None:
            between()
    return grads


def _planned(
    q: Tensor,
    k: Tensor,
    q_positions: Positions,
    kv_positions: Positions,
    mask: Mask | None,
    logits: Logits,
) -> tuple[tuple[Block, ...], How]:
    """Return the blocks that have a visible pair, and how `block_attention` computes a block.

    Bool masks of partial blocks are made on the CPU. All equal tiles of a sliding window share one.
    Raise ShapeError if the number of positions differs from that of tokens.
    """
    for name, length, positions in (
        ("q", q.shape[2], q_positions),
        ("kv", k.shape[2], kv_positions),
    ):
        if len(positions) != length:
            raise ShapeError(
                f"{name}_positions has {len(positions)} positions, needed {length}, one for each "
                f"token of {name}"
            )
    blocks = plan_blocks(q_positions, kv_positions, mask)
    logits = logits.between(q_positions, kv_positions, q.device)
    band = cache(band_mask)
    places = cache(lambda: [position_tensor(x, "cpu") for x in (q_positions, kv_positions)])

    def how(block: Block) -> dict[str, Any]:
        allowed = None if block.band is None else band(*block.shape, *block.band)
        if block.kind == "partial" and allowed is None and mask is not None:
            q_places, kv_places = places()
            allowed = mask.allowed(q_places[block.queries], kv_places[block.keys])
        return {
            "kind": block.kind,
            "allowed": allowed,
            "all_seen": block.band is not None,
            "logits": logits.at(block.queries, block.keys),
        }

    return blocks, how


def _zeros(like: Tensor, dtype: torch.dtype) -> Tensor:
    """Return zeros of the shape (B, H, S, D) of `like`, laid out in memory as (B, S, H, D).

    The schemes send tensors of that layout without a copy.
    """
    b, h, s, d = like.shape
    return like.new_zeros((b, s, h, d), dtype=dtype).transpose(1, 2)


def _with_lse_columns(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, grad_lse: Tensor
) -> Tensors:
    """Widen the heads so that every kernel's rowsum(dO * out) becomes rowsum(dO * out) - grad_lse.

    The new columns of q, k and v are 0, so scores and dO v^T do not change. The products of those
    of out and dO sum to -grad_lse. There are several, because a single bfloat16 would round it.

    Returns:
        The wider grad_out, q, k, v and out, with D + LSE_COLUMNS elements per head.
    """
    columns = q.new_zeros((*q.shape[:3], LSE_COLUMNS))
    ones, rest = torch.ones_like(columns), -grad_lse
    for column, factor in enumerate(LSE_FACTORS[q.dtype == torch.float16]):
        ones[..., column] = factor
        columns[..., column] = rest / factor
        rest = rest.sub(columns[..., column], alpha=factor)
    return (
        torch.cat((grad_out.to(q.dtype), columns), dim=-1),
        *(pad(t, (0, LSE_COLUMNS)) for t in (q, k, v)),
        torch.cat((out.to(q.dtype), ones), dim=-1),
    )
