"""Asynchronous copies between a device and the host: what the pipelined transport needs of a device, and CUDA's form of it."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor


class Event(Protocol):
    """A point in a stream of copies."""

    def test(self) -> bool:
        """Whether every copy before it is complete."""
        ...


class Streams(Protocol):
    """Two streams of copies, one in each direction, beside the stream that computes."""

    def buffer(self, nbytes: int) -> Tensor:
        """Host memory, uint8 `(nbytes,)`, that the device can copy from and to asynchronously."""
        ...

    def begin(self) -> None:
        """Let the copies that follow wait for what has been computed so far."""
        ...

    def download(self, host: Tensor, device: Tensor) -> None:
        """Begin a copy from device to host."""
        ...

    def upload(self, device: Tensor, host: Tensor) -> None:
        """Begin a copy from host to device."""
        ...

    def downloaded(self) -> Event:
        """The point after the downloads begun so far."""
        ...

    def uploaded(self) -> Event:
        """The point after the uploads begun so far."""
        ...

    def finish(self) -> None:
        """Let what is computed next wait for the uploads begun so far."""
        ...


class CudaEvent:
    """What has been asked of a stream so far."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._event = torch.cuda.Event()
        self._event.record(stream)

    def test(self) -> bool:
        return bool(self._event.query())


class CudaStreams:
    """Copy streams of one CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._down = torch.cuda.Stream(device)
        self._up = torch.cuda.Stream(device)

    def buffer(self, nbytes: int) -> Tensor:
        """Page-locked host memory."""
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def begin(self) -> None:
        """Let both copy streams wait for the current stream."""
        current = torch.cuda.current_stream(self._device)
        self._down.wait_stream(current)
        self._up.wait_stream(current)

    def download(self, host: Tensor, device: Tensor) -> None:
        """Begin a copy on the stream that goes down."""
        with torch.cuda.stream(self._down):
            host.copy_(device, non_blocking=True)

    def upload(self, device: Tensor, host: Tensor) -> None:
        """Begin a copy on the stream that goes up."""
        with torch.cuda.stream(self._up):
            device.copy_(host, non_blocking=True)

    def downloaded(self) -> Event:
        """An event on the stream that goes down."""
        return CudaEvent(self._down)

    def uploaded(self) -> Event:
        """An event on the stream that goes up."""
        return CudaEvent(self._up)

    def finish(self) -> None:
        """Let the current stream wait for the stream that goes up."""
        torch.cuda.current_stream(self._device).wait_stream(self._up)
