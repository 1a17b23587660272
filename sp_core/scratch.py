"""Keep scratch memory, so that collectives need not allocate it in every call.

Allocating memory in every call costs more than the copies into it.

Source: fresh pages are written at about a tenth of the speed of used ones, because the kernel
clears each of them first.
"""

from __future__ import annotations

import torch
from torch import Tensor

KEPT = 4
"""The most blocks of memory that are kept for later calls. That many collectives at once need no
new memory."""


class Scratch:
    """Blocks of memory on one device, which `take` lends and `give` takes back.

    Args:
        device: where the memory is.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._free: list[Tensor] = []

    def take(self, nbytes: int) -> Tensor:
        """Return a flat uint8 tensor of at least `nbytes` bytes, with any content.

        Pass it to `give` after use.
        """
        if nbytes == 0:
            return torch.empty(0, dtype=torch.uint8, device=self._device)
        fitting = [block for block in self._free if block.numel() >= nbytes]
        if not fitting:
            if len(self._free) == KEPT:  # the smallest
                del self._free[0]
            return torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        best = min(fitting, key=Tensor.numel)
        self._free = [block for block in self._free if block is not best]
        return best

    def give(self, block: Tensor) -> None:
        """Keep a block that `take` gave for later calls. Of more than KEPT, drop the smallest."""
        if block.numel():
            self._free = sorted([*self._free, block], key=Tensor.numel)[-KEPT:]

    def clear(self) -> None:
        """Let go of all blocks that are kept."""
        self._free.clear()
