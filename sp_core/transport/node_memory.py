"""Memory on which a device works and which all processes of a node can map: made by one rank, found by the others."""

from __future__ import annotations

import mmap
import os
import secrets
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
from torch import Tensor

from sp_core.transport.base import Handle, wait
from sp_core.transport.shared import NotShared, together

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

Work = Callable[[], object]
_NONCE_BYTES = 8


class Offer(NamedTuple):
    """Memory of one rank, for the others to map."""

    process: int
    address: int
    handle: bytes
    nbytes: int


class NodeMemory(Protocol):
    """What a window needs of a device. The methods that make or map memory raise OSError where that cannot be done."""

    def allocate(self, nbytes: int) -> tuple[Tensor, Offer]:
        """Memory of this rank, uint8 `(nbytes,)`, zero, and how the others find it."""
        ...

    def open(self, offer: Offer) -> Tensor:
        """Map the memory of another rank, as if on the own device."""
        ...

    def close(self, x: Tensor) -> None:
        """Give back what `open` gave."""
        ...

    def free(self, x: Tensor) -> None:
        """Give back what `allocate` gave, after all others have closed it."""
        ...

    def begin(self) -> None:
        """Let what is launched from now on wait for what has been computed so far."""
        ...

    def launch(self, work: Sequence[Work]) -> Handle:
        """Ask the device to do something, after what was launched before; the event comes when it has."""
        ...

    def copying(self, into: Tensor, part: Tensor) -> Work:
        """Return a copy, to be launched."""
        ...


def share_on_device(comm: Intracomm, memory: NodeMemory, nbytes: int) -> list[Tensor]:
    """Make memory of a device that all ranks see.

    Args:
        comm: an mpi4py communicator; all its ranks call this.
        memory: of this rank's device.
        nbytes: of this rank's part.

    Returns:
        The part of every rank, uint8 and zero, of so many bytes or a few more.

    Communication:
        At most six exchanges of a few bytes.

    Raises:
        NotShared: on every rank.
    """
    if not together(comm):
        raise NotShared(
            f"its {comm.size} ranks are on several machines, or in containers that do not see each other"
        )
    mine, offer, problem = _allocated(memory, max(nbytes, _NONCE_BYTES))
    offers = [found for found in comm.allgather(offer) if found is not None]
    parts: list[Tensor] = []
    if len(offers) == comm.size:
        parts, problem = _opened(memory, offers, mine, comm.rank)
    problems = comm.allgather(problem)
    if not any(problems):
        problems = comm.allgather(_misread(comm, memory, parts))
    if any(problems):
        give_back(comm, memory, mine, parts)
        rank = next(rank for rank, text in enumerate(problems) if text)
        raise NotShared(f"rank {rank} {problems[rank]}")
    return parts


def give_back(
    comm: Intracomm, memory: NodeMemory, mine: Tensor | None, parts: Sequence[Tensor]
) -> None:
    """Close what belongs to others, wait for them to do the same, and free the own part; every rank calls this."""
    for part in parts:
        if part is not mine:
            memory.close(part)
    comm.Barrier()
    if mine is not None:
        memory.free(mine)


def _allocated(memory: NodeMemory, nbytes: int) -> tuple[Tensor | None, Offer | None, str]:
    try:
        return *memory.allocate(nbytes), ""
    except OSError as error:
        return None, None, f"cannot allocate {nbytes:,} bytes on its device: {error}"


def _opened(
    memory: NodeMemory, offers: Sequence[Offer], mine: Tensor | None, own: int
) -> tuple[list[Tensor], str]:
    """Map the parts of all ranks. Return those before the first that cannot be mapped, and the reason."""
    parts: list[Tensor] = []
    assert mine is not None
    for rank, offer in enumerate(offers):
        try:
            parts.append(mine if rank == own else memory.open(offer))
        except OSError as error:
            return parts, f"cannot map the memory of rank {rank}: {error}"
    return parts, ""


def _misread(comm: Intracomm, memory: NodeMemory, parts: Sequence[Tensor]) -> str:
    """Write a number into the own part and look for those of the others; what was wrong, if anything."""
    mine, device = parts[comm.rank][:_NONCE_BYTES], parts[comm.rank].device
    number = torch.tensor([secrets.randbits(62)], device=device)
    _made(memory, memory.copying(mine, number.view(torch.uint8)))
    numbers = comm.allgather(int(number))
    found = torch.empty(comm.size, dtype=torch.int64, device=device)
    rows = found.view(torch.uint8).view(comm.size, _NONCE_BYTES)
    _made(
        memory,
        *(memory.copying(row, part[:_NONCE_BYTES]) for row, part in zip(rows, parts, strict=True)),
    )
    comm.Barrier()
    _made(memory, memory.copying(mine, torch.zeros_like(mine)))
    comm.Barrier()
    wrong = [
        rank
        for rank, (one, other) in enumerate(zip(numbers, found.tolist(), strict=True))
        if one != other
    ]
    return (
        f"finds something else in the memory of rank {wrong[0]} than was written there"
        if wrong
        else ""
    )


def _made(memory: NodeMemory, *work: Work) -> None:
    """Launch something and wait for it."""
    memory.begin()
    wait(memory.launch(work))


class FileMemory:
    """Host memory that has no name in any file system; others map it through the `/proc` entry of its owner.

    Attributes:
        mapped: the memory that lies at an address.
    """

    def __init__(self) -> None:
        self.mapped: dict[int, mmap.mmap] = {}
        self._files: dict[int, int] = {}

    def allocate(self, nbytes: int) -> tuple[Tensor, Offer]:
        """Make new memory."""
        file = os.memfd_create("sp_core")
        try:
            os.posix_fallocate(file, 0, nbytes)
            x = self._map(file, nbytes)
        except OSError:
            os.close(file)
            raise
        self._files[x.data_ptr()] = file
        return x, Offer(os.getpid(), x.data_ptr(), str(file).encode(), nbytes)

    def open(self, offer: Offer) -> Tensor:
        """Map the memory of another process, or of another thread."""
        file = os.open(f"/proc/{offer.process}/fd/{offer.handle.decode()}", os.O_RDWR)
        try:
            return self._map(file, offer.nbytes)
        finally:
            os.close(file)

    def close(self, x: Tensor) -> None:
        """Let go of a mapping, which ends with the last tensor in it."""
        self.mapped.pop(x.data_ptr(), None)

    def free(self, x: Tensor) -> None:
        """Let go of own memory."""
        self.close(x)
        os.close(self._files.pop(x.data_ptr()))

    def _map(self, file: int, nbytes: int) -> Tensor:
        memory = mmap.mmap(file, nbytes)
        x = torch.frombuffer(memory, dtype=torch.uint8)
        self.mapped[x.data_ptr()] = memory
        return x
