"""Test that schedules count each contribution once, without conflicts and deadlocks."""

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from oracle.proof import Schedule, ScheduleError, replay, verify
from oracle.schedule_cases import NAMES, nodes_of, pieces, schedule

from sp_core.programs import (
    Buffer,
    Combine,
    Message,
    Operation,
    Program,
    Region,
    Step,
    cost,
    defaults,
    operation,
    segment_length,
)
from sp_core.programs.program import AHEAD
from sp_core.transport.host import are_equal

TASKS: list[tuple[str, int, int, tuple[Any, ...], int, bool, int]] = [
    ("all_gather", 1, 0, ((2,), (1, 2, 4), 4), 7, False, 2 * 2),
    ("reduce_scatter", 1, 0, ((1, 2, 4), (2,), 4), 7, True, 1 + 4),
    ("all_to_all", 1, 0, ((1, 2, 4), (2, 2, 2), 4), 3 * 4, False, 1 + 4),
    ("all_reduce", 1, 0, ((7,), (7,), 7), 7, True, 7),
    ("shift", 1, 4, ((2,), (1,), 4), 4, False, 2),
    ("shift", 1, -1, ((2,), (4,), 4), 4, False, 2),
    ("broadcast", 1, 4, ((7,), (), 7), 7, False, 2 * 7),
    ("broadcast", 0, 1, ((), (7,), 7), 7, False, 0),
    ("reduce", 1, -2, ((7,), (7,), 7), 7, True, 0),
    ("reduce", 0, 1, ((7,), (), 7), 7, True, 7),
]
"""Operations of three ranks with pieces of 1, 2 and 4 elements, as one rank sees them: name, rank,
root (or offset), sizes (sent, received, longest), elements in all, whether it adds, elements
sent."""


@pytest.mark.parametrize(("op", "rank", "root", "sizes", "elements", "adds", "sent"), TASKS)
def test_operations_are_as_counted_by_hand(
    op: str, rank: int, root: int, sizes: tuple[Any, ...], elements: int, adds: bool, sent: int
) -> None:
    task = operation(op, rank, 3, (1, 2, 4), root)
    assert task == (op, rank, 3, *sizes, root % 3, "sum", 1, None, (), 0, 0, False, False)
    assert (task.reduces, task.elements, task.bytes_sent) == (adds, elements, sent)
    task, single = task._replace(itemsize=8), operation(op, 0, 1, (1,))
    assert (task.nbytes, task.bytes_sent) == (8 * elements, 8 * sent)
    assert (single.bytes_sent, len([*single.chunks(1)])) == (0, 1)
    parts = [(*part.send, *part.recv, part.longest) for _, part in task.chunks(3)]
    assert list(map(sum, zip(*parts, strict=True))) == [*task.send, *task.recv, task.longest]


def test_pieces_have_one_length_on_all_ranks_or_on_none() -> None:
    """Otherwise ranks would make different MPI calls. The same holds for parts of a long vector."""
    for size in (1, 2, 3):
        lengths = [*product((0, 1, 2, 4), repeat=size)]
        for split, joined in product(lengths, lengths):
            pieces_of = [[joined[a] * split[b] for b in range(size)] for a in range(size)]
            most = max(map(max, pieces_of))
            ranks = [
                Operation(
                    "all_to_all", rank, size, tuple(row), tuple(r[rank] for r in pieces_of), most
                )
                for rank, row in enumerate(pieces_of)
            ]
            one = len({piece for row in pieces_of for piece in row}) == 1
            assert {are_equal(moves) for moves in ranks} == {one}, (split, joined)
            for parts in zip(*(moves.chunks(2) for moves in ranks), strict=True):
                assert not any(are_equal(part) for _, part in parts)
    for op in ("all_gather", "reduce_scatter"):
        for counts, even in (((3, 3), True), ((3, 2), False), ((0, 3), False), ((0, 0), True)):
            assert {are_equal(operation(op, rank, 2, counts)) for rank in (0, 1)} == {even}


@st.composite
def schedules(draw: st.DrawFn, op: str, algorithm: str, max_size: int = 9) -> Schedule:
    size = draw(st.integers(1, max_size))
    counts = pieces(size, draw(st.integers(0, 30)))
    return schedule(
        op,
        algorithm,
        counts,
        draw(st.integers(0, size - 1)),
        draw(st.none() | st.integers(1, 4)),
        nodes_of(size, draw(st.integers(0, 12))),
    )


