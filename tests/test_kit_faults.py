"""Test that every fault of a rank is caught, attributed and shrunk, and the next test still runs.

On ranks other than 0 the text of a failure has one line.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, strategies as st
from kit.failing import SEARCH, assert_fails, assert_told, failure_of, finish
from kit.faults import FAULTS, average

from sp_core.errors import CollectiveMismatch, PeerFailed, RankError
from sp_core.testing import given, session, spmd, tier

pytestmark = pytest.mark.ranks  # these laws hold for threads and for MPI


@pytest.fixture(autouse=True)
def still_works() -> Iterator[None]:
    """Check after each test that another example passes."""
    yield
    spmd()(lambda comm: around(comm, 1))()


@pytest.mark.parametrize(("fault", "name", "minimum", "told"), FAULTS)
def test_a_fault_is_attributed_and_shrunk(fault: str, name: str, minimum: str, told: str) -> None:
    keep = f"to keep this example: @example({minimum}, seed=0)"
    test = "test_kit_faults.py::test_a_fault_is_attributed_and_shrunk"
    launch = ["python -m sp_core.testing.launch -n"] if tier() == "mpi" else []
    text = assert_fails(average(fault), name, told, keep, "run it again: ", test, *launch)
    assert bool(launch) or "sp_core.testing.launch" not in text


def test_two_bugs_are_told_apart() -> None:
    @SEARCH
    @given(n=st.integers(0, 40), d=st.integers(0, 40))
    def both(comm: Any, n: int, d: int) -> None:
        if n > 20:
            raise KeyError("n")
        if d > 2 and comm.rank == comm.size - 1:
            raise ZeroDivisionError("d")
        comm.Barrier()

    errors = ("KeyError on rank 0 of 1", "ZeroDivisionError on rank 0 of 1")
    examples = ("@example(nprocs=1, n=21, d=0)", "@example(nprocs=1, n=0, d=3)")
    assert_told(failure_of(both), *errors, *examples)


def cleans_up(comm: Any) -> None:
    """Fail on the last rank, and free a communicator while the error propagates."""
    duplicate = comm.Dup()
    try:
        lost(comm)
        comm.Barrier()
    finally:
        duplicate.Free()


def on_other_communicators(comm: Any) -> None:
    """Fail on the last rank while ranks wait for it directly or through other ranks."""
    row, column = comm.Split(comm.rank // 2, comm.rank), comm.Split(comm.rank % 2, comm.rank)
    row.Barrier()
    lost(comm)
    column.Barrier()
    comm.Barrier()


def around(comm: Any, n: int, fail: Any = lambda comm: None) -> None:
    """Send n numbers to the next rank. `fail` is called after the receive has begun."""
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    received = np.empty(n)
    request = comm.Irecv(received, left)
    fail(comm)
    finish(request, comm.Isend(np.full(n, comm.rank + 1.0), right))
    assert received[0] == left + 1.0


def for_a_message(comm: Any) -> None:
    """Fail on the last rank before it sends a long message."""
    around(comm, 100_000, lost)
    comm.Barrier()


def outside(comm: Any) -> None:
    """Fail on the last rank while the others wait outside of MPI."""
    lost(comm)
    while True:
        comm.watch("a flag of the last rank")


def after_a_start(comm: Any) -> None:
    """Fail on the last rank after starting a collective for which no rank waits."""
    comm.Iallreduce(np.ones(1000), np.empty(1000))
    lost(comm)
    comm.Barrier()


def lost(comm: Any) -> None:
    """Fail on the last rank."""
    if comm.rank == comm.size - 1:
        raise LookupError("the cause")


@pytest.mark.parametrize(
    ("ranks", "body"),
    [
        (3, cleans_up),
        (4, on_other_communicators),
        (3, for_a_message),
        (2, after_a_start),
        (3, outside),
    ],
)
def test_a_rank_that_fails_wakes_the_others_and_leaves_nothing(ranks: int, body: Any) -> None:
    stopped = [f"rank {rank}: stopped: PeerFailed" for rank in range(ranks - 1)]
    for _ in range(2):
        assert "Mismatch" not in assert_fails(spmd(ranks)(body), "LookupError", *stopped)
        spmd(ranks)(lambda comm: around(comm, 1))()


@pytest.mark.parametrize("op", ["Allreduce", "Iallreduce", "allgather"])
def test_a_rank_that_is_interrupted_keeps_its_word(op: str) -> None:
    """The interrupted rank still makes the call that all had announced; peers may wait in it."""

    @spmd(3)
    def body(comm: Any) -> None:
        def interrupted(steps: Any, what: str, **more: bool) -> None:
            del vars(comm.lockstep.carrier)["drive"]
            next(steps, None)
            raise InterruptedError("a signal")

        if comm.rank == 1:
            comm.lockstep.carrier.drive = interrupted
        arguments = [0] if op == "allgather" else [np.ones(1), np.empty(1)]
        request = getattr(comm, op)(*arguments)
        if op == "Iallreduce":
            request.Wait()
        comm.Barrier()

    stopped = [f"rank {rank}: stopped: PeerFailed" for rank in (0, 2)]
    assert "Mismatch" not in assert_fails(body, "InterruptedError", *stopped)


def caught(comm: Any) -> None:
    """Catch the error of calls that differ."""
    with contextlib.suppress(CollectiveMismatch):
        comm.Barrier() if comm.rank else comm.allreduce(1)


def caught_on_a_twin(comm: Any) -> None:
    """Catch the error of calls that differ on a communicator that is then freed."""
    twin = comm.Dup()
    caught(twin)
    twin.Free()


def expected(comm: Any) -> None:
    """Expect the error of a call that is wrong on every rank."""
    with pytest.raises(ValueError, match="read-only"):
        comm.Allreduce(np.ones(1), np.float64(0.0))


def freed(comm: Any) -> None:
    """Expect the errors of a communicator that is freed too early, and then used."""
    twin, peer, memory = comm.Dup(), 1 - comm.rank, np.zeros((2, 1))
    request = twin.Isend(memory[0], peer)
    twin.Recv(memory[1], peer)
    with pytest.raises(CollectiveMismatch, match="Free before these were found complete"):
        twin.Free()
    request.Wait()
    twin.Free()
    with pytest.raises(RankError, match="freed"):
        twin.Barrier()


def freed_by_the_body(comm: Any) -> None:
    """Expect the error of the body's own communicator; while an error is handled it stays."""
    try:
        dict[str, int]()["k"]
    except KeyError:
        comm.Free()
    for free in comm.Free, comm.Disconnect:
        with pytest.raises(RankError, match=r"Pass comm.Dup\(\) to code that frees"):
            free()
    comm.Barrier()


