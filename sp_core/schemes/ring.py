"""Ring attention: pass keys and values from rank to rank, and attend to those that have arrived.

    step s: rank r holds the keys of rank j = r - s      send k_j v_j --> r+1
            out, lse = merge(out, lse, attend(q_r, k_j, v_j))

Block j is the keys and values of rank j; only those that other ranks see are sent. Ranks are
counted modulo P, so rank P-1 sends to rank 0. While a rank computes on one block, some heads at a
time, it receives the block of the next step. A block is passed on until it has reached every rank
whose queries see any of its keys. In the backward all blocks are passed on again, each followed by
the sum of its gradients. The last rank that adds to a sum sends the sum to the owner of the block.
Ranks that share memory send no messages: in step s they read block j in its owner's memory
(`in_place`).
Shapes: B batch, S sequence, H heads, K key/value heads, D head dim, P ranks.
"""

from collections.abc import Iterator, Sequence
from itertools import starmap
from typing import Unpack

import torch
from torch import Tensor

from sp_core.attention import Terms, accumulation_dtype
from sp_core.communicator import Communicator
from sp_core.mask import Mask, Positions, position_tensor
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
    run,
)
from sp_core.segments import positions_of
from sp_core.sharding import Sharding
from sp_core.transport import Done, Handle


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
        Another agreement begins the backward unless the communicator has `check="off"`. In the
        forward a rank sends P-1 messages of `2*B*(S/P)*K*D` elements. A block of keys and values
        is passed on up to the last rank that sees any of its keys. So a sliding window or documents
        make fewer messages. They make shorter ones, too. Of each range of positions in a document,
        only the keys from the first to the last that another rank sees are sent. But blocks are
        sent whole if a shard of `sharding` or `kv_sharding` has positions with a constant step
        above 1, as in a striped one. They are also sent whole if one range of positions holds all
        queries.
        In the backward a rank sends the same messages, and up to P messages of as many elements in
        float32 or wider. A single rank sends nothing.

        In shared memory (`Mesh(transport="window")`) a rank sends no message. It writes its k and
        v once, or never if both are tensors of `shared_empty` on `comm` and no saved-tensor hooks
        are active, and reads those of P-1 ranks. All ranks wait for each other once, and once more
        for tensors of `shared_empty`.
        In the backward they do the same. There a rank also adds its parts of the gradients of k
        and v to the sums of P-1 ranks, in float32 or wider. It waits for all ranks in each step.
        One more agreement comes before the ranks make more shared memory, as the first calls do.
        Over the transports "ipc" and "pinned" a rank sends the messages named above.

    Raises:
        TypeError, ValueError, ShapeError, DtypeError, DeviceError, RankError: wrong arguments; on
            every rank, before the first message. Only a wrong `comm` is an error of one rank.
        CollectiveMismatch: the ranks' arguments differ.
        RuntimeError: autograd is asked for a second derivative; only the first is implemented.

    Source: Liu et al. 2023, Ring Attention with Blockwise Transformers, arXiv:2310.01889, section
    3.
    """
    problem = check_call(
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
    out, lse = run(q, k, v, problem, SCHEME)
    return (out, lse) if return_lse else out


def ring_blocks(
    k: Tensor, v: Tensor, problem: Problem
) -> Iterator[tuple[int, int, KeyValue | None]]:
    """Yield the keys and values (the block) of each rank as the ring brings them, own block first.

    Yields:
        (step, rank that owns the block, (k, v) of (B, S_block, K, D) each). None stands for (k, v)
        if this rank does not receive the block: neither it nor a rank after it needs the block.
        From step 1 on, k and v have only the keys that ranks other than the owner see
        (`Problem.shown`).
    """
    if in_place.reads_in_place(problem.comm, "shift"):
        return in_place.blocks_in_place(k, v, problem)
    return Travel(problem, k.detach()).blocks_by_message(k.detach(), v.detach())


def _visits(k: Tensor, v: Tensor, problem: Problem, groups: Sequence[Group]) -> Iterator[Visit]:
    """Yield a `Visit` for each step of the ring: one rank's keys and values, and all heads.

    Keys and values are freed when the next visit begins. With a sliding window or documents all
    heads form a single group: the mask then cuts the work into small pieces, and communication
    makes progress between them.
    """
    if problem.mask.window is not None or problem.mask.documents is not None:
        groups = [(slice(None), slice(None))]

    shown = problem.shown

    def visit(step: int, owner: int, held: KeyValue | None) -> Visit:
        if not problem.sees(owner):
            held = None
        positions: Positions = positions_of(problem.kv_sharding.segments[owner])
        if step and held is not None:
            at = shown.of(owner)
            positions = positions[at] if isinstance(at, slice) else position_tensor(positions)[at]
        return Visit(step, positions, groups, held)

    return starmap(visit, ring_blocks(k, v, problem))


def _gradients(
    upstream: Upstream,
    k: Tensor,
    v: Tensor,
    problem: Problem,
    groups: Sequence[Group],
    with_kv: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Pass the blocks around again, and sum the gradients of each on the way to its owner.

    Arguments and results are those of `Scheme.gradients`. Without `with_kv` no dk and dv are sent.
    """
    _, q, *_ = upstream
    dq: Tensor | None = None
    like = k[:, :0].to(accumulation_dtype(q.dtype))
    kind = in_place.SharedSums if in_place.reads_in_place(problem.comm, "shift") else TravellingSums
    sums = kind(problem, like)
    for step, positions, visit_groups, held in _visits(k, v, problem, groups):
        own, keys = None, slice(None)
        if step and dq is None:
            dq = torch.zeros_like(q, dtype=like.dtype)
        if held is not None:
            part = queries, keys = problem.part(positions) if step else (slice(None), keys)
            dkv: list[Tensor | None] = [None, None]
            for heads, kv in visit_groups:
                group_dq, *grads = block_gradients(
                    upstream, held, positions, (heads, kv), problem, part
                )
                if step == 0:
                    dq = _with_heads(dq, heads, group_dq, q.shape[1])
                elif dq is not None:
                    dq[:, heads, queries] += group_dq
                dkv = [_with_heads(x, kv, y, k.shape[2]) for x, y in zip(dkv, grads, strict=True)]
                problem.comm.poll()
            dk, dv = (x.transpose(1, 2).contiguous() for x in dkv if x is not None)
            own = dk, dv
            del group_dq, grads, dkv, dk, dv
        if with_kv:
            sums.add(step, own, keys)
        del held, own
    dq = torch.zeros_like(q, dtype=like.dtype) if dq is None else dq
    return dq, *(sums.arrived() if with_kv else (k, v))


