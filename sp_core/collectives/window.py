"""Carries a collective out in the memory that the ranks of a node share.

Its steps depend on the slots that it begins with; they are bound to memory when they are first needed, and kept for the next run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from sp_core.collectives.execution import combination
from sp_core.communicator import Communicator
from sp_core.counters import Count
from sp_core.schedules import SLOTS, Buffer, Gather, InWindow, Place, WindowTask, in_window, widest_sum
from sp_core.scratch import Scratch
from sp_core.transport import Operation, Transfer

Work = Callable[[], object]


@dataclass(frozen=True)
class BoundSteps:
    """Steps on memory, and what they read from other ranks' memory."""

    steps: list[list[Work]]
    messages: int
    bytes_read: int
    scratch: int


class BoundWindow:
    """A collective in shared memory, ready to run any number of times.

    Args:
        comm: ranks that have a window.
        transfer: what moves.
        send, recv: flat contiguous IN and OUT; None where this rank has none.
        scratch: where room for sums in float32 comes from.
        resident: IN lives in shared memory on every rank, at the same place.
    """

    def __init__(
        self,
        comm: Communicator,
        transfer: Transfer,
        send: Tensor | None,
        recv: Tensor | None,
        scratch: Scratch,
        *,
        resident: bool = False,
    ) -> None:
        assert comm.window is not None
        self._comm, self._window, self._transfer = comm, comm.window, transfer
        self._send, self._recv = send, recv
        self._scratch, self._resident = scratch, resident
        self._like = cast("Tensor", send if send is not None else recv)
        self._block = scratch.take(0)
        self._what = f"{transfer.op} in a window: {transfer.reduction}, {transfer.steps} x {self._like.dtype}, {transfer.root}"
        self._bound: dict[int, BoundSteps] = {}
        self._name = transfer.op.value

    def start(self) -> Operation:
        """Begin a run. The memory must not be touched until it is complete."""
        return self._window.start(self._next(), self._what)

    def run(self) -> None:
        """A run to its end."""
        self._window.make(self._next(), self._what, self._comm.poll)

    def _next(self) -> list[list[Work]]:
        """The steps of a run that begins now; it is counted."""
        first = self._window.begun % SLOTS
        if first not in self._bound:
            self._bound[first] = self._bind(first)
        bound = self._bound[first]
        count: Count = self._comm.counters[self._name]
        count.add(messages=bound.messages, bytes_sent=bound.bytes_read, scratch=bound.scratch)
        return bound.steps

    def release(self) -> None:
        """Give the scratch back, after the last run."""
        self._scratch.give(self._block)

    def _bind(self, first: int) -> BoundSteps:
        program = in_window(self._task(first))
        length = widest_sum(program, self._like.dtype)
        if self._block.numel() < 8 * length:
            self._block = self._scratch.take(8 * length)
        wide = self._block[: 8 * length].view(torch.float32).split(length or 1)
        return _Binding(self, program, (wide[0], wide[1]) if length else None).steps()

    def _task(self, first: int) -> WindowTask:
        transfer, window = self._transfer, self._window
        return WindowTask(
            *(transfer.op.value, self._comm.rank, self._comm.size, transfer.send, transfer.recv, transfer.steps, transfer.root),
            itemsize=self._like.itemsize,
            slot=window.slot_bytes // self._like.itemsize,
            first=first,
            resident=self._resident,
            in_place=self._send is not None and self._send is self._recv,
        )

    def buffers(self) -> Callable[[Place], Tensor]:
        """What gives the memory of a place."""
        nothing = self._like.new_empty(0)
        own = {Buffer.IN: nothing if self._send is None else self._send, Buffer.OUT: nothing if self._recv is None else self._recv}
        tmp = [memory.view(self._like.dtype) for memory in self._window.slots]
        peers = self._window.peers(cast("Tensor", self._send)) if self._resident else []

        def memory(place: Place) -> Tensor:
            buffer, start, stop = place.region.buffer, place.region.start, place.region.stop
            if buffer is Buffer.TMP:
                return tmp[place.rank][start:stop]
            return (own[buffer] if place.rank == self._comm.rank else peers[place.rank])[start:stop]

        return memory

    def copying(self, into: Tensor, part: Tensor) -> Work:
        """A copy."""
        return self._window.copying(into, part)

    @property
    def reduction(self) -> str:
        """The sum, or what takes its place."""
        return self._transfer.reduction


class _Binding:
    """Binds a program to memory, and counts what it reads and writes."""

    def __init__(self, bound: BoundWindow, program: InWindow, wide: tuple[Tensor, Tensor] | None) -> None:
        self._memory, self._reduction, self._program, self._wide = bound.buffers(), bound.reduction, program, wide
        self._copying = bound.copying
        self._read: list[Tensor] = []
        self._used: dict[int, int] = {}

    def steps(self) -> BoundSteps:
        """The steps as calls that write into existing memory."""
        steps = [[work for gather in step for work in self._work(gather)] for step in self._program.steps]
        scratch = sum(self._used.values()) + (0 if self._wide is None else sum(room.nbytes for room in self._wide))
        return BoundSteps(steps, len(self._read), sum(x.nbytes for x in self._read), scratch)

    def _work(self, gather: Gather) -> Iterator[Work]:
        rank = self._program.rank
        into, parts = self._memory(Place(rank, gather.into)), [self._memory(place) for place in gather.parts]
        self._read += [x for x, place in zip(parts, gather.parts, strict=True) if place.rank != rank]
        if gather.into.buffer is Buffer.TMP:
            slot, start = divmod(gather.into.start, self._program.slot)
            self._used[slot] = max(self._used.get(slot, 0), start * into.itemsize + into.nbytes)
        if len(parts) > 1:
            yield from combination(into, parts, self._wide, self._reduction)
        elif into.data_ptr() != parts[0].data_ptr():
            yield self._copying(into, parts[0])
