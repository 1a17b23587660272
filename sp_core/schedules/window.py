"""Collectives in memory that the ranks of a node share: nothing is sent, a rank reads what the others have put there.

Every rank has a scratch area that all can read, cut into `SLOTS` slots. A vector goes through it in chunks, each in a slot of its
own, and the stages of consecutive chunks overlap. All ranks make the same number of steps; in step t they may read what the others
wrote before it, and what they write is read later. Two ranks, an all-reduce of two chunks; w writes the other's half of a chunk
into the own slot, + adds up the own half, r reads the other's sum:

    step      0      1      2      3
    chunk 0   w      +      r
    chunk 1          w      +      r

    all-gather, broadcast, shift      write the own piece; read the others'
    all-to-all                        write all pieces but the own; read those meant for the own rank
    reduce-scatter, reduce            the same, and add them up in the order of the ranks
    all-reduce, short                 write everything; every rank adds up everything (one-shot); so too where two ranks read each
                                      other's tensors in place, because two shots would read as much and write more
    all-reduce                        every rank adds up its part of a chunk and writes the sum; read the others' sums (two-shot)

A tensor that itself lives in shared memory is not written into slots: one step in which all arrive, then the others read it where
it is, then one step in which all have done so. Every sum is bitwise that of a loop over the ranks; half types are summed in
float32 and rounded once.

A slot may be used again after `SLOTS` steps: what is written in step t is read in steps t + 1 and t + 2 at most, and a rank in
step t + 4 has waited for all to have finished step t + 2.

Source: one-shot and two-shot all-reduce as in NVIDIA's TensorRT-LLM custom all-reduce and vLLM; slots as in Graham and Shipman,
"MPI support for multi-core architectures: optimized shared memory collectives", EuroPVM/MPI 2008.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from itertools import chain

from sp_core.schedules.definition import Region, inp, out, spans, tmp
from sp_core.schedules.window_definition import SLOTS, Gather, InWindow, Place, Stage, WindowTask
from sp_core.segments import split_ranges

ONE_SHOT_BYTES = 1 << 15
"""Bytes that a rank reads from others in an all-reduce in one shot at most; above that, adding up everything costs more than a
second step. Measured on two cores."""

IN_PLACE_BYTES = 1 << 20
"""A chunk of a sum that goes through no slot: there fewer steps, in which ranks wait for each other, count more than a cache."""


@lru_cache(maxsize=256)
def in_window(task: WindowTask) -> InWindow:
    """What a rank does."""
    chunks = _BUILDERS[task.op](task)
    steps = [tuple(gather for gather in stage if len(gather.into)) for stage in _pipelined(list(chunks))]
    return InWindow(task.rank, ((), *steps, ()) if task.resident else tuple(steps), task.slot)


def _pipelined(chunks: Sequence[tuple[Stage, ...]]) -> Iterator[Stage]:
    """Stage s of chunk k in step k + s."""
    depth = len(chunks[0])
    for step in range(len(chunks) + depth - 1):
        yield tuple(chain.from_iterable(chunks[step - s][s] for s in range(depth) if 0 <= step - s < len(chunks)))


def _cut(piece: range, chunk: range) -> range:
    """The elements of a piece that are in a chunk."""
    return range(min(piece.start + chunk.start, piece.stop), min(piece.start + chunk.stop, piece.stop))


def _stages(task: WindowTask, write: Stage, read: Stage) -> tuple[Stage, ...]:
    return (read,) if task.resident else (write, read)


def _read(task: WindowTask, rank: int, resident: range, slot: int) -> Place:
    """What another rank offers, where it is."""
    return Place(rank, inp(resident) if task.resident else tmp(slot, len(resident)))


def _own(task: WindowTask, region: Region) -> Place:
    return Place(task.rank, region)


def _one_piece(task: WindowTask, sources: dict[int, tuple[range, range]], writes: bool) -> Iterator[tuple[Stage, ...]]:
    """Ranks that offer one piece each; `sources` says where that of a rank lies there, and where it goes here."""
    for slot, chunk in task.chunks(max(task.longest, 1) if task.resident else task.slot):
        mine = _cut(range(sum(task.send)), chunk)
        write = (Gather(tmp(slot, len(mine)), (_own(task, inp(mine)),)),) if writes else ()
        read = tuple(
            Gather(
                out(_cut(into, chunk)),
                (_own(task, inp(mine)) if rank == task.rank else _read(task, rank, _cut(there, chunk), slot),),
            )
            for rank, (there, into) in sources.items()
        )
        yield _stages(task, write, read)


def _all_gather(task: WindowTask) -> Iterator[tuple[Stage, ...]]:
    places = spans(task.recv)
    sources = {rank: (range(len(places[rank])), places[rank]) for rank in (task.rank, *task.others)}
    return _one_piece(task, sources, writes=True)


def _broadcast(task: WindowTask) -> Iterator[tuple[Stage, ...]]:
    whole = range(task.count)
    sources = {} if task.rank == task.root else {task.root: (whole, whole)}
    return _one_piece(task, sources, writes=task.rank == task.root)


def _shift(task: WindowTask) -> Iterator[tuple[Stage, ...]]:
    whole = range(sum(task.recv))
    return _one_piece(task, {(task.rank - task.root) % task.size: (whole, whole)}, writes=bool(task.root % task.size))


def _many_pieces(
    task: WindowTask, read: Callable[[range, list[Place]], Stage], own_offset: Sequence[range]
) -> Iterator[tuple[Stage, ...]]:
    """Ranks that offer a piece to each other one; `read` says what becomes of those for this rank, in the order of the ranks."""
    room = task.slot // task.size
    pieces = spans(task.send)
    for slot, chunk in task.chunks(max(task.longest, 1) if task.resident else room):
        write = tuple(
            Gather(tmp(slot + rank * room, len(part)), (_own(task, inp(part)),))
            for rank in task.others
            for part in [_cut(pieces[rank], chunk)]
        )
        mine = _cut(pieces[task.rank], chunk)
        offered = []
        for rank in range(task.size):
            there = _cut(own_offset[rank], chunk)
            offered.append(_own(task, inp(mine)) if rank == task.rank else _read(task, rank, there, slot + task.rank * room))
        yield _stages(task, write, read(chunk, offered))


def _reduce_scatter(task: WindowTask) -> Iterator[tuple[Stage, ...]]:
    mine = range(task.send[task.rank])

    def total(chunk: range, offered: list[Place]) -> Stage:
        return (Gather(out(_cut(mine, chunk)), tuple(offered)),)

    return _many_pieces(task, total, [spans(task.send)[task.rank]] * task.size)


def _all_to_all(task: WindowTask) -> Iterator[tuple[Stage, ...]]:
    places = spans(task.recv)

    def each(chunk: range, offered: list[Place]) -> Stage:
        return tuple(Gather(out(_cut(places[rank], chunk)), (offered[rank],)) for rank in (task.rank, *task.others))

    return _many_pieces(task, each, [range(count) for count in task.recv])


def _reduce(task: WindowTask) -> Iterator[tuple[Stage, ...]]:
    for slot, chunk in task.chunks(max(task.longest, 1) if task.resident else task.slot):
        part = _cut(range(task.count), chunk)
        mine = _own(task, inp(part))
        if task.rank != task.root:
            yield _stages(task, (Gather(tmp(slot, len(part)), (mine,)),), ())
            continue
        parts = tuple(mine if rank == task.rank else _read(task, rank, part, slot) for rank in range(task.size))
        yield _stages(task, (), (Gather(out(part), parts),))


def one_shot(task: WindowTask) -> bool:
    """Whether every rank adds up everything."""
    short = task.count * task.itemsize * (task.size - 1) <= ONE_SHOT_BYTES
    if task.resident:
        return not task.in_place and (short or task.size == 2)
    return short and task.count <= task.slot


def _all_reduce(task: WindowTask) -> Iterator[tuple[Stage, ...]]:
    if one_shot(task):
        slot, whole = task.first % SLOTS * task.slot, range(task.count)
        room = inp(whole) if task.resident else tmp(slot, task.count)
        write = (Gather(room, (_own(task, inp(whole)),)),)
        yield _stages(task, write, (Gather(out(whole), tuple(Place(r, room) for r in range(task.size))),))
        return
    slotless = task.resident and task.in_place and task.size == 2
    for slot, chunk in task.chunks(max(IN_PLACE_BYTES // task.itemsize, task.slot) if slotless else task.slot):
        yield _two_shot(task, slot, _cut(range(task.count), chunk))


def _two_shot(task: WindowTask, slot: int, chunk: range) -> tuple[Stage, ...]:
    parts = split_ranges(len(chunk), task.size)
    here = [range(chunk.start + part.start, chunk.start + part.stop) for part in parts]
    mine, room = here[task.rank], [tmp(slot + part.start, len(part)) for part in parts]
    write = tuple(Gather(room[rank], (_own(task, inp(here[rank])),)) for rank in task.others)
    addends = tuple(
        _own(task, inp(mine)) if rank == task.rank else _read(task, rank, mine, slot + parts[task.rank].start)
        for rank in range(task.size)
    )
    result = Gather(out(mine), (_own(task, room[task.rank]),))
    total: Stage = (Gather(room[task.rank], addends), result)
    where = room
    if task.resident and task.in_place:  # the others read the sum where it belongs
        where = [out(part) for part in here]
        total = (Gather(out(mine), addends),) if task.rank < 2 else total  # the first two addends may be overwritten by their sum
    read = tuple(Gather(out(here[rank]), (Place(rank, where[rank]),)) for rank in task.others)
    return (total, read) if task.resident else (write, total, read)


_BUILDERS: dict[str, Callable[[WindowTask], Iterator[tuple[Stage, ...]]]] = {
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_reduce": _all_reduce,
    "all_to_all": _all_to_all,
    "broadcast": _broadcast,
    "reduce": _reduce,
    "shift": _shift,
}
