"""Run a collective: in messages, by the MPI library, or in memory that the ranks share.

`bind` prepares a collective on fixed memory and returns a `Ready`. The regions of its program
become views of that memory. The messages take the form that the transport sends, and the sums and
copies become calls. A run (one execution) makes no new tensors. When a run begins, it tells the
communicator's observer what it will send; only those of tests look at it. The messages of a run
have their own tag, and each rank posts them when ready, so several runs may be under way.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable
from functools import cached_property, partial
from itertools import chain

import torch
from torch import Tensor

from sp_core.collectives.combining import combination
from sp_core.communicator import Communicator
from sp_core.programs import (
    OWN,
    SLOTS,
    Buffer,
    Message,
    Operation,
    Program,
    Region,
    cost,
    program_of,
    segment_length,
    wide_length,
)
from sp_core.scratch import Scratch, used
from sp_core.transport import Bound, Broken, Done, Handle, Transfer, Work, ordered, wait


def bind(
    comm: Communicator,
    operation: Operation,
    send: Tensor | None,
    recv: Tensor | None,
    algorithm: str,
    scratch: Scratch,
    *,
    resident: bool = False,
) -> Ready:
    """Prepare a collective on fixed memory, to be run any number of times.

    Args:
        comm: the communicator whose ranks run the collective.
        operation: this rank's view of the collective.
        send, recv: flat contiguous input and output (IN and OUT); None if this rank has none. They
            are one object, or share no memory: if two views overlap, sums may overwrite what is
            still being sent.
        algorithm: a name of `sp_core.programs.ALGORITHMS`, but not "auto".
        scratch: provides scratch memory.
        resident: whether all ranks have agreed that IN lies in tensors of one call of
            `shared_empty`, at the same offset on every rank.

    Returns:
        A `Library` for "mpi", a `BoundWindow` for "window", else a `BoundProgram`.

    Raises:
        RankError: the communicator has been freed.
    """
    comm.ensure_open()
    if algorithm == "mpi":
        return Library(comm, operation, send, recv, scratch)
    if algorithm == "window":
        return BoundWindow(comm, operation._replace(resident=resident), send, recv, scratch)
    segment = segment_length(operation.elements, comm.size, operation.itemsize)
    program = program_of(operation._replace(segment=segment, nodes=comm.nodes), algorithm)
    return BoundProgram(comm, operation, send, recv, scratch, program)


class Ready(ABC):
    """Hold a collective on fixed memory, ready to run any number of times, one run after the other.

    A run is one execution of the collective. The constructor takes the arguments of `bind`.
    """

    def __init__(
        self,
        comm: Communicator,
        operation: Operation,
        send: Tensor | None,
        recv: Tensor | None,
        scratch: Scratch,
    ) -> None:
        like = send if send is not None else recv
        assert like is not None
        self.comm, self.operation, self.name = comm, operation, operation.op
        self.device, self.dtype, self._scratch = like.device, like.dtype, scratch
        self._buffers = send, recv
        self._block = nothing = like.new_empty(0)
        self._memory = {
            (OWN, Buffer.IN): nothing if send is None else send,
            (OWN, Buffer.OUT): nothing if recv is None else recv,
        }

    @abstractmethod
    def begin(self, *, once: bool = False) -> Handle:
        """Begin a run of the collective, and return a handle that says when the run is complete.

        All ranks must begin their collectives in the same order. Until the handle is complete, the
        caller must neither write the input nor read or write the output. With `once`, `release` is
        called when the run ends, so the collective cannot run again.
        """

    def start(self, *, once: bool = False) -> Handle:
        """Do what `begin` does, and let `comm.poll` test the handle."""
        begun, running = time.perf_counter(), self.begin(once=once)
        self.comm.counters[self.name].seconds += time.perf_counter() - begun
        return self.comm.track(running)

    def run(self, *, once: bool = False) -> None:
        """Run the collective to its end, and add the wall time to the counters of `comm`.

        With `once`, the end of the run calls `release`: the collective cannot run again.
        """
        if once:
            self.comm.wait(self.start(once=True), self.name)
            return
        begun, running = time.perf_counter(), self.begin()
        try:
            wait(running, self.comm.poll, self.comm.look)
        except BaseException:  # MPI may go on and use the memory
            self.comm.track(Transfer([running.test], keep=self))
            raise
        self.comm.counters[self.name].seconds += time.perf_counter() - begun

    def release(self) -> None:
        """Give the scratch memory back, for other collectives. This one cannot run afterwards."""
        self._scratch.give(self._block)

    def _view(self, region: Region) -> Tensor:
        return self._memory[region.rank, region.buffer][region.start : region.stop]

    def _work(
        self, program: Program, copying: Callable[[Tensor, Tensor], Work]
    ) -> list[tuple[Work, ...]]:
        """Return, for each step of a program, the calls that make its sums and copies.

        Take scratch memory for half-type sums in float32, and for TMP unless the ranks share it.

        Args:
            program: the steps of this rank.
            copying: a function that returns the call that copies its second argument into its
                first.
        """
        length = wide_length(program, self.dtype)
        own = 0 if (OWN, Buffer.TMP) in self._memory else program.scratch
        nbytes = 8 * length + own * self.dtype.itemsize
        if self._block.numel() < nbytes:
            self._block = self._scratch.take(nbytes)
        room = self._block[: 8 * length].view(torch.float32)
        self._memory.setdefault(
            (OWN, Buffer.TMP), self._block[8 * length : nbytes].view(self.dtype)
        )
        bring = partial(
            combination,
            wide=(room[:length], room[length:]),
            reduction=self.operation.reduction,
            copying=copying,
        )
        return [
            tuple(
                item
                for c in step.then
                for item in bring(self._view(c.into), [self._view(part) for part in c.parts])
            )
            for step in program.steps
        ]


class Library(Ready):
    """Run a collective by the transport, which for host tensors calls the MPI library.

    MPI has no shift, so for a shift each rank sends one message and receives one.
    """

    def begin(self, *, once: bool = False) -> Handle:
        """Begin a run of the collective, and return its handle, which `comm.poll` tests.

        `once` changes nothing, because there is no scratch memory.
        """
        comm, operation, (send, recv) = self.comm, self.operation, self._buffers
        if operation.op != "shift":
            return comm.start(operation, send, recv)
        assert send is not None
        assert recv is not None
        dest, source = ((comm.rank + way * operation.root) % comm.size for way in (1, -1))
        if dest == comm.rank:
            recv.copy_(send)
            return comm.exchange([], [], "shift")
        return comm.exchange([(dest, send)], [(source, recv)], "shift")

    def start(self, *, once: bool = False) -> Handle:
        """Do what `begin` does. The communicator's own methods have counted and tracked the run."""
        return self.begin()

    def run(self, *, once: bool = False) -> None:
        """Run the collective to its end. `once` changes nothing, because there is no scratch."""
        if self.operation.op == "shift":
            self.comm.wait(self.begin(), self.name)
        else:
            self.comm.run(self.operation, self._call)

    @cached_property
    def _call(self) -> Work:
        """Return the function that runs the collective, prepared once."""
        with torch.inference_mode(False):  # later runs may be outside of that mode
            return self.comm.transport.prepare(self.operation, *self._buffers)