def _with_heads(whole: Tensor | None, heads: slice, part: Tensor, count: int) -> Tensor:
    """Write `part` (B, some heads, S, D) over these heads of `whole` (B, count, S, D); return it.

    If `whole` is None, make it. A part with all heads is returned uncopied.
    """
    batch, some, tokens, head_dim = part.shape
    if some == count:
        return part
    if whole is None:
        whole = part.new_empty((batch, tokens, count, head_dim)).transpose(1, 2)
    whole[:, heads] = part
    return whole


class Travel:
    """Send and receive the blocks of a ring on this rank.

    Block j is a tensor (2, B, S_j, K, D): of keys and values, or of their gradients. S_j counts the
    keys of rank j that other ranks see. In step s block j is on rank j + s, unless it has stopped
    earlier (`hops`).

    Args:
        problem: the attention call; its communicator carries the messages.
        like: any tensor (B, *, K, D) of the dtype and on the device of the blocks.
    """

    def __init__(self, problem: Problem, like: Tensor) -> None:
        self.comm = comm = problem.comm
        self.right, self.left = ((comm.rank + way) % comm.size for way in (1, -1))
        shown = problem.shown
        self.shown, self._lengths = shown.of(comm.rank, like.device), shown.lengths
        self._hops = problem.hops
        self.last = max(self._hops)  # the step in which every block has reached its last rank
        self._like = like[:, :0].clone()  # not the tensor itself, which would stay alive
        token = like.shape[0] * like.shape[2:].numel() * like.itemsize
        self._longest = 2 * max(self._lengths) * token if in_place.may_share(comm, "shift") else 0

    def owner(self, step: int) -> int:
        """Return the rank whose keys and values the ring brings to this rank in `step`."""
        return (self.comm.rank - step) % self.comm.size

    def goes_on(self, owner: int, step: int) -> bool:
        """Return whether the block of rank `owner` is passed on after `step`."""
        return self._hops[owner] > step

    def empty(self, owner: int) -> Tensor:
        """Return an uninitialized tensor (2, B, S_block, K, D) for the block of rank `owner`."""
        batch, _, *head = self._like.shape
        return self._like.new_empty((2, batch, self._lengths[owner], *head))

    def arriving(self, step: int) -> Tensor | None:
        """Return an uninitialized tensor for the block that arrives in `step`; None without one."""
        coming = self.owner(step + 1)
        return self.empty(coming) if self.goes_on(coming, step) else None

    def exchange(self, *messages: list[tuple[int, Tensor | None]]) -> Handle:
        """Start the messages of a step. Return a handle that completes with all of them.

        Every rank calls this in every step, also without messages.

        Args:
            messages: two lists, the sends and the receives. Each holds (other rank, tensor),
                received ones contiguous; if the tensor is None, there is no message.
        """
        sends, recvs = (
            [(peer, x.reshape(-1)) for peer, x in some if x is not None] for some in messages
        )
        return self.comm.exchange(sends, recvs, "ring", longest=self._longest)

    def blocks_by_message(self, k: Tensor, v: Tensor) -> Iterator[tuple[int, int, KeyValue | None]]:
        """Yield the block (a rank's keys and values) of each step, while the next one is received.

        This rank's own block comes first. Every rank iterates to the end.

        Args:
            k, v: this rank's own keys and values, (B, S, K, D). The keys that other ranks see are
                copied; if k or v is not contiguous, all of it is copied too.

        Yields:
            (step, rank that owns the block, (k, v)). From step 1 on, k and v have only the keys
            that other ranks see. None stands for (k, v) if this rank does not receive the block.
        """
        present: Tensor | None = torch.stack((k[:, self.shown], v[:, self.shown]))
        # contiguous on every rank, so that the kernels round alike
        held: KeyValue | None = (k.contiguous(), v.contiguous())
        for step in range(self.last + 1):
            arriving, owner = self.arriving(step), self.owner(step)
            handle: Handle = Done()
            if step < self.last:
                going = [(self.right, present)] if self.goes_on(owner, step) else []
                handle = self.exchange(going, [(self.left, arriving)])
                del going
            yield step, owner, held
            self.comm.wait(handle, "ring")
            held = present = arriving


