"""Every fault of a rank is caught, attributed and shrunk, and the next test still runs.

On ranks other than 0 a failure has one line of text.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st
from kit.failing import SEARCH, failure_of, leads
from kit.faults import FAULTS, average

from sp_core.testing import given, spmd, tier

pytestmark = pytest.mark.ranks  # these laws hold for threads and for MPI


@spmd()
def still_works(comm: Any) -> None:
    """A collective that works."""
    total = np.empty(1)
    comm.Allreduce(np.ones(1), total)
    assert total[0] == comm.size


def test_a_correct_system_passes() -> None:
    average("")()
    still_works()


@pytest.mark.parametrize(("fault", "name", "minimum", "told"), FAULTS)
def test_a_fault_is_attributed_and_shrunk(fault: str, name: str, minimum: str, told: str) -> None:
    text = failure_of(average(fault))
    assert f"RankFailure[{name}" in text
    if leads():
        assert told in text
        assert f"to keep this example: @example({minimum}, seed=0)" in text
        assert "run it again: " in text
        assert "test_kit_faults.py::test_a_fault_is_attributed_and_shrunk" in text
        assert ("python -m sp_core.testing.launch -n" in text) == (tier() == "mpi")
    still_works()


def test_two_bugs_are_told_apart() -> None:
    @SEARCH
    @given(n=st.integers(0, 40), d=st.integers(0, 40))
    def both(comm: Any, n: int, d: int) -> None:
        if n > 20:
            raise KeyError("n")
        if d > 2 and comm.rank == comm.size - 1:
            raise ZeroDivisionError("d")
        comm.Barrier()

    text = failure_of(both)
    if leads():
        assert "KeyError on rank 0 of 1" in text
        assert "ZeroDivisionError on rank 0 of 1" in text
        assert "@example(nprocs=1, n=21, d=0)" in text
        assert "@example(nprocs=1, n=0, d=3)" in text


def stopped(text: str, *ranks: int) -> bool:
    """Whether these ranks were woken, and none saw a mismatch.

    Only the leading rank's text says so.
    """
    return not leads() or (
        "Mismatch" not in text
        and all(f"rank {rank}: stopped: PeerFailed" in text for rank in ranks)
    )


def cleans_up(comm: Any) -> None:
    """The first cause is reported, although cleaning up communicates."""
    duplicate = comm.Dup()
    try:
        if comm.rank == 2:
            raise LookupError("the cause")
        comm.Barrier()
    finally:
        duplicate.Free()


def waits_elsewhere(comm: Any) -> None:
    """Ranks that wait on other communicators are woken."""
    row, column = comm.Split(comm.rank // 2, comm.rank), comm.Split(comm.rank % 2, comm.rank)
    row.Barrier()
    if comm.rank == 3:
        raise LookupError("only rank 3")
    column.Barrier()  # rank 1 waits for rank 3 here
    comm.Barrier()  # and the others here


def leaves_a_request(comm: Any) -> None:
    """What was started and not waited for does no harm."""
    total = np.empty(1000)
    comm.Iallreduce(np.ones(1000), total)
    if comm.rank:
        raise LookupError("before the wait")
    comm.Barrier()


@pytest.mark.parametrize(
    ("body", "size", "woken"),
    [(cleans_up, 3, (0, 1)), (waits_elsewhere, 4, (0, 1, 2)), (leaves_a_request, 2, ())],
)
def test_a_rank_that_fails_wakes_the_others(body: Any, size: int, woken: tuple[int, ...]) -> None:
    text = failure_of(spmd(size)(body))
    assert "RankFailure[LookupError" in text
    assert stopped(text, *woken)
    still_works()


def test_a_rank_that_fails_wakes_ranks_that_wait_for_its_message() -> None:
    @spmd(3)
    def body(comm: Any) -> None:
        right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
        received = np.empty(100_000)
        comm.announce_exchange(sends=[(right, 800_000)], recvs=[(left, 800_000)])
        request = comm.Irecv(received, left)
        if comm.rank == 1:
            raise LookupError("before it sends")
        sent = comm.Isend(np.full(100_000, comm.rank + 1.0), right)
        while not (request.Test() and sent.Test()):
            pass
        comm.Barrier()

    @spmd(3)
    def clean(comm: Any) -> None:
        """No message of the broken exchange may be found by the next one."""
        right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
        received = np.empty(1)
        if hasattr(comm, "announce_exchange"):  # a raw communicator has nothing to announce to
            comm.announce_exchange(sends=[(right, 8)], recvs=[(left, 8)])
        sent, came = comm.Isend(np.full(1, -1.0 - comm.rank), right), comm.Irecv(received, left)
        while not (sent.Test() and came.Test()):
            pass
        assert received[0] == -1.0 - left

    for _ in range(3):
        assert "RankFailure[LookupError" in failure_of(body)
        clean()


@pytest.mark.parametrize("op", ["Allreduce", "Iallreduce", "allgather"])
def test_a_rank_that_is_interrupted_keeps_its_word(op: str) -> None:
    """Its peers may be inside the call already, to which all had agreed."""

    @spmd(3)
    def body(comm: Any) -> None:
        def interrupted(steps: Any, what: str, **more: bool) -> None:
            del vars(comm.lockstep.carrier)["drive"]
            next(steps, None)
            raise InterruptedError("a signal")

        if comm.rank == 1:
            comm.lockstep.carrier.drive = interrupted
        request = (
            comm.allgather(0) if op == "allgather" else getattr(comm, op)(np.ones(1), np.empty(1))
        )
        if op == "Iallreduce":
            request.Wait()
        comm.Barrier()

    text = failure_of(body)
    assert "RankFailure[InterruptedError" in text
    assert stopped(text, 0, 2)
    still_works()