class BoundProgram(Ready):
    """Run a collective by messages, as `program`, the last argument, describes.

    Attributes:
        steps: for each step, (sends, receives, the calls that sum and copy, the number of the step
            that overwrites memory of the sends, and so begins once they are complete).
    """

    def __init__(
        self,
        comm: Communicator,
        operation: Operation,
        send: Tensor | None,
        recv: Tensor | None,
        scratch: Scratch,
        program: Program,
    ) -> None:
        super().__init__(comm, operation, send, recv, scratch)
        self.depth, self._cost = program.depth, cost(program, self.dtype)
        work = self._work(program, lambda into, part: partial(into.copy_, part))
        sends = [self._messages(step.sends) for step in program.steps]
        recvs = [self._messages(step.receives) for step in program.steps]
        self._sends, self._recvs = list(chain(*sends)), list(chain(*recvs))
        bound = (map(comm.transport.bind, messages) for messages in (sends, recvs))
        rewritten = program.rewritten_in_place if send is recv else program.rewritten
        self.steps: list[tuple[Bound, Bound, tuple[Work, ...], int]] = list(
            zip(*bound, work, rewritten, strict=True)
        )

    def _messages(self, messages: Iterable[Message]) -> list[tuple[int, Tensor]]:
        return [(message.peer, self._view(message.region)) for message in messages]

    def begin(self, *, once: bool = False) -> Handle:
        """Tell the communicator's observer what will be sent, begin, and return the handle.

        On a device, the work of the run follows what was queued on the current stream before. The
        handle may be tested on any stream.
        """
        self.comm.counters[self.name].add(**self._cost)
        used(self._block)
        running = Running(self, self.comm.transport.announce(self._sends, self._recvs))
        return ordered(
            Transfer([running.test], after=self.release) if once else running, self.device
        )


