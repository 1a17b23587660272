"""Share memory of a CUDA device by the few calls of the CUDA runtime that torch does not offer.

torch's own allocator hands out parts of large blocks, which may grow in place; a handle leads to a
block as it was. So the memory of a window comes from the runtime itself, once.

Source: CUDA runtime API, "Memory Management" and "Device Management" (cudaIpcGetMemHandle,
cudaIpcOpenMemHandle).
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from sp_core.machine import loaded_library
from sp_core.transport.base import Transfer, on_stream
from sp_core.transport.shared import HostMemory, Offer, Work

HANDLE_BYTES = 64
PEER_ACCESS = 1  # cudaIpcMemLazyEnablePeerAccess
ANY_DIRECTION = 4  # cudaMemcpyDefault


class Handle(ctypes.Structure):
    """What the runtime calls cudaIpcMemHandle_t."""

    _fields_ = (("reserved", ctypes.c_ubyte * HANDLE_BYTES),)


def uuid_of(device: torch.device) -> str:
    """Return what tells a device from all others, also where each rank sees its own as number 0."""
    return str(torch.get_device_module(device).get_device_properties(device).uuid)


def _reached(stream: torch.Stream) -> Transfer:
    """Return a handle of what has been asked of a stream so far."""
    return Transfer([stream.record_event().query])


class CudaStreams:
    """The CUDA streams of one device on which copies run."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._down = torch.Stream(device)
        self._up = torch.Stream(device)

    def buffer(self, nbytes: int) -> Tensor:
        """Page-locked host memory."""
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def begin(self) -> None:
        """Let both copy streams wait for the current stream."""
        current = torch.accelerator.current_stream(self._device)
        self._down.wait_stream(current)
        self._up.wait_stream(current)

    def download(self, host: Tensor, device: Tensor) -> None:
        """Begin a copy on the stream that goes down."""
        with on_stream(self._down):
            host.copy_(device, non_blocking=True)

    def upload(self, device: Tensor, host: Tensor) -> None:
        """Begin a copy on the stream that goes up."""
        with on_stream(self._up):
            device.copy_(host, non_blocking=True)

    def downloaded(self) -> Transfer:
        """Return an event on the stream that goes down."""
        return _reached(self._down)

    def uploaded(self) -> Transfer:
        """Return an event on the stream that goes up."""
        return _reached(self._up)

    def finish(self) -> None:
        """Let the current stream wait for the stream that goes up."""
        torch.accelerator.current_stream(self._device).wait_stream(self._up)