def too_long(comm: Any) -> None:
    """Expect the error of a message that is too long, after one that is not counted."""
    peer = 1 - comm.rank
    comm.Isendrecv(np.ones(1), peer, 0, np.ones(1), peer, 0).Wait()
    with pytest.raises(CollectiveMismatch, match="a message is longer than its buffer"):
        comm.Sendrecv(np.ones(2), peer, 0, np.ones(1), peer, 0)


def stuck(comm: Any) -> None:
    """Expect the error of a deadlock."""
    with pytest.raises(CollectiveMismatch, match="every rank waits and none can go on"):
        comm.recv(source=1 - comm.rank)


@pytest.mark.parametrize(
    "body",
    [
        *(caught, caught_on_a_twin, expected, freed, freed_by_the_body),
        *(pytest.param(body, marks=pytest.mark.mpi) for body in (too_long, stuck)),
    ],
)
def test_an_example_in_which_a_check_raised_is_not_repeated_without_checks(
    monkeypatch: pytest.MonkeyPatch, body: Any
) -> None:
    """Without checks its ranks would hang, or raise another error or none."""
    monkeypatch.setattr(session.current, "raw_replay", True)
    before = session.current.tally.raw
    spmd(2)(body)()
    assert session.current.tally.raw == before


def handling(comm: Any) -> None:
    """Wait for the other rank while an error is handled."""
    try:
        dict[str, int]()["k"]
    except KeyError:
        comm.Dup()


def grouped(comm: Any) -> None:
    """Raise the errors of a wait in a group."""
    errors = []
    try:
        comm.Dup()
    except PeerFailed as error:
        errors.append(error)
    raise ExceptionGroup("of tasks", errors)


@pytest.mark.parametrize("waits", [handling, grouped])
def test_a_rank_that_is_stopped_while_it_handles_an_error_is_not_blamed(waits: Any) -> None:
    def body(comm: Any, leave: Any) -> None:
        leave() if comm.rank else waits(comm)

    test = spmd(2)(lambda comm: body(comm, lambda: int("mine")))
    assert_fails(test, "ValueError", "ValueError on rank 1 of 2: invalid literal")
    spmd(1, 2)(lambda comm: body(comm, lambda: assume(False)) if comm.size > 1 else None)()


def test_a_call_begun_early_ends_with_the_peer_that_never_makes_it() -> None:
    @spmd(2)
    def body(comm: Any) -> None:
        lost(comm)
        comm.announce_early()
        comm.Iallreduce(np.ones(1), np.empty(1))

    assert_fails(body, "LookupError")
