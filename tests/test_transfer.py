"""Laws of chunking: the chunks of a transfer move each element exactly once, and all ranks make as many of them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from sp_core.transport import transfer as tr
from sp_core.transport.transfer import Op, Transfer

counts = st.lists(st.integers(0, 30), min_size=1, max_size=6).map(tuple)


def transfers(sizes: tuple[int, ...]) -> list[Transfer]:
    """Every rank's view of collectives with these sizes."""
    ranks = range(len(sizes))
    square = [tuple((a * b) % 7 for b in sizes) for a in sizes]
    return [
        *(tr.all_gather(sizes, rank) for rank in ranks),
        *(tr.reduce_scatter(sizes, rank) for rank in ranks),
        *(tr.all_to_all(square[rank], tuple(row[rank] for row in square), 6) for rank in ranks),
        *(tr.broadcast(sizes[0], rank, len(sizes) - 1) for rank in ranks),
        *(tr.reduce(sizes[0], rank, 0) for rank in ranks),
        tr.all_reduce(sizes[0]),
    ]


@given(counts, st.integers(1, 12))
def test_chunks_cover_every_piece_exactly_once(sizes: tuple[int, ...], length: int) -> None:
    for transfer in transfers(sizes):
        for side in ("send", "recv"):
            covered: list[list[int]] = [[] for _ in getattr(transfer, side)]
            for offset, chunk in transfer.chunks(length):
                for piece, size in zip(covered, getattr(chunk, side), strict=True):
                    assert 0 <= size <= length
                    piece.extend(range(offset, offset + size))
            assert covered == [list(range(size)) for size in getattr(transfer, side)]


@given(counts, st.integers(1, 12))
def test_all_ranks_make_the_same_number_of_chunks(sizes: tuple[int, ...], length: int) -> None:
    made: dict[Op, set[int]] = {}
    for transfer in transfers(sizes):
        made.setdefault(transfer.op, set()).add(len(list(transfer.chunks(length))))
    assert all(len(numbers) == 1 for numbers in made.values())


@given(counts, st.integers(1, 12))
def test_the_chunks_of_all_ranks_fit_together(sizes: tuple[int, ...], length: int) -> None:
    ranks = range(len(sizes))
    gathers = [list(tr.all_gather(sizes, rank).chunks(length)) for rank in ranks]
    for step in range(len(gathers[0])):
        sent = tuple(gathers[rank][step][1].send[0] for rank in ranks)
        assert all(gathers[rank][step][1].recv == sent for rank in ranks)
