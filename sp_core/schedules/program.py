"""A collective as plain integers (`Operation`), and what each rank does in it (`Program`).

An operation says how many elements of which piece go where. A buffer is a flat vector cut into
pieces, one per rank (or a single one). A transport that moves a vector in chunks takes elements
[k*c, (k+1)*c) of EVERY piece in step k, so that each step is again an operation of the same kind,
and ranks whose pieces are short take part with empty pieces.

A program says which regions of which buffers are sent, received and combined, in which order. A
rank has three flat buffers: IN holds what it contributes and is only read, OUT what it gets, TMP
is scratch. OUT may be the same memory as IN (an operation in place). A program is a list of steps;
a step sends and receives messages, all at once, and once they are complete it combines what is
there:

    post step t   when step t - depth is complete and its combinations are made
    complete      all messages of the step have been sent and received; then its combinations
                  are made, in order

So with depth 1 one step follows another, and with depth 2 the messages of the next step travel
while this one's are added. Whoever carries it out may combine before a step's own messages have
been sent, as long as no memory is written that is still being sent.

In shared memory there are no messages: a combination reads regions of other ranks where they lie.
All programs of a collective have equally many steps there, and step t may read what the others have
written in their steps before t.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

HALF = (torch.bfloat16, torch.float16)
"""Types whose sums are made in float32 and rounded once."""

REDUCTIONS: dict[str, Callable[..., Tensor]] = {
    "sum": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
}

WIDE_BLOCK = 1 << 15
"""Elements that are summed in float32 at a time where a half type has more than two addends."""

OWN = -1
"""In a region: the rank whose program it is."""

AHEAD = 8
"""Steps after which sends are waited for in any case, so that few of them are under way."""


class Operation(NamedTuple):
    """One collective as seen by one rank, with sizes in elements.

    Args:
        op: the name of the collective.
        rank, size: the rank, and the number of ranks.
        send: sizes of the pieces that this rank sends (empty where it sends nothing, as off the
            root of a broadcast).
        recv: sizes of the pieces that it receives.
        longest: size of the largest piece on ANY rank, so that all ranks make the same number of
            chunks.
        root: rank of the root, for broadcast and reduce; by how many ranks a shift goes.
        reduction: "sum", "max" or "min".
        itemsize: bytes per element.
        segment: elements per segment, for algorithms that cut pieces.
        nodes: by rank, the node that it is on; all on one where it is empty.
        slot: elements of a slot of shared memory.
        first: number of the step that a program in shared memory begins with, modulo the number of
            slots.
        resident: the input lives in shared memory on every rank, at the same place.
        in_place: the result takes the place of the input.
    """

    op: str
    rank: int
    size: int
    send: tuple[int, ...]
    recv: tuple[int, ...]
    longest: int
    root: int = 0
    reduction: str = "sum"
    itemsize: int = 1
    segment: int | None = None
    nodes: tuple[int, ...] = ()
    slot: int = 0
    first: int = 0
    resident: bool = False
    in_place: bool = False

    @property
    def elements(self) -> int:
        """Elements of the whole vector, alike on all ranks.

        An all-to-all counts the longest piece for each.
        """
        match self.op:
            case "all_gather":
                return sum(self.recv)
            case "reduce_scatter":
                return sum(self.send)
        return self.longest * (self.size if self.op == "all_to_all" else 1)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole vector, the same on every rank."""
        return self.elements * self.itemsize

    @property
    def reduces(self) -> bool:
        """Whether elements are combined, not only moved."""
        return self.op in ("reduce_scatter", "all_reduce", "reduce")

    @property
    def bytes_sent(self) -> int:
        """Bytes of this rank's input that other ranks need."""
        needed = sum(self.send)
        if self.op in ("all_gather", "broadcast"):
            needed *= self.size - 1
        elif self.op in ("reduce_scatter", "all_to_all"):
            needed -= self.send[self.rank]
        elif self.size == 1 or (self.op == "reduce" and self.rank == self.root):
            needed = 0
        return needed * self.itemsize

    def chunks(self, length: int) -> Iterator[tuple[int, Operation]]:
        """Yield operations on chunks of each piece, of at most `length` elements.

        Each comes with the offset of its chunk.
        """
        for offset in range(0, max(self.longest, 1), length):
            send, recv = (
                tuple(min(max(n - offset, 0), length) for n in sizes)
                for sizes in (self.send, self.recv)
            )
            yield (
                offset,
                self._replace(send=send, recv=recv, longest=min(self.longest - offset, length)),
            )


