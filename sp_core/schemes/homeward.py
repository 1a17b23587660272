"""Sum the gradients of travelling keys and values, and return each sum to the owner of its block.

step s: rank r adds its part of block j = r - s to the sum that came with it from r-1, and sends the sum to r+1,
        or home to rank j where no rank further along adds to it
"""

from __future__ import annotations

from torch import Tensor

from sp_core.schemes.travel import Travel
from sp_core.transport import Done, Handle


class Homeward:
    """Sums of gradients that follow their blocks around the ring. Call `add` in every step, then `arrived`.

    Args:
        travel: the way of the blocks, made for the dtype of the sums.
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