class TravellingSums(Travel):
    """Sum the gradients of each block's keys and values in messages around the ring.

    In step s rank r adds its gradient of block j = r - s (mod P) to the sum that it received from
    rank r - 1. It sends the sum to rank r + 1, or to the owner, rank j, if no query of a later rank
    sees the block. Every rank calls `add` once in every step, and `arrived` once after the last.

    Args:
        problem, like: as in `Travel`; `like` has the dtype of the sums.
    """

    def __init__(self, problem: Problem, like: Tensor) -> None:
        super().__init__(problem, like)
        self._length = problem.kv_sharding.local_len(self.comm.rank)
        self._handle: Handle = Done()
        self._coming: Tensor | None = None
        self._mine: KeyValue | None = None
        self._sum: Tensor | None = None

    def add(self, step: int, own: KeyValue | None, keys: slice) -> None:
        """Add this rank's gradient of one block to the block's sum, and start to send the sum.

        In step s the block is the keys and values of rank r - s, on rank r. First wait for the
        messages of the previous step.

        Args:
            step: the step of the ring.
            own: gradients of k and v, (B, S_keys, K, D) each; they may be changed. None if no query
                of this rank sees the block.
            keys: the indices of these S_keys keys in the block; in step 0 all keys.
        """
        self.comm.wait(self._handle, "ring")
        owner, total, rank = self.owner(step), self._coming, self.comm.rank
        goes_on = self.goes_on(owner, step)
        if step == 0:
            own = in_place.zeros(self._like, self._length) if own is None else own
            total = torch.stack([x[:, self.shown] for x in own]) if goes_on else None
            self._mine = None if goes_on and self._lengths[rank] == self._length else own
        elif own is not None:
            assert total is not None
            for half, addend in zip(total, own, strict=True):
                half[:, keys].add_(addend)
        if self.last == 0:
            return
        self._coming = self.arriving(step)
        recvs = [(self.left, self._coming)]
        if self._hops[rank] == step > 0:  # this rank's block has reached the last rank
            self._sum = self.empty(rank)
            recvs.append(((rank + step) % self.comm.size, self._sum))
        self._handle = self.exchange([(self.right if goes_on else owner, total)], recvs)

    def arrived(self) -> KeyValue:
        """Wait for the last messages. Return the summed dk and dv of this rank's block.

        Each is (B, S_block, K, D).
        """
        self.comm.wait(self._handle, "ring")
        if self._mine is None:  # all gradients were sent
            assert self._sum is not None
            return self._sum
        if self._sum is not None:
            for x, part in zip(self._mine, self._sum, strict=True):
                x[:, self.shown] = part
        return self._mine


SCHEME = Scheme("ring_attention", _visits, _gradients)