class CudaStream(HostMemory):
    """A stream of one device beside the one that computes; what windows need of it.

    Args:
        device: a CUDA device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.Stream(device)

    def begin(self) -> None:
        """Let the stream wait for the current one."""
        self._stream.wait_stream(torch.accelerator.current_stream(self._device))

    def launch(self, work: Sequence[Work]) -> Transfer:
        """Launch on the stream."""
        with on_stream(self._stream):
            for item in work:
                item()
        return _reached(self._stream)

    def lend(self, part: Tensor) -> Tensor:
        """Return another tensor over a part."""
        return tensor_at(part.data_ptr(), part.nbytes, self._device)

    def copying(self, into: Tensor, part: Tensor) -> Work:
        """Return a copy on the stream, wherever its two sides are."""
        sides = _pointer(into), _pointer(part)
        stream = ctypes.c_void_p(self._stream.native_handle)  # type: ignore[attr-defined]
        return partial(
            _call,
            "cudaMemcpyAsync",
            *sides,
            ctypes.c_size_t(into.nbytes),
            ctypes.c_int(ANY_DIRECTION),
            stream,
        )


class CudaMemory(CudaStream):
    """Device memory whose handle other processes open."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._opened: set[int] = set()

    def allocate(self, nbytes: int) -> tuple[Tensor, Offer]:
        """Memory from cudaMalloc, outside of torch's allocator."""
        pointer, handle = ctypes.c_void_p(), Handle()
        with torch.accelerator.device_index(self._device.index):
            _call("cudaMalloc", ctypes.byref(pointer), ctypes.c_size_t(nbytes))
            try:
                _call("cudaIpcGetMemHandle", ctypes.byref(handle), pointer)
            except OSError:
                _call("cudaFree", pointer)
                raise
        address = int(pointer.value or 0)
        offer = Offer(os.getpid(), address, nbytes, handle=bytes(handle))
        return tensor_at(address, nbytes, self._device).zero_(), offer

    def open(self, offer: Offer) -> Tensor:
        """Map the memory of a handle.

        Memory of this process is used as it is: a process cannot open its own handles.
        """
        if offer.process == os.getpid():
            return tensor_at(offer.address, offer.nbytes, self._device)
        pointer, handle = ctypes.c_void_p(), Handle.from_buffer_copy(offer.handle)
        with torch.accelerator.device_index(self._device.index):
            _call("cudaIpcOpenMemHandle", ctypes.byref(pointer), handle, ctypes.c_uint(PEER_ACCESS))
        self._opened.add(int(pointer.value or 0))
        return tensor_at(int(pointer.value or 0), offer.nbytes, self._device)

    def close(self, x: Tensor) -> None:
        """Unmap what a handle led to."""
        if x.data_ptr() in self._opened:
            self._opened.remove(x.data_ptr())
            with torch.accelerator.device_index(self._device.index):
                _call("cudaIpcCloseMemHandle", _pointer(x))

    def free(self, x: Tensor) -> None:
        """Give memory back to the runtime."""
        with torch.accelerator.device_index(self._device.index):
            _call("cudaFree", _pointer(x))


_REGISTERED: dict[int, Tensor] = {}
"""Host memory by its address. It must stay mapped for as long as a device may use it."""


class PinnedMemory(CudaStream):
    """Share host memory that the device reads and writes in place.

    It is registered once; inside a node nothing else is copied.
    """

    def allocate(self, nbytes: int) -> tuple[Tensor, Offer]:
        """Make new host memory."""
        host, offer = super().allocate(nbytes)
        try:
            return self._registered(host), offer
        except OSError:
            os.close(offer.file)
            raise

    def open(self, offer: Offer) -> Tensor:
        """Map the memory of another process."""
        return self._registered(super().open(offer))

    def close(self, x: Tensor) -> None:
        """Let the device forget it, and unmap it."""
        with torch.accelerator.device_index(self._device.index):
            _call("cudaHostUnregister", _pointer(x))
        del _REGISTERED[x.data_ptr()]

    free = close

    def _registered(self, host: Tensor) -> Tensor:
        flags = ctypes.c_uint(0)
        with torch.accelerator.device_index(self._device.index):
            _call("cudaHostRegister", _pointer(host), ctypes.c_size_t(host.nbytes), flags)
        _REGISTERED[host.data_ptr()] = host
        return tensor_at(host.data_ptr(), host.nbytes, self._device)


def _pointer(x: Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(x.data_ptr())


def tensor_at(address: int, nbytes: int, device: torch.device) -> Tensor:
    """View the bytes at an address as a tensor on a device that can reach them.

    The caller frees the memory.
    """
    storage: Any = torch._C._construct_storage_from_data_pointer(address, device, nbytes)
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage, 0, (nbytes,), (1,))


@functools.cache
def _runtime() -> ctypes.CDLL:
    """Return the CUDA runtime that torch has loaded."""
    path = loaded_library("libcudart")
    if path is None:
        raise OSError("torch has loaded no libcudart")
    library = ctypes.CDLL(path)
    library.cudaGetErrorString.restype = ctypes.c_char_p
    return library


def _call(name: str, *arguments: object) -> None:
    """Call the runtime.

    An error is cleared in the runtime, or torch's next call would report it.
    """
    library = _runtime()
    code = int(getattr(library, name)(*arguments))
    if code:
        library.cudaGetLastError()
        raise OSError(f"{name}: {library.cudaGetErrorString(code).decode()}")
