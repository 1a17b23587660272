"""Scratch memory that outlives the calls that use it: memory made in every call costs more than the copies made in it.

Source: fresh pages are written at about a tenth of the speed of used ones, because the kernel clears each of them first.
"""

from __future__ import annotations

import torch
from torch import Tensor

KEPT = 4
"""Blocks kept for the next call; as many collectives under way at once find memory without making it."""


class Scratch:
    """Blocks of memory on one device, handed out and taken back.

    Args:
        device: where the memory is.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._free: list[Tensor] = []

    def take(self, nbytes: int) -> Tensor:
        """A block of at least that many bytes, uint8, with anything in it. Give it back when it is no longer used."""
        if nbytes == 0:
            return torch.empty(0, dtype=torch.uint8, device=self._device)
        fitting = [block for block in self._free if block.numel() >= nbytes]
        if fitting:
            best = min(fitting, key=Tensor.numel)
            self._free = [block for block in self._free if block is not best]
            return best
        self._free = self._free[1:] if len(self._free) == KEPT else self._free  # a small one makes room for a larger one
        return torch.empty(nbytes, dtype=torch.uint8, device=self._device)

    def give(self, block: Tensor) -> None:
        """Take a block back."""
        if block.numel():
            self._free = sorted([*self._free, block], key=Tensor.numel)[-KEPT:]

    def clear(self) -> None:
        """Let go of all memory."""
        self._free.clear()
