"""AllGather-KV: every rank keeps its queries and receives the keys and values of all.

    rank r:   q_r  k_r v_r  --all-gather-->  k_0..k_P-1  v_0..v_P-1,    out_r = softmax(q_r k^T) v
    backward: gather k, v again;  dq_r stays,  dk dv of all tokens  --reduce-scatter-->  dk_r dv_r

K and V travel together, a group of heads at a time: while one group is attended to, the next is
under way. The backward gathers them again: what a layer saves grows with S/P. Shapes: B batch, S
sequence, H heads, K key/value heads, D head dim, P ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Unpack

import torch
from torch import Tensor

from sp_core.attention import Terms
from sp_core.collectives.maps import AllGather, ReduceScatter, one_ahead
from sp_core.communicator import Communicator
from sp_core.mask import Mask
from sp_core.schemes import in_place
from sp_core.schemes.heads import Group
from sp_core.schemes.problem import Block, Gradients, Problem, Scheme, Visit, agree, joined, run
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
    **terms: Unpack[Terms],
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
        terms: more terms of the scores, by the names of `Terms`: `softcap`, `sinks`, `alibi`.

    Returns:
        out (B, S/P, H, D) in the dtype of q; with `return_lse` also lse (B, H, S/P) in float32 or
        wider. A query that sees no key gets out = 0 and lse = -inf, or its sink.

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
        **terms,
    )
    out, lse = run(q, k, v, problem, _SCHEME)
    return (out, lse) if return_lse else out


def _visits(k: Tensor, v: Tensor, problem: Problem, groups: Sequence[Group]) -> Iterator[Visit]:
    """Yield all keys and values for each group of heads."""
    positions = problem.kv_sharding.sorted_positions
    blocks = _gathered(k, v, problem, groups)
    for number, (heads, _) in enumerate(groups):  # `zip` would keep the block before
        yield Visit(number, positions, [(heads, slice(None))], next(blocks))


def _gathered(k: Tensor, v: Tensor, problem: Problem, groups: Sequence[Group]) -> Iterator[Block]:
    """Yield k and v of all ranks for each group, (B, S, K, D).

    The next group is gathered meanwhile.
    """
    comm, sharding = problem.comm, problem.kv_sharding
    if comm.size == 1:
        yield sharding.sort_segments(k, 1), sharding.sort_segments(v, 1)
    elif in_place.is_read(comm, "all_gather"):
        keys, values = (x.transpose(1, 2) for x in in_place.whole(k, v, problem))
        yield from ((keys[:, :, kv], values[:, :, kv]) for _, kv in groups)
    else:
        gather = AllGather(comm, 2, sharding.lengths)
        calls = ((gather, torch.stack((k[:, :, kv], v[:, :, kv]))) for _, kv in groups)
        for both in one_ahead(calls):
            keys, values = sharding.sort_segments(both, 2).unbind()
            yield keys, values


def _sums(gradients: Gradients, _: Tensor, problem: Problem) -> Block:
    """Sum dk and dv of all tokens over the ranks: a group of heads while the next is computed."""
    sharding = problem.kv_sharding
    parts: Iterator[Tensor] = (
        sharding.unsort_segments(own, 2) for _, own in gradients if own is not None
    )
    if problem.comm.size > 1:
        scatter = ReduceScatter(problem.comm, 2, sharding.lengths)
        parts = one_ahead((scatter, part) for part in parts)
    dk, dv = joined(list(parts), 3).unbind()
    return dk, dv


_SCHEME = Scheme("allgather_kv_attention", _visits, _sums)