def operation(
    op: str, rank: int, size: int, counts: tuple[int, ...], root: int = 0, **more: Any
) -> Operation:
    """Return one rank's view of a collective.

    Args:
        op, rank, size, root: as in `Operation`.
        counts: of an all-gather and a shift the elements that each rank contributes, of a
            reduce-scatter and an all-to-all those that each gets from each rank; of the others
            pieces of the vector that is summed or sent.
        more: other fields of the operation.
    """
    send, recv, longest = _PIECES[op](counts, rank, root)
    return Operation(op, rank, size, send, recv, longest, root % size, **more)


_PIECES: dict[
    str, Callable[[tuple[int, ...], int, int], tuple[tuple[int, ...], tuple[int, ...], int]]
] = {
    "all_gather": lambda counts, rank, _: ((counts[rank],), counts, max(counts)),
    "reduce_scatter": lambda counts, rank, _: (counts, (counts[rank],), max(counts)),
    "shift": lambda counts, rank, offset: (
        (counts[rank],),
        (counts[(rank - offset) % len(counts)],),
        max(counts),
    ),
    "all_to_all": lambda counts, rank, _: (counts, (counts[rank],) * len(counts), max(counts)),
    "all_reduce": lambda counts, _, __: ((sum(counts),), (sum(counts),), sum(counts)),
    "broadcast": lambda counts, rank, root: (
        (sum(counts),) if rank == root else (),
        () if rank == root else (sum(counts),),
        sum(counts),
    ),
    "reduce": lambda counts, rank, root: (
        (sum(counts),),
        (sum(counts),) if rank == root else (),
        sum(counts),
    ),
}
"""By collective, what a rank sends, what it receives and the longest piece, for `operation`."""


class Buffer(StrEnum):
    """A rank's buffers."""

    IN = "in"
    OUT = "out"
    TMP = "tmp"


