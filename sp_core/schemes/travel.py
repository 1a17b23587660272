"""The messages of a ring: which block of keys and values each rank sends and receives in each step.

Block j starts at rank j. In step s it is at rank j + s, which passes it on if a later rank sees any
of it. `hops` counts the steps of each block. Every rank computes all counts from the positions, so
all ranks know every message without asking.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

from torch import Tensor

from sp_core.mask import Mask, plan_blocks
from sp_core.schemes.problem import Problem
from sp_core.sharding import Sharding
from sp_core.transport import Done, Handle

Block = tuple[Tensor, Tensor]
"""Keys and values of one rank, or their gradients."""


@lru_cache(maxsize=64)
def visibility(
    sharding: Sharding, kv_sharding: Sharding, mask: Mask
) -> tuple[tuple[bool, ...], ...]:
    """Return, for each rank and each block, whether the rank's queries see any key of the block."""
    queries = [sharding.positions(rank) for rank in range(sharding.size)]
    keys = [kv_sharding.positions(rank) for rank in range(sharding.size)]
    return tuple(tuple(bool(plan_blocks(q, k, mask)) for k in keys) for q in queries)


def sees(problem: Problem, block: int) -> bool:
    """Return whether this rank's queries see any key of a block."""
    return visibility(problem.sharding, problem.kv_sharding, problem.mask)[problem.comm.rank][block]


@lru_cache(maxsize=64)
def hops(sharding: Sharding, kv_sharding: Sharding, mask: Mask) -> tuple[int, ...]:
    """Return how often each block is passed on: from its owner to the last rank that sees any of its keys."""
    seen, size = visibility(sharding, kv_sharding, mask), sharding.size
    return tuple(
        max((s for s in range(size) if seen[(block + s) % size][block]), default=0)
        for block in range(size)
    )


class Travel:
    """One rank's view of the ring: the messages that it sends and receives in each step.

    Args:
        problem: what is computed; its communicator carries the messages.
        like: any tensor (B, *, K, D) of the dtype and on the device of the blocks.
    """

    def __init__(self, problem: Problem, like: Tensor) -> None:
        self.comm = problem.comm
        self._lengths = problem.kv_sharding.lengths
        self._hops = hops(problem.sharding, problem.kv_sharding, problem.mask)
        self._like = like[:, :0].clone()  # not the tensor itself, which would stay alive

    @property
    def steps(self) -> int:
        """The number of steps until every block has reached its last rank."""
        return max(self._hops) + 1

    def block(self, step: int) -> int:
        """Return the number of the block that is at this rank in `step`, if it comes this far."""
        return (self.comm.rank - step) % self.comm.size

    def goes_on(self, block: int, step: int) -> bool:
        """Return whether `block` is passed on after `step`."""
        return self._hops[block] > step and self._lengths[block] > 0

    def ends(self, block: int, step: int) -> bool:
        """Return whether `step` is the last step of `block`, on another rank than its owner."""
        return self._hops[block] == step > 0 and self._lengths[block] > 0

    def empty(self, block: int) -> Tensor:
        """Make an empty tensor (2, B, S_block, K, D) for the keys and values of a block."""
        batch, _, heads, head_dim = self._like.shape
        return self._like.new_empty((2, batch, self._lengths[block], heads, head_dim))

    def circulate(self, held: list[Tensor | None]) -> Iterator[tuple[int, int, Block | None]]:
        """Yield (step, block, keys and values) while the next block is received. None marks a block not received.

        Args:
            held: this rank's own block alone; it is taken out of the list, so that nobody holds it
                longer than needed.
        """
        present = held.pop()
        for step in range(self.steps):
            handle, arriving = self._pass_on(step, present)
            yield step, self.block(step), None if present is None else (present[0], present[1])
            self.comm.wait(handle, "ring")
            present = arriving

    def _pass_on(self, step: int, held: Tensor | None) -> tuple[Handle, Tensor | None]:
        if step == self.steps - 1:
            return Done(), None
        coming = self.block(step + 1)
        arriving = self.empty(coming) if self.goes_on(coming, step) else None
        sends = (
            [(self.right, held.view(-1))]
            if held is not None and self.goes_on(self.block(step), step)
            else []
        )
        recvs = [(self.left, arriving.view(-1))] if arriving is not None else []
        return self.comm.exchange(sends, recvs, "ring"), arriving

    @property
    def right(self) -> int:
        """The rank that blocks are sent to."""
        return (self.comm.rank + 1) % self.comm.size

    @property
    def left(self) -> int:
        """The rank that blocks come from."""
        return (self.comm.rank - 1) % self.comm.size

    def home(self, step: int) -> int:
        """Return the rank that holds this rank's block in `step`."""
        return (self.comm.rank + step) % self.comm.size


class TravellingSums:
    """Sums of the gradients of keys and values, which follow their blocks. Call `add` in every step of the ring, then `arrived`.

    In step s rank r adds its gradient of block j = r - s to the sum that came from rank r - 1. It
    sends the sum to rank r + 1, or to the owner, rank j, if no later rank adds to it.

    Args:
        travel: the messages of the ring, for tensors of the dtype of the sums.
    """

    def __init__(self, travel: Travel) -> None:
        self._travel = travel
        self._handle: Handle = Done()
        self._coming: Tensor | None = None
        self._mine: Tensor | None = None

    def add(self, step: int, own: Tensor | None) -> None:
        """Add this rank's gradient of the block of `step` to its sum. Send the sum to the next rank or to its owner."""
        travel = self._travel
        travel.comm.wait(self._handle, "ring")
        block = travel.block(step)
        total = self._coming
        if own is not None:
            total = own if total is None else total.add_(own)
        if total is None and (step == 0 or travel.goes_on(block, step) or travel.ends(block, step)):
            total = travel.empty(block).zero_()
        if step == 0:
            self._mine = total  # stays if the block goes nowhere
        self._send(step, block, total)

    def _send(self, step: int, block: int, total: Tensor | None) -> None:
        travel, rank = self._travel, self._travel.comm.rank
        if travel.steps == 1:
            return
        sends, recvs = [], []
        if total is not None and travel.goes_on(block, step):
            sends.append((travel.right, total.view(-1)))
        elif total is not None and travel.ends(block, step):
            sends.append((block, total.view(-1)))
        coming = travel.block(step + 1)
        self._coming = travel.empty(coming) if travel.goes_on(coming, step) else None
        if self._coming is not None:
            recvs.append((travel.left, self._coming.view(-1)))
        if travel.ends(rank, step):
            self._mine = travel.empty(rank)
            recvs.append((travel.home(step), self._mine.view(-1)))
        self._handle = travel.comm.exchange(sends, recvs, "ring")

    def arrived(self) -> tuple[Tensor, Tensor]:
        """Return dk and dv of this rank's block, (B, S_block, K, D) each."""
        self._travel.comm.wait(self._handle, "ring")
        assert self._mine is not None
        dk, dv = self._mine.unbind()
        return dk, dv