@pytest.mark.parametrize(("op", "algorithm"), NAMES)
@given(data=st.data())
def test_every_contribution_is_counted_once(op: str, algorithm: str, data: st.DataObject) -> None:
    made = data.draw(schedules(op, algorithm))
    verify(made)
    assert made.size > 1 or made.programs[0].scratch == scratch_used(made.programs[0])


def lengths(program: Program) -> list[int]:
    """Return for each step with messages the elements of the longest, sent or received."""
    steps = [(*step.sends, *step.receives) for step in program.steps]
    return [max(len(message.region) for message in messages) for messages in steps if messages]


def scratch_used(program: Program) -> int:
    """Return how many elements of scratch a program's messages and sums write to."""
    received = [message.region for step in program.steps for message in step.receives]
    written = [*received, *(combine.into for step in program.steps for combine in step.then)]
    return max((region.stop for region in written if region.buffer is Buffer.TMP), default=0)


@pytest.mark.parametrize(("op", "algorithm"), NAMES)
def test_no_more_scratch_is_asked_for_than_is_used(op: str, algorithm: str) -> None:
    """The pieces are equal here. If pieces or segments differ, scratch is for the longest one."""
    for size, nodes, segment in product(range(1, 9), (0, 1, 3, 9), (None, 60)):
        made = schedule(op, algorithm, (840,) * size, 0, segment, nodes_of(size, nodes))
        assert size > 1 or not lengths(made.programs[0])
        assert [program.scratch for program in made.programs] == list(
            map(scratch_used, made.programs)
        )


