"""A schedule carried out by one process, one rank after the other, on ordinary tensors: what the ranks must get, bit by bit."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from sp_core.schedules.definition import Buffer, Combine, Region, Schedule

HALF = (torch.bfloat16, torch.float16)
"""Types whose sums are made in float32 and rounded once."""

REDUCTIONS: dict[str, Callable[..., Tensor]] = {"sum": torch.add, "max": torch.maximum, "min": torch.minimum}


def replay(schedule: Schedule, inputs: Sequence[Tensor], reduction: str = "sum") -> list[Tensor]:
    """The results of all ranks.

    Args:
        schedule: one that `verify` accepts.
        inputs: by rank, flat.
        reduction: "sum", "max" or "min".

    Returns:
        By rank, flat.
    """
    like = inputs[0]
    memories = [
        {Buffer.IN: x, Buffer.OUT: like.new_empty(sum(recv)), Buffer.TMP: like.new_empty(program.scratch)}
        for x, recv, program in zip(inputs, schedule.recv, schedule.programs, strict=True)
    ]
    mail: Mail = defaultdict(deque)
    at_work = [_rank(schedule, rank, memories[rank], mail, reduction) for rank in range(schedule.size)]
    while at_work:
        at_work = [steps for steps in at_work if next(steps, "ended") != "ended"]
    return [memory[Buffer.OUT] for memory in memories]


Mail = dict[tuple[int, int], "deque[Tensor]"]


def _rank(schedule: Schedule, rank: int, memory: dict[Buffer, Tensor], mail: Mail, reduction: str) -> Iterator[str]:
    """One rank's steps; it yields where a message is not there yet."""
    for step in schedule.programs[rank].steps:
        for message in step.sends:
            mail[rank, message.peer].append(_view(memory, message.region).clone())
        for message in step.receives:
            while not mail[message.peer, rank]:
                yield "waits"
            _view(memory, message.region).copy_(mail[message.peer, rank].popleft())
        for combine in step.then:
            _view(memory, combine.into).copy_(_combined(memory, combine, reduction))


def _view(memory: dict[Buffer, Tensor], region: Region) -> Tensor:
    return memory[region.buffer][region.start : region.stop]


def _combined(memory: dict[Buffer, Tensor], combine: Combine, reduction: str) -> Tensor:
    parts = [_view(memory, part) for part in combine.parts]
    wide = torch.float32 if parts[0].dtype in HALF else parts[0].dtype
    total = parts[0].to(wide)
    for part in parts[1:]:
        total = REDUCTIONS[reduction](total, part.to(wide))
    return total.to(parts[0].dtype)
