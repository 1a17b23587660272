"""Keep scratch memory, so that collectives need not allocate it in every call.

Allocating memory in every call costs more than the copies into it.

Source: fresh pages are written at about a tenth of the speed of used ones, because the kernel
clears each of them first.
"""

from threading import Lock

import torch
from torch import Tensor

KEPT = 4
"""The most blocks of memory that are kept for later calls. So many collectives at once need no new
memory."""


def used(x: Tensor) -> Tensor:
    """Return x. If x is freed, its memory stays until the current stream's work so far is done."""
    if x.device.type not in ("cpu", "meta"):  # these have no streams
        try:
            x.record_stream(torch.accelerator.current_stream(x.device))
        except RuntimeError as error:
            # cudaMallocAsync refuses memory that torch did not allocate and will not free
            if "ptr not found in ptr_info" not in str(error):
                raise
    return x


class Scratch:
    """Hold blocks of memory on one device, which `take` lends and `give` takes back.

    Several threads may call these at once, on any streams, and so may a signal handler. No call
    waits for another one: meanwhile `take` returns new memory, and `give` keeps nothing.

    Args:
        device: where the memory is.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._lock = device, Lock()
        # (block, event after its last use on a device), the smallest block first
        self._free: list[tuple[Tensor, torch.Event | None]] = []

    def take(self, nbytes: int) -> Tensor:
        """Return a flat uint8 tensor of `nbytes` bytes or more, with any content.

        `nbytes` is at least 1. Pass the tensor to `give` after use. The current stream waits for
        the last use.
        """
        if self._lock.acquire(False):
            try:
                for place, (block, end) in enumerate(self._free):
                    if block.numel() >= nbytes:
                        del self._free[place]
                        if end is not None:
                            torch.accelerator.current_stream(self._device).wait_event(end)
                        return block
            finally:
                self._lock.release()
        return torch.empty(nbytes, dtype=torch.uint8, device=self._device)

    def give(self, block: Tensor) -> None:
        """Keep a block for later calls, unless it is empty. Of more than KEPT, drop the smallest.

        On a device, call this on the stream that used the block last.
        """
        if not block.numel() or not self._lock.acquire(False):
            return
        try:
            on_cpu = self._device.type == "cpu"
            end = None if on_cpu else torch.accelerator.current_stream(self._device).record_event()
            together = [*self._free, (block, end)]
            self._free = sorted(together, key=lambda kept: kept[0].numel())[-KEPT:]
        finally:
            self._lock.release()

    def clear(self) -> None:
        """Drop all blocks that are kept."""
        self._free.clear()
