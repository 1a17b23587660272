"""Formulas for the messages and bytes of each scheme, forward and backward. No MPI, no tensors.

With own = B * (S/P) * D * e for one head of one rank's tokens, the even, full-mask case is

    scheme         forward                                   backward
    allgather_kv   (P-1) * 2K own                            the same, and (P-1) * 2K own, wide
    ring           (P-1) * 2K own in P-1 messages            the same, and P * 2K own, wide, in P
    ulysses        (P-1)/P * (2H + 2K) own                   the same
    hybrid         (U-1)/U * (2H + 2K) own + (R-1) * 2K own  as in the parts
    tp_sp          2 (P-1) * B * (S/P) * E * e per pair      3 (P-1) * B * (S/P) * E * e

Wide numbers are sums of gradients, in float32 or wider.

This is what the payload is; a mesh that was made with an algorithm sends what
`sp_core.schedules.cost` says of its schedule. Ranks that share memory send nothing: with `shared`
what counts is what they read of others, and messages are blocks read in place.

The functions sum over the actual shards, the head split, the mask and the ring's schedule instead.
Letters: B batch, S sequence, H heads, K key/value heads, D head dim, E model dim, P ranks, U and R
ranks of the two axes of a hybrid, e bytes per element.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from sp_core.mask import Mask
from sp_core.schemes.heads import split_heads
from sp_core.schemes.reach import hops, seen_blocks
from sp_core.sharding import Sharding


@dataclass(frozen=True)
class Traffic:
    """Messages and bytes that one rank sends. With shared memory, those that it reads."""

    messages: int = 0
    bytes_sent: int = 0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(self.messages + other.messages, self.bytes_sent + other.bytes_sent)


@dataclass(frozen=True)
class Attention:
    """The sizes of an attention problem, and which results and gradients are wanted.

    Args:
        sharding, kv_sharding: who owns which queries and keys.
        mask: who sees whom.
        batch, num_heads, num_kv_heads, head_dim: B, H, K, D.
        itemsize: bytes per element of q, k and v.
        return_lse: whether the log-sum-exp is returned too.
        needs_grad: which of q, k and v have gradients.
        lse_grad: whether a gradient flows into the log-sum-exp.
        shared: whether the ranks share memory, so that bytes are read there instead of sent.
    """

    sharding: Sharding
    kv_sharding: Sharding
    mask: Mask
    batch: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    itemsize: int
    return_lse: bool = False
    needs_grad: tuple[bool, bool, bool] = (True, True, True)
    lse_grad: bool = False
    shared: bool = False

    @property
    def wide(self) -> int:
        """Bytes of an element of a sum or of the log-sum-exp."""
        return max(self.itemsize, 4)

    def kv_block(self, rank: int, itemsize: int) -> int:
        """Return the bytes of one rank's keys and values."""
        return (
            2
            * self.batch
            * self.kv_sharding.local_len(rank)
            * self.num_kv_heads
            * self.head_dim
            * itemsize
        )


Both = tuple[Traffic, Traffic]
"""Forward and backward."""


def allgather_kv(problem: Attention, rank: int) -> Both:
    """Return what `rank` sends in `allgather_kv_attention`."""
    others = [other for other in range(problem.kv_sharding.size) if other != rank]
    gathered, summed = (_blocks(problem, others, size) for size in (problem.itemsize, problem.wide))
    if problem.shared:
        own = problem.kv_block(rank, problem.wide)
        return _both(problem, gathered, Traffic(0, len(others) * own))
    own = problem.kv_block(rank, problem.itemsize)
    return _both(problem, Traffic(0, len(others) * own), Traffic(0, summed.bytes_sent))


def _both(problem: Attention, keys: Traffic, sums: Traffic) -> Both:
    """Return the traffic of forward and of backward.

    Forward sends `keys`. Backward sends `keys` again if any gradient is needed, and `sums` if that
    of a key or value is.
    """
    backward = keys if any(problem.needs_grad) else Traffic()
    return keys, backward + sums if any(problem.needs_grad[1:]) else backward


def _blocks(problem: Attention, ranks: Sequence[int], itemsize: int) -> Traffic:
    """Return the cost of some ranks' blocks, one message each. Empty blocks are not sent."""
    filled = [rank for rank in ranks if problem.kv_sharding.local_len(rank)]
    return Traffic(len(filled), sum(problem.kv_block(rank, itemsize) for rank in filled))


