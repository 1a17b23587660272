"""AllGather-KV: every rank keeps its queries and receives the keys and values of all.

    rank r:   q_r  k_r v_r  --all-gather-->  k_0..k_P-1  v_0..v_P-1,    out_r = softmax(q_r k^T) v
    backward: gather k, v again;  dq_r stays,  dk dv of all tokens  --reduce-scatter-->  dk_r dv_r

K and V travel together, a group of heads at a time: while one group is attended to, the next is
under way. The backward gathers them again: what a layer saves grows with S/P. Shapes: B batch, S
sequence, H heads, K key/value heads, D head dim, P ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from sp_core.attention import attend, attend_backward
from sp_core.attention.once import Saved, differentiable_once, exact
from sp_core.collectives.maps import ReduceScatter
from sp_core.communicator import Communicator
from sp_core.mask import Mask
from sp_core.schemes.blocks import gathered
from sp_core.schemes.overlap import join_heads, one_ahead
from sp_core.schemes.problem import Problem, agree
from sp_core.sharding import Sharding


def allgather_kv_attention(
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
    """Compute attention over the tokens of all ranks by gathering keys and values.

    Args:
        q: (B, S/P, H, D), this rank's queries; float64, float32, bfloat16 or float16.
        k: (B, S/P, K, D), this rank's keys; H is a multiple of K.
        v: (B, S/P, K, D), this rank's values.
        comm: the ranks.
        sharding: who owns which queries.
        kv_sharding: who owns which keys; like `sharding` if not given.
        mask: who sees whom; everybody if not given.
        softmax_scale: factor of the scores; 1/sqrt(D) if not given.
        return_lse: also return the log-sum-exp of each query's scores.

    Returns:
        out (B, S/P, H, D) in the dtype of q; with `return_lse` also lse (B, H, S/P) in float32 or
        wider. A query that sees no key gets out = 0 and lse = -inf.

    Communication:
        Forward an all-gather of K and V: (P-1) * 2*B*(S/P)*K*D elements sent per rank. Backward the
        same again, and a reduce-scatter of their gradients in float32 or wider: 2*B*(S - S/P)*K*D
        elements. A single rank sends nothing. In shared memory (`Mesh(transport="window")`) the
        ranks write their K and V into one tensor, which all read; nothing is gathered.

    Raises:
        ShapeError, DtypeError, DeviceError, RankError: on every rank, before the first message.
        CollectiveMismatch: the ranks' arguments differ.
        RuntimeError: a second derivative.

    Source: Grattafiori et al. 2024, The Llama 3 Herd of Models, arXiv:2407.21783, section 3.3.2,
    context parallelism.
    """
    problem = agree(
        "allgather_kv_attention",
        *(q, k, v),
        comm=comm,
        sharding=sharding,
        kv_sharding=kv_sharding,
        mask=mask,
        softmax_scale=softmax_scale,
        return_lse=return_lse,
    )
    apply: Any = _AllGatherKV.apply
    out, lse = apply(q, k, v, problem)
    return (out, lse) if return_lse else out


class _AllGatherKV(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, problem: Problem
    ) -> tuple[Tensor, Tensor]:
        ctx.problem, ctx.agree = problem, problem.comm.numbered()
        ctx.set_materialize_grads(False)
        among = problem.against(problem.kv_sharding.sorted_positions)
        with exact(q):
            between = problem.comm.poll
            parts = [
                attend(q[:, :, h].transpose(1, 2), *kv, **among, between=between)
                for h, kv in gathered(q, k, v, problem)
            ]
        out, lse = join_heads([out for out, _ in parts]), _joined([lse for _, lse in parts], 1)
        ctx.save_for_backward(q, k, v, out, lse)
        return out, lse

    @staticmethod
    @differentiable_once
    def backward(
        ctx: Any, saved: Saved, grad_out: Tensor | None, grad_lse: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        ctx.agree("the backward of allgather_kv_attention")
        q, k, v, out, lse = saved
        problem: Problem = ctx.problem
        among = problem.against(problem.kv_sharding.sorted_positions)
        grad_out = torch.zeros_like(out) if grad_out is None else grad_out
        dqs: list[Tensor] = []

        def gradients() -> Iterator[tuple[Tensor, Tensor]]:
            for h, kv in gathered(q, k, v, problem):
                do, q_, out_ = (x[:, :, h].transpose(1, 2) for x in (grad_out, q, out))
                gl = None if grad_lse is None else grad_lse[:, h]
                dq, dk, dv = attend_backward(
                    do, q_, *kv, out_, lse[:, h], **among, grad_lse=gl, between=problem.comm.poll
                )
                dqs.append(dq.transpose(1, 2).to(q.dtype))
                yield dk, dv

        if not any(ctx.needs_input_grad[1:3]):
            for _ in gradients():  # only dqs is wanted
                pass
            return _joined(dqs, 2), None, None, None
        dk, dv = (_joined(list(x), 2) for x in zip(*_reduced(gradients(), problem), strict=True))
        return _joined(dqs, 2), dk.to(k.dtype), dv.to(v.dtype), None


def _reduced(
    gradients: Iterator[tuple[Tensor, Tensor]], problem: Problem
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield dk and dv (B, S/P, K, D) of this rank's tokens for each group of heads.

    The gradients of all tokens (B, K, S, D) are summed over the ranks. One group is summed while
    the next is computed.
    """
    if problem.comm.size == 1:
        for grads in gradients:
            dk, dv = (problem.kv_sharding.unsort_segments(x.transpose(1, 2), 1) for x in grads)
            yield dk, dv
        return
    scatter = ReduceScatter(problem.comm, 0, problem.kv_sharding.lengths)
    calls = (
        (scatter, problem.kv_sharding.unsort_segments(torch.stack(x).permute(3, 0, 1, 2, 4), 0))
        for x in gradients
    )
    for mine in one_ahead(calls):
        dk, dv = mine.movedim(0, 2).unbind()
        yield dk, dv


def _joined(parts: list[Tensor], dim: int) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)
