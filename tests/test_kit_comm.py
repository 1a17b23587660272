"""Laws of the communicators that bodies get, the same for threads and for MPI."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st
from kit.failing import SEARCH, failure_of, leads
from mpi4py import MPI

from sp_core.errors import RankError
from sp_core.testing import ThreadComm, given, spmd, tier
from sp_core.testing.comm import LockstepComm

pytestmark = pytest.mark.ranks  # these laws hold for threads and for MPI
SIZES = st.lists(st.integers(0, 5), min_size=4, max_size=4)


def announce(
    comm: Any, sends: list[tuple[int, int]], recvs: list[tuple[int, int]], **later: bool
) -> None:
    """As the library's transport does: a raw communicator is not told."""
    if hasattr(comm, "announce_exchange"):
        comm.announce_exchange(sends=sends, recvs=recvs, **later)


def finish(request: Any) -> None:
    """Wait as the library does."""
    while request is not None and not request.Test():
        pass


def values(rank: int, count: int) -> np.ndarray[Any, Any]:
    """What a rank sends; different for each rank and place."""
    return 100.0 * (rank + 1) + np.arange(count)


@pytest.mark.parametrize("blocking", [True, False])
@given(nprocs=st.integers(1, 4), counts=SIZES, seed=st.integers(0, 9), max_examples=40)
def test_collectives_do_what_mpi_says(
    comm: Any, blocking: bool, counts: list[int], seed: int
) -> None:
    from mpi4py import MPI

    def call(name: str, *args: Any, **more: Any) -> None:
        finish(getattr(comm, name if blocking else "I" + name.lower())(*args, **more))

    p, rank = comm.size, comm.rank
    counts, root = counts[:p], seed % p
    everyone = np.concatenate([values(r, n) for r, n in enumerate(counts)])
    n = len(everyone)

    gathered = np.empty(n)
    call("Allgatherv", values(rank, counts[rank]), [gathered, counts])
    np.testing.assert_array_equal(gathered, everyone)

    total, largest, at_root = np.empty(n), np.empty(n), np.full(n, -1.0)
    call("Allreduce", everyone * (rank + 1), total)
    np.testing.assert_array_equal(total, everyone * p * (p + 1) / 2)
    call("Allreduce", everyone * (rank + 1), largest, op=MPI.MAX)
    np.testing.assert_array_equal(largest, everyone * p)
    call("Reduce", everyone, at_root if rank == root else None, op=MPI.SUM, root=root)
    np.testing.assert_array_equal(at_root, everyone * p if rank == root else -1.0)

    mine = np.empty(counts[rank])
    call("Reduce_scatter", everyone, mine, counts)
    np.testing.assert_array_equal(mine, values(rank, counts[rank]) * p)

    # rank i sends (i + j) % 3 values to rank j
    sent = np.concatenate([values(10 * rank + j, (rank + j) % 3) for j in range(p)])
    came = np.empty(sum((i + rank) % 3 for i in range(p)))
    call(
        "Alltoallv",
        [sent, [(rank + j) % 3 for j in range(p)]],
        [came, [(i + rank) % 3 for i in range(p)]],
    )
    np.testing.assert_array_equal(
        came, np.concatenate([values(10 * i + rank, (i + rank) % 3) for i in range(p)])
    )

    buffer = values(rank, n)
    call("Bcast", buffer, root=root)
    np.testing.assert_array_equal(buffer, values(root, n))


@spmd()
def test_objects(comm: Any) -> None:
    assert comm.allgather({"rank": comm.rank}) == [{"rank": r} for r in range(comm.size)]
    assert comm.bcast([comm.rank], root=comm.size - 1) == [comm.size - 1]
    assert comm.gather(comm.rank) == (list(range(comm.size)) if comm.rank == 0 else None)
    assert comm.allreduce(comm.rank + 1) == comm.size * (comm.size + 1) // 2
    comm.barrier()


@given(nprocs=st.integers(1, 4), sizes=SIZES, offset=st.integers(0, 3), max_examples=40)
def test_messages_arrive_in_order(comm: Any, sizes: list[int], offset: int) -> None:
    """Two messages between the same ranks, one of them empty or not, self-sends included."""
    right, left = (comm.rank + offset) % comm.size, (comm.rank - offset) % comm.size
    out = [values(comm.rank, sizes[comm.rank]), -values(comm.rank, 3)]
    into = [np.empty(sizes[left]), np.empty(3)]
    announce(comm, [(right, x.nbytes) for x in out], [(left, x.nbytes) for x in into])
    requests = [comm.Irecv(x, left, 0) for x in into] + [comm.Isend(x, right, 0) for x in out]
    for request in requests:
        finish(request)
    np.testing.assert_array_equal(into[0], values(left, sizes[left]))
    np.testing.assert_array_equal(into[1], -values(left, 3))


