"""Compute the messages and bytes that each scheme sends, forward and backward. No MPI, no tensors.

`allgather_kv`, `ring`, `ulysses`, `hybrid` and `tp_sp` return the traffic of one rank. They sum
over the actual shards, the head split, the mask and the ring's schedule. For even shards, a full
mask, and H and K that P (in a hybrid U) divides, these are the bytes, with own = B * (S/P) * D * e
for one head of one rank's tokens:

    scheme         forward                                   backward
    allgather_kv   (P-1) * 2K own                            the same, and (P-1) * 2K wide
    ring           (P-1) * 2K own in P-1 messages            the same, and P * 2K wide in P messages
    ulysses        (P-1)/P * (2H + 2K) own                   the same
    hybrid         (U-1)/U * (2H + 2K) own + (R-1) * 2K own  as in ulysses and ring
    tp_sp          2 (P-1) * B * (S/P) * E * e               3 (P-1) * B * (S/P) * E * e

wide = B * (S/P) * D * max(e, 4) are the bytes of as many elements of summed gradients. A ring sends
the keys and values that other ranks see, and may send more of a block: `ring_attention` says which.
A full mask shows all. A block is the keys and values of one rank. With fewer key/value heads than
ranks, Ulysses sends copies, which the functions count. tp_sp is a column-parallel layer followed by
a row-parallel one.

These are bytes of payload. If a mesh uses an algorithm of this library for a collective,
`sp_core.programs.cost` gives the bytes sent. With `shared`, ranks read keys and values in each
other's memory. Then the bytes are those that a rank reads of other ranks, and the messages are the
blocks that it reads in place. Heads are exchanged, and allgather_kv sums gradients, by messages all
the same.

Letters: B batch, S sequence, H heads, K key/value heads, D head dim, E model dim, P ranks, U ranks
along a hybrid's ulysses axis and R along its ring axis, e bytes per element.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from sp_core.arguments import plain
from sp_core.mask import Mask
from sp_core.schemes.heads import split_heads
from sp_core.schemes.reach import hops, seen_blocks, shown_keys
from sp_core.sharding import Sharding


@dataclass(frozen=True)
class Traffic:
    """Count messages and bytes that a rank sends, or blocks and bytes it reads in shared memory.

    Messages inside a collective of the MPI library are not counted.
    """

    messages: int = 0
    bytes_sent: int = 0

    def __add__(self, other: "Traffic") -> "Traffic":
        return Traffic(self.messages + other.messages, self.bytes_sent + other.bytes_sent)


@dataclass(frozen=True)
class Attention:
    """Describe an attention problem: its sizes, and which results and gradients are wanted.

    Pass a problem that the schemes accept. For others the results mean nothing.

    Args:
        sharding, kv_sharding: which rank holds which queries, and which keys and values. Pass both,
            also if they are equal.
        mask: which keys each query sees; `Mask()` for all.
        batch, num_heads, num_kv_heads, head_dim: numbers of sequences, query heads and key/value
            heads, and elements of a head.
        itemsize: bytes per element of q, k and v.
        return_lse: whether the log-sum-exp is returned too.
        needs_grad: which of q, k and v have gradients.
        lse_grad: whether a gradient flows into the log-sum-exp.
        shared: whether ranks read keys and values in memory that they share.
        sinks_grad: whether sinks have a gradient.
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
    sinks_grad: bool = False

    def __post_init__(self) -> None:
        vars(self).update({name: plain(value) for name, value in vars(self).items()})

    @property
    def wide(self) -> int:
        """Bytes per element of a summed gradient or of the log-sum-exp, 4 (float32) or more."""
        return max(self.itemsize, 4)

    def kv_block(self, tokens: int, itemsize: int) -> int:
        """Return the bytes of some tokens' keys and values at `itemsize` bytes per element."""
        return 2 * self.batch * tokens * self.num_kv_heads * self.head_dim * itemsize


Both = tuple[Traffic, Traffic]
"""The traffic of one rank: (in the forward, in the backward)."""


def allgather_kv(problem: Attention, rank: int) -> Both:
    """Return the traffic of `rank` in `allgather_kv_attention`: (forward, backward)."""
    own = problem.kv_block(problem.kv_sharding.local_len(rank), problem.itemsize)
    lengths = problem.kv_sharding.lengths
    tokens = [length for other, length in enumerate(lengths) if other != rank]
    gathered, summed = (_blocks(problem, tokens, size) for size in (problem.itemsize, problem.wide))
    if not problem.shared:
        gathered = Traffic(0, len(tokens) * own)
    return _both(problem, gathered, Traffic(0, summed.bytes_sent))


def _both(problem: Attention, keys: Traffic, sums: Traffic) -> Both:
    """Return (traffic of the forward, traffic of the backward).

    The forward moves keys and values (`keys`). The backward moves them again if any gradient is
    needed. If k or v needs a gradient, it also moves the gradients of keys and values (`sums`).
    """
    backward = keys if problem.sinks_grad or any(problem.needs_grad) else Traffic()
    return keys, backward + sums if any(problem.needs_grad[1:]) else backward


def _blocks(problem: Attention, tokens: Sequence[int], itemsize: int) -> Traffic:
    """Return the traffic of blocks of keys and values: block i has `tokens[i]` tokens.

    A block without tokens is not counted as a message.
    """
    filled = [problem.kv_block(number, itemsize) for number in tokens if number]
    return Traffic(len(filled), sum(filled))


