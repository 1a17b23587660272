"""AllGather-KV: every rank keeps its queries and receives the keys and values of all.

    rank r:   q_r  k_r v_r  --all-gather-->  k_0..k_P-1  v_0..v_P-1,    out_r = softmax(q_r k^T) v
    backward: gather k, v again;  dq_r stays,  dk dv of all tokens  --reduce-scatter-->  dk_r dv_r

K and V travel in one message. They are not kept for the backward, which gathers them again: what a layer saves grows with S/P.
Shapes: B batch, S sequence, H heads, K key/value heads, D head dim, P ranks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sp_core.attention import attend, attend_backward
from sp_core.attention.once import differentiable_once
from sp_core.collectives.maps import AllGather, ReduceScatter
from sp_core.communicator import Communicator
from sp_core.mask import Mask
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
    """Attention over the tokens of all ranks, by gathering keys and values.

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
        out (B, S/P, H, D) in the dtype of q; with `return_lse` also lse (B, H, S/P) in float32 or wider. A query that sees no key
        gets out = 0 and lse = -inf.

    Communication:
        Forward one all-gather of K and V: (P-1) * 2*B*(S/P)*K*D elements sent per rank. Backward the same again, and one
        reduce-scatter of their gradients in float32 or wider: 2*B*(S - S/P)*K*D elements. A single rank sends nothing.

    Raises:
        ShapeError, DtypeError, DeviceError, RankError: on every rank, before the first message.
        CollectiveMismatch: the ranks' arguments differ.
        RuntimeError: a second derivative.

    Source: Grattafiori et al. 2024, The Llama 3 Herd of Models, arXiv:2407.21783, section 3.3.2, context parallelism.
    """
    problem = agree(
        "allgather_kv_attention",
        *(q, k, v),
        comm=comm,
        sharding=sharding,
        kv_sharding=kv_sharding,
        mask=mask,
        softmax_scale=softmax_scale,
    )
    apply: Any = _AllGatherKV.apply
    out, lse = apply(q, k, v, problem)
    return (out, lse) if return_lse else out


class _AllGatherKV(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, problem: Problem) -> tuple[Tensor, Tensor]:
        ctx.problem = problem
        ctx.set_materialize_grads(False)
        out, lse = attend(_heads_first(q), *_gather(k, v, problem), **_who(problem))
        out = _heads_last(out)
        ctx.save_for_backward(q, k, v, out, lse)
        return out, lse

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        problem: Problem = ctx.problem
        grad_out = torch.zeros_like(out) if grad_out is None else grad_out
        q_, out_, do = (_heads_first(x) for x in (q, out, grad_out))
        dq, dk, dv = attend_backward(do, q_, *_gather(k, v, problem), out_, lse, **_who(problem), grad_lse=grad_lse)
        if any(ctx.needs_input_grad[1:3]):
            dk, dv = _reduce_scatter(dk, dv, problem)
        return _heads_last(dq).to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None


def _who(problem: Problem) -> dict[str, Any]:
    """Positions, mask and scale; keys in the order that `_gather` gives."""
    positions = problem.sharding.positions(problem.comm.rank)
    kv_positions = problem.kv_sharding.sorted_positions
    return {"q_positions": positions, "kv_positions": kv_positions, "mask": problem.mask, "scale": problem.scale}


def _gather(k: Tensor, v: Tensor, problem: Problem) -> tuple[Tensor, Tensor]:
    """Keys and values of all ranks, (B, K, S, D) each."""
    if problem.comm.size > 1:
        mine = torch.stack((k.detach(), v.detach())).movedim(2, 0)  # (S/P, 2, B, K, D)
        rows = AllGather(problem.comm, 0, problem.kv_sharding.lengths).run(mine)
        k, v = problem.kv_sharding.sort_segments(rows, 0).movedim(0, 2).unbind()
    else:
        k, v = (problem.kv_sharding.sort_segments(x, 1) for x in (k, v))
    return _heads_first(k), _heads_first(v)


def _reduce_scatter(dk: Tensor, dv: Tensor, problem: Problem) -> tuple[Tensor, Tensor]:
    """Gradients of this rank's keys and values, (B, S/P, K, D) each, from what every rank has for all tokens."""
    if problem.comm.size > 1:
        rows = problem.kv_sharding.unsort_segments(torch.stack((dk, dv)).movedim(3, 0), 0)  # (S, 2, B, K, D)
        mine = ReduceScatter(problem.comm, 0, problem.kv_sharding.lengths).run(rows)
        dk, dv = mine.movedim(0, 2).unbind()
        return dk, dv
    dk, dv = (problem.kv_sharding.unsort_segments(_heads_last(x), 1) for x in (dk, dv))
    return dk, dv


def _heads_first(x: Tensor) -> Tensor:
    return x.transpose(1, 2)


def _heads_last(x: Tensor) -> Tensor:
    return x.transpose(1, 2)