@spmd(1, 2, 3, 4)
def test_sendrecv(comm: Any) -> None:
    received = np.empty(2)
    comm.Sendrecv(
        np.full(2, float(comm.rank)),
        (comm.rank + 1) % comm.size,
        7,
        received,
        (comm.rank - 1) % comm.size,
        7,
    )
    assert (received == (comm.rank - 1) % comm.size).all()


@given(nprocs=st.integers(1, 4), columns=st.integers(1, 3), reverse=st.booleans(), max_examples=30)
def test_sub_communicators(comm: Any, columns: int, reverse: bool) -> None:
    row = comm.Split(comm.rank // columns, -comm.rank if reverse else comm.rank)
    members = [r for r in range(comm.size) if r // columns == comm.rank // columns]
    assert row.allgather(comm.rank) == (members[::-1] if reverse else members)
    twin = row.Dup()
    assert (twin.rank, twin.size) == (row.rank, row.size)
    twin.Free()
    row.Free()
    assert comm.allreduce(1) == comm.size


@spmd(2, 3)
def test_a_rank_may_be_left_out_of_a_split(comm: Any) -> None:
    from mpi4py import MPI

    part = comm.Split(MPI.UNDEFINED if comm.rank == 0 else 0, comm.rank)
    assert bool(part) == (comm.rank > 0)
    if part:
        assert part.allreduce(1) == comm.size - 1
        part.Free()


@spmd(2)
def test_a_freed_communicator_is_refused_on_every_rank(comm: Any) -> None:
    twin = comm.Dup()
    twin.Free()
    if isinstance(comm, LockstepComm):
        assert not twin
        with pytest.raises(RankError, match="freed"):
            twin.Barrier()
    comm.Barrier()


@spmd(2)
def test_threads_refuse_what_they_do_not_offer(comm: Any) -> None:
    if isinstance(comm, ThreadComm):
        assert not hasattr(comm, "Probe")
        with pytest.raises(
            AttributeError, match="under mpiexec, where every call of mpi4py is there"
        ):
            comm.Alltoallw()


def at(
    rank: int, wrong: Callable[[Any], object], right: Callable[[Any], object], size: int = 2
) -> str:
    """The failure where one rank calls something else than the others."""

    @spmd(size)
    def body(comm: Any) -> None:
        (wrong if comm.rank == rank else right)(comm)

    return failure_of(body)


def zeros(n: int) -> np.ndarray[Any, Any]:
    """A buffer."""
    return np.zeros(n)


RIGHT_AND_WRONG: dict[str, tuple[Callable[[Any], object], Callable[[Any], object]]] = {
    "counts": (
        lambda c: c.Allgatherv(zeros(2), [zeros(4), [2, 2]]),
        lambda c: c.Allgatherv(zeros(2), [zeros(5), [3, 2]]),
    ),
    "length": (
        lambda c: c.Allreduce(zeros(2), zeros(2)),
        lambda c: c.Allreduce(zeros(3), zeros(3)),
    ),
    "dtype": (
        lambda c: c.Allreduce(zeros(2), zeros(2)),
        lambda c: c.Allreduce(np.zeros(2, "f4"), np.zeros(2, "f4")),
    ),
    "reduction": (
        lambda c: c.Allreduce(zeros(2), zeros(2)),
        lambda c: c.Allreduce(zeros(2), zeros(2), "max"),
    ),
    "root": (lambda c: c.Bcast(zeros(2), 0), lambda c: c.Bcast(zeros(2), 1)),
    "blocking or not": (
        lambda c: c.Allreduce(zeros(2), zeros(2)),
        lambda c: c.Iallreduce(zeros(2), zeros(2)),
    ),
    "operation": (lambda c: c.Barrier(), lambda c: c.Dup()),
    "skipped": (lambda c: c.Barrier(), lambda c: None),
    "all to all": (
        lambda c: c.Alltoallv([zeros(2), [1, 1]], [zeros(2), [1, 1]]),
        lambda c: c.Alltoallv([zeros(3), [2, 1]], [zeros(2), [1, 1]]),
    ),
    "announcement": (lambda c: announce(c, [], [(1, 8)]), lambda c: announce(c, [(0, 16)], [])),
}


@pytest.mark.parametrize("case", RIGHT_AND_WRONG)
def test_ranks_that_differ_are_told_apart(case: str) -> None:
    right, wrong = RIGHT_AND_WRONG[case]
    text = at(1, wrong, right)
    assert "RankFailure[CollectiveMismatch]" in text
    if leads():
        assert "rank 0: " in text
        assert "rank 1: " in text
        assert "test_kit_comm.py:" in text


def test_a_wrong_announcement_names_the_message() -> None:
    right, wrong = RIGHT_AND_WRONG["announcement"]
    text = at(1, wrong, right)
    if leads():
        assert "rank 1 sends 16 bytes to rank 0, which does not expect them" in text
        assert "rank 0 expects 8 bytes from rank 1, which does not send them" in text


LOCAL: dict[str, tuple[str, Callable[[Any], object]]] = {
    "own counts": (
        "sends itself 16 bytes of float64, but expects 24 of float64",
        lambda c: c.Allgatherv(zeros(2), [zeros(5), [2, 3]]),
    ),
    "short buffer": (
        "a buffer of 24 bytes, its counts add up to 4",
        lambda c: c.Allgatherv(zeros(2), [zeros(3), [2, 2]]),
    ),
    "strides": ("is not contiguous", lambda c: c.Allreduce(np.zeros(4)[::2], zeros(2))),
    "aliasing": ("share memory", lambda c: (lambda x: c.Allreduce(x, x))(zeros(2))),
    "no such root": ("root 2 is not one of the 2 ranks", lambda c: c.Bcast(zeros(2), 2)),
    "no such rank": ("rank 5 is not one of the 2 ranks", lambda c: announce(c, [(5, 8)], [])),
}


@pytest.mark.parametrize("case", LOCAL)
def test_a_rank_that_contradicts_itself_is_told_so_and_the_others_are_woken(case: str) -> None:
    message, wrong = LOCAL[case]
    text = at(1, wrong, lambda c: c.Barrier())
    assert text.startswith(("RankFailure[ValueError", "RankFailure[RootError"))
    if leads():
        assert message in text
        assert "rank 0: stopped: PeerFailed" in text


def test_messages_must_be_those_announced() -> None:
    unannounced = at(
        0,
        lambda c: (announce(c, [], []), c.Isend(zeros(1), 1)),
        lambda c: (announce(c, [], []), c.Barrier()),
    )
    assert "CollectiveMismatch" in unannounced
    forgotten = at(
        0,
        lambda c: announce(c, [(1, 8)], []),
        lambda c: (announce(c, [], [(0, 8)]), c.Irecv(zeros(1), 0)),
    )
    assert "CollectiveMismatch" in forgotten
    if leads():
        assert "Isend of 8 bytes with rank 1 was not announced" in unannounced
        assert "missing: Isend of 8 bytes with rank 1" in forgotten


@spmd(2, 3)
def test_messages_for_later_may_be_posted_after_other_calls(comm: Any) -> None:
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    received = zeros(2)
    announce(comm, [(right, 8), (right, 16)], [(left, 8), (left, 16)], later=True)
    comm.Barrier()
    sent = np.full(2, float(comm.rank))
    requests = [comm.Irecv(zeros(1), left), comm.Isend(sent[:1], right)]
    comm.Barrier()
    requests += [comm.Irecv(received, left), comm.Isend(sent, right)]
    for request in requests:
        finish(request)
    assert received.tolist() == [float(left)] * 2


@pytest.mark.parametrize("end", ["body", "Free"])
def test_messages_for_later_must_be_posted_before_the_end(end: str) -> None:
    @spmd(2)
    def body(comm: Any) -> None:
        twin = comm.Dup()
        announce(twin, [(1 - comm.rank, 8)], [(1 - comm.rank, 8)], later=True)
        if end == "Free":
            twin.Free()

    text = failure_of(body)
    assert "CollectiveMismatch" in text
    if leads():
        assert "missing: Isend of 8 bytes with rank" in text


def test_waiting_for_each_other_on_different_communicators_is_found() -> None:
    """The classic deadlock: two calls in another order on one rank, on two communicators."""

    @SEARCH
    @given(nprocs=st.integers(1, 3), n=st.integers(0, 9))
    def body(comm: Any, n: int) -> None:
        one, other = comm.Dup(), comm.Dup()
        swap = n >= 4 and comm.rank == 1
        for twin in (other, one) if swap else (one, other):
            twin.Barrier()

    text = failure_of(body)
    assert "RankFailure[CollectiveMismatch]" in text
    if leads():
        assert "every rank waits and none can go on" in text
        assert "rank 0: Barrier() on comm.0" in text
        assert "rank 1: Barrier() on comm.1" in text
        assert "@example(nprocs=2, n=4)" in text


def test_the_names_are_those_of_the_tier() -> None:
    @spmd(1)
    def body(comm: Any) -> None:
        if isinstance(comm, LockstepComm):
            assert type(comm).__name__ == {"threads": "ThreadComm", "mpi": "CheckedComm"}[tier()]

    body()


def test_what_is_left_out_is_what_mpi4py_takes() -> None:
    """Its own signatures stand in the first lines of its docstrings."""
    compared = 0
    for name, method in inspect.getmembers(ThreadComm, inspect.isfunction):
        if name.startswith("_"):
            continue
        theirs = (getattr(MPI.Intracomm, name, None).__doc__ or "").partition("\n")[0]
        for parameter in inspect.signature(method).parameters.values():
            if (
                parameter.name in ("root", "sendtag", "color", "key")
                and parameter.default is not parameter.empty
            ):
                assert f"{parameter.name}: int = {parameter.default}" in theirs, name
                compared += 1
    assert compared >= 7
