"""The chunks of an operation move each element once, and all ranks make as many of them."""

from __future__ import annotations

from hypothesis import given, strategies as st

from sp_core.schedules import Op, Operation, operation

counts = st.lists(st.integers(0, 30), min_size=1, max_size=6).map(tuple)


def operations(sizes: tuple[int, ...]) -> list[Operation]:
    """Every rank's view of collectives with these sizes."""
    ranks = range(len(sizes))
    square = [tuple((a * b) % 7 for b in sizes) for a in sizes]
    return [
        *(operation("all_gather", rank, len(sizes), sizes) for rank in ranks),
        *(operation("reduce_scatter", rank, len(sizes), sizes) for rank in ranks),
        *(
            Operation(
                Op.ALL_TO_ALL, rank, len(sizes), square[rank], tuple(row[rank] for row in square), 6
            )
            for rank in ranks
        ),
        *(operation("broadcast", rank, len(sizes), sizes[:1], len(sizes) - 1) for rank in ranks),
        *(operation("reduce", rank, len(sizes), sizes[:1]) for rank in ranks),
        operation("all_reduce", 0, len(sizes), sizes[:1]),
    ]


@given(counts, st.integers(1, 12))
def test_chunks_cover_every_piece_exactly_once(sizes: tuple[int, ...], length: int) -> None:
    for one in operations(sizes):
        for side in ("send", "recv"):
            covered: list[list[int]] = [[] for _ in getattr(one, side)]
            for offset, chunk in one.chunks(length):
                for piece, size in zip(covered, getattr(chunk, side), strict=True):
                    assert 0 <= size <= length
                    piece.extend(range(offset, offset + size))
            assert covered == [list(range(size)) for size in getattr(one, side)]


@given(counts, st.integers(1, 12))
def test_all_ranks_make_the_same_number_of_chunks(sizes: tuple[int, ...], length: int) -> None:
    made: dict[Op, set[int]] = {}
    for one in operations(sizes):
        made.setdefault(one.op, set()).add(len(list(one.chunks(length))))
    assert all(len(numbers) == 1 for numbers in made.values())


@given(counts, st.integers(1, 12))
def test_the_chunks_of_all_ranks_fit_together(sizes: tuple[int, ...], length: int) -> None:
    ranks = range(len(sizes))
    gathers = [
        list(operation("all_gather", rank, len(sizes), sizes).chunks(length)) for rank in ranks
    ]
    for step in range(len(gathers[0])):
        sent = tuple(gathers[rank][step][1].send[0] for rank in ranks)
        assert all(gathers[rank][step][1].recv == sent for rank in ranks)
