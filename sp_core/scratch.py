"""Scratch memory that calls reuse.

Allocating memory in every call costs more than the copies into it.

Source: fresh pages are written at about a tenth of the speed of used ones, because the kernel
clears each of them first.
"""

from __future__ import annotations

import torch
from torch import Tensor

KEPT = 4
"""The number of blocks kept for later calls. So many collectives can run at once without new
memory."""


class Scratch:
    """Blocks of memory on one device.

    Args:
        device: where the memory is.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._free: list[Tensor] = []

    def take(self, nbytes: int) -> Tensor:
        """Return a block of at least `nbytes` bytes, uint8, with any content.

        Give it back after use.
        """
        if nbytes == 0:
            return torch.empty(0, dtype=torch.uint8, device=self._device)
        fitting = [block for block in self._free if block.numel() >= nbytes]
        if not fitting:
            if len(self._free) == KEPT:  # a small one makes room for a larger one
                del self._free[0]
            return torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        best = min(fitting, key=Tensor.numel)
        self._free = [block for block in self._free if block is not best]
        return best

    def give(self, block: Tensor) -> None:
        """Take a block back."""
        if block.numel():
            self._free = sorted([*self._free, block], key=Tensor.numel)[-KEPT:]

    def clear(self) -> None:
        """Free all blocks."""
        self._free.clear()