@dataclass(frozen=True, slots=True)
class Region:
    """Elements `start` to `stop - 1` of a buffer.

    It is this rank's, or another's with which it shares memory.
    """

    buffer: Buffer
    start: int
    stop: int
    rank: int = OWN

    def __len__(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Message:
    """A region sent to `peer`, or received from it."""

    peer: int
    region: Region


@dataclass(frozen=True, slots=True)
class Combine:
    """`into` becomes ((p0 + p1) + p2) + ... of `parts`.

    All are read before it is written; one part is copied.

    Parts of a half type are added in float32 and rounded once. Instead of the sum it may be the
    maximum or minimum.
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
    """The steps of one rank.

    Args:
        steps: in order. Empty messages are not in it.
        scratch: elements of TMP that it uses.
        depth: how many steps may be under way at the same time.
        shared: whether the ranks share memory and send no messages.
    """

    steps: tuple[Step, ...]
    scratch: int = 0
    depth: int = 1
    shared: bool = False

    @cached_property
    def figures(self) -> tuple[int, int, int, int, int]:
        """Messages or reads, their elements, the longest one, steps with messages, longest sum.

        Only sums of three or more parts count in the last figure.
        """
        sends = [message.region for step in self.steps for message in step.sends]
        received = [message.region for step in self.steps for message in step.receives]
        combined = [combine for step in self.steps for combine in step.then]
        read = [part for combine in combined for part in combine.parts if part.rank != OWN]
        return (
            len(sends) + len(read),
            sum(map(len, [*sends, *read])),
            max(map(len, [*sends, *received]), default=0),
            sum(bool(step.sends or step.receives) for step in self.steps),
            max((len(combine.into) for combine in combined if len(combine.parts) > 2), default=0),
        )

    @cached_property
    def rewritten(self) -> tuple[int, ...]:
        """For each step, the first one before which its sends must have completed.

        OUT is other memory than IN.
        """
        return _rewritten(self.steps, in_place=False)

    @cached_property
    def rewritten_in_place(self) -> tuple[int, ...]:
        """The same, if OUT is the same memory as IN."""
        return _rewritten(self.steps, in_place=True)


def wide_length(program: Program, dtype: torch.dtype) -> int:
    """Return the length of each float32 buffer.

    Three or more parts of a half type are added in two of them.
    """
    return min(program.figures[-1], WIDE_BLOCK) if dtype in HALF else 0


def _rewritten(steps: Sequence[Step], *, in_place: bool) -> tuple[int, ...]:
    """For each step, find the first one from it on before which its sends must have completed.

    On a slow link a library calls a send complete only when the receiver has answered, so waiting
    for sends costs a round trip:

        waiting for sends     |--- message --->|<--- answer ---|--- message --->|<--- answer ---|
        not waiting           |--- message --->|--- message --->|<--- answer ---|
    """
    written = [
        [*(message.region for message in step.receives), *(combine.into for combine in step.then)]
        for step in steps
    ]

    def first(number: int, step: Step) -> int:
        last = min(number + AHEAD, len(steps))
        sent = [message.region for message in step.sends]
        hits = (
            k
            for k in range(number, last)
            if any(overlap(one, other, in_place) for one in sent for other in written[k])
        )
        return next(hits, last)

    return tuple(
        first(number, step) if number + 1 < len(steps) else number
        for number, step in enumerate(steps)
    )


def overlap(one: Region, other: Region, in_place: bool) -> bool:
    """Return whether two regions of a rank share memory, with OUT the same memory as IN or not."""
    same = one.buffer is other.buffer or (in_place and Buffer.TMP not in (one.buffer, other.buffer))
    return same and one.rank == other.rank and one.start < other.stop and other.start < one.stop


def program(steps: Iterable[Step], scratch: int = 0, depth: int = 1) -> Program:
    """Make a program without empty messages, empty combinations and empty steps."""
    kept = [
        Step(
            tuple(message for message in step.sends if len(message.region)),
            tuple(message for message in step.receives if len(message.region)),
            tuple(combine for combine in step.then if len(combine.into)),
        )
        for step in steps
    ]
    if depth == 1:  # with more, how far two steps are apart says which of them may overlap
        kept = [step for step in kept if step != Step()]
    return Program(tuple(kept), scratch, depth)


def exchange(dest: int, sent: Region, source: int, received: Region, *then: Combine) -> Step:
    """Return a step with one message each way."""
    return Step((Message(dest, sent),), (Message(source, received),), then)


def inp(span: range) -> Region:
    """Return a region of IN."""
    return Region(Buffer.IN, span.start, span.stop)


def out(span: range) -> Region:
    """Return a region of OUT."""
    return Region(Buffer.OUT, span.start, span.stop)


def tmp(start: int, length: int) -> Region:
    """Return a region of TMP."""
    return Region(Buffer.TMP, start, start + length)


def copy(source: Region, into: Region) -> Combine:
    """Return a combination of one part."""
    return Combine(into, (source,))


def spans(counts: Iterable[int], start: int = 0) -> tuple[range, ...]:
    """Return consecutive ranges of these lengths."""
    edges = accumulate(counts, initial=start)
    return tuple(range(first, stop) for first, stop in pairwise(edges))


def joined(first: range, last: range) -> range:
    """Return the range from the beginning of one to the end of another."""
    return range(first.start, last.stop)
