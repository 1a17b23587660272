"""Make programs of collectives in memory that the ranks of a node share. No messages are sent.

`in_window` returns the `Program` of one rank. Every rank has a scratch area that all ranks can
read, cut into `SLOTS` slots (buffers of equal size). A vector goes through it in chunks. Each chunk
has a slot of its own, and the stages of consecutive chunks overlap. All ranks make the same number
of steps. In step t a rank may read what the others wrote in their steps before t. Two ranks, an
all-reduce of two chunks: w writes the other rank's half of a chunk into the own slot, + adds up the
own half, r reads the other rank's sum:

    step      0      1      2      3
    chunk 0   w      +      r
    chunk 1          w      +      r

    all-gather, broadcast, shift  write the own piece; read the others'
    all-to-all                    write all pieces but the own; read those meant for the own rank
    reduce-scatter                the same, but add up those read, in the order of the ranks
    reduce                        write everything; the root adds up everything in that order
    all-reduce, short             write everything; every rank adds up everything (one-shot); so too
                                  if two ranks read each other's tensors in place, because two
                                  shots would read as much and write more
    all-reduce                    every rank adds up its part of a chunk and writes the sum; read
                                  the others' sums (two-shot)

A resident tensor is one that itself lives in shared memory. Such a tensor is not written into
slots. The program then begins with an empty step, which waits until all ranks have arrived. The
other ranks read the tensor in place. A last empty step waits until all have done so. A single rank
uses no slots either, since nobody would read them. Every sum is bitwise that of a loop over the
ranks. Half types are summed in float32 and rounded once.

A slot may be used again after `SLOTS` steps. Data written in step t are read in steps t + 1 and t +
2 at most. A rank in step t + 4 has waited until all ranks have made step t + 2.

Source: one-shot and two-shot all-reduce as in NVIDIA's TensorRT-LLM custom all-reduce and vLLM;
slots as in Graham and Shipman, "MPI support for multi-core architectures: optimized shared memory
collectives", EuroPVM/MPI 2008.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import chain

from sp_core.programs.program import (
    Buffer,
    Combine,
    Operation,
    Program,
    Region,
    Step,
    copy,
    inp,
    out,
    spans,
    tmp,
)
from sp_core.segments import moved, split_ranges

SLOTS = 4
"""How many slots (buffers in shared memory) each rank has."""

ONE_SHOT_BYTES = 1 << 15
"""Most bytes that a rank reads from other ranks in a one-shot all-reduce.

With more bytes, adding up everything costs more than a second step. Measured on two cores."""

IN_PLACE_BYTES = 1 << 20
"""Bytes of a chunk of an in-place sum of two ranks, which uses no slots.

Larger chunks mean fewer steps in which the ranks wait for each other. This gains more than chunks
that fit in a cache."""

Stage = tuple[Combine, ...]
"""The copies and sums of one chunk in one step."""

Stages = Iterator[tuple[Stage, ...]]
"""For each chunk of a vector, its stages in order."""


@lru_cache(maxsize=256)
def in_window(t: Operation) -> Program:
    """Return the program of one rank for a collective in shared memory. The result is cached.

    In each step the rank copies its own data into slots (buffers that all ranks can read), or reads
    or adds up what other ranks wrote in earlier steps. The programs of all ranks have the same
    number of steps. Before each step but the first, a rank waits until all ranks have made the
    previous step.

    Args:
        t: this rank's view of the collective, with the fields for shared memory (`slot`, `first`
            and `resident`, see `Operation`).
    """
    around = [Step()] if t.resident else []
    if t.size == 1:  # nobody would read a slot
        t = t._replace(resident=True)
    if t.resident and t.op != "all_reduce":  # goes through no slot: one chunk holds everything
        t = t._replace(slot=t.size * max(t.longest, 1))
    chunks = list(_BUILDERS[t.op](t))
    depth = len(chunks[0])
    steps = []
    for number in range(len(chunks) + depth - 1):  # stage s of chunk k in step k + s
        stages = [chunks[number - s][s] for s in range(depth) if 0 <= number - s < len(chunks)]
        steps.append(Step(then=tuple(combine for combine in chain(*stages) if len(combine.into))))
    into = [combine.into for step in steps for combine in step.then]
    written = sorted(region.stop for region in into if region.buffer is Buffer.TMP)
    used = {(stop - 1) // t.slot: stop for stop in written}  # for each slot the largest
    return Program(
        (*around, *steps, *around), sum(stop - slot * t.slot for slot, stop in used.items())
    )


def _others(t: Operation) -> list[int]:
    """List the other ranks, beginning with the next one.

    With this order the ranks do not all read from one rank first.
    """
    return [(t.rank + k) % t.size for k in range(1, t.size)]


def _chunks(t: Operation, length: int) -> Iterator[tuple[int, range]]:
    """Yield for each chunk (where its slot begins in TMP, its elements in every piece).

    The elements are counted from the start of a piece, which may end before them.

    Args:
        t: the operation.
        length: most elements of a chunk in one piece.
    """
    for number, start in enumerate(range(0, max(t.longest, 1), length)):
        yield (t.first + number + t.resident) % SLOTS * t.slot, range(start, start + length)


def _cut(piece: range, chunk: range) -> range:
    """Return the elements of a piece that are in a chunk, which counts from the piece's start."""
    return range(
        min(piece.start + chunk.start, piece.stop), min(piece.start + chunk.stop, piece.stop)
    )


