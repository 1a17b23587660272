"""Memory that all ranks of one machine see, of the host or of a device.

Each rank makes its part, and the others map it. Host memory has no name in any file system: its
owner makes it (`memfd_create`), the others open it through the owner's `/proc` entry. So however a
run ends, nothing is left behind, a small /dev/shm does not matter, and a tensor in it may outlive
its communicator: the memory goes when the last process has let go of it. That is why this is not
`MPI_Win_allocate_shared`, whose memory goes with a collective call and whose segments are files in
/dev/shm.
"""

from __future__ import annotations

import math
import mmap
import os
import platform
import secrets
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from sp_core.errors import RankError
from sp_core.machine import node_number
from sp_core.transport.base import Done, Handle, wait
from sp_core.transport.host import as_numpy

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

ORDERED = ("x86_64", "amd64", "i686", "i386")
"""Processors on which others see the writes of one core in their order. Elsewhere a flag might be
seen before the data."""
ALIGNMENT = 128
"""Tensors of a room begin so many bytes apart, because cores fetch cache lines in pairs."""
NONCE_BYTES = 8
"""The last bytes of each part hold a number, by which the others see that they have found it."""

Spec = tuple[Sequence[int], torch.dtype]
"""Shape and dtype of a tensor."""
Work = Callable[[], object]


class NotShared(Exception):
    """There is no memory that all ranks see; the text says why. The same on every rank."""


class Offer(NamedTuple):
    """Where the memory of one rank is: an open file of its process, or a handle of a device."""

    process: int
    address: int
    nbytes: int
    file: int = -1
    handle: bytes = b""


class HostMemory:
    """Provide a window with host memory; a subclass provides that of a device.

    Host memory is freed with the last tensor in it, in any process.
    """

    def allocate(self, nbytes: int) -> tuple[Tensor, Offer]:
        """Make memory of this rank, uint8 `(nbytes,)`, zero. Return it, and how others find it.

        Its owner takes the pages now: later it would be a signal that ends the process.

        Raises:
            OSError: it cannot be made.
        """
        file = os.memfd_create("sp_core")
        try:
            os.posix_fallocate(file, 0, nbytes)
            x = _mapped(file, nbytes)
        except OSError:
            os.close(file)
            raise
        return x, Offer(os.getpid(), x.data_ptr(), nbytes, file)

    def open(self, offer: Offer) -> Tensor:
        """Map the memory that another process, or another thread, offers.

        Raises:
            OSError: it cannot be mapped.
        """
        file = os.open(f"/proc/{offer.process}/fd/{offer.file}", os.O_RDWR)
        try:
            return _mapped(file, offer.nbytes)
        finally:
            os.close(file)

    def lend(self, part: Tensor) -> Tensor:
        """Return a tensor for the caller, whose storage is another one if `free` does something."""
        return part

    def close(self, x: Tensor) -> None:
        """Give back what `open` gave: nothing to do here."""

    def free(self, x: Tensor) -> None:
        """Give back what `allocate` gave, after all others have closed it: nothing to do here."""

    def begin(self) -> None:
        """Make every later `launch` wait for the work that the current stream has so far.

        Operations on host memory are complete when they return.
        """

    def launch(self, work: Sequence[Work]) -> Handle:
        """Carry out some work after all that was launched before. Return a handle of it."""
        for item in work:
            item()
        return _DONE

    def copying(self, into: Tensor, part: Tensor) -> Work:
        """Return a copy, to be launched. NumPy begins it sooner than torch."""
        return partial(np.copyto, as_numpy(into), as_numpy(part))


_DONE = Done()
HOST = HostMemory()


def _mapped(file: int, nbytes: int) -> Tensor:
    return torch.frombuffer(mmap.mmap(file, nbytes), dtype=torch.uint8)


