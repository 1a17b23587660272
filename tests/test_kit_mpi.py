"""Test calls that only ranks under mpiexec have: they do what they do in mpi4py."""

import contextlib
import gc
import pickle
import re
import time
import weakref
from collections.abc import Callable
from functools import partial
from itertools import product
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kit.failing import as_two, assert_fails, assert_told, failure_of
from kit.wrong_calls import ON_PROCESSES, STUCK
from mpi4py import MPI
from test_kit_messages import ask, numbers

from sp_core.errors import RankError
from sp_core.testing import CheckedComm, carriers, checked, messages, requests, spmd
from sp_core.testing.comm import LockstepComm
from sp_core.testing.lockstep import UNCOUNTED
from sp_core.testing.specs import Part

pytestmark = pytest.mark.mpi  # ranks that are threads do not have these calls


def replaced(comm: Any) -> object:
    """Exchange buffers by calls that do not wait."""
    x, into, peer = numbers(comm), np.zeros(8), 1 - comm.rank
    comm.Isendrecv(x, peer, 4, into, peer, 4).Wait()
    comm.Isendrecv_replace(x, peer, 5, peer, 5).Wait()
    return into.tolist(), x.tolist()


def neighbours(comm: Any) -> object:
    """Exchange objects with both neighbours in a ring of two ranks."""
    ring = comm.Create_cart([2], [True])
    found = ring.neighbor_alltoall([("down", comm.rank), ("up", comm.rank)])
    everyone = ring.neighbor_allgather(comm.rank)
    ring.Free()
    return found, everyone


def at_the_ends(comm: Any) -> object:
    """Gather from both neighbours on a line, at whose ends there is none."""
    line, into = comm.Create_cart([2], [False]), np.full(4, -1.0)
    line.Neighbor_allgather(numbers(comm, 2), into)
    line.Free()
    return into.tolist()


def not_needed(comm: Any) -> object:
    """Receive from nobody by a probe, an object with a buffer, and ask for complete requests."""
    into, peer = np.zeros(8), 1 - comm.rank
    comm.Mprobe(MPI.PROC_NULL).Recv(into)
    request = comm.isend(1, peer, 3)
    with pytest.warns(UserWarning, match="buf"):
        found = comm.recv(bytearray(99), peer, 3)
    request.wait()
    request, done = comm.Isend(numbers(comm), peer), comm.Irecv(into, peer)
    some = MPI.Request.Waitsome([done]), MPI.Request.Testsome([done])
    request.Wait()
    return found, some, into.tolist()


def by_addresses(comm: Any) -> object:
    """Exchange numbers by a datatype that holds their address, so that there is no buffer."""
    out, into, peer = numbers(comm), np.zeros(8), 1 - comm.rank
    at = [
        MPI.Datatype.Create_struct([8], [MPI.Get_address(x)], [MPI.DOUBLE]).Commit()
        for x in (out, into)
    ]
    comm.Sendrecv([MPI.BOTTOM, 1, at[0]], peer, 0, [MPI.BOTTOM, 1, at[1]], peer, 0)
    comm.Sendrecv_replace([MPI.BOTTOM, 1, at[0]], peer, 0, peer, 0)
    for datatype in at:
        datatype.Free()
    return out.tolist(), into.tolist()


def duplicated(comm: Any) -> object:
    """Use a duplicate that was made without blocking."""
    twin, request = comm.Idup()
    request.Wait()
    found = twin.allgather(comm.rank)
    twin.Free()
    return found


def between(comm: Any) -> object:
    """Make an intercommunicator, whose calls are not checked. `CheckedComm` refuses it."""
    own = comm.Split(comm.rank)
    inter = own.Create_intercomm(0, comm, 1 - comm.rank)
    with pytest.raises(RankError, match="takes no intercommunicator"):
        CheckedComm(inter)
    found = type(inter), inter.remote_size
    inter.Free()
    own.Free()
    return found


def smaller(comm: Any) -> object:
    """Make a grid of one rank, which the other rank is not in."""
    grid = comm.Create_cart([1])
    found = bool(grid)
    if found:
        grid.Free()
    return found


def freed(comm: Any) -> object:
    """Free requests of messages that are then received, one of them without checks."""
    found, peer = [], 1 - comm.rank
    for on in (comm, getattr(comm, "_raw", comm)):
        into = np.zeros(8)
        request = on.Isend(numbers(comm), peer)
        # the second request is of the kit's class, but the kit does not know its message
        one = request if on is comm else MPI.Request(request)
        one.Free()
        on.Recv(into, peer)
        found += [*into.tolist(), bool(one)]
    complete = comm.Irecv(into, peer)
    comm.Send(numbers(comm, 2), peer)
    while not complete.Get_status():
        pass
    complete.Free()
    return found + into.tolist()