def _stages(t: Operation, write: Stage, read: Stage) -> tuple[Stage, ...]:
    """Return the copies and sums of a chunk by step: `write` into slots, then `read`.

    There is only `read` for a resident tensor: one in shared memory, which is read in place.
    """
    return (read,) if t.resident else (write, read)


def _offered(t: Operation, rank: int, mine: range, there: range, slot: int) -> Region:
    """Return the region from which this rank reads the contribution of `rank`.

    Args:
        t: the operation.
        rank: the rank that contributes; it may be this rank.
        mine: the elements of this rank's contribution in IN of this rank.
        there: the elements of another rank's contribution in IN of that rank, for a resident
            tensor. Else only their number counts.
        slot: where the other rank's contribution begins in TMP of that rank.
    """
    if rank == t.rank:
        return inp(mine)
    return replace(inp(there) if t.resident else tmp(slot, len(there)), rank=rank)


def _one_piece(t: Operation, sources: Mapping[int, tuple[range, range]], *, writes: bool) -> Stages:
    """Yield the stages of each chunk, where a rank writes at most one piece for all others.

    The stages of a chunk are its copies and sums, step by step.

    Args:
        t: the operation.
        sources: for each rank to read from, (elements in its IN, where they go in OUT of this
            rank).
        writes: whether other ranks read from this rank.
    """
    for slot, chunk in _chunks(t, t.slot):
        mine = _cut(range(sum(t.send)), chunk)
        write = (copy(inp(mine), tmp(slot, len(mine))),) if writes else ()
        read = tuple(
            copy(_offered(t, rank, mine, _cut(there, chunk), slot), out(_cut(into, chunk)))
            for rank, (there, into) in sources.items()
        )
        yield _stages(t, write, read)


def _all_gather(t: Operation) -> Stages:
    """Yield, for each chunk of an all-gather, its copies by step, the own piece included."""
    places = spans(t.recv)
    sources = {rank: (range(len(places[rank])), places[rank]) for rank in (t.rank, *_others(t))}
    return _one_piece(t, sources, writes=True)


def _broadcast(t: Operation) -> Stages:
    """Yield, for each chunk of a broadcast, its copies by step: the root writes, others read."""
    whole = range(t.elements)
    return _one_piece(
        t, {} if t.rank == t.root else {t.root: (whole, whole)}, writes=t.rank == t.root
    )


def _shift(t: Operation) -> Stages:
    """Yield, for each chunk of a shift, its copies by step: write the own, read the sender's."""
    whole = range(sum(t.recv))
    return _one_piece(t, {(t.rank - t.root) % t.size: (whole, whole)}, writes=bool(t.root))