def share(comm: Intracomm, memory: HostMemory, nbytes: int) -> list[Tensor]:
    """Make memory that all ranks see.

    Args:
        comm: an mpi4py communicator; all its ranks call this.
        memory: of the host, or of this rank's device.
        nbytes: of this rank's part.

    Returns:
        The part of every rank, uint8 and zero, of so many bytes or a few more.

    Communication:
        Two all-gathers of a few bytes.

    Raises:
        NotShared: on every rank.
    """
    nonce, problem = secrets.randbits(62), ""
    mine = offer = None
    parts: list[Tensor] = []
    try:
        mine, offer = memory.allocate((-(-nbytes // NONCE_BYTES) + 1) * NONCE_BYTES)
        _copy(memory, mine[-NONCE_BYTES:], torch.tensor([nonce]).view(torch.uint8).to(mine.device))
    except (OSError, AttributeError) as error:  # a system may lack `memfd_create`
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
    """Close what belongs to others, wait for them, and free the own part; every rank calls this."""
    for part in parts:
        if part is not mine:
            memory.close(part)
    comm.Barrier()
    if mine is not None:
        memory.free(mine)


def demand(comm: Intracomm, memory: HostMemory, nbytes: int) -> list[Tensor]:
    """Call `share` where the memory is needed.

    Raises:
        RankError: there is none left; on every rank.
    """
    try:
        return share(comm, memory, nbytes)
    except NotShared as reason:
        raise RankError(
            f"{nbytes:,} bytes of shared memory were asked for, but {reason}. Free some, or make "
            "the mesh with transport='host'."
        ) from None


def this_machine() -> tuple[int, str]:
    """Identify the machine and the process namespace of this rank."""
    try:
        return node_number(), os.readlink("/proc/self/ns/pid")  # noqa: PTH115
    except OSError:
        return node_number(), "unknown"


def _excluded(told: Sequence[tuple[Any, str, Any, Any]]) -> str:
    """Return why these ranks cannot share memory, if they cannot."""
    if (places := len({place for place, *_ in told})) > 1:
        return (
            f"its {len(told)} ranks are on {places} machines, "
            "or in containers that do not see each other"
        )
    if platform.machine().lower() not in ORDERED:
        kind = platform.machine()
        return f"a processor of type {kind} may show writes to other cores in another order"
    return next((problem for _, problem, *_ in told if problem), "")


def _opened(
    memory: HostMemory, told: Sequence[tuple[Any, Any, Offer, int]], mine: Tensor | None, own: int
) -> tuple[list[Tensor], str]:
    """Map the parts of all ranks.

    Return those up to the first that cannot be used, and the reason.
    """
    parts: list[Tensor] = []
    for rank, (_, _, offer, nonce) in enumerate(told):
        try:
            part = mine if mine is not None and rank == own else memory.open(offer)
        except OSError as error:
            return parts, f"rank {own} cannot map the memory of rank {rank}: {error}"
        parts.append(part)
        found = torch.empty_like(part[-NONCE_BYTES:])
        _copy(memory, found, part[-NONCE_BYTES:])
        if int(found.view(torch.int64)) != nonce:
            return (
                parts,
                f"rank {own} finds something else in the memory of rank {rank} than was written "
                f"there",
            )
    return parts, ""


def _copy(memory: HostMemory, into: Tensor, part: Tensor) -> None:
    """Copy, and wait for it."""
    memory.begin()
    wait(memory.launch([memory.copying(into, part)]))


class Rooms:
    """Keep memory that all ranks of a node see, as rooms that take turns.

    In a use of a room every rank writes its part in a step of the window; when all have made it,
    each reads what it needs where it is. With two rooms nobody waits until the others have read:

        use     room
        1       0       write, fence, read
        2       1                           write, fence, read
        3       0                                               write

    A rank writes in use 3 when all have begun use 2, so nobody reads what use 1 left there.

    Args:
        comm: an mpi4py communicator whose ranks have memory in common.
        count: how many rooms.
    """

    def __init__(self, comm: Intracomm, count: int) -> None:
        self._comm = comm
        self._rooms = [torch.empty(0, dtype=torch.uint8) for _ in range(count)]
        self._uses = 0

    def enter(self, specs: Sequence[Spec]) -> list[Tensor]:
        """Return tensors in the next room, with anything in them; every rank calls this.

        They are the same memory on every rank.

        Args:
            specs: the same on every rank.

        Raises:
            RankError: there is not so much memory; on every rank.
        """
        sizes = [math.prod(shape) * dtype.itemsize for shape, dtype in specs]
        starts = list(accumulate((-(-size // ALIGNMENT) * ALIGNMENT for size in sizes), initial=0))
        number, self._uses = self._uses % len(self._rooms), self._uses + 1
        if self._rooms[number].numel() < starts[-1]:  # the old one lives as long as a tensor in it
            nbytes = starts[-1] if self._comm.rank == 0 else 0
            self._rooms[number] = demand(self._comm, HOST, nbytes)[0]
        return [
            shaped(self._rooms[number][start:], shape, dtype)
            for (shape, dtype), start in zip(specs, starts, strict=False)
        ]

    def clear(self) -> None:
        """Drop all memory. The memory of a tensor that is still used is freed with that tensor."""
        self._rooms = [torch.empty(0, dtype=torch.uint8)] * len(self._rooms)


def shaped(part: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """View the beginning of some memory as a tensor."""
    return part[: math.prod(shape) * dtype.itemsize].view(dtype).view(tuple(shape))
