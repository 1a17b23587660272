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

from sp_core.attention import Terms, accumulation_dtype
from sp_core.communicator import Communicator
from sp_core.mask import Mask
from sp_core.schemes import in_place
from sp_core.schemes.heads import Group
from sp_core.schemes.problem import (
    Block,
    Problem,
    Scheme,
    Upstream,
    Visit,
    agree,
    block_gradients,
    run,
)
from sp_core.sharding import Sharding
from sp_core.transport import Done, Handle

_DONE: Handle = Done()


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
        the backward one for each step. A window on a device (`ipc`, `pinned`) carries the messages.

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
        return Visit(step, positions, groups, held if problem.sees(block) else None)

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
    _, q, *_ = upstream
    dq = torch.zeros_like(q, dtype=accumulation_dtype(q.dtype))
    like = k[:, :0].to(dq.dtype)
    in_memory = in_place.is_read(problem.comm, "shift")
    sums = in_place.SharedSums(problem, like) if in_memory else TravellingSums(problem, like)
    for step, positions, visited, held in _visits(k, v, problem, groups):
        own = None
        if held is not None:
            i, j = part = problem.part(positions)
            own = k.new_zeros((2, *held[0].shape), dtype=dq.dtype)
            for h, kv in visited:
                mine, dk, dv = block_gradients(upstream, held, positions, (h, kv), problem, part)
                dq[:, h, i] += mine
                own[0, :, j, kv], own[1, :, j, kv] = dk.transpose(1, 2), dv.transpose(1, 2)
                problem.comm.poll()
        if with_kv:
            sums.add(step, own)
        del held, own
    return dq, *(sums.arrived() if with_kv else (k, v))


class Travel:
    """One rank's view of the ring: the messages that it sends and receives in each step.

    Args:
        problem: what is computed; its communicator carries the messages.
        like: any tensor (B, *, K, D) of the dtype and on the device of the blocks.
    """

    def __init__(self, problem: Problem, like: Tensor) -> None:
        self.comm = comm = problem.comm
        self.right, self.left = ((comm.rank + way) % comm.size for way in (1, -1))
        self._lengths = problem.kv_sharding.lengths
        self._hops = problem.hops
        self.last = max(self._hops)  # step, in which every block has reached its last rank
        self._like = like[:, :0].clone()  # not the tensor itself, which would stay alive
        token = like.shape[0] * like.shape[2:].numel() * like.itemsize
        self._longest = 2 * max(self._lengths) * token if in_place.may_share(comm, "shift") else 0

    def block(self, step: int) -> int:
        """Return the number of the block that is at this rank in `step`, if it comes this far."""
        return (self.comm.rank - step) % self.comm.size

    def goes_on(self, block: int, step: int) -> bool:
        """Return whether `block` is passed on after `step`."""
        return self._hops[block] > step

    def ends(self, block: int, step: int) -> bool:
        """Return whether `step` is the last step of `block`, on another rank than its owner."""
        return self._hops[block] == step > 0

    def empty(self, block: int) -> Tensor:
        """Make an empty tensor (2, B, S_block, K, D) for the keys and values of a block."""
        batch, _, heads, head_dim = self._like.shape
        return self._like.new_empty((2, batch, self._lengths[block], heads, head_dim))

    def arriving(self, step: int) -> Tensor | None:
        """Make an empty tensor for the block that this rank receives in `step`, if any."""
        coming = self.block(step + 1)
        return self.empty(coming) if self.goes_on(coming, step) else None

    def exchange(self, *messages: list[tuple[int, Tensor]]) -> Handle:
        """Start the messages that are sent, and those that are received, in a step."""
        sends, recvs = ([(peer, x.view(-1)) for peer, x in some] for some in messages)
        return self.comm.exchange(sends, recvs, "ring", longest=self._longest)

    def circulate(self, held: list[Tensor | None]) -> Iterator[tuple[int, int, Block | None]]:
        """Yield (step, block, keys and values) while the next block is received.

        None marks a block that was not received.

        Args:
            held: this rank's own block alone; it is taken out of the list, so that nobody holds it
                longer than needed.
        """
        present = held.pop()
        for step in range(self.last + 1):
            arriving, block = self.arriving(step), self.block(step)
            going = present if self.goes_on(block, step) else None
            sends = [] if going is None else [(self.right, going)]
            recvs = [] if arriving is None else [(self.left, arriving)]
            handle = self.exchange(sends, recvs) if step < self.last else _DONE
            del going, sends
            yield step, block, None if present is None else (present[0], present[1])
            self.comm.wait(handle, "ring")
            present = arriving


class TravellingSums:
    """Sums of the gradients of keys and values, which follow their blocks.

    In step s rank r adds its gradient of block j = r - s to the sum that came from rank r - 1. It
    sends the sum to rank r + 1, or to the owner, rank j, if no later rank adds to it.

    Args:
        problem, like: as of `Travel`, for tensors of the dtype of the sums.
    """

    def __init__(self, problem: Problem, like: Tensor) -> None:
        self._travel = Travel(problem, like)
        self._handle: Handle = _DONE
        self._coming: Tensor | None = None
        self._mine: Tensor | None = None

    def add(self, step: int, own: Tensor | None) -> None:
        """Add this rank's gradient of the block of `step`, and send the sum on, or to its owner."""
        travel, rank = self._travel, self._travel.comm.rank
        travel.comm.wait(self._handle, "ring")
        block, total = travel.block(step), self._coming
        goes_on, ends = travel.goes_on(block, step), travel.ends(block, step)
        if step == 0:  # it stays here if the block goes nowhere
            total = self._mine = travel.empty(block).zero_() if own is None else own
        elif own is not None:
            assert total is not None
            total.add_(own)
        if travel.last == 0:
            return
        going = total if goes_on or ends else None
        sends = [] if going is None else [(travel.right if goes_on else block, going)]
        self._coming = travel.arriving(step)
        recvs = [] if self._coming is None else [(travel.left, self._coming)]
        if travel.ends(rank, step):
            self._mine = travel.empty(rank)
            recvs.append(((rank + step) % travel.comm.size, self._mine))
        self._handle = travel.exchange(sends, recvs)

    def arrived(self) -> Block:
        """Return dk and dv of this rank's block, (B, S_block, K, D) each."""
        self._travel.comm.wait(self._handle, "ring")
        assert self._mine is not None
        dk, dv = self._mine.unbind()
        return dk, dv


_SCHEME = Scheme("ring_attention", _visits, _gradients)