def ring(problem: Attention, rank: int) -> Both:
    """Return the traffic of `rank` in `ring_attention`: (forward, backward).

    The block of a rank is its keys and values that other ranks see. It is passed on until it has
    reached the last rank that sees any of the keys. The gradient of the block takes one message
    more, back to the rank that owns the block. With `problem.shared` only blocks that `rank` sees
    are read.
    """
    problem.sharding.local_len(rank)  # refuses a rank that does not exist
    seen_by = problem.sharding, problem.kv_sharding, problem.mask
    way, size, rank = hops(*seen_by), problem.sharding.size, plain(rank)
    if problem.shared:
        seen = seen_blocks(*seen_by, rank)
        keys = sums = [block for block in range(size) if seen[block] and block != rank]
    else:
        passing = [(step, (rank - step) % size) for step in range(size)]
        keys = [block for step, block in passing if way[block] > step]
        sums = [block for step, block in passing if way[block] >= step]
    lengths = shown_keys(*seen_by).lengths
    sent = (
        _blocks(problem, [lengths[block] for block in blocks], itemsize)
        for blocks, itemsize in ((keys, problem.itemsize), (sums, problem.wide))
    )
    return _both(problem, *sent)


def ulysses(problem: Attention, rank: int) -> Both:
    """Return the traffic of `rank` in `ulysses_attention`: (forward, backward)."""
    return _exchange(problem, rank, problem)


def hybrid(problem: Attention, ring_rank: int, ulysses_rank: int, groups: list[list[int]]) -> Both:
    """Return the traffic of one rank in `hybrid_attention`: (forward, backward).

    Args:
        problem: the attention over all ranks.
        ring_rank, ulysses_rank: the rank's index along each axis.
        groups: for each index along the ring, the ranks of `problem` that exchange heads there.
    """
    sharding, kv_sharding = (x.group(groups) for x in (problem.sharding, problem.kv_sharding))
    sharding.local_len(ring_rank)  # refuses a rank that does not exist
    mine = groups[ring_rank]
    inside = replace(
        problem,
        sharding=Sharding(tuple(problem.sharding.segments[rank] for rank in mine)),
        kv_sharding=Sharding(tuple(problem.kv_sharding.segments[rank] for rank in mine)),
    )
    exchanged = _exchange(inside, ulysses_rank, problem)
    _, kv_heads = split_heads(problem.num_heads, problem.num_kv_heads, len(mine))
    around = replace(
        problem,
        sharding=sharding,
        kv_sharding=kv_sharding,
        num_kv_heads=len(kv_heads[ulysses_rank]),
        needs_grad=_through_exchange(problem, inside),
    )
    parts = zip(exchanged, ring(around, ring_rank), strict=True)
    forward, backward = (one + other for one, other in parts)
    return forward, backward


def tp_sp(sharding: Sharding, rank: int, batch: int, hidden: int, itemsize: int) -> Both:
    """Return the traffic of `rank` in a column- and a row-parallel layer: (forward, backward).

    The layers have no bias, and every input and weight gets a gradient.

    Args:
        sharding: which rank holds which tokens before and after the two layers.
        rank: the rank whose traffic is returned.
        batch: the number of sequences.
        hidden: the number of elements of a token.
        itemsize: bytes per element.
    """
    mine = sharding.local_len(rank)
    token = plain(batch) * plain(hidden) * plain(itemsize)
    gather, scatter = (sharding.size - 1) * mine * token, (sharding.seq_len - mine) * token
    return Traffic(0, gather + scatter), Traffic(0, gather + (gather + scatter))


def _exchange(problem: Attention, rank: int, whole: Attention) -> Both:
    """Return the traffic of the all-to-alls of Ulysses: (forward, backward).

    Args:
        problem: the attention restricted to the ranks that exchange heads with each other: all
            ranks in Ulysses, one group of them in a hybrid.
        rank: the index, among those ranks, of the rank whose traffic is returned.
        whole: the attention of all ranks of the scheme. Its shard lengths decide which of q, k and
            v get a gradient (`_through_exchange`).
    """
    shares = split_heads(problem.num_heads, problem.num_kv_heads, problem.sharding.size)
    heads, slots = ([len(share) for share in part] for part in shares)
    slots = [2 * number for number in slots]  # of k and v
    # bytes for one head of one token, in all sequences of the batch
    unit = problem.batch * problem.head_dim * problem.itemsize
    lse_unit = problem.batch * problem.wide
    own, kv_own = problem.sharding.local_len(rank), problem.kv_sharding.local_len(rank)
    others, kv_others = problem.sharding.seq_len - own, problem.kv_sharding.seq_len - kv_own
    there, home = own * (sum(heads) - heads[rank]), others * heads[rank]
    kv_there, kv_home = kv_own * (sum(slots) - slots[rank]), kv_others * slots[rank]
    forward = unit * (there + kv_there + home) + lse_unit * home * problem.return_lse
    q_back, kv_back, _ = _through_exchange(whole, problem)
    backward = unit * (q_back * home + kv_back * kv_home)
    if problem.sinks_grad or any(problem.needs_grad):
        backward += unit * there + lse_unit * there * problem.lse_grad
    return Traffic(0, forward), Traffic(0, backward)


def _through_exchange(problem: Attention, inside: Attention) -> tuple[bool, bool, bool]:
    """Return which of q, k and v have gradients after the exchange of heads among some ranks.

    If every rank has as many queries as keys, q, k and v are exchanged in one collective. Then all
    three have a gradient if any of them has.

    Args:
        problem: the attention of all ranks of the scheme. Its shard lengths are examined.
        inside: the attention restricted to the ranks that exchange heads with each other.
    """
    q, *kv = problem.needs_grad
    if inside.sharding.size == 1:
        return problem.needs_grad
    if problem.sharding.lengths == problem.kv_sharding.lengths:
        return (q or any(kv),) * 3
    return q, any(kv), any(kv)
