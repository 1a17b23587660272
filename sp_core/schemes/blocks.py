"""Keys and values of other ranks, from messages or from shared memory. A scheme does not know which.

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
from sp_core.schemes.overlap import head_groups, one_ahead
from sp_core.schemes.problem import Problem
from sp_core.schemes.travel import Block, Travel, TravellingSums


def reads_in_place(comm: Communicator, op: str) -> bool:
    """Return whether ranks read each other's tensors in shared memory instead of calling the collective `op`."""
    shared = comm.window is not None and comm.window.has_rooms
    return comm.size > 1 and shared and comm.algorithms[op] in ("auto", "window")


def circulate(k: Tensor, v: Tensor, problem: Problem) -> Iterator[tuple[int, int, Block | None]]:
    """Yield (step, block, its k and v (B, S_block, K, D)), this rank's own block first. None marks a block not received."""
    if reads_in_place(problem.comm, "shift"):
        return in_place.circulate(k, v, problem)
    return Travel(problem, k.detach()).circulate([torch.stack((k.detach(), v.detach()))])


class Sums(Protocol):
    """The gradients of all blocks, each summed over the ranks that see the block."""

    def add(self, step: int, own: Tensor | None) -> None:
        """Add this rank's gradient (2, B, S_block, K, D) of the block of `step`, or None. Every rank calls this in every step."""
        ...

    def arrived(self) -> Block:
        """Return dk and dv of this rank's block, (B, S_block, K, D) each."""
        ...


def gradient_sums(problem: Problem, like: Tensor) -> Sums:
    """Make the sums of a ring's gradients. `like` is any tensor (B, *, K, D) of their dtype."""
    return (
        in_place.SharedSums(problem, like)
        if reads_in_place(problem.comm, "shift")
        else TravellingSums(Travel(problem, like))
    )


def gathered(q: Tensor, k: Tensor, v: Tensor, problem: Problem) -> Iterator[tuple[slice, Block]]:
    """Yield each group's query heads with its k and v (B, K, S, D) of all ranks. The next group is gathered meanwhile."""
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
        calls = (
            (gather, torch.stack((k[:, :, kv], v[:, :, kv])).movedim(2, 0)) for _, kv in groups
        )  # (S/P, 2, B, K, D)
        for (heads, _), rows in zip(groups, one_ahead(calls), strict=True):
            keys, values = (
                problem.kv_sharding.sort_segments(rows, 0).permute(1, 2, 3, 0, 4).unbind()
            )
            yield heads, (keys, values)
