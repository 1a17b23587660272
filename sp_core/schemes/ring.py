"""Ring attention: keys and values go from rank to rank, and each rank attends to the block that it holds.

    step s: rank r holds the keys of rank j = r - s      send k_j v_j --> r+1      out, lse =
    merge(out, lse, attend(q_r, k_j, v_j))

While a rank computes on a block, some heads at a time, it receives the next one. A block is passed
on to the last rank that sees any of it. In the backward the blocks travel again, each followed by
the sum of its gradients. The last rank that adds to a sum sends it to the owner of the block. Ranks
that share memory send nothing: in step s they read block j in its owner's memory.
Shapes: B batch, S sequence, H heads, K key/value heads, D head dim, P ranks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sp_core.attention import accumulation_dtype, attend, attend_backward, merge_into
from sp_core.attention.once import Saved, differentiable_once, exact
from sp_core.communicator import Communicator
from sp_core.mask import Mask
from sp_core.schemes.blocks import circulate, gradient_sums
from sp_core.schemes.overlap import head_groups, join_heads, polled
from sp_core.schemes.problem import Problem, agree
from sp_core.schemes.travel import Block, sees
from sp_core.sharding import Sharding


def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    comm: Communicator,
    sharding: Sharding,
    kv_sharding: Sharding | None = None,
    mask: Mask | None = None,
    softmax_scale: float | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute attention over the tokens of all ranks by passing keys and values around a ring.

    Args:
        q, k, v, comm, sharding, kv_sharding, mask, softmax_scale, return_lse: as in
            `allgather_kv_attention`.

    Returns:
        As `allgather_kv_attention`.

    Communication:
        Forward P-1 messages of 2*B*(S/P)*K*D elements, fewer where the mask hides whole blocks.
        Backward the same, and P messages of as many elements in float32 or wider. A single rank
        sends nothing. In shared memory (`Mesh(transport="window")`) no
        message: a rank writes its K and V once, or not at all where both are tensors of
            `shared_empty` on `comm`, and reads P-1
        others'; backward the same, and it adds to as many sums in float32 or wider. One fence, in
        the backward one for each step.

    Raises:
        As `allgather_kv_attention`.

    Source: Liu et al. 2023, Ring Attention with Blockwise Transformers, arXiv:2310.01889, section
    3.
    """
    problem = agree(
        "ring_attention",
        *(q, k, v),
        comm=comm,
        sharding=sharding,
        kv_sharding=kv_sharding,
        mask=mask,
        softmax_scale=softmax_scale,
        return_lse=return_lse,
    )
    out, lse = run_ring(q, k, v, problem)
    return (out, lse) if return_lse else out


def run_ring(q: Tensor, k: Tensor, v: Tensor, problem: Problem) -> tuple[Tensor, Tensor]:
    """Run the scheme on arguments that the ranks have compared."""
    apply: Any = _Ring.apply
    out, lse = apply(q, k, v, problem)
    return out, lse


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, problem: Problem
    ) -> tuple[Tensor, Tensor]:
        ctx.problem, ctx.agree = problem, problem.comm.numbered()
        ctx.set_materialize_grads(False)
        with exact(q):
            out, lse = _attend_ring(q.transpose(1, 2), k, v, problem)
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse)
        return out, lse

    @staticmethod
    @differentiable_once
    def backward(
        ctx: Any, saved: Saved, grad_out: Tensor | None, grad_lse: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        ctx.agree("the backward of ring_attention")
        q, k, v, out, lse = saved
        grad_out = torch.zeros_like(out) if grad_out is None else grad_out
        upstream = (grad_out.transpose(1, 2), q.transpose(1, 2), out.transpose(1, 2), lse, grad_lse)
        dq, dk, dv = _ring_gradients(
            upstream, k, v, ctx.problem, with_kv=any(ctx.needs_input_grad[1:3])
        )
        return dq.transpose(1, 2).to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None


def _attend_ring(q: Tensor, k: Tensor, v: Tensor, problem: Problem) -> tuple[Tensor, Tensor]:
    """Run the forward: q (B, H, S/P, D) to out (B, S/P, H, D) and lse (B, H, S/P), in float32 or wider."""
    dtype = accumulation_dtype(q.dtype)
    groups = head_groups(q.shape[1], k.shape[2], problem.comm.size)
    results: list[tuple[Tensor, Tensor]] = []
    for _, block, held in circulate(k, v, problem):
        if held is None or not sees(problem, block):
            continue
        among = problem.against(problem.kv_sharding.positions(block))
        parts = [
            attend(
                q[:, heads],
                *_heads_first(held, kv_heads),
                **among,
                out_dtype=dtype,
                between=problem.comm.poll,
            )
            for heads, kv_heads in polled(problem.comm, groups)
        ]
        for result, part in zip(results, parts, strict=True) if results else ():
            merge_into(*result, *part)
        results = results or parts
        del held, parts
    if not results:
        return torch.zeros_like(q.transpose(1, 2), dtype=dtype), q.new_full(
            q.shape[:3], -torch.inf, dtype=dtype
        )
    return join_heads([out for out, _ in results]), torch.cat([lse for _, lse in results], 1)


def _ring_gradients(
    upstream: tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None],
    k: Tensor,
    v: Tensor,
    problem: Problem,
    *,
    with_kv: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Run the backward: return dq (B, H, S/P, D), dk and dv (B, S/P, K, D), in float32 or wider."""
    grad_out, q, out, lse, grad_lse = upstream
    dq = torch.zeros_like(q, dtype=accumulation_dtype(q.dtype))
    groups = head_groups(q.shape[1], k.shape[2], problem.comm.size)
    sums = gradient_sums(problem, k[:, :0].to(dq.dtype))
    for step, block, held in circulate(k, v, problem):
        own = None
        if held is not None and sees(problem, block):
            among = problem.against(problem.kv_sharding.positions(block))
            own = k.new_empty((2, *held[0].shape), dtype=dq.dtype)
            for h, kv in polled(problem.comm, groups):
                given = (grad_out[:, h], q[:, h], *_heads_first(held, kv), out[:, h], lse[:, h])
                gl = None if grad_lse is None else grad_lse[:, h]
                part, dk, dv = attend_backward(
                    *given, **among, grad_lse=gl, between=problem.comm.poll
                )
                dq[:, h] += part
                own[0, :, :, kv], own[1, :, :, kv] = dk.transpose(1, 2), dv.transpose(1, 2)
        if with_kv:
            sums.add(step, own)
        del held, own
    return dq, *(sums.arrived() if with_kv else (k, v))


def _heads_first(block: Block, heads: slice) -> Block:
    """Return some heads of k and v as (B, K, S_block, D), from a block (B, S_block, K, D)."""
    k, v = (x[:, :, heads].transpose(1, 2) for x in block)
    return k, v