@pytest.mark.parametrize(("op", "algorithm"), NAMES)
def test_many_ranks(op: str, algorithm: str) -> None:
    """If a maximum is 0, its sign is the same on all ranks."""
    for size in (13, 16, 31):
        counts = tuple(rank % 3 for rank in range(size))
        made = schedule(op, algorithm, counts, size // 2, 1, nodes_of(size, size))
        verify(made)
        if op == "all_reduce":
            zeros = 0 * torch.randn(size, sum(counts), generator=torch.Generator().manual_seed(0))
            signs = torch.stack(replay(made, [*zeros], "max")).signbit()
            assert torch.equal(signs, signs[:1].expand(signs.shape))


@given(data=st.data(), case=st.sampled_from(NAMES), in_place=st.booleans())
def test_no_step_writes_to_what_is_still_being_sent(
    data: st.DataObject, case: tuple[str, str], in_place: bool
) -> None:
    """A send is waited for before a step overwrites what it sends, at most `AHEAD` steps later."""

    def places(region: Region) -> set[tuple[str, int]]:
        name = "user" if in_place and region.buffer != Buffer.TMP else region.buffer.value
        return {(name, k) for k in range(region.start, region.stop)}

    def union(regions: list[Region]) -> set[tuple[str, int]]:
        return set().union(*map(places, regions))

    for made in data.draw(schedules(*case, 5)).programs:
        written = [
            union([m.region for m in step.receives] + [c.into for c in step.then])
            for step in made.steps
        ]
        firsts = made.rewritten_in_place if in_place else made.rewritten
        assert len(firsts) == len(made.steps)
        assert firsts[-1:] in ((), (len(firsts) - 1,))  # no step follows the last
        for number, (step, first) in enumerate(zip(made.steps[:-1], firsts, strict=False)):
            sent = union([message.region for message in step.sends])
            touched = [k for k in range(number, len(written)) if sent & written[k]]
            assert min(touched, default=first) >= first
            assert first in touched or first == min(number + AHEAD, len(written))


@pytest.mark.parametrize("size", range(2, 10))
def test_costs_are_those_of_the_papers(size: int) -> None:
    """Compare messages, bytes and steps of the busiest rank, for even pieces of m elements."""
    m = 16  # 4 segments
    n, logs, floor = size * m * 4, (size - 1).bit_length(), size.bit_length() - 1
    core = 1 << floor
    folds = size != core
    gathered = (size - 1) * m * 4
    expected: dict[tuple[str, str], tuple[int, int, int]] = {
        ("all_gather", "ring"): (size - 1, gathered, size - 1),
        ("all_gather", "bruck"): (logs, gathered, logs),
        ("all_gather", "recursive_doubling"): (floor + folds, -1, floor + 2 * folds),
        ("reduce_scatter", "ring"): (size - 1, gathered, size - 1),
        ("reduce_scatter", "segmented_ring"): (4 * (size - 1), gathered, 4 * (size - 1)),
        ("reduce_scatter", "pairwise"): (4 * (size - 1), gathered, 4 * (size - 1)),
        ("all_reduce", "ring"): (2 * (size - 1), 2 * gathered, 2 * (size - 1)),
        ("all_reduce", "segmented_ring"): (6 * (size - 1), 2 * gathered, 6 * (size - 1)),
        ("all_reduce", "pairwise"): (6 * (size - 1), 2 * gathered, 6 * (size - 1)),
        ("all_reduce", "recursive_doubling"): (
            floor + folds,
            (floor + folds) * n,
            floor + 2 * folds,
        ),
        ("all_reduce", "hierarchical"): (2 * (size - 1), 2 * gathered, size),
        ("all_reduce", "rabenseifner"): (
            2 * floor + folds,
            -1 if folds else 2 * gathered,
            2 * floor + 2 * folds,
        ),
        ("all_to_all", "pairwise"): (size - 1, -1, size - 1),
        ("broadcast", "binomial"): (logs, logs * n, logs),
        ("reduce", "binomial"): (1, n, logs),
    }
    assert set(expected) == set(NAMES), "state what the busiest rank sends, and in how many steps"
    for (op, algorithm), (messages, sent, steps) in expected.items():
        programs = schedule(op, algorithm, (m,) * size, segment=4).programs
        costs = [cost(program, torch.float32) for program in programs]
        assert max(c["messages"] for c in costs) == messages, (op, algorithm)
        assert sent in (-1, max(c["bytes_sent"] for c in costs)), (op, algorithm)
        assert max(len(lengths(program)) for program in programs) == steps, (op, algorithm)


@pytest.mark.parametrize(("op", "algorithm"), NAMES)
def test_sums_of_three_and_more_half_types_need_room_for_float32(op: str, algorithm: str) -> None:
    """Sums of two, and elements that only move, need no such scratch."""
    for program in schedule(op, algorithm, (2, 3, 2)).programs:
        sums = [combine for step in program.steps for combine in step.then]
        wide = max((len(combine.into) for combine in sums if len(combine.parts) > 2), default=0)
        assert cost(program, torch.bfloat16)["scratch"] == 2 * program.scratch + 8 * wide


@pytest.mark.parametrize("nodes", [(0, 0, 1, 1), (0, 1, 0, 1), (0, 0, 0, 1), (0, 1, 1, 2, 2, 2)])
def test_between_nodes_a_hierarchy_sends_as_little_as_is_possible(nodes: tuple[int, ...]) -> None:
    """Each of N nodes sends 2 (N - 1) / N of the vector, all its ranks together."""
    size, number = len(nodes), len(set(nodes))
    count = 12 * number
    made = schedule("all_reduce", "hierarchical", (count // size,) * size, nodes=nodes)
    sent = dict.fromkeys(nodes, 0)
    for rank, program in enumerate(made.programs):
        messages = [m for step in program.steps for m in step.sends]
        sent[nodes[rank]] += sum(len(m.region) for m in messages if nodes[m.peer] != nodes[rank])
        inside = sum(len(m.region) for m in messages if nodes[m.peer] == nodes[rank])
        mates = nodes.count(nodes[rank])
        assert inside == 2 * count * (mates - 1) / mates or max(map(nodes.count, nodes)) % mates
    assert set(sent.values()) == {2 * (number - 1) * count // number}


@pytest.mark.parametrize(("op", "algorithm"), NAMES)
def test_a_piece_as_long_as_a_segment_is_not_cut(op: str, algorithm: str) -> None:
    whole, cut = (schedule(op, algorithm, (8,) * 4, segment=segment) for segment in (None, 8))
    assert cut == whole


@pytest.mark.parametrize("size", [2, 3, 8])
def test_scratch_is_small_where_there_are_segments(size: int) -> None:
    """This also holds if only one piece has several segments."""
    segment, long = 1 << 10, 1 << 14
    for op, algorithm, segments in (
        ("all_reduce", "segmented_ring", 2),
        ("reduce_scatter", "segmented_ring", 2 if size == 2 else 4),
        ("all_reduce", "pairwise", 2 * (size - 1)),
        ("reduce_scatter", "pairwise", 2 * (size - 1)),
    ):
        counts = (long, *(long if op == "all_reduce" else 1,) * (size - 1))
        for program in schedule(op, algorithm, counts, segment=segment).programs:
            scratch = cost(program, torch.float32)["scratch"]
            assert scratch == segments * segment * 4, (op, algorithm)
            largest = max(segment, long // 2 if op == "all_reduce" else 0)
            assert max(lengths(program)) == largest


def test_a_rank_of_a_tree_keeps_a_sum_and_what_arrives_and_a_leaf_neither() -> None:
    """A rank with one child adds its vector to what arrives. The root adds into its result."""
    made = schedule("reduce", "binomial", (3,) * 8).programs
    assert [program.scratch for program in made] == [24, 0, 24, 0, 48, 0, 24, 0]


@pytest.mark.parametrize(
    ("nbytes", "size", "itemsize", "length"),
    [
        (64, 2, 4, 1 << 16),
        (1 << 26, 2, 4, 1 << 19),
        (1 << 24, 2, 2, 1 << 18),
        (1 << 30, 4, 4, 1 << 19),
        (0, 3, 8, 1 << 15),
    ],
)
def test_segments_are_a_sixteenth_of_a_piece_within_limits(
    nbytes: int, size: int, itemsize: int, length: int
) -> None:
    assert segment_length(nbytes // itemsize, size, itemsize) == length


def changed(made: Schedule, rank: int, number: int, change: Callable[[Step], Step]) -> Schedule:
    programs = list(made.programs)
    steps = list(programs[rank].steps)
    steps[number] = change(steps[number])
    programs[rank] = replace(programs[rank], steps=tuple(steps))
    return replace(made, programs=tuple(programs))


def with_programs(made: Schedule, change: Callable[[Program], Program]) -> Schedule:
    return replace(made, programs=tuple(map(change, made.programs)))


def later(region: Region) -> Region:
    return Region(region.buffer, region.start + 1, region.stop + 1)


RING = schedule("all_reduce", "ring", (2, 2, 2))
LONG_RING = schedule("all_reduce", "segmented_ring", (8, 8, 8), segment=2)
FAULTS: dict[str, tuple[str, Schedule]] = {
    "a sum counted twice": (
        "should be",
        changed(
            RING,
            1,
            0,
            lambda s: replace(
                s, then=(*s.then, Combine(s.then[0].into, (s.then[0].into, s.then[0].parts[1])))
            ),
        ),
    ),
    "an addend forgotten": (
        "should be",
        changed(
            RING, 2, 1, lambda s: replace(s, then=(Combine(s.then[0].into, s.then[0].parts[:1]),))
        ),
    ),
    "a piece off by one": (
        "should be",
        changed(RING, 1, 0, lambda s: replace(s, sends=(Message(2, later(s.sends[0].region)),))),
    ),
    "a message too short": (
        "do not fit",
        changed(RING, 0, 0, lambda s: replace(s, sends=(Message(1, Region(Buffer.IN, 0, 1)),))),
    ),
    "sent before it was received": (
        "not defined",
        changed(RING, 0, 0, lambda s: replace(s, sends=(Message(1, Region(Buffer.OUT, 0, 2)),))),
    ),
    "nobody sends it": (
        "nobody can go on: rank 0 in step 3",
        changed(RING, 2, 3, lambda s: replace(s, sends=())),
    ),
    "a rank that was folded gets nothing back": (
        "nobody can go on",
        with_programs(
            schedule("all_reduce", "recursive_doubling", (1, 1, 1)),
            lambda p: replace(p, steps=p.steps[:2]),
        ),
    ),
    "a step too early": ("under way", with_programs(LONG_RING, lambda p: replace(p, depth=3))),
    "the next step too early": ("under way", with_programs(RING, lambda p: replace(p, depth=2))),
    "one receive for two messages": (
        "under way",
        changed(RING, 0, 0, lambda s: replace(s, receives=(*s.receives, *s.receives))),
    ),
    "result over a part": (
        "lies across",
        changed(
            RING,
            0,
            0,
            lambda s: replace(s, then=(Combine(later(s.then[0].into), s.then[0].parts),)),
        ),
    ),
    "result over a later part": (
        "no scratch to add in",
        changed(
            RING,
            0,
            0,
            lambda s: replace(
                s, then=(Combine(s.then[0].into, (*s.then[0].parts[::-1], s.then[0].into)),)
            ),
        ),
    ),
}


@pytest.mark.parametrize("fault", sorted(FAULTS))
def test_what_is_wrong_is_found(fault: str) -> None:
    text, made = FAULTS[fault]
    with pytest.raises(ScheduleError, match=text):
        verify(made)


def test_defaults_as_text_may_have_spaces_and_need_names() -> None:
    assert defaults("all_gather=bruck, reduce = mpi")["reduce"] == "mpi"
    with pytest.raises(ValueError, match="there are"):
        defaults("all_reduce=")
