"""Copy between a CUDA device and host memory, and share device memory between processes.

`CudaStreams` serves the transports that stage tensors through host memory. `CudaMemory` and
`PinnedMemory` provide the memory of a `Window`: device memory opened by CUDA IPC handles, and host
memory that the device reads. Both classes call the CUDA runtime library directly, because torch
does not offer these calls. torch's allocator hands out parts of large blocks that may grow in
place, while an IPC handle leads to a block as it was. So the memory of a window comes from the
runtime, once.

Source: CUDA runtime API, "Memory Management" and "Device Management" (cudaIpcGetMemHandle,
cudaIpcOpenMemHandle).
"""

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
from sp_core.transport.shared import REFUSALS, HostMemory, Offer, Work

HANDLE_BYTES = 64
"""Size of a cudaIpcMemHandle_t."""
PEER_ACCESS = 1  # cudaIpcMemLazyEnablePeerAccess
ANY_DIRECTION = 4  # cudaMemcpyDefault


class Handle(ctypes.Structure):
    """Hold the bytes of a cudaIpcMemHandle_t, which lets another process map device memory."""

    _fields_ = (("reserved", ctypes.c_ubyte * HANDLE_BYTES),)


def uuid_of(device: torch.device) -> str:
    """Return the UUID of a CUDA device as text.

    The UUID tells all GPUs apart, even if every rank sees its own GPU as number 0.
    """
    return str(torch.get_device_module(device).get_device_properties(device).uuid)


def _reached(stream: torch.Stream) -> Transfer:
    """Return a handle that is complete once the device has done all work queued on `stream`."""
    return Transfer([stream.record_event().query])


class CudaStreams:
    """Run copies on two CUDA streams of one device: one for device to host, one for host to device.

    A copy in one direction overlaps with copies in the other and with computing. `begin` and
    `finish` order the copies with the work of the current stream.

    Args:
        device: a CUDA device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._down = torch.Stream(device)
        self._up = torch.Stream(device)

    def buffer(self, nbytes: int) -> Tensor:
        """Return new page-locked host memory, uint8 of shape (nbytes,)."""
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True, device="cpu")

    def begin(self) -> None:
        """Make later `download` and `upload` copies wait for the current stream's work so far."""
        current = torch.accelerator.current_stream(self._device)
        self._down.wait_stream(current)
        self._up.wait_stream(current)

    def download(self, host: Tensor, device: Tensor) -> None:
        """Queue a copy of `device` into `host`, a page-locked tensor, and return at once."""
        with on_stream(self._down):
            host.copy_(device, non_blocking=True)

    def upload(self, device: Tensor, host: Tensor) -> None:
        """Queue a copy of the page-locked tensor `host` into the tensor `device`; return at once.

        The copy runs on a stream for uploads. `host` must not change until `uploaded` is complete.
        """
        with on_stream(self._up):
            device.copy_(host, non_blocking=True)

    def downloaded(self) -> Transfer:
        """Return a handle that is complete once all copies of `download` so far are done."""
        return _reached(self._down)

    def uploaded(self) -> Transfer:
        """Return a handle that is complete once all copies of `upload` so far are done."""
        return _reached(self._up)

    def finish(self) -> None:
        """Make later work on the current stream wait for all copies of `upload` so far."""
        torch.accelerator.current_stream(self._device).wait_stream(self._up)


