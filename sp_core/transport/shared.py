"""Provide memory that all ranks of one machine map, of the host or of a device.

`share` makes such memory: each rank allocates one part and maps the parts of all others. `demand`
does the same, but raises `RankError` if it cannot. `HostMemory` allocates and maps host memory; the
module `cuda` has the classes for a device. `Regions` reuses shared memory for many tensors.

Host memory has no name in any file system. The owner makes the memory (`memfd_create`), and the
other ranks open it through the owner's `/proc` entry. However a program ends, nothing is left
behind, and a small /dev/shm does not matter. The kernel frees the memory when no process maps it
any more, so a tensor may outlive its communicator. `MPI_Win_allocate_shared` is not used: its
memory is freed by a collective call, and its segments are files in /dev/shm.
"""

import ctypes
import errno
import math
import mmap
import os
import platform
import secrets
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate, count
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from sp_core.errors import RankError
from sp_core.machine import memory, node_number
from sp_core.transport.base import Done, Handle, Intracomm, wait
from sp_core.transport.host import as_numpy

ORDERED = ("x86_64", "amd64", "i686", "i386")
"""Values of `platform.machine()` whose processors show the writes of a core in order.

On other processors a rank might see a flag before the data that were written ahead of it."""
ALIGNMENT = 128
"""Tensors of `Regions` begin at multiples of so many bytes: cores fetch cache lines in pairs."""
NONCE_BYTES = 8
"""Bytes at the end of each rank's part. They hold a random number (nonce).

By it the other ranks check that they have mapped the right memory."""

Spec = tuple[Sequence[int], torch.dtype]
"""Shape and dtype of a tensor."""
Work = Callable[[], object]
"""A function that makes one copy or sum."""


class NotShared(Exception):
    """Report, on every rank, that the ranks cannot share memory. The text says why."""


class Offer(NamedTuple):
    """Describe the memory of one rank so that other ranks can map it.

    Args:
        process: process id of the owner.
        address: where the memory begins in the owner's process.
        nbytes: length of the memory.
        file: the owner's file descriptor of host memory; -1 for device memory.
        handle: CUDA IPC handle of device memory; empty for host memory.
        device: number of the GPU in the owner's process; None for host memory.
    """

    process: int
    address: int
    nbytes: int
    file: int = -1
    handle: bytes = b""
    device: int | None = None


class HostMemory:
    """Allocate, map and copy the memory of a window: host memory here, device memory in a subclass.

    Host memory is freed when the last tensor in it is gone, in any process.
    """

    def allocate(self, nbytes: int) -> tuple[Tensor, Offer]:
        """Allocate zeroed memory of this rank.

        The operating system provides the pages now. If it could not do so at the first write, a
        signal would end the process.

        Returns:
            (the memory, uint8 of shape (nbytes,); the offer from which other ranks map it).

        Raises:
            OSError: there is not enough memory.
        """
        if nbytes > memory():
            # the system would take all memory for the first pages, and then end this process
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
        if (file := _LIBC.memfd_create(b"sp_core", _MFD_CLOEXEC)) < 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        try:
            self._extend(file, nbytes)
            x = _mapped(file, nbytes)
        except OSError:
            os.close(file)
            raise
        return x, Offer(os.getpid(), x.data_ptr(), nbytes, file)

    def _extend(self, file: int, nbytes: int) -> None:
        """Make an empty file `nbytes` bytes long, with all its pages.

        Many Linux kernels undo a call that a signal interrupts, and Python repeats that call.
        """
        for start in range(0, nbytes, _PIECE):
            os.posix_fallocate(file, start, min(_PIECE, nbytes - start))

    def open(self, offer: Offer) -> Tensor:
        """Map the memory that another rank offers, and return it as uint8 of shape (nbytes,).

        Raises:
            OSError: the memory cannot be mapped.
        """
        file = os.open(f"/proc/{offer.process}/fd/{offer.file}", os.O_RDWR)
        try:
            return _mapped(file, offer.nbytes)
        finally:
            os.close(file)

    def lend(self, part: Tensor) -> Tensor:
        """Return the tensor to give to a caller in place of `part`, over the same memory.

        If memory must be freed explicitly, as on a device, the result has a storage object of its
        own. When this object is gone, the caller no longer uses the memory. Here the result is
        `part` itself.
        """
        return part

    def close(self, x: Tensor) -> None:
        """Unmap memory that `open` returned. Do nothing here: the last tensor in it unmaps it."""

    def free(self, x: Tensor) -> None:
        """Free memory that `allocate` returned. Do nothing here, where the kernel frees it.

        A subclass for a device frees it now. The caller must know that all other ranks have closed
        the memory: `give_back` waits for them.
        """

    def begin(self) -> None:
        """Make every later `launch` wait for the work queued on the current stream so far.

        Operations on host memory are complete when they return, so here there is nothing to do.
        """

    def launch(self, work: Sequence[Work]) -> Handle:
        """Run copies and sums after those launched before, and return their handle.

        Here they are complete on return.
        """
        for item in work:
            item()
        return _DONE

    def copying(self, into: Tensor, part: Tensor) -> Work:
        """Return a function that copies `part` into `into`, to be passed to `launch`.

        NumPy copies, because its calls take less time to begin than torch's.
        """
        return partial(np.copyto, as_numpy(into), as_numpy(part))


