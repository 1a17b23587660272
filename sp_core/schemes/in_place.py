"""Exchange keys, values and their gradients through shared memory, without messages.

The ring and AllGather-KV use this module if `is_read` says so. The ring then works like this:

    step 0     rank r copies k_r and v_r to shared memory, and attends to them
    fence      all ranks have written
    step s     rank r reads the block (keys and values) of rank j = r - s in place; in the backward
               it adds its gradient to the sum of dk_j and dv_j, also in shared memory, after rank
               r - 1 has added its gradient in step s - 1

If k and v are in shared memory already (`Problem.resident`), step 0 copies nothing. Every sum has
the same addends in the same order as a ring with messages, so the results are equal bit for bit.
Results of AllGather-KV may differ in rounding. Here its keys and values are contiguous by head, in
messages by token, and matrix products of other strides may round differently.
Shapes: B batch, S sequence, K key/value heads, D head dim, P ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from sp_core.communicator import Communicator
from sp_core.schemes.problem import Block, Problem
from sp_core.transport import Done, Handle, Window, wait


def may_share(comm: Communicator, op: str) -> bool:
    """Return whether the ranks share memory, and the collective `op` is allowed to use it.

    Args:
        comm: the ranks.
        op: name of the collective, such as "shift"; allowed if its algorithm on `comm` is "auto" or
            "window".
    """
    return comm.window is not None and comm.algorithms[op] in ("auto", "window")


def is_read(comm: Communicator, op: str) -> bool:
    """Return whether ranks read each other's tensors in shared memory, in place of a collective.

    False for a single rank, and for memory shared between devices, where only copies are ordered.

    Args:
        comm: the ranks.
        op: name of the collective that would send the tensors otherwise, such as "shift".
    """
    has_rooms = comm.window is not None and comm.window.has_rooms
    return comm.size > 1 and has_rooms and may_share(comm, op)


def circulate(k: Tensor, v: Tensor, problem: Problem) -> Iterator[tuple[int, int, Block]]:
    """Yield each rank's keys and values in the order of the ring, own first, without a message.

    Such a block is valid until the next one is asked for. All ranks iterate to the end: they wait
    for each other before the second block. If k and v are read where the caller put them
    (`Problem.resident`), they wait once more after the last.

    Yields:
        (step, rank that owns the block, (k, v) of (B, S_block, K, D) each).
    """
    comm = problem.comm
    blocks, written = (
        _resident(k, v, problem) if problem.resident else _written(k.detach(), v.detach(), problem)
    )
    yield 0, comm.rank, blocks[comm.rank]
    comm.wait(written, "ring")
    for step in range(1, max(problem.hops) + 1):
        block = (comm.rank - step) % comm.size
        if problem.sees(block):
            _count(comm, "ring", blocks[block])
        yield step, block, blocks[block]
    if problem.resident:
        comm.fence()  # then all ranks have read k and v, and the caller may change them


def _written(k: Tensor, v: Tensor, problem: Problem) -> tuple[list[Block], Handle]:
    """Copy this rank's k and v into shared memory.

    Returns:
        The blocks of all ranks by rank, views of shared memory; a handle that completes when every
        rank has written its block.
    """
    comm, window = problem.comm, _window(problem)
    batch, _, heads, head_dim = k.shape
    shapes = [(2, batch, length, heads, head_dim) for length in problem.kv_sharding.lengths]
    room = window.blocks.enter([(shape, k.dtype) for shape in shapes])
    what = f"blocks of {problem.kv_sharding.fingerprint} in place"
    wait(window.start([[lambda: torch.stack((k, v), out=room[comm.rank])]], what), comm.poll)
    return [(both[0], both[1]) for both in room], _fence(problem)


def _resident(k: Tensor, v: Tensor, problem: Problem) -> tuple[list[Block], Handle]:
    """Return the blocks of all ranks as views of the tensors that their owners passed.

    Returns:
        The blocks by rank; a handle that completes when every rank has reached this point.
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
    """Gather k and v of all ranks in one shared tensor, and wait until all have written it.

    Every rank calls this, and writes only its own tokens.

    Returns:
        k and v, (B, K, S, D) each, in the order of `sorted_positions`: views of shared memory that
        are valid until the next call.
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
    """Sum the gradients of each block's keys and values in shared memory.

    Call `add` once in every step of the ring, then `arrived`, on every rank. `ring.TravellingSums`
    does the same with messages.

    Args:
        problem: the attention call.
        like: any tensor (B, *, K, D) of the dtype of the sums.
    """

    def __init__(self, problem: Problem, like: Tensor) -> None:
        self._problem, self._like = problem, like[:, :0]
        self._sums: list[Tensor] = []
        self._adding: Handle = Done()

    def add(self, step: int, own: Tensor | None, keys: slice) -> None:
        """Start to add this rank's gradient of one block to the sum of the block's gradients.

        In step s the block is the keys and values of rank r - s, on rank r.

        First wait for this rank's addition of the previous step. The new addition begins when all
        ranks have called `add` for this step, so every addition of the previous step is done.

        Args:
            step: the step of the ring. Step 0 starts the sum of this rank's own block.
            own: gradients of k and v, (2, B, S_keys, K, D); None if no query of this rank sees
                the block.
            keys: the indices of these S_keys keys in the block; in step 0 all keys.
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
            work.append(partial(total[:, :, keys].add_, own))
        self._adding = comm.track(_window(self._problem).start([[], work], "gradients in place"))

    def _begin(self, own: Tensor | None) -> None:
        """Write the first addend, `own` or zeros, of the sum of this rank's own block.

        No lock is needed: no other rank has used this memory since all ranks waited for each other
        in `arrived`, in the previous backward.
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
        """Wait until all ranks have added their gradients. Return dk and dv of this rank's tokens.

        Each is a copy, (B, S_block, K, D).
        """
        comm = self._problem.comm
        for handle in (self._adding, _fence(self._problem)):
            comm.wait(handle, "ring")
        dk, dv = self._sums[comm.rank].clone().unbind()
        return dk, dv


def _window(problem: Problem) -> Window:
    """Return the shared memory of the ranks; `is_read` has checked that there is one."""
    assert problem.comm.window is not None
    return problem.comm.window


def _fence(problem: Problem) -> Handle:
    """Return a handle that completes when every rank has reached this point."""
    return problem.comm.track(_window(problem).start([[], []], "fence of blocks in place"))


def _count(comm: Communicator, name: str, block: Block) -> None:
    """Count a block read from another rank's memory as one message in the counter `name`."""
    comm.counters[name].add(messages=1, bytes_sent=sum(x.nbytes for x in block))
