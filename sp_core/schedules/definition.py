"""What a schedule is: for every rank, which regions of which buffers are sent, received and combined, in which order. Plain data.

A rank has three flat buffers: IN holds what it contributes and is only read, OUT what it gets, TMP is scratch. OUT may be the same
memory as IN (an operation in place). A program is a list of steps; a step sends and receives messages, all at once, and once they
are complete it combines what is there:

    post step t   when step t - depth is complete and its combinations are made
    complete      all messages of the step have been sent and received; then its combinations are made, in order

So with depth 1 one step follows another, and with depth 2 the messages of the next step travel while this one's are added. Whoever
carries it out may combine before a step's own messages have been sent, as long as no memory is written that is still being sent.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property

from sp_core.schedules import rewriting


class Buffer(StrEnum):
    """A rank's buffers."""

    IN = "in"
    OUT = "out"
    TMP = "tmp"


@dataclass(frozen=True, slots=True)
class Region:
    """Elements `start` to `stop - 1` of a buffer."""

    buffer: Buffer
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start

    def __str__(self) -> str:
        return f"{self.buffer}[{self.start}:{self.stop}]"


@dataclass(frozen=True, slots=True)
class Message:
    """A region sent to `peer`, or received from it."""

    peer: int
    region: Region


@dataclass(frozen=True, slots=True)
class Combine:
    """`into` becomes ((p0 + p1) + p2) + ... of `parts`, which are all read before it is written; a copy where there is one part.

    Parts of a half type are added in float32 and rounded once. Instead of the sum it may be the maximum or minimum.
    """

    into: Region
    parts: tuple[Region, ...]


@dataclass(frozen=True, slots=True)
class Step:
    """Messages that travel together, and what is combined after them."""

    sends: tuple[Message, ...] = ()
    receives: tuple[Message, ...] = ()
    then: tuple[Combine, ...] = ()


@dataclass(frozen=True)
class Program:
    """What one rank does.

    Args:
        steps: in order. Empty messages are not in it.
        scratch: elements of TMP.
        depth: how many steps may be under way at the same time.
    """

    steps: tuple[Step, ...]
    scratch: int = 0
    depth: int = 1

    @cached_property
    def rewritten(self) -> tuple[int, ...]:
        """For each step the first one before which its sends must have left, where OUT is other memory than IN."""
        return rewriting.rewritten(self.steps, in_place=False)

    @cached_property
    def rewritten_in_place(self) -> tuple[int, ...]:
        """The same where OUT is IN."""
        return rewriting.rewritten(self.steps, in_place=True)


@dataclass(frozen=True)
class Schedule:
    """What all ranks do, and what it is for.

    Args:
        op: the collective.
        send, recv: by rank, the sizes of the pieces that it contributes and gets, in elements.
        root: of a broadcast or a reduction.
        programs: by rank.
    """

    op: str
    send: tuple[tuple[int, ...], ...]
    recv: tuple[tuple[int, ...], ...]
    root: int
    programs: tuple[Program, ...]

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.programs)


def program(steps: Iterable[Step], scratch: int = 0, depth: int = 1) -> Program:
    """A program without empty messages, empty combinations, and steps in which nothing happens."""
    kept = [Step(_full(step.sends), _full(step.receives), tuple(c for c in step.then if len(c.into))) for step in steps]
    if depth == 1:  # with more, how far two steps are apart says which of them may overlap
        kept = [step for step in kept if step != Step()]
    return Program(tuple(kept), scratch, depth)


def _full(messages: tuple[Message, ...]) -> tuple[Message, ...]:
    return tuple(message for message in messages if len(message.region))


def inp(span: range) -> Region:
    """A region of IN."""
    return Region(Buffer.IN, span.start, span.stop)


def out(span: range) -> Region:
    """A region of OUT."""
    return Region(Buffer.OUT, span.start, span.stop)


def tmp(start: int, length: int) -> Region:
    """A region of TMP."""
    return Region(Buffer.TMP, start, start + length)


def copy(source: Region, into: Region) -> Combine:
    """A combination of one part."""
    return Combine(into, (source,))


def spans(counts: Iterable[int], start: int = 0) -> tuple[range, ...]:
    """Consecutive ranges of these lengths."""
    found = []
    for count in counts:
        found.append(range(start, start + count))
        start += count
    return tuple(found)


def joined(first: range, last: range) -> range:
    """From the beginning of one range to the end of another."""
    return range(first.start, last.stop)
