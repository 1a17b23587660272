"""Read keys and values of other ranks in shared memory, and sum their gradients there.

No message is sent.

    step 0     rank r writes k_r v_r once, and attends to them
    fence      all have written
    step s     rank r reads the block of rank j = r - s where it lies; in the backward it adds its
               part to the sum of dk_j dv_j, which lies there too, as soon as rank r - 1 has added
               its own in the step before

No message, and no copy but the first one; none at all where k and v live in shared memory
themselves (`Problem.resident`). Every sum has the addends of one that travels in messages, in the
same order, so the bits are the same. (Not those of AllGather-KV: its keys and values lie head by
head here, token by token in messages, and a matrix product over other strides may round
differently.)
Shapes: B batch, S sequence, K key/value heads, D head dim, P ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from sp_core.communicator import Communicator
from sp_core.schemes.problem import Block, Problem
from sp_core.transport import Done, Handle, Window


def may_share(comm: Communicator, op: str) -> bool:
    """Return whether the collective `op` may go through memory that the ranks share."""
    return comm.window is not None and comm.algorithms[op] in ("auto", "window")


def is_read(comm: Communicator, op: str) -> bool:
    """Return whether ranks read each other's tensors in place, instead of the collective `op`."""
    has_rooms = comm.window is not None and comm.window.has_rooms
    return comm.size > 1 and has_rooms and may_share(comm, op)


def circulate(k: Tensor, v: Tensor, problem: Problem) -> Iterator[tuple[int, int, Block | None]]:
    """Yield the blocks in the order of the ring, this rank's own first.

    None marks a block that it does not see.

    A block may be read until the next one is asked for.
    """
    comm = problem.comm
    blocks, written = (
        _resident(k, v, problem) if problem.resident else _written(k.detach(), v.detach(), problem)
    )
    for step in range(max(problem.hops) + 1):
        block = (comm.rank - step) % comm.size
        if step == 1:
            comm.wait(written, "ring")
        seen = problem.sees(block)
        if seen and step:
            _count(comm, "ring", blocks[block])
        yield step, block, blocks[block] if seen else None
    comm.wait(written, "ring")
    if problem.resident:
        comm.fence()  # the caller may write into k and v again when all have read them


def _written(k: Tensor, v: Tensor, problem: Problem) -> tuple[list[Block], Handle]:
    """Copy this rank's block into shared memory.

    Return the blocks of all ranks and a handle for when all are written.
    """
    comm, window = problem.comm, _window(problem)
    batch, _, heads, head_dim = k.shape
    shapes = [(2, batch, length, heads, head_dim) for length in problem.kv_sharding.lengths]
    room = window.blocks.enter([(shape, k.dtype) for shape in shapes])
    what = f"blocks of {problem.kv_sharding.fingerprint} in place"
    window.make([[lambda: torch.stack((k, v), out=room[comm.rank])]], what, comm.poll)
    return [(both[0], both[1]) for both in room], _fence(problem)


def _resident(k: Tensor, v: Tensor, problem: Problem) -> tuple[list[Block], Handle]:
    """Return the blocks of all ranks where their owners hold them.

    The handle is complete when all ranks have arrived.
    """
    batch, _, heads, head_dim = k.shape
    window, lengths = _window(problem), problem.kv_sharding.lengths

    def of_all(x: Tensor) -> list[Tensor]:
        places = zip(window.peers(x.detach().view(-1)), lengths, strict=True)
        return [
            place[: batch * length * heads * head_dim].view(batch, length, heads, head_dim)
            for place, length in places
        ]

    return list(zip(of_all(k), of_all(v), strict=True)), _fence(problem)


def whole(k: Tensor, v: Tensor, problem: Problem) -> Block:
    """Return k and v of all ranks, (B, K, S, D) each, in the order of `sorted_positions`.

    All ranks write and read one tensor.

    They may be read until the next call.
    """
    comm, window, sharding = problem.comm, _window(problem), problem.kv_sharding
    batch, _, heads, head_dim = k.shape
    (room,) = window.blocks.enter([((2, batch, heads, sharding.seq_len, head_dim), k.dtype)])
    ranges = sharding.sorted_ranges(comm.rank)
    writes = [
        partial(into[:, :, place.start : place.stop].copy_, part)
        for into, x in zip(room, (k, v), strict=True)
        for place, part in zip(
            ranges, x.detach().transpose(1, 2).split(list(map(len, ranges)), 2), strict=True
        )
    ]
    what = f"keys and values of {sharding.fingerprint} in place"
    comm.wait(comm.track(window.start([writes, []], what)), "all_gather")
    others = [
        length for rank, length in enumerate(sharding.lengths) if length and rank != comm.rank
    ]
    comm.counters["all_gather"].add(
        messages=len(others), bytes_sent=sum(others) * room[..., :1, :].nbytes
    )
    return room[0], room[1]


class SharedSums:
    """Sums of gradients in shared memory.

    Call `add` in every step of the ring, then `arrived`, as for `TravellingSums`.

    Args:
        problem: what is computed.
        like: any tensor (B, *, K, D) of the dtype of the sums.
    """

    def __init__(self, problem: Problem, like: Tensor) -> None:
        self._problem, self._like = problem, like[:, :0]
        self._sums: list[Tensor] = []
        self._adding: Handle = Done()

    def add(self, step: int, own: Tensor | None) -> None:
        """Add this rank's gradient of the block of `step` to its sum.

        The previous rank has added its own before.
        """
        comm = self._problem.comm
        if step == 0:
            self._begin(own)
            return
        comm.wait(self._adding, "ring")
        work = []
        if own is not None:
            total = self._sums[(comm.rank - step) % comm.size]
            _count(comm, "ring", (total[0], total[1]))
            work.append(partial(total.add_, own))
        self._adding = comm.track(_window(self._problem).start([[], work], "gradients in place"))

    def _begin(self, own: Tensor | None) -> None:
        """Write the first term of this rank's sum.

        No lock is needed: since the fence that ended the last use of this memory, no other rank
        has touched it.
        """
        batch, _, heads, head_dim = self._like.shape
        shapes = [
            (2, batch, length, heads, head_dim) for length in self._problem.kv_sharding.lengths
        ]
        self._sums = _window(self._problem).sums.enter(
            [(shape, self._like.dtype) for shape in shapes]
        )
        mine = self._sums[self._problem.comm.rank]
        mine.zero_() if own is None else mine.copy_(own)

    def arrived(self) -> Block:
        """Return dk and dv of this rank's block, (B, S_block, K, D) each."""
        comm = self._problem.comm
        comm.wait(_fence(self._problem), "ring")
        dk, dv = self._sums[comm.rank].clone().unbind()
        return dk, dv


def _window(problem: Problem) -> Window:
    assert problem.comm.window is not None
    return problem.comm.window


def _fence(problem: Problem) -> Handle:
    """Return a handle that completes when every rank has reached this point."""
    return problem.comm.track(_window(problem).start([[], []], "fence of blocks in place"))


def _count(comm: Communicator, name: str, block: Block) -> None:
    """Count a block that is read in another rank's memory."""
    comm.counters[name].add(messages=1, bytes_sent=sum(x.nbytes for x in block))
