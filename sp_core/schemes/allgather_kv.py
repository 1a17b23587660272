"""AllGather-KV: every rank keeps its queries, and gathers the keys and values of all ranks.

    rank r:   q_r  k_r v_r  --all-gather-->  k_0..k_P-1  v_0..v_P-1,    out_r = softmax(q_r k^T) v
    backward: gather k, v again;  dq_r stays,  dk dv of all tokens  --reduce-scatter-->  dk_r dv_r

Keys and values are gathered together, a group of heads at a time. While a rank attends to one
group, it gathers the next. The backward gathers again, so a layer saves only its S/P own tokens.
Shapes: B batch, S sequence, H heads, K key/value heads, D head dim, P ranks.
"""

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
from sp_core.schemes.problem import (
    KeyValue,
    Problem,
    Scheme,
    Upstream,
    Visit,
    block_gradients,
    check_call,
    joined,
    run,
)
from sp_core.segments import positions_of
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
        comm: the ranks that hold the sequence. All of them call this function together, and all
            of them use its results in their losses, or none does.
        sharding: which rank holds which queries. Shards may be uneven or empty: S/P stands for
            this rank's own number of tokens, in the order of `sharding.positions(comm.rank)`.
        kv_sharding: which rank holds which keys and values; `sharding` if not given.
        mask: which keys a query sees; all keys if not given.
        softmax_scale: factor of the scores q k^T; 1/sqrt(D) if not given.
        return_lse: also return the log-sum-exp of each query's scores.
        terms: arguments that change the scores further, explained in `Terms`: `softcap`, `sinks`,
            `alibi`.

    Returns:
        out (B, S/P, H, D) in the dtype of q; with `return_lse` also lse (B, H, S/P) in float32 or
        wider. With sinks, lse includes them. A query that sees no key gets out = 0 and lse = -inf;
        with sinks, its lse is the sink of the head.

    Communication:
        First one agreement: each rank waits for all, and they check that their arguments match.
        Another agreement begins the backward unless the communicator has `check="off"`. The
        forward gathers k and v from all ranks in up to 4 groups of heads: a rank sends
        `(P-1) * 2*B*(S/P)*K*D` elements. The backward gathers them again. If k or v needs a
        gradient, it also reduce-scatters dk and dv in float32 or wider: a rank sends
        `2*B*(S - S/P)*K*D` elements. A single rank sends nothing.

        In shared memory (`Mesh(transport="window")`) no keys or values are sent: the ranks write k
        and v into one tensor, wait for each other, and all read it. One more agreement comes before
        the ranks make more shared memory, as the first calls do.

    Raises:
        TypeError, ValueError, ShapeError, DtypeError, DeviceError, RankError: wrong arguments; on
            every rank, before the first message. Only a wrong `comm` is an error of one rank.
        CollectiveMismatch: the ranks' arguments differ.
        RuntimeError: autograd is asked for a second derivative; only the first is implemented.

    Source: Grattafiori et al. 2024, The Llama 3 Herd of Models, arXiv:2407.21783, section 3.3.2,
    context parallelism.
    """
    problem = check_call(
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
    """Yield a `Visit` for each group of heads, with the keys and values of all ranks."""
    positions = positions_of(problem.kv_sharding.sorted_segments)
    blocks = _gathered(k, v, problem, groups)
    for number, (heads, _) in enumerate(groups):  # `zip` would keep the last block alive
        yield Visit(number, positions, [(heads, slice(None))], next(blocks))


def _gathered(
    k: Tensor, v: Tensor, problem: Problem, groups: Sequence[Group]
) -> Iterator[KeyValue]:
    """Yield k and v of all ranks for each group of heads, (B, S, heads, D) each.

    Tokens are in the order of `kv_sharding.sorted_positions`. Before a group is yielded, the
    all-gather of the next group is started.
    """
    comm, sharding = problem.comm, problem.kv_sharding
    if in_place.reads_in_place(comm, "all_gather"):
        keys, values = (x.transpose(1, 2) for x in in_place.whole(k, v, problem))
        yield from ((keys[:, :, kv], values[:, :, kv]) for _, kv in groups)
    else:
        gather = AllGather(comm, 0, sharding.lengths)
        # each gathers a tensor (S/P, 2, B, K, D)
        calls = (
            (gather, torch.stack((k[:, :, kv], v[:, :, kv])).movedim(2, 0)) for _, kv in groups
        )
        for rows in one_ahead(calls):
            keys, values = sharding.sort_segments(rows, 0).permute(1, 2, 0, 3, 4).unbind()
            yield keys, values


def _gradients(
    upstream: Upstream,
    k: Tensor,
    v: Tensor,
    problem: Problem,
    groups: Sequence[Group],
    with_kv: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gather keys and values again, compute all gradients, and reduce-scatter dk and dv.

    Arguments and results are those of `Scheme.gradients`. The gradients of one group of heads are
    summed over the ranks while those of the next group are computed.
    """
    _, q, *_ = upstream
    dqs: list[Tensor] = []

    def gradients() -> Iterator[tuple[Tensor, Tensor]]:
        for _, positions, [group], held in _visits(k, v, problem, groups):
            assert held is not None
            dq, dk, dv = block_gradients(upstream, held, positions, group, problem)
            dqs.append(dq.to(q.dtype))
            yield dk, dv

    if with_kv:
        sharding = problem.kv_sharding
        scatter = ReduceScatter(problem.comm, 0, sharding.lengths)
        calls = (
            (scatter, sharding.unsort_segments(torch.stack(x).permute(3, 0, 1, 2, 4), 0))
            for x in gradients()
        )
        k, v = joined([mine.movedim(0, 2) for mine in one_ahead(calls)], 3)  # dk and dv
    else:
        for _ in gradients():  # only dq is wanted
            pass
    return joined(dqs, 1), k, v


_SCHEME = Scheme("allgather_kv_attention", _visits, _gradients)