def cancelled(comm: Any) -> object:
    """Cancel a receive after another message."""
    comm.Sendrecv(numbers(comm), 1 - comm.rank, 0, np.zeros(8), 1 - comm.rank, 0)
    request, status = comm.Irecv(np.zeros(1), tag=9), MPI.Status()
    request.Cancel()
    request.Wait(status)
    return status.Is_cancelled()


def persistent(comm: Any) -> object:
    """Start a message twice, and never start another."""
    x, into, peer = numbers(comm), np.zeros(8), 1 - comm.rank
    unused, found = comm.Recv_init(into, peer, 9), []
    requests = [comm.Recv_init(into, peer), comm.Send_init(x, peer)]
    for _ in range(2):
        MPI.Prequest.Startall(requests)
        MPI.Request.Waitall(requests)
        found += into.tolist()
        x += 1
    unknown = MPI.Prequest(comm.Recv_init(into, MPI.PROC_NULL))  # not by the kit
    unknown.Start()
    unknown.Wait()
    for request in (unused, unknown, *requests):
        request.Free()
    return found


CALLS = (
    *(replaced, not_needed, by_addresses, neighbours, at_the_ends, duplicated),
    *(between, smaller, freed, cancelled, persistent),
)


@pytest.mark.parametrize("call", CALLS)
@spmd(2)
def test_a_call_does_what_it_does_in_mpi4py(comm: Any, call: Callable[[Any], object]) -> None:
    assert call(comm) == call(getattr(comm, "_raw", comm))  # some examples are without checks


@pytest.mark.parametrize("name", ["Testany", "testany", "Testsome", "testsome"])
@spmd(2)
def test_a_message_is_found_beside_a_collective_that_a_rank_has_not_begun(
    comm: Any, name: str
) -> None:
    if comm.rank == 1:
        comm.Send(np.ones(1), 0)
        comm.Recv(np.zeros(1), 0)
    request = comm.Iallgather(np.ones(1), np.zeros(2))
    if comm.rank == 0:
        both = [request, comm.Irecv(np.zeros(1), 1)]
        is_complete, got = ask(name, both, 0)
        while not is_complete:
            is_complete, got = ask(name, both, 0)
        comm.Send(np.ones(1), 1)
        assert got[0][0] in (1, [1])
    request.Wait()


