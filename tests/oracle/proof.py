"""Prove that a schedule computes its collective, and run a schedule in a single process."""

from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from sp_core.programs import (
    HALF,
    REDUCTIONS,
    Buffer,
    Combine,
    Message,
    Program,
    Region,
    Step,
)
from sp_core.programs.program import overlap

Value = tuple[tuple[int, int], ...]
"""An element as the sorted list of its addends: (rank, index in that rank's IN buffer) each."""

Memory = dict[Buffer, Any]
"""The elements of each buffer: a list of a `Value` each (None if undefined), or a tensor."""


@dataclass(frozen=True)
class Schedule:
    """Hold the programs of all ranks, and the collective that they compute together.

    Args:
        op: the collective.
        send, recv: for each rank, the sizes in elements of the pieces that it contributes, and of
            the pieces that it gets.
        root: the root of a broadcast or a reduction.
        programs: the program of each rank.
    """

    op: str
    send: tuple[tuple[int, ...], ...]
    recv: tuple[tuple[int, ...], ...]
    root: int
    programs: tuple[Program, ...]

    @property
    def size(self) -> int:
        """Return the number of ranks."""
        return len(self.programs)


class ScheduleError(AssertionError):
    """Report that a schedule is wrong; the text says on which rank and where."""


def verify(schedule: Schedule) -> None:
    """Run a schedule on symbols, and check all elements of the results.

    An element is a `Value`, the list of the input elements that were added up in it. A send is
    complete only when its message has been received, as in MPI with long messages. An all-reduce
    is run with OUT apart from IN, then with both as the same memory.

    Args:
        schedule: a schedule of any collective. Time and memory grow with the number of elements:
            use small ones.

    Raises:
        ScheduleError: an element of a result is not the sum of exactly the right inputs; an
            undefined element is sent or added; a buffer is used while a message is under way in
            it; a send or receive has no counterpart, or one of a different length; ranks wait for
            each other for ever.
    """
    modes = (False, True) if schedule.op == "all_reduce" else (False,)
    for aliased in modes:
        for rank in range(schedule.size):
            _no_conflicts(schedule, rank, aliased)
    for aliased in modes:
        memories = [_symbols(schedule, rank, aliased) for rank in range(schedule.size)]
        _carry_out(schedule, memories, _added)
        for rank, memory in enumerate(memories):
            for place, (value, wanted) in enumerate(
                zip(memory[Buffer.OUT], expected(schedule, rank), strict=True)
            ):
                if value != wanted:
                    raise ScheduleError(
                        f"rank {rank}, out[{place}] is the sum of {value}; "
                        f"it should be that of {wanted}"
                    )


def expected(schedule: Schedule, rank: int) -> list[Value]:
    """Return for each element of a rank's OUT the input elements that it must be the sum of."""
    ranks, received = range(schedule.size), schedule.recv[rank]
    match schedule.op:
        case "all_gather":
            return [((q, i),) for q in ranks for i in range(received[q])]
        case "all_to_all":
            starts = [sum(schedule.send[q][:rank]) for q in ranks]
            return [((q, starts[q] + i),) for q in ranks for i in range(received[q])]
        case "broadcast":
            return [((schedule.root, i),) for i in range(sum(received))]
    start = sum(schedule.send[rank][:rank]) if schedule.op == "reduce_scatter" else 0
    return [tuple((q, start + i) for q in ranks) for i in range(sum(received))]


def _symbols(schedule: Schedule, rank: int, aliased: bool) -> Memory:
    held = [((rank, i),) for i in range(sum(schedule.send[rank]))]
    result = held if aliased else [None] * sum(schedule.recv[rank])
    return {
        Buffer.IN: held,
        Buffer.OUT: result,
        Buffer.TMP: [None] * schedule.programs[rank].scratch,
    }


def _added(parts: Sequence[list[Value]]) -> list[Value]:
    return [tuple(sorted(sum(column, ()))) for column in zip(*parts, strict=True)]


def _no_conflicts(schedule: Schedule, rank: int, aliased: bool) -> None:
    """Raise ScheduleError if a step touches memory that a message is writing or reading."""
    program = schedule.programs[rank]
    for number, step in enumerate(program.steps):
        where = f"rank {rank}, step {number}"
        for region, other in _under_way(step, program.steps[number + 1 : number + program.depth]):
            if overlap(region, other, aliased):
                raise ScheduleError(f"{where}: {region} is used while {other} is under way")
        for combine in step.then:
            possible(combine, where, aliased)


def _under_way(step: Step, flying: Sequence[Step]) -> Iterator[tuple[Region, Region]]:
    """Yield pairs of regions in use at the same time, of which one or both are written."""
    received, sent = (
        [message.region for message in messages] for messages in (step.receives, step.sends)
    )
    coming = [message.region for other in flying for message in other.receives]
    going = [message.region for other in flying for message in other.sends]
    for place, region in enumerate(received):
        yield from ((region, other) for other in (*received[:place], *sent))
    for region in (*received, *(combine.into for combine in step.then)):
        yield from ((region, other) for other in (*coming, *going))
    for region in (*sent, *(part for combine in step.then for part in combine.parts)):
        yield from ((region, other) for other in coming)


