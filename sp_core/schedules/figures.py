"""What a schedule costs, and how it looks."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sp_core.schedules.definition import Message, Program, Schedule
from sp_core.schedules.replay import HALF

WIDE_BLOCK = 1 << 15
"""Elements that are summed in float32 at a time where a half type has more than two addends."""


@dataclass(frozen=True)
class Cost:
    """What a program costs one rank.

    Attributes:
        messages: that it sends.
        bytes_sent: in these.
        largest: bytes of the longest message that it sends or receives.
        steps: in which it sends or receives.
        scratch: bytes of scratch memory, room for sums in float32 included.
    """

    messages: int
    bytes_sent: int
    largest: int
    steps: int
    scratch: int


def cost(program: Program, dtype: torch.dtype) -> Cost:
    """What a program costs with elements of `dtype`."""
    sends = [message for step in program.steps for message in step.sends]
    moved = [message for step in program.steps for message in (*step.sends, *step.receives)]
    return Cost(
        messages=len(sends),
        bytes_sent=sum(len(message.region) for message in sends) * dtype.itemsize,
        largest=max((len(message.region) for message in moved), default=0) * dtype.itemsize,
        steps=sum(bool(step.sends or step.receives) for step in program.steps),
        scratch=program.scratch * dtype.itemsize + 2 * torch.float32.itemsize * wide_length(program, dtype),
    )


def wide_length(program: Program, dtype: torch.dtype) -> int:
    """Elements of each of the two float32 buffers that sums of more than two parts need in a half type."""
    if dtype not in HALF:
        return 0
    lengths = [len(c.into) for step in program.steps for c in step.then if len(c.parts) > 2]
    return min(max(lengths, default=0), WIDE_BLOCK)


def show(schedule: Schedule) -> str:
    """A picture as text: for every step and rank what it sends, receives and combines."""
    lines = [f"{schedule.op} of {schedule.size} ranks"]
    for number in range(max(len(program.steps) for program in schedule.programs)):
        for rank, program in enumerate(schedule.programs):
            if number < len(program.steps):
                step = program.steps[number]
                parts = [*(_message("->", m) for m in step.sends), *(_message("<-", m) for m in step.receives)]
                parts += [f"{c.into} = {' + '.join(map(str, c.parts))}" for c in step.then]
                lines.append(f"step {number:3}  rank {rank:3}  " + "   ".join(parts))
    return "\n".join(lines)


def _message(arrow: str, message: Message) -> str:
    return f"{arrow} {message.peer} {message.region}"