@spmd(2)
def test_a_checked_communicator_may_take_the_place_of_mpis(
    comm: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        alone: Any = CheckedComm(MPI.COMM_SELF)
        patch.setattr(MPI, "COMM_SELF", alone)
        for call in (by_addresses, smaller, between):
            assert call(comm) == call(getattr(comm, "_raw", comm))
        twin = alone.Split(0)
        assert isinstance(twin, LockstepComm)
        twin.Free()


@pytest.mark.parametrize(
    ("op", "right", "wrong", "said"),
    [
        ("Split", 0, "a", "Split on rank 1 of 2: an integer is required"),
        ("Split_type", MPI.COMM_TYPE_SHARED, None, "Split_type on rank 1 of 2: an integer"),
        ("Create", MPI.COMM_SELF.Get_group(), None, "NoneType was given as the group"),
        ("Create", MPI.COMM_SELF.Get_group(), MPI.GROUP_NULL, "nvalid group"),
        ("neighbor_alltoall", [0] * 2, [0] * 3, "3 objects for 2 ranks"),
    ],
)
def test_a_wrong_argument_of_one_rank_stops_the_others_too(
    op: str, right: object, wrong: object, said: str
) -> None:
    def call(given: object, comm: Any) -> None:
        getattr(comm.Create_cart([2], [True]), op)(given)

    test = as_two(partial(call, right), partial(call, wrong))
    assert_fails(test, "", said, "rank 0: stopped: PeerFailed")


@pytest.mark.parametrize("known", [True, False])
@spmd(2)
def test_only_messages_in_unknown_memory_are_said_to_be_unchecked(
    comm: Any, monkeypatch: pytest.MonkeyPatch, *, known: bool
) -> None:
    told: list[str] = []
    monkeypatch.setattr(messages, "say", told.append)
    if not known:
        monkeypatch.setattr(messages.Messages, "_part", lambda *_: Part(0, UNCOUNTED))
    comm.Sendrecv(numbers(comm), 1 - comm.rank, 0, np.zeros(8), 1 - comm.rank, 0)
    assert (told == []) == (known or not isinstance(comm, LockstepComm))


@pytest.mark.parametrize("after", ["raise", "go on", "Free"])
@pytest.mark.parametrize("on_twin", [False, True])
@pytest.mark.parametrize("form", ["Bcast", "Ibcast"])
def test_an_error_inside_a_call_of_one_rank_reaches_no_later_example(
    form: str, after: str, *, on_twin: bool
) -> None:
    """The message of rank 0 is under way when rank 1 raises."""

    @spmd(2)
    def wrong(comm: Any) -> None:
        on = comm.Dup() if on_twin or after == "Free" else comm

        def refused(*_: object) -> None:
            del vars(on)["_make"]
            raise BufferError("refused")

        if comm.rank == 1:
            on._make = refused
        with contextlib.suppress(*([] if after == "raise" else [BufferError])):
            request = getattr(on, form)(np.full(1, 9.0))
            assert request is None or request.Wait()
        if after == "Free":
            on.Free()

    @spmd(2)
    def right(comm: Any) -> None:
        for on in (comm, comm.Dup(), comm.Split()):
            x = np.full(1, float(comm.rank))
            on.Bcast(x)
            assert x.tolist() == [0]

    for _ in range(2):
        before = len(checked._kept)
        if after == "go on":
            wrong()
        else:
            text = failure_of(wrong)
        kept = len(checked._kept)
        right()  # on every rank, so before an assert that only rank 0 can fail
        assert kept == len(checked._kept)
        assert (before < kept) == (MPI.COMM_WORLD.rank < 2)
        if after != "go on":
            told = {"raise": "BufferError", "Free": "after errors inside calls (1,)"}[after]
            assert_told(text, told)


@pytest.mark.usefixtures("only_checked")
@spmd(2)
def test_each_part_of_a_communicator_has_a_name_of_its_own(comm: Any) -> None:
    half, twin, whole = comm.Split(comm.rank), comm.Dup(), comm.Split()
    group = comm.Create_group(comm.Get_group())
    assert len({*comm.allgather(repr(half))}) == 2
    found = [each.lockstep.name for each in (half, twin, whole)]
    assert found == [f"comm.0[{comm.rank}]", "comm.1", "comm.2"]
    assert re.fullmatch(r"comm\.g\d+\[0\]", group.lockstep.name)
    for each in (half, twin, whole, group):
        each.Free()


def test_a_receive_from_any_rank_does_not_take_what_ends_the_clearing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rank 0 is late, so rank 1 could send its last message while rank 0 still receives."""
    gather = carriers.MpiCarrier.gather

    def late(self: Any, value: object) -> list[Any]:
        found = gather(self, value)
        until = time.monotonic() + 0.1 * (self.rank == 0)
        while time.monotonic() < until:
            self.comm.Iprobe()  # MPI makes progress
        return found

    monkeypatch.setattr(carriers.MpiCarrier, "gather", late)
    _, zero, one = ON_PROCESSES["nobody sends to anyone"]
    assert_fails(as_two(zero, one), "CollectiveMismatch", STUCK)


@pytest.mark.parametrize(
    ("name", "args"),
    [
        ("Win.Create", [bytearray(8), 1, MPI.INFO_NULL]),
        ("Win.Allocate", [8, 1, MPI.INFO_NULL]),
        ("Win.Allocate_shared", [8, 1, MPI.INFO_NULL]),
        ("Win.Create_dynamic", [MPI.INFO_NULL]),
        ("File.Open", []),
    ],
)
@spmd(2)
def test_what_takes_a_communicator_and_is_not_checked_is_told(
    comm: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, args: list[Any]
) -> None:
    said: list[str] = []
    monkeypatch.setattr(requests, "say", said.append)
    kind, call = getattr(MPI, name.partition(".")[0]), attrgetter(name)(MPI)
    file = [comm.bcast(str(tmp_path / "file")), MPI.MODE_CREATE | MPI.MODE_WRONLY]
    for on in (getattr(comm, "_raw", comm), comm):
        assert said == []
        made = call(*args, on) if kind is MPI.Win else call(on, *file)
        assert type(made) is kind
        (made.Free if kind is MPI.Win else made.Close)()
    assert said == ([name] if isinstance(comm, LockstepComm) else [])


@pytest.mark.usefixtures("only_checked")
@pytest.mark.parametrize("form", ["Iallreduce", "Allreduce_init"])
@spmd(2)
def test_the_buffers_of_a_request_live_as_long_as_it(comm: Any, form: str) -> None:
    """mpi4py does not keep those of reductions."""
    buffers = [np.ones(2), np.zeros(2)]
    kept = [weakref.ref(buffer) for buffer in buffers]
    request = getattr(comm, form)(*buffers)
    del buffers
    gc.collect()
    assert all(ref() is not None for ref in kept)
    request.Wait()
    if form == "Allreduce_init":
        request.Free()


def test_values_of_any_length_are_gathered() -> None:
    """Those whose pickles fill the first exchange, or do not fit into it, too."""
    lengths = [1, *(carriers.HEAD_BYTES + more for more in (-1, 0, 1, 2000))]
    overhead = len(pickle.dumps(bytes(1000))) - 1000
    world = MPI.COMM_WORLD.Dup()
    carrier = carriers.MpiCarrier(world)
    for shift, length in product(range(5), lengths):
        mine = lengths[(lengths.index(length) + shift * world.rank) % 5] - overhead
        value = b"a" * max(mine, 0)
        assert carrier.gather(value) == world.allgather(value)
    world.Free()