def possible(combine: Combine, where: str, aliased: bool) -> None:
    """Raise ScheduleError if a sum overwrites addends that are read later in the same sum."""
    shared = [part for part in combine.parts if overlap(part, combine.into, aliased)]
    if any((part.start, part.stop) != (combine.into.start, combine.into.stop) for part in shared):
        raise ScheduleError(f"{where}: {combine.into} lies across one of its parts")
    if (
        any(part in combine.parts[2:] for part in shared)
        and combine.parts[0].buffer is not Buffer.TMP
    ):
        raise ScheduleError(
            f"{where}: {combine.into} is a later part, and the first part is no scratch to add in"
        )


class _Rank:
    """Track how far a rank has come in its program."""

    def __init__(self, number: int, program: Program, memories: Sequence[Memory]) -> None:
        self.number, self.program, self._memories = number, program, memories
        self.posted = self.complete = 0
        self.open: dict[int, int] = defaultdict(int)  # messages under way, by step

    def read(self, region: Region, where: str) -> Any:
        values = self._memories[self.number][region.buffer][region.start : region.stop]
        if len(values) != len(region) or (isinstance(values, list) and None in values):
            raise ScheduleError(f"{where}: {region} is not defined there")
        return values

    def write(self, region: Region, values: Any, where: str) -> None:
        buffer = self._memories[self.number][region.buffer]
        if region.stop > len(buffer) or len(values) != len(region):
            raise ScheduleError(
                f"{where}: {len(values)} elements do not fit {region} of {len(buffer)}"
            )
        buffer[region.start : region.stop] = values


Posted = deque[tuple[int, Message]]
"""Messages that are posted, each with the number of its step."""

Waiting = dict[tuple[int, int], Posted]
"""Posted messages by (source, destination)."""


def _carry_out(
    schedule: Schedule, memories: Sequence[Memory], combined: Callable[[Any], Any]
) -> None:
    ranks = [_Rank(number, program, memories) for number, program in enumerate(schedule.programs)]
    sent: Waiting = defaultdict(deque)
    coming: Waiting = defaultdict(deque)
    before: list[tuple[int, int]] = []
    while before != (now := [(rank.posted, rank.complete) for rank in ranks]):
        before = now
        for rank in ranks:
            _post(rank, sent, coming)
        for pair in list(sent):
            _meet(pair, ranks, sent[pair], coming[pair])
        for rank in ranks:
            _finish(rank, combined)
    stuck = [
        f"rank {rank.number} in step {rank.complete}"
        for rank in ranks
        if rank.complete < len(rank.program.steps)
    ]
    if stuck:
        raise ScheduleError(f"nobody can go on: {', '.join(stuck)}")


def _post(rank: _Rank, sent: Waiting, coming: Waiting) -> None:
    while rank.posted < min(len(rank.program.steps), rank.complete + rank.program.depth):
        step = rank.program.steps[rank.posted]
        for message in step.sends:
            sent[rank.number, message.peer].append((rank.posted, message))
        for message in step.receives:
            coming[message.peer, rank.number].append((rank.posted, message))
        rank.open[rank.posted] = len(step.sends) + len(step.receives)
        rank.posted += 1


def _meet(pair: tuple[int, int], ranks: Sequence[_Rank], sent: Posted, coming: Posted) -> None:
    """Deliver messages of which both sides are posted, in order."""
    source, dest = pair
    while sent and coming:
        (step, message), (other_step, other) = sent.popleft(), coming.popleft()
        where = f"message from rank {source}, step {step}, to rank {dest}, step {other_step}"
        ranks[dest].write(other.region, ranks[source].read(message.region, where), where)
        ranks[source].open[step] -= 1
        ranks[dest].open[other_step] -= 1


def _finish(rank: _Rank, combined: Callable[[Any], Any]) -> None:
    while rank.complete < rank.posted and rank.open[rank.complete] == 0:
        where = f"rank {rank.number}, step {rank.complete}"
        for combine in rank.program.steps[rank.complete].then:
            parts = [rank.read(part, where) for part in combine.parts]
            if len({len(part) for part in parts}) != 1:
                raise ScheduleError(f"{where}: parts of different lengths make {combine.into}")
            rank.write(combine.into, combined(parts), where)
        rank.complete += 1


def replay(schedule: Schedule, inputs: Sequence[Tensor], reduction: str = "sum") -> list[Tensor]:
    """Run a schedule in one process, one rank after the other, on ordinary tensors.

    Args:
        schedule: a schedule that `verify` accepts.
        inputs: one flat tensor for each rank.
        reduction: "sum", "max" or "min".

    Returns:
        One flat result for each rank.
    """
    memories: list[Memory] = []
    for x, recv, program in zip(inputs, schedule.recv, schedule.programs, strict=True):
        result, scratch = x.new_empty(sum(recv)), x.new_empty(program.scratch)
        memories.append({Buffer.IN: x, Buffer.OUT: result, Buffer.TMP: scratch})
    wide = torch.float32 if inputs[0].dtype in HALF else inputs[0].dtype

    def combined(parts: Sequence[Tensor]) -> Tensor:
        return reduce(REDUCTIONS[reduction], (part.to(wide) for part in parts)).to(inputs[0].dtype)

    _carry_out(schedule, memories, combined)
    return [memory[Buffer.OUT] for memory in memories]
