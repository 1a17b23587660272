"""Ulysses: an all-to-all gives every rank all tokens of some heads, and back.

    q k v  (B, S/P, H, D)  --all-to-all-->  (B, S, H/P, D)
    inner attention
    (B, S, H/P, D)  --all-to-all-->  out  (B, S/P, H, D)

Key/value heads stay with the query heads that read them. Where there are fewer of them than ranks,
or they do not divide, a head goes to every rank that reads it, and its gradients are summed on the
way back. Shapes: B batch, S sequence, H heads, K key/value heads, D head dim, P ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Unpack

from torch import Tensor

from sp_core.attention import Terms, local_attention
from sp_core.collectives.differentiable import apply
from sp_core.collectives.maps import AllToAll
from sp_core.communicator import Communicator
from sp_core.mask import Mask
from sp_core.schemes.heads import Part, parts_of, side_by_side, split_heads
from sp_core.schemes.problem import Problem, agree
from sp_core.sharding import Sharding

Inner = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""Attention of queries (B, S, h, D) over the tokens of all ranks. Returns (out, lse)."""


def ulysses_attention(
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
    inner: Callable[..., Any] | None = None,
    **terms: Unpack[Terms],
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute attention over the tokens of all ranks; each rank computes some of the heads.

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
        inner: attention over the whole sequence on one device, `local_attention` if not given;
            called as that with `q_positions`, `kv_positions`, `mask`, `softmax_scale`,
            `return_lse=True`, and the other terms of the logits that were given.
        terms: more terms of the scores, by the names of `Terms`: `softcap`, `sinks`, `alibi`.

    Returns:
        out (B, S/P, H, D) in the dtype of q; with `return_lse` also lse (B, H, S/P) in float32 or
        wider. A query that sees no key gets out = 0 and lse = -inf, or its sink.
        Any number of heads fits any number of ranks; ranks may get no head.

    Communication:
        Forward an all-to-all of q, k and v (one message to each rank; two where queries and keys
        are sharded differently) and one of out: (P-1)/P of 2Q + K elements sent per rank, where Q =
        B*(S/P)*H*D and K = 2*B*(S/P)*K*D. Backward the same.

    Raises:
        ShapeError, DtypeError, DeviceError, RankError: on every rank, before the first message.
        CollectiveMismatch: the ranks' arguments differ.
        RuntimeError: a second derivative.

    Source: Jacobs et al. 2023, DeepSpeed Ulysses, arXiv:2309.14509, section 3.
    """
    problem = agree(
        "ulysses_attention",
        *(q, k, v),
        comm=comm,
        sharding=sharding,
        kv_sharding=kv_sharding,
        mask=mask,
        softmax_scale=softmax_scale,
        return_lse=return_lse,
        inner=inner,
        **terms,
    )
    exchange = Exchange.of(problem.comm, problem, range(problem.comm.size), q, k)
    attend: Callable[..., Any] = inner or local_attention
    whole = partial(
        attend,
        q_positions=_gathered_positions(problem.sharding),
        kv_positions=_gathered_positions(problem.kv_sharding),
        mask=problem.mask,
        return_lse=True,
        **problem.logits.of_heads(exchange.heads[comm.rank]).given(),
    )
    out, lse = exchange.run(q, k, v, whole, return_lse=return_lse)
    return (out, lse) if return_lse else out


def _gathered_positions(sharding: Sharding) -> Tensor:
    return sharding.group([range(sharding.size)]).positions(0)


@dataclass(frozen=True)
class Exchange:
    """The two all-to-alls of Ulysses: the heads and the number of tokens of each rank.

    Args:
        comm: the ranks.
        lengths, kv_lengths: tokens of each rank.
        heads: query heads that each rank computes.
        kv_heads: for each rank, the key/value head of each of its key/value slots; one that several
            ranks read is in several.
        alike: q, k and v go in one exchange, because every rank has as many queries as keys. In a
            hybrid that is every rank of the whole grid: what goes together needs a gradient
            together, and the ranks of a ring must agree on which gradients travel.
    """

    comm: Communicator
    lengths: tuple[int, ...]
    kv_lengths: tuple[int, ...]
    heads: tuple[range, ...]
    kv_heads: tuple[tuple[int, ...], ...]
    alike: bool

    @classmethod
    def of(
        cls, comm: Communicator, problem: Problem, ranks: Sequence[int], q: Tensor, k: Tensor
    ) -> Exchange:
        """Make the exchange between some ranks of a problem, those of `comm`."""
        lengths, kv_lengths = (
            tuple(sharding.local_len(rank) for rank in ranks)
            for sharding in (problem.sharding, problem.kv_sharding)
        )
        shares = split_heads(q.shape[2], k.shape[2], comm.size)
        alike = problem.sharding.lengths == problem.kv_sharding.lengths
        return cls(comm, lengths, kv_lengths, *shares, alike=alike)

    def run(
        self, q: Tensor, k: Tensor, v: Tensor, inner: Inner, *, return_lse: bool
    ) -> tuple[Tensor, Tensor]:
        """Exchange, attend, exchange back.

        Without `return_lse`, lse is not exchanged back and must not be used.
        """
        if self.comm.size == 1:
            return inner(q, k, v)
        out, lse = inner(*self._forward(q, k, v))
        counts = tuple(len(heads) for heads in self.heads)
        out = apply(out, AllToAll(self.comm, 1, 2, self.lengths, counts))
        if return_lse:
            lse = apply(lse, AllToAll(self.comm, 2, 1, self.lengths, counts))
        return out, lse

    def _forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return this rank's heads of q, k and v for all tokens."""
        rank = self.comm.rank
        own = [len(self.heads[rank]), *[len(self.kv_heads[rank])] * 2]
        if self.alike:
            dealt = [
                [*parts_of(0, queries), *parts_of(1, keys), *parts_of(2, keys)]
                for queries, keys in zip(self.heads, self.kv_heads, strict=True)
            ]
            q, k, v = self._dealt((q, k, v), dealt, self.lengths).split(own, 2)
            return q, k, v
        q = self._dealt((q,), [parts_of(0, queries) for queries in self.heads], self.lengths)
        dealt = [[*parts_of(0, keys), *parts_of(1, keys)] for keys in self.kv_heads]
        k, v = self._dealt((k, v), dealt, self.kv_lengths).split(own[1:], 2)
        return q, k, v

    def _dealt(
        self, tensors: tuple[Tensor, ...], parts: Sequence[list[Part]], lengths: tuple[int, ...]
    ) -> Tensor:
        """Exchange heads: (B, S/P, *, D) tensors to (B, S, heads of this rank, D).

        `parts` lists the heads that each rank gets.
        """
        widths = tuple(sum(len(heads) for _, heads in dealt) for dealt in parts)
        x = side_by_side(tensors, [part for dealt in parts for part in dealt])
        return apply(x, AllToAll(self.comm, 2, 1, widths, lengths))