class CudaStream(HostMemory):
    """Run the copies of a `Window` on a CUDA stream other than the current one.

    This class is the base of `CudaMemory` and `PinnedMemory`, which say what `allocate`, `open`,
    `close` and `free` do.

    Args:
        device: a CUDA device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.Stream(device)

    def _call(self, name: str, *arguments: object) -> None:
        """Call a function of the CUDA runtime while this object's device is the current one."""
        with torch.accelerator.device_index(self._device.index):
            _call(name, *arguments)

    def begin(self) -> None:
        """Make later `launch` calls wait for the work queued on the current stream so far."""
        self._stream.wait_stream(torch.accelerator.current_stream(self._device))

    def launch(self, work: Sequence[Work]) -> Transfer:
        """Queue copies and sums on the stream. Return a handle, complete when they are done."""
        with on_stream(self._stream):
            for item in work:
                item()
        return _reached(self._stream)

    def lend(self, part: Tensor) -> Tensor:
        """Return a tensor that shares the memory of `part` but has its own storage object.

        The window of shared memory frees that memory when no rank uses such a storage any more.
        """
        return tensor_at(part.data_ptr(), part.nbytes, self._device)

    def copying(self, into: Tensor, part: Tensor) -> Work:
        """Return a function that queues a copy of `part` into `into` on the stream.

        Either tensor may lie on the device or in registered host memory.
        """
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
    """Provide device memory that other processes map through CUDA IPC handles.

    Args:
        device: a CUDA device.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._opened: set[int] = set()

    def allocate(self, nbytes: int) -> tuple[Tensor, Offer]:
        """Allocate zeroed device memory by cudaMalloc.

        Returns:
            (the memory, uint8 of shape (nbytes,); the offer from which other ranks open it).

        Raises:
            OSError: the runtime cannot allocate the memory or make an IPC handle for it.
        """
        address, handle = ctypes.c_size_t(), Handle()
        self._call("cudaMalloc", ctypes.byref(address), ctypes.c_size_t(nbytes))
        try:
            self._call("cudaIpcGetMemHandle", ctypes.byref(handle), address)
            offer = Offer(
                *(os.getpid(), address.value, nbytes),
                handle=bytes(handle),
                device=self._device.index,
            )
            return tensor_at(address.value, nbytes, self._device).zero_(), offer
        except REFUSALS:
            self._call("cudaFree", address)
            raise

    def open(self, offer: Offer) -> Tensor:
        """Map the memory of another rank until `close`; return it as uint8 of shape (nbytes,).

        A process cannot open IPC handles that it exported itself. If the other rank is a thread of
        this process, its memory is used at the same address.

        Raises:
            OSError: the runtime cannot map the memory, or it is another GPU's in this process.
        """
        if offer.process == os.getpid():
            if offer.device != self._device.index:  # without IPC there is no peer access
                raise OSError("the ranks are threads of one process on different GPUs")
            return tensor_at(offer.address, offer.nbytes, self._device)
        address, handle = ctypes.c_size_t(), Handle.from_buffer_copy(offer.handle)
        lazily = ctypes.c_uint(PEER_ACCESS)
        self._call("cudaIpcOpenMemHandle", ctypes.byref(address), handle, lazily)
        self._opened.add(address.value)
        return tensor_at(address.value, offer.nbytes, self._device)

    def close(self, x: Tensor) -> None:
        """Unmap memory that `open` has mapped. Memory of this process stays."""
        if x.data_ptr() in self._opened:
            self._opened.remove(x.data_ptr())
            self._call("cudaIpcCloseMemHandle", _pointer(x))

    def free(self, x: Tensor) -> None:
        """Free memory that `allocate` returned, by cudaFree."""
        self._call("cudaFree", _pointer(x))


_REGISTERED: dict[int, Tensor] = {}
"""Address -> registered host memory. The reference keeps the memory mapped while devices use it."""


class PinnedMemory(CudaStream):
    """Provide host memory that the ranks share and that the device reads and writes in place.

    Each rank registers the memory with the CUDA runtime once (cudaHostRegister). So the device
    copies straight from and to this memory, and no other copy is needed inside a node.

    Args:
        device: a CUDA device.
    """

    def allocate(self, nbytes: int) -> tuple[Tensor, Offer]:
        """Allocate zeroed host memory and register it.

        Returns:
            (the memory as a tensor of the device, uint8 of shape (nbytes,); the offer for other
            ranks).

        Raises:
            OSError: the memory cannot be allocated or registered.
        """
        host, offer = super().allocate(nbytes)
        try:
            return self._registered(host), offer
        except REFUSALS:
            os.close(offer.file)
            raise

    def open(self, offer: Offer) -> Tensor:
        """Map and register the host memory of another rank; return it as a tensor of the device.

        Raises:
            OSError: the memory cannot be mapped or registered.
        """
        return self._registered(super().open(offer))

    def close(self, x: Tensor) -> None:
        """Unregister memory that `allocate` or `open` returned, and drop the reference to it."""
        self._call("cudaHostUnregister", _pointer(x))
        del _REGISTERED[x.data_ptr()]

    free = close

    def _registered(self, host: Tensor) -> Tensor:
        """Register host memory, and return it as a tensor of the device."""
        nbytes, flags = ctypes.c_size_t(host.nbytes), ctypes.c_uint(0)
        x = tensor_at(host.data_ptr(), host.nbytes, self._device)
        self._call("cudaHostRegister", _pointer(host), nbytes, flags)
        _REGISTERED[host.data_ptr()] = host
        return x


def _pointer(x: Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(x.data_ptr())


def tensor_at(address: int, nbytes: int, device: torch.device) -> Tensor:
    """Return the `nbytes` bytes at an address as a uint8 tensor on a device that can reach them.

    The caller frees the memory when the tensor is no longer used.
    """
    storage: Any = torch._C._construct_storage_from_data_pointer(address, device, nbytes)
    return torch.tensor((), dtype=torch.uint8, device=device).set_(storage)


@functools.cache
def _runtime() -> ctypes.CDLL:
    """Return the CUDA runtime library that torch has loaded.

    Raises:
        OSError: torch has loaded no such library.
    """
    path = loaded_library("libcudart")
    if path is None:
        raise OSError("torch has loaded no libcudart")
    library = ctypes.CDLL(path)
    library.cudaGetErrorString.restype = ctypes.c_char_p
    return library


def _call(name: str, *arguments: object) -> None:
    """Call a function of the CUDA runtime.

    After a failure the runtime's error state is cleared, or torch's next call would report it.

    Raises:
        OSError: the call failed; the error has the runtime's text.
    """
    library = _runtime()
    code = int(getattr(library, name)(*arguments))
    if code:
        library.cudaGetLastError()
        raise OSError(f"{name}: {library.cudaGetErrorString(code).decode()}")
