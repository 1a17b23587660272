"""Proof that a schedule does what it is for, without running it: every contribution counted once, no conflict, no deadlock."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Sequence

from sp_core.schedules.definition import Buffer, Combine, Message, Program, Region, Schedule, Step
from sp_core.schedules.expected import Value, expected

IN_PLACE = ("all_reduce",)
"""Collectives whose OUT may be the same memory as IN."""

Memory = dict[Buffer, list[Value | None]]


class ScheduleError(AssertionError):
    """A schedule that is wrong; the text says on which rank and where."""


def verify(schedule: Schedule) -> None:
    """Carry a schedule out on symbols.

    An element is the list of contributions that it is the sum of, (rank, place) each. A send is complete only when its message has
    been received, as MPI does it with long messages. OUT is tried apart from IN and, for what may be done in place, as the same
    memory.

    Args:
        schedule: of any collective. Time and memory grow with the number of elements: use small ones.

    Raises:
        ScheduleError: an element of a result is not the sum of exactly its contributions; something undefined is sent or added; a
            buffer is used while a message is under way in it; a message has no other side, or another length there; ranks wait for
            each other for ever.
    """
    modes = (False, True) if schedule.op in IN_PLACE else (False,)
    for rank, steps in enumerate(schedule.programs):
        for aliased in modes:
            _no_conflicts(rank, steps, aliased)
    for aliased in modes:
        memories = [_memory(schedule, rank, aliased) for rank in range(schedule.size)]
        _carry_out(schedule, memories)
        for rank, memory in enumerate(memories):
            _same(schedule, rank, memory[Buffer.OUT])


def _memory(schedule: Schedule, rank: int, aliased: bool) -> Memory:
    held: list[Value | None] = [((rank, i),) for i in range(sum(schedule.send[rank]))]
    result: list[Value | None] = held if aliased else [None] * sum(schedule.recv[rank])
    return {Buffer.IN: held, Buffer.OUT: result, Buffer.TMP: [None] * schedule.programs[rank].scratch}


def _no_conflicts(rank: int, program: Program, aliased: bool) -> None:
    """What is received into is not touched before it is complete, what is sent is not written."""
    for number, step in enumerate(program.steps):
        flying = program.steps[number + 1 : number + program.depth]
        for region, other in (*_in_flight(step, flying), *_combined(step, flying)):
            if _overlap(region, other, aliased):
                raise ScheduleError(f"rank {rank}, step {number}: {region} is used while {other} is under way")
        for combine in step.then:
            _possible(combine, f"rank {rank}, step {number}", aliased)


Pairs = Iterator[tuple[Region, Region]]


def _in_flight(step: Step, flying: Sequence[Step]) -> Pairs:
    """Pairs of messages of this step and of those beside it, one of them received."""
    received = [message.region for message in step.receives]
    sent = [message.region for message in step.sends]
    coming = [message.region for other in flying for message in other.receives]
    going = [message.region for other in flying for message in other.sends]
    for place, region in enumerate(received):
        yield from ((region, other) for other in (*received[:place], *sent, *coming, *going))
    yield from ((region, other) for region in sent for other in coming)


def _combined(step: Step, flying: Sequence[Step]) -> Pairs:
    """Pairs of what a step combines and a message that must not be touched by it."""
    coming = [message.region for other in flying for message in other.receives]
    going = [message.region for other in flying for message in other.sends]
    for combine in step.then:
        yield from ((combine.into, other) for other in (*coming, *going))
        yield from ((part, other) for part in combine.parts for other in coming)


def _possible(combine: Combine, where: str, aliased: bool) -> None:
    """Whether the result may be written where it is while the parts are read one after the other."""
    shared = [part for part in combine.parts if _overlap(part, combine.into, aliased)]
    if any((part.start, part.stop) != (combine.into.start, combine.into.stop) for part in shared):
        raise ScheduleError(f"{where}: {combine.into} lies across one of its parts")
    if any(part in combine.parts[2:] for part in shared) and combine.parts[0].buffer is not Buffer.TMP:
        raise ScheduleError(f"{where}: {combine.into} is a later part, and the first part is no scratch to add in")


def _overlap(one: Region, other: Region, aliased: bool) -> bool:
    same = one.buffer is other.buffer or (aliased and Buffer.TMP not in (one.buffer, other.buffer))
    return same and one.start < other.stop and other.start < one.stop


class _Rank:
    """How far a rank has come."""

    def __init__(self, program: Program, memory: Memory) -> None:
        self.program = program
        self.memory = memory
        self.posted = self.complete = 0
        self.open: dict[int, int] = defaultdict(int)  # messages under way, by step

    def read(self, region: Region, where: str) -> list[Value]:
        values = self.memory[region.buffer][region.start : region.stop]
        if len(values) != len(region) or None in values:
            raise ScheduleError(f"{where}: {region} is not defined there")
        return [value for value in values if value is not None]

    def write(self, region: Region, values: Sequence[Value], where: str) -> None:
        buffer = self.memory[region.buffer]
        if region.stop > len(buffer) or len(values) != len(region):
            raise ScheduleError(f"{where}: {len(values)} elements do not fit {region} of {len(buffer)}")
        buffer[region.start : region.stop] = values


Posted = deque[tuple[int, Message]]
"""Messages with the number of their step."""

Waiting = dict[tuple[int, int], Posted]
"""By source and destination."""


def _carry_out(schedule: Schedule, memories: Sequence[Memory]) -> None:
    ranks = [_Rank(program, memory) for program, memory in zip(schedule.programs, memories, strict=True)]
    sent: Waiting = defaultdict(deque)
    coming: Waiting = defaultdict(deque)
    while True:
        before = [(rank.posted, rank.complete) for rank in ranks]
        for number, rank in enumerate(ranks):
            _post(number, rank, sent, coming)
        for pair in list(sent):
            _meet(pair, ranks, sent[pair], coming[pair])
        for number, rank in enumerate(ranks):
            _finish(number, rank)
        if before == [(rank.posted, rank.complete) for rank in ranks]:
            break
    stuck = [f"rank {n} in step {r.complete}" for n, r in enumerate(ranks) if r.complete < len(r.program.steps)]
    if stuck:
        raise ScheduleError(f"nobody can go on: {', '.join(stuck)}")


def _post(number: int, rank: _Rank, sent: Waiting, coming: Waiting) -> None:
    while rank.posted < min(len(rank.program.steps), rank.complete + rank.program.depth):
        step = rank.program.steps[rank.posted]
        for message in step.sends:
            sent[number, message.peer].append((rank.posted, message))
        for message in step.receives:
            coming[message.peer, number].append((rank.posted, message))
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


def _finish(number: int, rank: _Rank) -> None:
    while rank.complete < rank.posted and rank.open[rank.complete] == 0:
        where = f"rank {number}, step {rank.complete}"
        for combine in rank.program.steps[rank.complete].then:
            parts = [rank.read(part, where) for part in combine.parts]
            if len({len(part) for part in parts}) != 1:
                raise ScheduleError(f"{where}: parts of different lengths make {combine.into}")
            rank.write(combine.into, [tuple(sorted(sum(column, ()))) for column in zip(*parts, strict=True)], where)
        rank.complete += 1


def _same(schedule: Schedule, rank: int, found: Sequence[Value | None]) -> None:
    for place, (value, wanted) in enumerate(zip(found, expected(schedule, rank), strict=True)):
        if value != wanted:
            raise ScheduleError(f"rank {rank}, out[{place}] is the sum of {value}; it should be that of {wanted}")
