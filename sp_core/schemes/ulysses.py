"""Ulysses: give every rank all tokens of some heads by an all-to-all, and send the result back.

    q k v  (B, S/P, H, D)  --all-to-all-->  (B, S, H/P, D)
    inner attention
    (B, S, H/P, D)  --all-to-all-->  out  (B, S/P, H, D)

A rank receives the key/value heads that its query heads read. With fewer key/value heads than
ranks, a head is sent to every rank that reads it. In the backward the rank that holds a token sums
the gradients of all copies of the head. Shapes: B batch, S sequence, H heads, K key/value heads, D
head dim, P ranks.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Unpack

from torch import Tensor
from torch.utils import checkpoint

from sp_core.agreement import make_alike
from sp_core.arguments import check_tensor
from sp_core.attention import Terms, local_attention
from sp_core.collectives.differentiable import apply
from sp_core.collectives.maps import AllToAll
from sp_core.communicator import Communicator
from sp_core.errors import ShapeError
from sp_core.mask import Mask
from sp_core.schemes.heads import side_by_side, split_heads
from sp_core.schemes.problem import Problem, check_call
from sp_core.segments import consecutive, positions_of
from sp_core.sharding import Sharding

STOPPED: Any = getattr(checkpoint, "_StopRecomputationError", ())
"""The exception by which torch's checkpoint ends its second call. Its name is private to torch."""


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
        comm: the ranks that hold the sequence. All of them call this function together, and all
            of them use its results in their losses, or none does.
        sharding: which rank holds which queries. Shards may be uneven or empty: S/P stands for
            this rank's own number of tokens, in the order of `sharding.positions(comm.rank)`.
        kv_sharding: which rank holds which keys and values; `sharding` if not given.
        mask: which keys a query sees; all keys if not given.
        softmax_scale: factor of the scores q k^T; 1/sqrt(D) if not given.
        return_lse: also return the log-sum-exp of each query's scores.
        inner: attention of some heads over the whole sequence on one device, `local_attention` if
            not given. It is called like `local_attention`, with (q, k, v), `q_positions`,
            `kv_positions`, `mask`, `softmax_scale`, `return_lse=True`, and the given `terms`. If it
            raises an error or returns other shapes on one rank, all ranks raise that error.
        terms: arguments that change the scores further, explained in `Terms`: `softcap`, `sinks`,
            `alibi`.

    Returns:
        out (B, S/P, H, D) in the dtype of q; with `return_lse` also lse (B, H, S/P) in float32 or
        wider. With sinks, lse includes them. A query that sees no key gets out = 0 and lse = -inf;
        with sinks, its lse is the sink of the head. H and K need not be multiples of P; with few
        heads some ranks compute none.

    Communication:
        First one agreement: each rank waits for all, and they check that their arguments match. A
        rank's own q has `N = B*(S/P)*H*D` elements, its k and v together have `M = 2*B*(S/P)*K*D`.
        In the forward a rank sends `(P-1)/P * (2N + M)` elements: an all-to-all of q, k and v, and
        one of out. If a rank has more or fewer queries than keys, q is sent in an all-to-all of its
        own. With `return_lse`, lse is sent in another one. With K < P, M counts every copy of a
        key/value head. The backward sends as much, with an agreement before each all-to-all unless
        the communicator has `check="off"`. With `inner`, another agreement checks its results. A
        gradient of lse is exchanged, too: the losses of all ranks use lse, or none does. A single
        rank sends nothing.

    Raises:
        TypeError, ValueError, ShapeError, DtypeError, DeviceError, RankError: wrong arguments; on
            every rank, before the first message. Only a wrong `comm` is an error of one rank.
        CollectiveMismatch: the ranks' arguments differ.
        RuntimeError: autograd is asked for a second derivative of `local_attention`.

    Source: Jacobs et al. 2023, DeepSpeed Ulysses, arXiv:2309.14509, section 3.
    """
    problem = check_call(
        "ulysses_attention" + "[inner]" * (inner is not None),
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
    exchange = Exchange(comm, problem, range(comm.size), q, k)
    whole: Callable[..., Any] = partial(
        inner or local_attention,
        q_positions=_positions(problem.sharding),
        kv_positions=_positions(problem.kv_sharding),
        mask=problem.mask,
        return_lse=True,
        **problem.logits.of_heads(exchange.heads[comm.rank]).given(),
    )
    whole = whole if inner is None else partial(_checked, comm, whole)
    out, lse = exchange.run(q, k, v, whole, return_lse=return_lse)
    return (out, lse) if return_lse else out


def _positions(sharding: Sharding) -> range | Tensor:
    """Return the positions of all tokens in the order of an all-gather, as `inner` takes them."""
    positions = positions_of(sharding.gathered_segments)
    return positions if isinstance(positions, range) else positions.tensor()


def _checked(
    comm: Communicator, inner: Callable[..., Any], q: Tensor, k: Tensor, v: Tensor
) -> tuple[Tensor, Tensor]:
    """Call `inner`. All ranks raise an error if it fails, or returns other shapes, on one rank.

    If a checkpoint of torch ends `inner` on all ranks, its exception is raised as it is.
    """
    wanted = f"{tuple(q.shape)}, {(q.shape[0], q.shape[2], q.shape[1])}"

    def make() -> tuple[Any, str]:
        try:
            found = inner(q, k, v)
        except STOPPED as stopped:
            return stopped, "inner of ulysses_attention was ended by a checkpoint"
        parts = found if isinstance(found, (tuple, list)) else [found]
        shapes = (str(tuple(x.shape)) if isinstance(x, Tensor) else type(x).__name__ for x in parts)
        if (given := ", ".join(shapes)) != wanted:
            raise ShapeError(
                f"inner returned {given or 'nothing'} for q {tuple(q.shape)}. It must return (out, "
                f"lse), two tensors of shapes {wanted}."
            )
        for name, x, dtypes in (("out", found[0], (q.dtype,)), ("lse", found[1], None)):
            check_tensor(x, comm, f"{name} of inner", dtypes)
        told = (f"{x.dtype} requires_grad={x.requires_grad}" for x in found)
        return found, f"inner of ulysses_attention returned {', '.join(told)}"

    found = make_alike(comm, make)
    if isinstance(found, STOPPED):
        raise found
    out, lse = found
    return out, lse


class Exchange:
    """Define the all-to-alls of Ulysses: which heads and tokens go to which rank.

    Args:
        comm: the ranks that exchange heads, some or all of those of `problem`.
        problem: the attention call.
        ranks: for each rank of `comm` its number in the shardings of `problem`.
        q, k: this rank's tensors (B, S/P, H or K, D); only the numbers of heads are used.

    Attributes:
        lengths, kv_lengths: for each rank its number of queries, and of keys.
        heads: for each rank the query heads that it computes.
        kv_heads: for each rank the key/value heads that it receives. A head that several ranks
            read is in the lists of all of them.
        alike: whether q, k and v are sent in one all-to-all, so that all three get a gradient. True
            if every rank of `problem` has as many queries as keys. In a hybrid these are the ranks
            of both axes, because all ranks of a ring must send the same gradients.
    """

    def __init__(
        self, comm: Communicator, problem: Problem, ranks: Sequence[int], q: Tensor, k: Tensor
    ) -> None:
        self.comm = comm
        self.lengths, self.kv_lengths = (
            tuple(sharding.local_len(rank) for rank in ranks)
            for sharding in (problem.sharding, problem.kv_sharding)
        )
        self.heads, self.kv_heads = split_heads(q.shape[2], k.shape[2], comm.size)
        self.alike = problem.sharding.lengths == problem.kv_sharding.lengths

    def run(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        inner: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]],
        *,
        return_lse: bool,
    ) -> tuple[Tensor, Tensor]:
        """Exchange heads, call `inner`, and exchange the result back; every rank calls this.

        Args:
            q, k, v: (B, S/P, H or K, D), this rank's tokens of all heads.
            inner: attention of this rank's h heads over all tokens: a function of q, k and v,
                (B, S, h, D) each, that returns (out, lse).
            return_lse: whether lse is needed; otherwise it is not exchanged back.

        Returns:
            out (B, S/P, H, D) and lse (B, H, S/P). Without `return_lse`, lse is that of `inner`,
            for its tokens and heads, and must not be used.
        """
        if self.comm.size == 1:
            return inner(q, k, v)
        out, lse = inner(*self._forward(q, k, v))
        counts = tuple(len(heads) for heads in self.heads)
        out = apply(out, AllToAll(self.comm, 1, 2, self.lengths, counts))
        if return_lse:
            lse = apply(lse, AllToAll(self.comm, 2, 1, self.lengths, counts))
        return out, lse

    def _forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        """Send all heads of this rank's tokens, and receive this rank's heads of all tokens.

        Take q (B, S/P, H, D), k and v (B, S/P, K, D). Return q, k and v, (B, S, heads, D) each, of
        this rank's query heads and the key/value heads that they read.
        """
        if self.alike:
            return self._dealt(
                self.lengths, (q, self.heads), (k, self.kv_heads), (v, self.kv_heads)
            )
        (q,) = self._dealt(self.lengths, (q, self.heads))
        return q, *self._dealt(self.kv_lengths, (k, self.kv_heads), (v, self.kv_heads))

    def _dealt(
        self, lengths: tuple[int, ...], *dealt: tuple[Tensor, Sequence[Sequence[int]]]
    ) -> tuple[Tensor, ...]:
        """Exchange the heads of some tensors in one all-to-all.

        Args:
            lengths: for each rank its number of tokens.
            dealt: tensors (B, S/P, *, D), each with the heads that each rank receives.

        Returns:
            For each tensor (B, S, heads that this rank receives, D).
        """
        tensors, heads = zip(*dealt, strict=True)
        by_rank = list(zip(*heads, strict=True))
        parts = [
            (number, part)
            for held in by_rank
            for number, own in enumerate(held)
            for part in consecutive(own)
        ]
        widths = tuple(sum(map(len, held)) for held in by_rank)
        x = apply(side_by_side(parts, *tensors), AllToAll(self.comm, 2, 1, widths, lengths))
        return tuple(x.split([*map(len, by_rank[self.comm.rank])], 2))
