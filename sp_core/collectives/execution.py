"""Carries a schedule out: messages are posted, and what has come is combined, whenever somebody asks how far it is.

A program is bound to memory once: its regions become views, its messages what the transport takes, its combinations calls that
write into existing memory. After that a run makes no tensor. All messages of a run are announced when it starts, under a tag of
their own; so each rank posts them when it is ready, and several collectives may be under way on a communicator.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from sp_core.communicator import Communicator
from sp_core.schedules import HALF, REDUCTIONS, WIDE_BLOCK, Buffer, Combine, Message, Program, cost, wide_length
from sp_core.scratch import Scratch
from sp_core.transport import Bound, Done, Handle, Messages, wait

Work = Callable[[], object]


@dataclass(frozen=True)
class Memory:
    """The memory of one rank: flat vectors by buffer, and room for sums of half types in float32."""

    buffers: dict[Buffer, Tensor]
    wide: tuple[Tensor, Tensor]

    def view(self, region_of: Message | Combine) -> Tensor:
        """The memory of a message, or of the result of a combination."""
        region = region_of.region if isinstance(region_of, Message) else region_of.into
        return self.buffers[region.buffer][region.start : region.stop]

    def of(self, combine: Combine) -> tuple[Tensor, list[Tensor]]:
        """The memory of the result of a combination, and of what is combined."""
        return self.view(combine), [self.buffers[part.buffer][part.start : part.stop] for part in combine.parts]


@dataclass(frozen=True)
class BoundStep:
    """A step whose messages and combinations know their memory."""

    sends: Bound
    recvs: Bound
    messages: int
    bytes_sent: int
    work: tuple[Work, ...]
    rewritten: int
    """The first step before which the sends must have left."""


class BoundProgram:
    """A program on memory, ready to run any number of times, one after the other.

    Args:
        comm: the ranks.
        name: the operation that it counts for.
        program: what this rank does.
        send, recv: flat contiguous IN and OUT; None where this rank has none.
        reduction: "sum", "max" or "min".
        scratch: where scratch memory comes from.
    """

    def __init__(
        self,
        comm: Communicator,
        name: str,
        program: Program,
        send: Tensor | None,
        recv: Tensor | None,
        reduction: str,
        scratch: Scratch,
    ) -> None:
        like = send if send is not None else recv
        assert like is not None
        self.comm, self.name, self.depth, self.device = comm, name, program.depth, like.device
        self._scratch_bytes = cost(program, like.dtype).scratch
        self._scratch = scratch
        self._block = scratch.take(self._scratch_bytes)
        memory = _memory(self._block, program, like, send, recv)
        self._sends, self._recvs = _all_messages(program, memory)
        self.steps = list(_bound(comm, program, memory, reduction, _rewritten(program, send, recv)))

    def start(self) -> Running:
        """Begin a run. The memory must not be touched until it is complete."""
        self.comm.counters[self.name].add(scratch=self._scratch_bytes)
        self.comm.transport.announce(self._sends, self._recvs)
        return Running(self)

    def run(self) -> None:
        """A run to its end."""
        wait(self.start(), self.comm.poll)

    def release(self) -> None:
        """Give the scratch back, after the last run."""
        self._scratch.give(self._block)


class Running:
    """A run under way; a handle.

    What it launches on a device follows what was launched before it began, whoever asks how far it is, and the results are complete
    on the stream of whoever is told that it is done.
    """

    def __init__(self, bound: BoundProgram) -> None:
        self._bound = bound
        self._tag = bound.comm.next_tag()
        self._count = bound.comm.counters[bound.name]
        self._posted = 0
        self._under_way: deque[tuple[Handle, tuple[Work, ...]]] = deque()
        self._leaving: list[tuple[int, Handle]] = []  # sends, and the step that has to wait for them
        self._stream = torch.cuda.current_stream(bound.device) if bound.device.type == "cuda" else None
        self._post()

    def test(self) -> bool:
        """Combine what has come and post what is next; True once all is done."""
        if self._stream is None:
            return self._advance()
        with torch.cuda.stream(self._stream):
            complete = self._advance()
        if complete:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)
        return complete

    def _advance(self) -> bool:
        self._post()
        while self._under_way:
            handle, work = self._under_way[0]
            if not handle.test():
                self._have_left(self._posted)  # a transport may need to be asked before it sends
                return False
            for item in work:
                item()
            self._under_way.popleft()
            self._post()
        return self._posted == len(self._bound.steps) and self._have_left(self._posted)

    def _post(self) -> None:
        """Post steps until as many are under way as may be, or the next one writes to what is still being sent."""
        bound = self._bound
        while len(self._under_way) < bound.depth and self._posted < len(bound.steps) and self._have_left(self._posted):
            step = bound.steps[self._posted]
            handle: Handle = _DONE
            if step.sends or step.recvs:
                handle = self._begin(step)
                self._count.messages += step.messages
                self._count.bytes_sent += step.bytes_sent
            self._posted += 1
            self._under_way.append((handle, step.work))

    def _begin(self, step: BoundStep) -> Handle:
        """Post the messages of a step; its sends apart, where what it receives can be worked on before they have left."""
        transport = self._bound.comm.transport
        if not step.sends or step.rewritten == self._posted:
            return transport.post(step.sends, step.recvs, self._tag)
        handle = transport.post((), step.recvs, self._tag) if step.recvs else _DONE
        self._leaving.append((step.rewritten, transport.post(step.sends, (), self._tag)))
        return handle

    def _have_left(self, step: int) -> bool:
        """Whether everything has left that has to before a step."""
        if self._leaving:
            self._leaving = [(first, handle) for first, handle in self._leaving if not handle.test()]
        return all(first > step for first, _ in self._leaving)


class Ready(Protocol):
    """A collective on memory, ready to run any number of times, one after the other."""

    def start(self) -> Handle:
        """Begin a run. The memory must not be touched until it is complete."""
        ...

    def run(self) -> None:
        """A run to its end."""
        ...

    def release(self) -> None:
        """Give scratch back, after the last run."""
        ...


class Once:
    """The only run of a collective; its scratch goes back to the communicator when it is complete."""

    def __init__(self, bound: Ready) -> None:
        self._bound: Ready | None = bound
        self._running = bound.start()

    def test(self) -> bool:
        """As `Running.test`."""
        complete = self._running.test()
        if complete and self._bound is not None:
            self._bound.release()
            self._bound = None
        return complete


_DONE = Done()


def _memory(block: Tensor, program: Program, like: Tensor, send: Tensor | None, recv: Tensor | None) -> Memory:
    """Buffers of a program; scratch holds TMP, after the room for sums in float32."""
    length, nothing = wide_length(program, like.dtype), like.new_empty(0)
    room = block[: length * 8].view(torch.float32)
    tmp = block[length * 8 : length * 8 + program.scratch * like.itemsize].view(like.dtype)
    buffers = {Buffer.IN: nothing if send is None else send, Buffer.OUT: nothing if recv is None else recv, Buffer.TMP: tmp}
    return Memory(buffers, (room[:length], room[length:]))


def _all_messages(program: Program, memory: Memory) -> tuple[Messages, Messages]:
    sends = [(message.peer, memory.view(message)) for step in program.steps for message in step.sends]
    recvs = [(message.peer, memory.view(message)) for step in program.steps for message in step.receives]
    return sends, recvs


def _rewritten(program: Program, send: Tensor | None, recv: Tensor | None) -> Sequence[int]:
    """By step, the first one before which its sends must have left; the step itself where IN and OUT overlap in part."""
    if send is None or recv is None or not _overlap(send, recv):
        return program.rewritten
    return program.rewritten_in_place if send.data_ptr() == recv.data_ptr() else range(len(program.steps))


def _overlap(one: Tensor, other: Tensor) -> bool:
    return one.data_ptr() < other.data_ptr() + other.nbytes and other.data_ptr() < one.data_ptr() + one.nbytes


def _bound(comm: Communicator, program: Program, memory: Memory, reduction: str, rewritten: Sequence[int]) -> Iterator[BoundStep]:
    for step, first in zip(program.steps, rewritten, strict=True):
        sends = [(message.peer, memory.view(message)) for message in step.sends]
        recvs = [(message.peer, memory.view(message)) for message in step.receives]
        work = tuple(item for combine in step.then for item in combination(*memory.of(combine), memory.wide, reduction))
        nbytes = sum(x.nbytes for _, x in sends)
        yield BoundStep(comm.transport.bind(sends), comm.transport.bind(recvs), len(sends), nbytes, work, first)


def combination(into: Tensor, parts: list[Tensor], wide: tuple[Tensor, Tensor] | None, reduction: str) -> Iterator[Work]:
    """The calls that bring the sum (or max, min) of some vectors into another one; `wide` is room for sums of half types."""
    together = REDUCTIONS[reduction]
    if len(parts) == 1:
        if not _same(into, parts[0]):
            yield partial(into.copy_, parts[0])
    elif len(parts) > 2 and into.dtype in HALF:
        assert wide is not None
        yield partial(_add_wide, into, parts, wide, together)
    else:
        total = parts[0] if any(_same(into, part) for part in parts[2:]) else into
        for place, part in enumerate(parts[1:]):
            left = total if place else parts[0]
            yield partial(together, left, part, out=into if place == len(parts) - 2 else total)


def _same(one: Tensor, other: Tensor) -> bool:
    return one.data_ptr() == other.data_ptr() and one.numel() > 0


def _add_wide(into: Tensor, parts: list[Tensor], wide: tuple[Tensor, Tensor], together: Callable[..., Tensor]) -> None:
    """Add half types in float32 and round once, block by block, in room that is there already."""
    for start in range(0, into.numel(), WIDE_BLOCK):
        first, *rest = (part[start : start + WIDE_BLOCK] for part in parts)
        total, addend = (room[: first.numel()] for room in wide)
        total.copy_(first)
        for part in rest:
            together(total, addend.copy_(part), out=total)
        into[start : start + WIDE_BLOCK].copy_(total)