class GrowingMemory(HostMemory):
    """Allocate host memory whose pages are provided one by one, each when it is first written."""

    def _extend(self, file: int, nbytes: int) -> None:
        """Make an empty file `nbytes` bytes long, without pages."""
        os.ftruncate(file, nbytes)


REFUSALS = OSError, RuntimeError  # of the system and the CUDA runtime; of torch on a full GPU
_DONE, _PIECE = Done(), 1 << 20  # to provide a MiB takes 0.3 ms, so a periodic signal lets it end
# Pythons of conda and uv lack `os.memfd_create`
_LIBC, _MFD_CLOEXEC = ctypes.CDLL(None, use_errno=True), 1
HOST, GROWING = HostMemory(), GrowingMemory()


def _mapped(file: int, nbytes: int) -> Tensor:
    """Return the first `nbytes` bytes of an open file as a uint8 tensor that maps it."""
    return torch.frombuffer(mmap.mmap(file, nbytes), dtype=torch.uint8)


def share(comm: Intracomm, memory: HostMemory, nbytes: int) -> list[Tensor]:
    """Allocate memory on each rank, and return the memory of all ranks. Every rank calls this.

    Args:
        comm: an mpi4py communicator.
        memory: allocates and maps the memory, of the host or of this rank's device.
        nbytes: bytes of this rank's part; may differ between ranks.

    Returns:
        The part of each rank, in rank order: zeroed uint8. Its length is that rank's `nbytes`,
        rounded up to a multiple of 8, and at least 8: an empty tensor would have no address.

    Communication:
        Two all-gathers of a few bytes per rank; after a failure also a barrier.

    Raises:
        NotShared: on every rank: the ranks are on several machines, the processor may reorder
            writes, or memory cannot be allocated or mapped.
    """
    nonce, problem = secrets.randbits(62), ""
    mine = offer = None
    parts: list[Tensor] = []
    try:
        mine, offer = memory.allocate((-(-max(nbytes, 1) // NONCE_BYTES) + 1) * NONCE_BYTES)
        _copy(
            memory, mine[-NONCE_BYTES:], torch.tensor([nonce], device=mine.device).view(torch.uint8)
        )
    except (*REFUSALS, AttributeError) as error:  # a system may lack `memfd_create`
        problem = f"rank {comm.rank} cannot allocate {nbytes:,} bytes: {error}"
    try:
        told = comm.allgather((this_machine(), problem, offer, nonce))
        problem = _excluded(told)
        if not problem:
            parts, problem = _opened(memory, told, mine, comm.rank)
            problem = next(filter(None, comm.allgather(problem)), "")
    finally:
        if offer is not None and offer.file >= 0:
            os.close(offer.file)
    if problem:
        give_back(comm, memory, mine, parts)
        raise NotShared(problem)
    return [part[:-NONCE_BYTES] for part in parts]


def give_back(
    comm: Intracomm, memory: HostMemory, mine: Tensor | None, parts: Sequence[Tensor]
) -> None:
    """Unmap the parts of other ranks, wait for all ranks, and free this rank's own part.

    Every rank calls this.

    Args:
        comm: the communicator of `share`.
        memory: the same as in `share`.
        mine: the part of this rank, or None.
        parts: the parts of all ranks that this rank has mapped; `mine` may be among them.
    """
    for part in parts:
        if part is not mine:
            memory.close(part)
    comm.Barrier()
    if mine is not None:
        memory.free(mine)


def demand(comm: Intracomm, memory: HostMemory, nbytes: int) -> list[Tensor]:
    """Do what `share` does, but raise `RankError` if that is impossible. Every rank calls this.

    Raises:
        RankError: the memory cannot be shared; on every rank.
    """
    try:
        return share(comm, memory, nbytes)
    except NotShared as reason:
        free, named = (
            ("", "host") if memory is HOST else (", call torch's empty_cache()", "pipelined")
        )
        raise RankError(
            f"{nbytes:,} bytes of shared memory were asked for, but {reason}. Free some{free}, or "
            f"make the mesh with transport={named!r}."
        ) from None


def this_machine() -> tuple[int, str]:
    """Return (node number, name of the process namespace) of this rank.

    Ranks with equal pairs run on one machine and see each other's processes.
    """
    try:
        return node_number(), os.readlink("/proc/self/ns/pid")  # noqa: PTH115
    except OSError:
        return node_number(), "unknown"


def _excluded(told: Sequence[tuple[Any, str, Any, Any]]) -> str:
    """Return why these ranks cannot share memory, or "" if they can.

    Args:
        told: for each rank (`this_machine()`, the problem of its allocation or "", offer, nonce).
    """
    if (places := len({place for place, *_ in told})) > 1:
        return (
            f"its {len(told)} ranks are on {places} machines, "
            "or in containers that do not see each other"
        )
    if platform.machine().lower() not in ORDERED:
        return (
            f"a processor of type {platform.machine()} may show writes to other cores in another "
            "order"
        )
    return next((problem for _, problem, *_ in told if problem), "")


def _opened(
    memory: HostMemory, told: Sequence[tuple[Any, Any, Offer, int]], mine: Tensor | None, own: int
) -> tuple[list[Tensor], str]:
    """Map the parts of all ranks, and check the random number at the end of each.

    Args:
        memory: maps the parts.
        told: for each rank (machine, problem, offer, random number).
        mine: the part that this rank has allocated; None if that failed.
        own: the number of this rank.

    Returns:
        (the parts in rank order, ""); or (the parts mapped so far, why the next cannot be used).
    """
    parts: list[Tensor] = []
    for rank, (_, _, offer, nonce) in enumerate(told):
        try:
            part = mine if mine is not None and rank == own else memory.open(offer)
            parts.append(part)
            found = torch.empty_like(part[-NONCE_BYTES:])
            _copy(memory, found, part[-NONCE_BYTES:])
        except (*REFUSALS, ValueError) as error:  # of `mmap`, if the file is shorter
            return parts, f"rank {own} cannot map the memory of rank {rank}: {error}"
        if int(found.view(torch.int64)) != nonce:
            return (
                parts,
                f"rank {own} finds something else in the memory of rank {rank} than was written "
                f"there",
            )
    return parts, ""


def _copy(memory: HostMemory, into: Tensor, part: Tensor) -> None:
    """Copy `part` into `into`, and wait for the copy."""
    memory.begin()
    wait(memory.launch([memory.copying(into, part)]))


class Regions:
    """Hold a few regions of shared memory, which successive uses take in turn.

    In one use every rank calls `enter` and writes its part of the region. Then the rank waits for
    all ranks (a fence, which the caller makes), and reads the other parts. With two regions no rank
    waits until the others have read:

        use     region
        1       0       write, fence, read
        2       1                           write, fence, read
        3       0                                               write

    A rank writes in use 3 only after the fence of use 2. By then every rank has finished use 1, so
    no rank still reads what use 1 left in the region. With one region a rank must not write before
    all ranks have entered.

    Args:
        comm: an mpi4py communicator whose ranks share memory.
        number: the number of regions.
    """

    def __init__(self, comm: Intracomm, number: int) -> None:
        self._comm = comm
        self._regions = [torch.empty(0, dtype=torch.uint8, device="cpu") for _ in range(number)]
        self._uses = count()

    def enter(self, specs: Sequence[Spec], arrive: Work = lambda: None) -> list[Tensor]:
        """Return tensors in the next region, with any content. Every rank calls this.

        The tensors are the same memory on every rank. If the region is too small, the ranks make a
        new one together.

        Args:
            specs: (shape, dtype) of each tensor; the same on every rank.
            arrive: waits until all ranks call `enter`. It is called before a new region is made,
                which blocks in MPI and lets no other operation make progress.

        Raises:
            RankError: there is not enough memory; on every rank.
        """
        sizes = [math.prod(shape) * dtype.itemsize for shape, dtype in specs]
        starts = list(accumulate((-(-size // ALIGNMENT) * ALIGNMENT for size in sizes), initial=0))
        number = next(self._uses) % len(self._regions)
        if self._regions[number].numel() < starts[-1]:  # tensors keep the old one
            arrive()
            nbytes = starts[-1] if self._comm.rank == 0 else 0
            self._regions[number] = demand(self._comm, HOST, nbytes)[0]
        return [
            shaped(self._regions[number][start:], shape, dtype)
            for (shape, dtype), start in zip(specs, starts, strict=False)
        ]

    def clear(self) -> None:
        """Drop all regions. Memory in which a tensor still lies is freed with that tensor."""
        self._regions = [torch.empty(0, dtype=torch.uint8, device="cpu")] * len(self._regions)


def shaped(part: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return the first bytes of a uint8 vector as a tensor of this shape and dtype."""
    return part[: math.prod(shape) * dtype.itemsize].view(dtype).view(tuple(shape))
