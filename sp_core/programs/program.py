"""Define collectives as plain integers (`Operation`), and each rank's steps in them (`Program`).

An operation says how many elements of which piece go where. A buffer is a flat vector cut into
pieces, one per rank (or a single one). A transport may move a vector in chunks. Chunk k consists of
elements [k*c, (k+1)*c) of EVERY piece, so each chunk is again an operation of the same kind. Ranks
whose pieces are short take part with empty pieces.

A program says which regions of which buffers are sent, received and combined (added or copied), in
which order. A rank has three flat buffers: IN holds its input and is only read, OUT receives the
result, TMP is scratch. OUT may be the same memory as IN (an operation in place). A program is a
list of steps. A step sends and receives messages, all at once, and combines regions once these
messages are complete:

    post step t   when step t - depth is complete and its combinations are made
    complete      all messages of the step have been sent and received; then its combinations
                  are made, in order

With depth 1 one step follows another. With depth 2 the messages of the next step are under way
while regions of this step are added. A rank may combine before its own sends have completed, as
long as it writes no memory that is still being sent.

In shared memory there are no messages: a combination reads regions of other ranks in place. All
ranks' programs of a collective then have equally many steps. Step t may read what the other ranks
have written in their steps before t.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from itertools import accumulate, pairwise, starmap
from typing import Any, NamedTuple

import torch
from torch import Tensor

HALF = (torch.bfloat16, torch.float16)
"""Half types: sums of three or more parts are made in float32 and rounded once."""

REDUCTIONS: dict[str, Callable[..., Tensor]] = {
    "sum": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
}

WIDE_BLOCK = 1 << 15
"""Most elements of a half type that are summed in float32 at a time."""

OWN = -1
"""Value of `Region.rank` for the rank that runs the program."""

AHEAD = 8
"""The most steps between a send and the step that waits for it. This bounds the sends under way."""


class Operation(NamedTuple):
    """Describe one collective as seen by one rank, with sizes in elements.

    Args:
        op: name of the collective, such as "all_gather".
        rank: this rank.
        size: the number of ranks.
        send: sizes of the pieces that this rank sends; empty if it sends nothing, like all ranks
            but the root in a broadcast.
        recv: sizes of the pieces that this rank receives.
        longest: size of the largest piece on ANY rank, so that all ranks make the same number of
            chunks.
        root: rank of the root of a broadcast or reduce; for a shift, the distance from sender to
            receiver.
        reduction: "sum", "max" or "min".
        itemsize: bytes per element.
        segment: most elements per segment, for algorithms that cut pieces into segments; None: no
            cut. For a transport a number marks a chunk of a longer collective (`chunks`), whose
            pieces may differ between ranks; None means that there is no such cut.
        nodes: for each rank the number of its node; empty if all ranks are on one node.
        slot: elements of one slot (buffer of fixed size) of the shared memory.
        first: for a program in shared memory, how many steps the ranks have made before it, modulo
            the number of slots.
        resident: whether the ranks' IN are tensors of one `shared_empty`, at the same offset.
        in_place: whether OUT is the same memory as IN.
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
        """Return the number of elements of the whole vector, the same on all ranks.

        An all-to-all counts the longest piece once for each rank.
        """
        match self.op:
            case "all_gather":
                return sum(self.recv)
            case "reduce_scatter":
                return sum(self.send)
        return self.longest * (self.size if self.op == "all_to_all" else 1)

    @property
    def pieces(self) -> int:
        """Return the number of pieces of the vector: 1, or one per rank."""
        return max(len(self.send), len(self.recv))

    @property
    def nbytes(self) -> int:
        """Return the bytes of the whole vector, the same on every rank."""
        return self.elements * self.itemsize

    @property
    def reduces(self) -> bool:
        """Return whether the collective combines elements, instead of only moving them."""
        return self.op in ("reduce_scatter", "all_reduce", "reduce")

    @property
    def bytes_sent(self) -> int:
        """Return the bytes of this rank's input that other ranks need.

        An all-gather and a broadcast count these bytes once for each other rank.
        """
        needed = sum(self.send)
        if self.op in ("all_gather", "broadcast"):
            needed *= self.size - 1
        elif self.op in ("reduce_scatter", "all_to_all"):
            needed -= self.send[self.rank]
        elif self.size == 1 or (self.op == "reduce" and self.rank == self.root):
            needed = 0
        return needed * self.itemsize

    def chunks(self, length: int) -> "Iterator[tuple[int, Operation]]":
        """Yield (offset, operation) for each chunk: at most `length` elements of every piece.

        The offset counts elements from the start of each piece.
        """
        for offset in range(0, max(self.longest, 1), length):
            send, recv = (
                tuple(min(max(n - offset, 0), length) for n in sizes)
                for sizes in (self.send, self.recv)
            )
            longest = min(self.longest - offset, length)
            yield offset, self._replace(send=send, recv=recv, longest=longest, segment=length)


def operation(
    op: str, rank: int, size: int, counts: tuple[int, ...], root: int = 0, **more: Any
) -> Operation:
    """Return the `Operation` of one rank.

    Args:
        op, rank, size, root: as in `Operation`; root may be negative or above `size`.
        counts: sizes in elements, the same on every rank. all_gather, shift: what each rank
            contributes. reduce_scatter: what each rank receives. all_to_all: what each rank
            receives from every single rank. Other collectives: pieces of the vector.
        more: further fields of `Operation`, by name.
    """
    root %= size
    return Operation(op, rank, size, *_PIECES[op](counts, rank, root), root, **more)


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
"""For each collective, a function of (counts, rank, root) that returns (send, recv, longest)."""


