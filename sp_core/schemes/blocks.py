"""Where the keys and values of other ranks come from: out of messages, or out of memory that all ranks see. No scheme knows which.

Shapes: B batch, S sequence, H heads, K key/value heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor

from sp_core.collectives.maps import AllGather
from sp_core.communicator import Communicator
from sp_core.schemes import in_place
from sp_core.schemes.homeward import Homeward
from sp_core.schemes.overlap import head_groups, one_ahead
from sp_core.schemes.problem import Problem
from sp_core.schemes.travel import Block, Travel


def reads_in_place(comm: Communicator, op: str) -> bool:
    """Whether what `op` would bring is read where it lies: the ranks share memory, and no other algorithm was asked for."""
    shared = comm.window is not None and comm.window.has_rooms
    return comm.size > 1 and shared and comm.algorithms[op] in ("auto", "window")


def circulate(k: Tensor, v: Tensor, problem: Problem) -> Iterator[tuple[int, int, Block | None]]:
    """(step, block, its k and v (B, S_block, K, D)) of a ring, this rank's own block first; None where none has come this far."""
    if reads_in_place(problem.comm, "shift"):
        return in_place.circulate(k, v, problem)
    return Travel(problem, k.detach()).circulate([torch.stack((k.detach(), v.detach()))])


class Sums(Protocol):
    """Sums of the gradients of blocks."""

    def add(self, step: int, own: Tensor | None) -> None:
        """Add this rank's gradient (2, B, S_block, K, D) of the block of `step`, or nothing; all ranks do so in every step."""
        ...

    def arrived(self) -> Block:
        """dk and dv of this rank's block, (B, S_block, K, D) each."""
        ...


def homeward(problem: Problem, like: Tensor) -> Sums:
    """The sums of gradients of the blocks of a ring; `like` is any tensor (B, *, K, D) of their dtype."""
    return in_place.SharedSums(problem, like) if reads_in_place(problem.comm, "shift") else Homeward(Travel(problem, like))


def gathered(q: Tensor, k: Tensor, v: Tensor, problem: Problem) -> Iterator[tuple[slice, Block]]:
    """For each group of heads its query heads, and its keys and values of all ranks (B, K, S, D); the next group is under way."""
    comm = problem.comm
    groups = head_groups(q.shape[2], k.shape[2], comm.size)
    if comm.size == 1:
        keys, values = (problem.kv_sharding.sort_segments(x, 1).transpose(1, 2) for x in (k, v))
        yield groups[0][0], (keys, values)
    elif reads_in_place(comm, "all_gather"):
        keys, values = in_place.whole(k, v, problem)
        yield from ((heads, (keys[:, kv], values[:, kv])) for heads, kv in groups)
    else:
        gather = AllGather(comm, 0, problem.kv_sharding.lengths)
        calls = ((gather, torch.stack((k[:, :, kv], v[:, :, kv])).movedim(2, 0)) for _, kv in groups)  # (S/P, 2, B, K, D)
        for (heads, _), rows in zip(groups, one_ahead(calls), strict=True):
            keys, values = problem.kv_sharding.sort_segments(rows, 0).permute(1, 2, 3, 0, 4).unbind()
            yield heads, (keys, values)
