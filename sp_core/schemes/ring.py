"""Ring attention: keys and values travel, and each rank attends to the block that it holds.

    step s: rank r holds the keys of rank j = r - s      send k_j v_j --> r+1
            out, lse = merge(out, lse, attend(q_r, k_j, v_j))

While a rank computes on a block, some heads at a time, it receives the next one. A block is passed
on to the last rank that sees any of it. In the backward the blocks travel again, each followed by
the sum of its gradients. The last rank that adds to a sum sends it to the owner of the block. Ranks
that share memory send nothing: in step s they read block j in its owner's memory.
Shapes: B batch, S sequence, H heads, K key/value heads, D head dim, P ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import starmap
from typing import Unpack

import torch
from torch import Tensor

from sp_core.attention import Terms, accumulation_dtype, attend_backward
from sp_core.communicator import Communicator
from sp_core.mask import Mask
from sp_core.schemes import in_place
from sp_core.schemes.blocks import Block, Scheme, Upstream, Visit, heads_first, run
from sp_core.schemes.heads import Group
from sp_core.schemes.problem import Problem, agree
from sp_core.schemes.travel import Travel, TravellingSums, sees
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
    **terms: Unpack[Terms],
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute attention over the tokens of all ranks by passing keys and values around a ring.

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
        Forward P-1 messages of 2*B*(S/P)*K*D elements, fewer where the mask hides whole blocks.
        Backward the same, and P messages of as many elements in float32 or wider. A single rank
        sends nothing. In shared memory (`Mesh(transport="window")`) no message: a rank writes its K
        and V once, or not at all where both are tensors of `shared_empty` on `comm`, and reads P-1
        others'; backward the same, and it adds to as many sums in float32 or wider. One fence, in
        the backward one for each step.

    Raises:
        ShapeError, DtypeError, DeviceError, RankError: on every rank, before the first message.
        CollectiveMismatch: the ranks' arguments differ.
        RuntimeError: a second derivative.

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
        **terms,
    )
    out, lse = run_ring(q, k, v, problem)
    return (out, lse) if return_lse else out


def run_ring(q: Tensor, k: Tensor, v: Tensor, problem: Problem) -> tuple[Tensor, Tensor]:
    """Run the scheme on arguments that the ranks have compared."""
    return run(q, k, v, problem, _SCHEME)


def circulate(k: Tensor, v: Tensor, problem: Problem) -> Iterator[tuple[int, int, Block | None]]:
    """Yield (step, block, its k and v (B, S_block, K, D)), this rank's own block first.

    None marks a block that was not received.
    """
    if in_place.is_read(problem.comm, "shift"):
        return in_place.circulate(k, v, problem)
    return Travel(problem, k.detach()).circulate([torch.stack((k.detach(), v.detach()))])


def _visits(k: Tensor, v: Tensor, problem: Problem, groups: Sequence[Group]) -> Iterator[Visit]:
    """Yield the blocks in the order of the ring. No block outlives its visit.

    A window or documents cut the work into small blocks, between which communication makes
    progress. All heads are one group then.
    """
    if problem.mask.window is not None or problem.mask.documents is not None:
        groups = [(slice(None), slice(None))]

    def visit(step: int, block: int, held: Block | None) -> Visit:
        positions = problem.kv_sharding.positions(block)
        return Visit(step, positions, groups, held if sees(problem, block) else None)

    return starmap(visit, circulate(k, v, problem))


def _gradients(
    upstream: Upstream,
    k: Tensor,
    v: Tensor,
    problem: Problem,
    groups: Sequence[Group],
    with_kv: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Let the blocks travel again, each followed by the sum of its gradients."""
    do, q, out, lse, grad_lse = upstream
    dq, poll = torch.zeros_like(q, dtype=accumulation_dtype(q.dtype)), problem.comm.poll
    like = k[:, :0].to(dq.dtype)
    in_memory = in_place.is_read(problem.comm, "shift")
    sums = in_place.SharedSums(problem, like) if in_memory else TravellingSums(problem, like)
    for step, positions, visited, held in _visits(k, v, problem, groups):
        own = None
        if held is not None:
            i, j = problem.part(positions)
            own = k.new_zeros((2, *held[0].shape), dtype=dq.dtype)
            for h, kv in visited:
                at = (slice(None), h, i)
                given = (do[at], q[at], *heads_first(held, kv, j), out[at], lse[at])
                gl = None if grad_lse is None else grad_lse[at]
                among = problem.against(positions, h, (i, j))
                part, dk, dv = attend_backward(*given, **among, grad_lse=gl, between=poll)
                dq[at] += part
                own[0, :, j, kv], own[1, :, j, kv] = dk.transpose(1, 2), dv.transpose(1, 2)
                del given
                poll()
        if with_kv:
            sums.add(step, own)
        del held, own
    return dq, *(sums.arrived() if with_kv else (k, v))


_SCHEME = Scheme("ring_attention", _visits, _gradients)