class Buffer(StrEnum):
    """Name a flat buffer of a rank: IN (input), OUT (result) or TMP (scratch)."""

    IN = "in"
    OUT = "out"
    TMP = "tmp"


@dataclass(frozen=True, slots=True)
class Region:
    """Name elements `start` to `stop - 1` of a buffer.

    The buffer belongs to the rank that runs the program. If `rank` is not OWN, the buffer belongs
    to that rank, and is read in shared memory.
    """

    buffer: Buffer
    start: int
    stop: int
    rank: int = OWN

    def __len__(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Message:
    """Describe a message: the rank `peer` it goes to or comes from, and the region it carries."""

    peer: int
    region: Region


@dataclass(frozen=True, slots=True)
class Combine:
    """Write ((p0 + p1) + p2) + ... of the regions `parts` into the region `into`.

    The operation's `reduction` says whether "+" is a sum, a maximum or a minimum. All parts are
    read before `into` is written. A single part is copied. Three or more parts of a half type are
    added in float32 and rounded once.
    """

    into: Region
    parts: tuple[Region, ...]


@dataclass(frozen=True, slots=True)
class Step:
    """Describe one step of a program: messages at the same time, then copies and sums.

    The copies and sums in `then` are made in order, after all messages are complete.
    """

    sends: tuple[Message, ...] = ()
    receives: tuple[Message, ...] = ()
    then: tuple[Combine, ...] = ()


@dataclass(frozen=True)
class Program:
    """List the steps of one rank in a collective.

    Args:
        steps: in order. Empty messages are left out.
        scratch: how many elements of TMP the steps use.
        depth: how many steps may be under way at the same time, if they send messages.
    """

    steps: tuple[Step, ...]
    scratch: int
    depth: int = 1

    @cached_property
    def figures(self) -> tuple[int, int, int]:
        """Return three integers from which `cost` computes the cost of the program.

        The integers are: how many messages this rank sends (in shared memory, regions it reads from
        other ranks); elements in these; elements of the longest combination of three or more parts.
        """
        sends = [message.region for step in self.steps for message in step.sends]
        combined = [combine for step in self.steps for combine in step.then]
        read = [part for combine in combined for part in combine.parts if part.rank != OWN]
        return (
            len(sends) + len(read),
            sum(map(len, [*sends, *read])),
            max((len(combine.into) for combine in combined if len(combine.parts) > 2), default=0),
        )

    @cached_property
    def rewritten(self) -> tuple[int, ...]:
        """Return for each step the index of the first step that may overwrite what the step sends.

        The sends must have completed before that step. This holds if IN and OUT share no memory.
        """
        return _rewritten(self.steps, in_place=False)

    @cached_property
    def rewritten_in_place(self) -> tuple[int, ...]:
        """Return the indices of `rewritten` for a collective whose OUT is the memory of IN."""
        return _rewritten(self.steps, in_place=True)


def wide_length(program: Program, dtype: torch.dtype) -> int:
    """Return how many elements the float32 buffers need, two of equal length, to add half types.

    The result is 0 if `dtype` is no half type, or no combination has three or more parts.
    """
    return min(program.figures[-1], WIDE_BLOCK) if dtype in HALF else 0


def _rewritten(steps: Sequence[Step], *, in_place: bool) -> tuple[int, ...]:
    """Return for each step the first step that may overwrite what it sends, which may be itself.

    Sends must have completed before that step. At the latest, this is the step `AHEAD` later.

    On a slow link an MPI library reports a send as complete only when the receiver has answered. So
    waiting for the sends of each step costs a round trip:

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
    """Return whether two regions share memory. With `in_place`, OUT is the memory of IN."""
    same = one.buffer is other.buffer or (in_place and Buffer.TMP not in (one.buffer, other.buffer))
    return same and one.rank == other.rank and one.start < other.stop and other.start < one.stop


def program(steps: Iterable[Step], scratch: int = 0, depth: int = 1) -> Program:
    """Return a `Program` without empty messages and empty combinations.

    Empty steps stay: how far apart two steps are decides whether they overlap.
    """
    kept = (
        Step(
            tuple(message for message in step.sends if len(message.region)),
            tuple(message for message in step.receives if len(message.region)),
            tuple(combine for combine in step.then if len(combine.into)),
        )
        for step in steps
    )
    return Program(tuple(kept), scratch, depth)


def exchange(dest: int, sent: Region, source: int, received: Region, *then: Combine) -> Step:
    """Return a step that sends to rank `dest`, receives from rank `source`, and then combines."""
    return Step((Message(dest, sent),), (Message(source, received),), then)


def inp(span: range) -> Region:
    """Return the region of IN with the elements of `span`."""
    return Region(Buffer.IN, span.start, span.stop)


def out(span: range) -> Region:
    """Return the region of OUT with the elements of `span`."""
    return Region(Buffer.OUT, span.start, span.stop)


def tmp(start: int, length: int) -> Region:
    """Return the region of TMP with `length` elements from `start` on."""
    return Region(Buffer.TMP, start, start + length)


def copy(source: Region, into: Region) -> Combine:
    """Return a `Combine` that copies `source` into `into`."""
    return Combine(into, (source,))


def spans(counts: Iterable[int], start: int = 0) -> tuple[range, ...]:
    """Return consecutive ranges of lengths `counts`; the first one begins at `start`."""
    return tuple(starmap(range, pairwise(accumulate(counts, initial=start))))


def joined(first: range, last: range) -> range:
    """Return the range from the start of `first` to the stop of `last`."""
    return range(first.start, last.stop)
