"""The messages of a ring: which block of keys and values each rank sends and receives in each step.

Block j starts at rank j. In step s it is at rank j + s, which passes it on if a later rank sees any
of it. `reach.hops` counts the steps of each block. Every rank computes all counts from the
positions, so all ranks know every message without asking.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from sp_core.schemes.blocks import Block
from sp_core.schemes.problem import Problem
from sp_core.schemes.reach import hops, seen_blocks
from sp_core.transport import Done, Handle

_DONE: Handle = Done()


def sees(problem: Problem, block: int) -> bool:
    """Return whether this rank's queries see any key of a block."""
    seen = seen_blocks(problem.sharding, problem.kv_sharding, problem.mask, problem.comm.rank)
    return seen[block]


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
        self._hops = hops(problem.sharding, problem.kv_sharding, problem.mask)
        self.last = max(self._hops)  # step, in which every block has reached its last rank
        self._like = like[:, :0].clone()  # not the tensor itself, which would stay alive

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
        return self.comm.exchange(sends, recvs, "ring")

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
        if own is not None:
            total = own if total is None else total.add_(own)
        if total is None and (step == 0 or goes_on or ends):
            total = travel.empty(block).zero_()
        if step == 0:
            self._mine = total  # stays if the block goes nowhere
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
