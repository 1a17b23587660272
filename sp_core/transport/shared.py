"""Memory that all ranks of a communicator see, where they are processes of one machine.

It has no name in any file system: rank 0 makes it (`memfd_create`), the others open it through rank
0's `/proc` entry. So however a run ends, nothing is left behind, a small /dev/shm does not matter,
and a tensor in it may outlive its communicator: the memory goes when the last process has let go of
it. That is why this is not `MPI_Win_allocate_shared`, whose memory goes with a collective call and
whose segments are files in /dev/shm.
"""

from __future__ import annotations

import errno
import hashlib
import math
import mmap
import os
import platform
import secrets
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from sp_core.errors import RankError

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

ORDERED = ("x86_64", "amd64", "i686", "i386")
"""Processors on which others see the writes of one core in their order. Elsewhere a flag might be seen before the data."""

_NONCE_BYTES = 8


ALIGNMENT = 128
"""Tensors of a room begin so many bytes apart, because cores fetch cache lines in pairs."""

Spec = tuple[Sequence[int], torch.dtype]
"""Shape and dtype of a tensor."""


class NotShared(Exception):
    """There is no memory that all ranks see; the text says why. The same on every rank."""


def share(comm: Intracomm, nbytes: int) -> list[Tensor]:
    """Make memory that all ranks see.

    Args:
        comm: an mpi4py communicator; all its ranks call this.
        nbytes: of this rank's part.

    Returns:
        The part of every rank, uint8, page-aligned and zero.

    Communication:
        Two all-gathers and a broadcast of a few numbers.

    Raises:
        NotShared: on every rank.
    """
    told = everybodys(comm, [_machine(), nbytes])
    sizes = [-(-int(size) // mmap.PAGESIZE) * mmap.PAGESIZE for size in told[:, 1]]
    places = len(set(told[:, 0].tolist()))
    if places > 1:
        raise NotShared(
            f"its {comm.size} ranks are on {places} machines, or in containers that do not see each other"
        )
    if platform.machine().lower() not in ORDERED:
        raise NotShared(
            f"a processor of type {platform.machine()} may show writes to other cores in another order"
        )
    fd = _made(comm, sizes)
    try:
        memory, problem = _opened(comm, fd, sizes)
        problems = everybodys(comm, [problem])[:, 0].tolist()
    finally:
        if fd >= 0:
            os.close(fd)
    if any(problems):
        rank = next(rank for rank, code in enumerate(problems) if code)
        raise NotShared(
            f"rank {rank} cannot map {sum(sizes):,} bytes of it: {os.strerror(problems[rank])}"
        )
    assert memory is not None
    return list(torch.frombuffer(memory, dtype=torch.uint8)[mmap.PAGESIZE :].split(sizes))


def demand(comm: Intracomm, nbytes: int) -> list[Tensor]:
    """`share`, by ranks that have been found to have memory in common.

    Raises:
        RankError: there is none left; on every rank.
    """
    try:
        return share(comm, nbytes)
    except NotShared as reason:
        text = f"{nbytes:,} bytes of shared memory were asked for, but {reason}. Free some, or make the mesh with transport='host'."
        raise RankError(text) from None


def together(comm: Intracomm) -> bool:
    """Return whether all ranks are on one machine; every rank calls this."""
    return len(set(everybodys(comm, [_machine()])[:, 0].tolist())) == 1


def first_of_its_machine(comm: Intracomm) -> bool:
    """Return whether no rank before the caller is on the same machine; every rank calls this."""
    machines = everybodys(comm, [_machine()])[:, 0].tolist()
    return bool(machines.index(machines[comm.rank]) == comm.rank)


def everybodys(
    comm: Intracomm, numbers: Sequence[int]
) -> np.ndarray[tuple[int, int], np.dtype[np.int64]]:
    """Gather the numbers of all ranks, by rank."""
    found = np.empty((comm.size, len(numbers)), np.int64)
    comm.Allgather(np.array(numbers, np.int64), found.reshape(-1))
    return found


def _machine() -> int:
    """Hash the machine, the host name and the process namespace of this rank."""
    parts = [platform.node()]
    for path in ("/proc/sys/kernel/random/boot_id", "/proc/self/ns/pid"):
        try:
            parts.append(os.readlink(path) if "ns" in path else Path(path).read_text())
        except OSError:
            parts.append("unknown")
    return int.from_bytes(
        hashlib.blake2b("|".join(parts).encode(), digest_size=8).digest(), "little", signed=True
    )


def _made(comm: Intracomm, sizes: Sequence[int]) -> int:
    """On rank 0 a file descriptor of new memory, whose first page is for `_NONCE_BYTES`; negative where there is none."""
    if comm.rank or not hasattr(os, "memfd_create"):
        return -1
    try:
        fd = os.memfd_create("sp_core")
        os.ftruncate(fd, mmap.PAGESIZE + sum(sizes))
    except OSError:
        return -1
    return fd


def _opened(comm: Intracomm, fd: int, sizes: Sequence[int]) -> tuple[mmap.mmap | None, int]:
    """Map the memory that rank 0 has made. Return it, or the number of the error."""
    offer = np.array([os.getpid(), fd, secrets.randbits(62)], np.int64)
    memory = mmap.mmap(fd, 0) if fd >= 0 else None
    if memory is not None:
        memory[:_NONCE_BYTES] = offer[2].tobytes()
    comm.Bcast(offer, 0)
    if offer[1] < 0:
        return None, errno.ENOMEM
    try:
        own = os.open(f"/proc/{offer[0]}/fd/{offer[1]}", os.O_RDWR)
        try:
            start = mmap.PAGESIZE + sum(sizes[: comm.rank])
            if sizes[
                comm.rank
            ]:  # now, and by its owner: later it would be a signal that ends the process
                os.posix_fallocate(own, start, sizes[comm.rank])
            memory = mmap.mmap(own, 0)
        finally:
            os.close(own)
    except OSError as error:
        return None, error.errno or errno.EIO
    return (memory, 0) if memory[:_NONCE_BYTES] == offer[2].tobytes() else (None, errno.ESTALE)


class Rooms:
    """Memory that all ranks of a node see, kept from one use to the next: some rooms that take turns.

    In a use of a room every rank writes its part in a step of the window; when all have made it,
    each reads what it needs where it is. With two rooms nobody waits until the others have read:

        use     room
        1       0       write, fence, read
        2       1                           write, fence, read
        3       0                                               write: all have begun use 2, so
        nobody reads what use 1 left here

    Args:
        comm: an mpi4py communicator whose ranks have memory in common.
        count: how many rooms.
    """

    def __init__(self, comm: Intracomm, count: int) -> None:
        self._comm = comm
        self._rooms = [torch.empty(0, dtype=torch.uint8) for _ in range(count)]
        self._uses = 0

    def enter(self, specs: Sequence[Spec]) -> list[Tensor]:
        """Tensors in the next room, the same memory on every rank, with anything in them; every rank calls this.

        Args:
            specs: the same on every rank.

        Raises:
            RankError: there is not so much memory; on every rank.
        """
        sizes = [math.prod(shape) * dtype.itemsize for shape, dtype in specs]
        starts = list(accumulate((-(-size // ALIGNMENT) * ALIGNMENT for size in sizes), initial=0))
        number, self._uses = self._uses % len(self._rooms), self._uses + 1
        if self._rooms[number].numel() < starts[-1]:
            self._rooms[number] = self._made(
                starts[-1]
            )  # the old one lives as long as anybody reads there
        room, found = self._rooms[number], zip(specs, starts, sizes, strict=False)
        return [
            room[start : start + size].view(dtype).view(tuple(shape))
            for (shape, dtype), start, size in found
        ]

    def clear(self) -> None:
        """Let go of all memory; it lives as long as a tensor in it."""
        self._rooms = [torch.empty(0, dtype=torch.uint8)] * len(self._rooms)

    def _made(self, nbytes: int) -> Tensor:
        """Memory of all ranks in one piece, of which each has made a part."""
        parts = demand(self._comm, -(-nbytes // self._comm.size))
        return parts[0].as_strided((nbytes,), (1,))