def _many_pieces(
    t: Operation, read: Callable[[range, list[Region]], Stage], there: Sequence[range]
) -> Stages:
    """Yield the stages of each chunk, for collectives with one piece for each pair of ranks.

    The stages of a chunk are its copies and sums, step by step.

    Args:
        t: the operation.
        read: a function of the range of a chunk and, for each rank in order, the region of the
            piece for this rank. The result of `read` is the combinations of the chunk.
        there: for each rank, where the piece for this rank lies in IN of that rank.
    """
    room = min(t.slot // t.size, max(t.longest, 1))  # short pieces share pages
    pieces = spans(t.send)
    for slot, chunk in _chunks(t, room):
        cuts = [(rank, _cut(pieces[rank], chunk)) for rank in _others(t)]
        write = tuple(copy(inp(part), tmp(slot + rank * room, len(part))) for rank, part in cuts)
        mine = _cut(pieces[t.rank], chunk)
        offered = [
            _offered(t, rank, mine, _cut(there[rank], chunk), slot + t.rank * room)
            for rank in range(t.size)
        ]
        yield _stages(t, write, read(chunk, offered))


def _reduce_scatter(t: Operation) -> Stages:
    """Yield, for each chunk of a reduce-scatter, its copies and sums by step."""
    mine = range(t.send[t.rank])
    return _many_pieces(
        t,
        lambda chunk, offered: (Combine(out(_cut(mine, chunk)), tuple(offered)),),
        [spans(t.send)[t.rank]] * t.size,
    )


def _all_to_all(t: Operation) -> Stages:
    """Yield, for each chunk of an all-to-all, its copies by step."""
    places = spans(t.recv)

    def each(chunk: range, offered: list[Region]) -> Stage:
        return tuple(
            copy(offered[rank], out(_cut(places[rank], chunk))) for rank in (t.rank, *_others(t))
        )

    return _many_pieces(t, each, [range(count) for count in t.recv])


def _reduce(t: Operation) -> Stages:
    """Yield, for each chunk of a reduction, its work by step: the root adds up, others write."""
    for slot, chunk in _chunks(t, t.slot):
        part = _cut(range(t.elements), chunk)
        write = copy(inp(part), tmp(slot, len(part)))
        total = Combine(
            out(part), tuple(_offered(t, rank, part, part, slot) for rank in range(t.size))
        )
        yield _stages(t, (), (total,)) if t.rank == t.root else _stages(t, (write,), ())


def one_shot(t: Operation) -> bool:
    """Return whether every rank of an all-reduce adds up the whole vector (else only its part)."""
    short = t.elements * t.itemsize * (t.size - 1) <= ONE_SHOT_BYTES
    if t.resident:
        return not t.in_place and (short or t.size == 2)
    return short and t.elements <= t.slot


def _all_reduce(t: Operation) -> Stages:
    """Yield, for each chunk of an all-reduce, its copies and sums by step.

    Either every rank adds up everything (one-shot), or each rank adds up its part (two-shot).
    """
    if one_shot(t):
        whole = range(t.elements)
        room = inp(whole) if t.resident else tmp(t.first % SLOTS * t.slot, t.elements)
        parts = tuple(
            room if rank == t.rank else replace(room, rank=rank) for rank in range(t.size)
        )
        yield _stages(t, (copy(inp(whole), room),), (Combine(out(whole), parts),))
        return
    slotless = t.resident and t.in_place and t.size == 2
    for slot, chunk in _chunks(
        t, max(IN_PLACE_BYTES // t.itemsize, t.slot) if slotless else t.slot
    ):
        yield _two_shot(t, slot, _cut(range(t.elements), chunk))


def _two_shot(t: Operation, slot: int, chunk: range) -> tuple[Stage, ...]:
    """Return the copies and sums that reduce one chunk in two shots, a tuple for each step.

    Each rank adds up its own part of the chunk. Then every rank copies the other ranks' sums.

    Args:
        t: this rank's view of the collective.
        slot: the index in TMP (scratch memory) at which the chunk's slot begins.
        chunk: the indices of the chunk's elements in the vector.
    """
    parts = split_ranges(len(chunk), t.size)
    here = [moved(part, chunk.start) for part in parts]
    mine, room = here[t.rank], [tmp(slot + part.start, len(part)) for part in parts]
    write = tuple(copy(inp(here[rank]), room[rank]) for rank in _others(t))
    addends = tuple(
        _offered(t, rank, mine, mine, slot + parts[t.rank].start) for rank in range(t.size)
    )
    total: Stage = (Combine(room[t.rank], addends), copy(room[t.rank], out(mine)))
    where = room
    if t.resident and t.in_place:  # the others read the sum at its final place
        where = [out(part) for part in here]
        # the first two addends may be overwritten by their sum
        total = (Combine(out(mine), addends),) if t.rank < 2 else total
    read = tuple(copy(replace(where[rank], rank=rank), out(here[rank])) for rank in _others(t))
    return (total, read) if t.resident else (write, total, read)


_BUILDERS: dict[str, Callable[[Operation], Stages]] = {
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_reduce": _all_reduce,
    "all_to_all": _all_to_all,
    "broadcast": _broadcast,
    "reduce": _reduce,
    "shift": _shift,
}