class Running:
    """Represent one execution (run) of a `BoundProgram`; a `Handle`. It advances only in `test`.

    The run ends after `told`: then the communicator's observer knows what will be sent.
    """

    def __init__(self, bound: BoundProgram, told: Handle) -> None:
        self._bound = bound
        self._tag = bound.comm.next_tag()
        self._posted = 0
        self._under_way: deque[tuple[Handle, tuple[Work, ...]]] = deque()
        # (step that must wait, handle it waits for); the step after the last is the end
        self._leaving = [] if told.test() else [(len(bound.steps), told)]
        self._post()

    def test(self) -> bool:
        """Combine what has arrived and post the next steps, without waiting.

        Return True once all steps are made and all sends have completed.
        """
        self._post()
        while self._under_way:
            handle, work = self._under_way[0]
            if not handle.test():
                self._have_left(self._posted)  # some transports send only when tested
                return False
            try:
                for item in work:
                    item()
                self._under_way.popleft()
            except BaseException:
                self._under_way.appendleft((Broken(), ()))
                raise
            self._post()
        return self._posted == len(self._bound.steps) and self._have_left(self._posted)

    def _post(self) -> None:
        """Start steps until `depth` are under way, or the next writes where a send still reads."""
        bound = self._bound
        while (
            len(self._under_way) < bound.depth
            and self._posted < len(bound.steps)
            and self._have_left(self._posted)
        ):
            sends, recvs, work, rewritten = bound.steps[self._posted]
            handle = self._begin(sends, recvs, rewritten) if sends or recvs else _DONE
            self._posted += 1
            self._under_way.append((handle, work))

    def _begin(self, sends: Bound, recvs: Bound, rewritten: int) -> Handle:
        """Post the messages of a step, and return the handle that its combinations wait for.

        `_leaving` keeps the handle of the sends if only later steps must wait for these.
        """
        transport = self._bound.comm.transport
        if not sends or rewritten == self._posted:
            return transport.post(sends, recvs, self._tag)
        handle = transport.post((), recvs, self._tag) if recvs else _DONE
        self._leaving.append((rewritten, transport.post(sends, (), self._tag)))
        return handle

    def _have_left(self, step: int) -> bool:
        """Return whether all sends have completed that must do so before step `step` is posted."""
        if self._leaving:
            self._leaving = [
                (first, handle) for first, handle in self._leaving if not handle.test()
            ]
        return all(first > step for first, _ in self._leaving)


class BoundWindow(Ready):
    """Run a collective in memory that the ranks share.

    The steps of a run depend on the slot (buffer in shared memory) that it begins with. For each
    slot the steps are bound to memory when first needed, and kept. If the argument `operation` is
    `resident`, the inputs are tensors of one call of `shared_empty`, at the same offset.
    """

    def __init__(
        self,
        comm: Communicator,
        operation: Operation,
        send: Tensor | None,
        recv: Tensor | None,
        scratch: Scratch,
    ) -> None:
        super().__init__(comm, operation, send, recv, scratch)
        assert comm.window is not None
        self._window = window = comm.window
        self._operation = operation._replace(
            slot=window.slot_bytes // self.dtype.itemsize,
            in_place=send is not None and send is recv,
        )
        self._memory |= {
            (rank, Buffer.TMP): memory.view(self.dtype) for rank, memory in enumerate(window.slots)
        }
        self._memory[OWN, Buffer.TMP] = self._memory[comm.rank, Buffer.TMP]
        if operation.resident and send is not None:
            self._memory |= {
                (rank, buffer): memory
                for rank, memory in enumerate(window.peers(send))
                for buffer in (Buffer.IN, Buffer.OUT)
            }
        self._what = (
            f"{operation.op} in a window: {operation.reduction}, {operation.longest} x "
            f"{self.dtype}, {operation.root}"
        )
        self._bound: dict[int, tuple[list[tuple[Work, ...]], dict[str, int]]] = {}

    def begin(self, *, once: bool = False) -> Handle:
        """Begin a run of the collective, in the same order on all ranks, and return its handle."""
        first = self._window.begun % SLOTS
        if first not in self._bound:
            program = program_of(self._operation._replace(first=first), "window")
            with torch.inference_mode(False):  # later runs may be outside of that mode
                work = self._work(program, self._window.memory.copying)
            self._bound[first] = work, cost(program, self.dtype)
        steps, figures = self._bound[first]
        self.comm.counters[self.name].add(**figures)
        after = self.release if once else None
        # copies of a device do not keep their memory alive
        return self._window.start(steps, self._what, keep=self, after=after)


_DONE = Done()
