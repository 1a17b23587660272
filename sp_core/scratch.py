"""Keep scratch memory, so that collectives need not allocate it in every call.

Allocating memory in every call costs more than the copies into it.

Source: fresh pages are written at about a tenth of the speed of used ones, because the kernel
clears each of them first.
"""

from __future__ import annotations

from threading import Lock

import torch
from torch import Tensor

KEPT = 4
"""The most blocks of memory that are kept for later calls. So many collectives at once need no new
memory."""


class Scratch:
    """Hold blocks of memory on one device, which `take` lends and `give` takes back.

    Several threads may call these at once.

    Args:
        device: where the memory is.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._lock = device, Lock()
        self._free: list[Tensor] = []  # the smallest first

    def take(self, nbytes: int) -> Tensor:
        """Return a flat uint8 tensor of `nbytes` bytes or more, with any content.

        `nbytes` is at least 1. Pass the tensor to `give` after use.
        """
        with self._lock:
            for place, block in enumerate(self._free):
                if block.numel() >= nbytes:
                    return self._free.pop(place)
        return torch.empty(nbytes, dtype=torch.uint8, device=self._device)

    def give(self, block: Tensor) -> None:
        """Keep a block (it may be empty) for later calls. Of more than KEPT, drop the smallest."""
        with self._lock:
            self._free = sorted([*self._free, block], key=Tensor.numel)[-KEPT:]

    def clear(self) -> None:
        """Drop all blocks that are kept."""
        self._free.clear()