def ring(problem: Attention, rank: int) -> Both:
    """Return what `rank` sends in `ring_attention`, or reads of the blocks that it sees."""
    seen_by = problem.sharding, problem.kv_sharding, problem.mask
    way, size = hops(*seen_by), problem.sharding.size
    if problem.shared:
        seen = seen_blocks(*seen_by, rank)
        keys = sums = [block for block in range(size) if seen[block] and block != rank]
    else:
        passing = [(step, (rank - step) % size) for step in range(size)]
        keys = [block for step, block in passing if way[block] > step]
        sums = [block for step, block in passing if way[block] > step or way[block] == step > 0]
    sent = _blocks(problem, keys, problem.itemsize), _blocks(problem, sums, problem.wide)
    return _both(problem, *sent)


def ulysses(problem: Attention, rank: int) -> Both:
    """Return what `rank` sends in `ulysses_attention`."""
    return _exchange(problem, rank, problem)


def hybrid(problem: Attention, ring_rank: int, ulysses_rank: int, groups: list[list[int]]) -> Both:
    """Return what a rank sends in `hybrid_attention`.

    `groups` lists the ranks that exchange heads, for each rank of the ring.
    """
    mine = groups[ring_rank]
    inside = replace(
        problem,
        sharding=Sharding(tuple(problem.sharding.segments[rank] for rank in mine)),
        kv_sharding=Sharding(tuple(problem.kv_sharding.segments[rank] for rank in mine)),
    )
    _, kv_heads = split_heads(problem.num_heads, problem.num_kv_heads, len(mine))
    around = replace(
        problem,
        sharding=problem.sharding.group(groups),
        kv_sharding=problem.kv_sharding.group(groups),
        num_kv_heads=len(kv_heads[ulysses_rank]),
        needs_grad=_through_exchange(problem, inside),
    )
    parts = _exchange(inside, ulysses_rank, problem), ring(around, ring_rank)
    forward, backward = (one + other for one, other in zip(*parts, strict=True))
    return forward, backward


def tp_sp(sharding: Sharding, rank: int, batch: int, hidden: int, itemsize: int) -> Both:
    """Return the messages and bytes that `rank` sends in a column- and a row-parallel layer.

    The layers have no bias, and every input and weight gets a gradient.
    """
    mine = sharding.local_len(rank)
    token = batch * hidden * itemsize
    gather, scatter = (sharding.size - 1) * mine * token, (sharding.seq_len - mine) * token
    return Traffic(0, gather + scatter), Traffic(0, gather + (gather + scatter))


def _exchange(problem: Attention, rank: int, whole: Attention) -> Both:
    """Return the cost of the all-to-alls of Ulysses, between some of the ranks of `whole`."""
    shares = split_heads(problem.num_heads, problem.num_kv_heads, problem.sharding.size)
    heads, slots = ([len(share) for share in part] for part in shares)
    slots = [2 * number for number in slots]  # of k and v
    unit = problem.batch * problem.head_dim * problem.itemsize
    lse_unit = problem.batch * problem.wide
    own, kv_own = problem.sharding.local_len(rank), problem.kv_sharding.local_len(rank)
    others, kv_others = problem.sharding.seq_len - own, problem.kv_sharding.seq_len - kv_own
    there, home = own * (sum(heads) - heads[rank]), others * heads[rank]
    kv_there, kv_home = kv_own * (sum(slots) - slots[rank]), kv_others * slots[rank]
    if problem.shared:  # a rank reads what the others would have sent to it
        (there, home), (kv_there, kv_home) = (home, there), (kv_home, kv_there)
    forward = unit * (there + kv_there + home) + lse_unit * home * problem.return_lse
    q_back, kv_back, _ = _through_exchange(whole, problem)
    backward = unit * (q_back * home + kv_back * kv_home)
    if any(problem.needs_grad):
        backward += unit * there + lse_unit * there * problem.lse_grad
    return Traffic(0, forward), Traffic(0, backward)


def _through_exchange(problem: Attention, inside: Attention) -> tuple[bool, bool, bool]:
    """Return which of q, k and v have gradients after the exchange between the ranks `inside`.

    All three travel together where the shards of all ranks of the problem are alike, not only those
    of the ranks inside.
    """
    q, *kv = problem.needs_grad
    if inside.sharding.size == 1:
        return problem.needs_grad
    if problem.sharding.lengths == problem.kv_sharding.lengths:
        return (q or any(kv),) * 3
    return q, any(kv), any(kv)
