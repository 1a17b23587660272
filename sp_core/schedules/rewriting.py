"""How long what a step sends stays as it is: a step need not wait for its sends before some step writes to that memory.

It matters on a slow link, where a library calls a send complete only when the receiver has answered:

    waiting for sends     |--- message --->|<--- answer ---|--- message --->|<--- answer ---|
    not waiting           |--- message --->|--- message --->|<--- answer ---|
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sp_core.schedules.definition import Region, Step

AHEAD = 8
"""Steps after which sends are waited for in any case, so that what is found is found quickly and few of them are under way."""


def rewritten(steps: Sequence[Step], *, in_place: bool) -> tuple[int, ...]:
    """For each step the first one, itself or later, before which its sends must have left; for the last step itself.

    Args:
        steps: of a program.
        in_place: whether OUT is the same memory as IN.
    """
    written = [[*(message.region for message in step.receives), *(combine.into for combine in step.then)] for step in steps]
    early = [_first([message.region for message in step.sends], written, place, in_place) for place, step in enumerate(steps[:-1])]
    return (*early, *([len(steps) - 1] if steps else []))


def _first(sent: Sequence[Region], written: Sequence[Sequence[Region]], place: int, in_place: bool) -> int:
    last = min(place + AHEAD, len(written))
    hits = (k for k in range(place, last) if any(_meet(one, other, in_place) for one in sent for other in written[k]))
    return next(hits, last)


def _meet(one: Region, other: Region, in_place: bool) -> bool:
    same = one.buffer == other.buffer or (in_place and "tmp" not in (one.buffer, other.buffer))
    return same and one.start < other.stop and other.start < one.stop
