"""Test the communicators that bodies get, alike for threads and for MPI.

Calls and requests do what the MPI standard says.
"""

import contextlib
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from inspect import signature
from itertools import product
from operator import methodcaller
from random import Random
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from hypothesis import assume, strategies as st
from kit.failing import assert_fails, finish
from mpi4py import MPI

from sp_core.errors import RankError
from sp_core.testing import ThreadComm, given, spmd
from sp_core.testing.checked import CheckedComm
from sp_core.testing.comm import LockstepComm
from sp_core.testing.lockstep import abandon

pytestmark = pytest.mark.ranks  # these laws hold for threads and for MPI
SIZES = st.lists(st.integers(0, 5), min_size=4, max_size=4)
Call = Callable[[Any], object]
ONE = np.ones(1)


def values(rank: int, count: int) -> np.ndarray[Any, Any]:
    """Return the numbers that a rank sends, different for each rank and index."""
    return 100.0 * (rank + 1) + np.arange(count)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2])
@spmd(2)
def test_short_floats_of_torch_are_sent_as_bytes(comm: Any, dtype: torch.dtype) -> None:
    mine, everyone = torch.full((3,), comm.rank + 0.5).to(dtype), torch.zeros(2, 3).to(dtype)
    comm.Allgather(mine, everyone)
    assert everyone.tolist() == [[0.5] * 3, [1.5] * 3]
    comm.Bcast(mine, root=1)
    assert mine.tolist() == [1.5] * 3
    request = comm.Irecv(everyone, 1 - comm.rank, tag=7)
    comm.Send(torch.full((2, 3), comm.rank + 0.5).to(dtype), 1 - comm.rank, tag=7)
    request.Wait()
    assert everyone.tolist() == [[1.5 - comm.rank] * 3] * 2
    with pytest.raises(ValueError, match=r"no SUM of bfloat16 or .*reduce float32"):
        comm.Allreduce(mine, torch.zeros_like(mine))


@pytest.mark.parametrize("name", ["Allreduce", "Iallreduce", "Reduce", "Scan"])
@spmd(2)
def test_a_reduction_that_mpi_lacks_for_a_type_is_an_error_of_each_rank(
    comm: Any, name: str
) -> None:
    """MPI itself says so under MPI; test_kit_flows.py has all types."""
    said = r"MPI_ERR_OP|[Ii]nvalid MPI_Op|of 2: MPI has no SUM of bool"
    with pytest.raises((ValueError, MPI.Exception), match=said):
        finish(getattr(comm, name)(*np.ones((2, 1), bool)))


@spmd()
def test_objects(comm: Any) -> None:
    rank, everyone, last = comm.rank, [*range(comm.size)], comm.size - 1
    is_last = rank == last
    found = {
        "allgather": comm.allgather({"rank": rank}),
        "bcast": comm.bcast([rank] if is_last else (lambda: "never sent"), root=last),
        "gather": comm.gather(rank),
        "scatter": comm.scatter([10 * r for r in everyone] if is_last else [0] * 9, root=last),
        "nothing": (comm.scatter(None), comm.alltoall(None)),
        "alltoall": comm.alltoall([(rank, r) for r in everyone]),
        "allreduce": comm.allreduce(rank + 1),
        "reduce": comm.reduce([rank], root=last),
        "scan": comm.scan([rank]),
        "exscan": comm.exscan([rank]),
        "least": [comm.allreduce(-rank, MPI.MIN), comm.reduce(-rank, MPI.MIN, last)],
        "least so far": [comm.scan(-rank, MPI.MIN), comm.exscan(-rank, MPI.MIN)],
        "barrier": comm.barrier(),
    }
    assert found == {
        "allgather": [{"rank": r} for r in everyone],
        "bcast": [last],
        "gather": everyone if rank == 0 else None,
        "scatter": 10 * rank,
        "nothing": (None, [None] * comm.size),
        "alltoall": [(r, rank) for r in everyone],
        "allreduce": sum(everyone) + comm.size,
        "reduce": everyone if is_last else None,
        "scan": everyone[: rank + 1],
        "exscan": everyone[:rank] or None,
        "least": [-last, -last if is_last else None],
        "least so far": [-rank, 1 - rank if rank else None],
        "barrier": None,
    }


@given(
    nprocs=st.integers(1, 4),
    sizes=SIZES,
    offset=st.integers(0, 3),
    is_ring=st.booleans(),
    max_examples=40,
)
def test_messages_arrive_in_order(comm: Any, sizes: list[int], offset: int, is_ring: bool) -> None:
    """Messages may be empty, and may go to the sender itself.

    Without a ring, ranks at the ends use MPI.PROC_NULL. Such a message changes no buffer.
    """
    places = comm.rank + offset, comm.rank - offset
    right, left = (
        place % comm.size if is_ring or 0 <= place < comm.size else MPI.PROC_NULL
        for place in places
    )
    out = [values(comm.rank, sizes[comm.rank]), -values(comm.rank, 3)]
    into = [np.full(sizes[left], -1.0), np.full(3, -1.0)]
    expected = [values(left, sizes[left]), -values(left, 3)] if left >= 0 else deepcopy(into)
    finish(*[comm.Irecv(x, left, 0) for x in into], *[comm.Isend(x, right, 0) for x in out])
    swapped = np.full(3, -1.0)
    comm.Sendrecv(out[1], right, 1, swapped, left, 1)
    for found, due in zip([*into, swapped], [*expected, expected[1]], strict=True):
        np.testing.assert_array_equal(found, due)


@given(
    nprocs=st.integers(1, 3),
    tags=st.lists(st.integers(0, 2), min_size=1, max_size=4),
    seed=st.integers(0, 999),
    max_examples=60,
)
def test_a_receive_takes_the_first_message_with_its_tag(
    comm: Any, tags: list[int], seed: int
) -> None:
    """A receive takes any tag by default. Which side begins first makes no difference."""
    draw, left, due = Random(seed), [*enumerate(tags)], []
    wanted = [draw.choice((tag, MPI.ANY_TAG)) for tag in draw.sample(tags, len(tags))]
    for tag in wanted:
        found = next((each for each in left if tag in (each[1], MPI.ANY_TAG)), None)
        assume(found is not None)
        left = [each for each in left if each != found]
        due += [float(found[0])] if found else []
    out, into = np.arange(float(len(tags))).reshape(-1, 1), np.full((len(tags), 1), -1.0)
    dest, source = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    requests = []
    for sends in Random(seed + comm.rank).sample([False, True], 2):
        if sends:
            requests += [comm.Isend(x, dest, tag) for x, tag in zip(out, tags, strict=True)]
        else:
            for x, tag in zip(into, wanted, strict=True):
                is_default = tag == MPI.ANY_TAG and seed % 2
                requests.append(comm.Irecv(x, source, *([] if is_default else [tag])))
    finish(*requests)
    assert into.ravel().tolist() == due


@spmd(2)
def test_bytes_are_received_as_numbers_and_no_elements_as_any_type(comm: Any) -> None:
    into, peer = np.zeros(2), 1 - comm.rank
    comm.Sendrecv(values(comm.rank, 2).view(np.uint8), peer, 0, into, peer, 0)
    comm.Sendrecv(np.zeros(0), peer, 0, np.zeros(0, int), peer, 0)
    np.testing.assert_array_equal(into, values(peer, 2))


@given(
    nprocs=st.integers(1, 4),
    columns=st.integers(1, 3),
    reverse=st.booleans(),
    left_out=st.booleans(),
    max_examples=30,
)
def test_sub_communicators(comm: Any, columns: int, reverse: bool, left_out: bool) -> None:
    """Split may leave out rank 0, which passes MPI.UNDEFINED."""
    is_out = left_out and comm.rank == 0
    color = MPI.UNDEFINED if is_out else comm.rank // columns
    row = comm.Split(color, -comm.rank if reverse else comm.rank)
    assert bool(row) == (not is_out)
    assert (row == MPI.COMM_NULL) == is_out
    if row:
        everyone = range(int(left_out), comm.size)
        members = [rank for rank in everyone if rank // columns == color]
        assert row.allgather(comm.rank) == (members[::-1] if reverse else members)
        twin = row.Dup()
        assert (twin.rank, twin.size) == (row.rank, row.size)
        twin.Free()
        row.Free()
    later = comm.Dup()
    assert later.allreduce(1) == comm.size
    later.Free()


@spmd(2)
def test_a_collective_that_is_under_way_ends_before_its_communicator_is_freed(comm: Any) -> None:
    """An error may leave one behind. Open MPI crashes if its communicator is freed."""
    twin, late = comm.Dup(), Mock(**{"Test.side_effect": [False, True]})
    is_checked = isinstance(twin, CheckedComm)
    if is_checked:
        twin.Irecv(np.empty(1), MPI.PROC_NULL).Wait()
        for begin in (twin.Ibarrier, partial(twin.Iallreduce, np.ones(1), np.empty(1))):
            request = begin()
            (running,) = twin._collectives  # a message is none, and one that ended is dropped
            assert running.request is request
            request.Wait()
        twin._collectives.add(Mock(request=late))
    twin.Free()
    assert late.Test.call_count == 2 * is_checked


@spmd(2)
def test_a_color_stands_for_a_whole_number(comm: Any) -> None:
    """mpi4py cuts numbers with a fraction."""
    pairs = [(1, True), (True, np.int32(1)), (1.0, np.bool_(1)), (0, 0.5)]
    found = [comm.Split(pair[comm.rank], pair[0]).allreduce(1) for pair in pairs]
    assert found == [2] * 4


@spmd(2)
def test_a_freed_communicator_is_refused_on_every_rank(comm: Any) -> None:
    twin, late, peer = comm.Dup(), comm.Dup(), 1 - comm.rank
    twin.Free()
    with contextlib.suppress(KeyError):
        try:
            raise KeyError
        finally:
            late.Free()
    assert not twin
    assert not late
    if not isinstance(comm, LockstepComm):
        return
    send, receive = methodcaller("Isend", ONE, peer), methodcaller("Irecv", np.zeros(1), peer)
    calls = [methodcaller("Barrier"), methodcaller("Dup"), methodcaller("allgather", 0)]
    calls += [send, receive, methodcaller("Send", ONE, peer)]
    if isinstance(comm, CheckedComm):
        calls += [methodcaller("iprobe", peer), methodcaller("Create_group", MPI.GROUP_EMPTY)]
    for call, made in product(calls, (twin, late)):
        with pytest.raises(RankError, match="which Free, or the end of its example or block, has"):
            call(made)


@spmd(2)
def test_a_message_is_sent_while_its_sender_waits_in_a_collective(comm: Any) -> None:
    requests = [comm.Isend(np.ones(1), 1)] if comm.rank == 0 else []
    if comm.rank == 1:
        comm.Recv(np.zeros(1), 0)
    comm.Barrier()
    finish(*requests)


@spmd(2)
def test_collectives_begun_early_are_made_while_a_rank_waits_for_a_message(comm: Any) -> None:
    into, x = np.zeros((3, 2)), np.zeros(1)
    requests = [comm.Iallgather(values(comm.rank, 3)[i : i + 1], into[i]) for i in range(3)]
    if comm.rank == 0:
        comm.Recv(x, 1)
    finish(*requests[::-1])
    if comm.rank == 1:
        comm.Send(x, 0)
    np.testing.assert_array_equal(into, [[100 + i, 200 + i] for i in range(3)])


@pytest.mark.usefixtures("only_checked")
@pytest.mark.parametrize("early", [False, True])
@spmd(2)
def test_a_request_that_is_abandoned_need_not_be_complete(comm: Any, *, early: bool) -> None:
    memory = np.ones((2, 1))
    for begin in [comm.announce_early] * early:
        begin()
    request = comm.Iallreduce(*memory)
    comm.Barrier()
    incomplete = len(comm._requests)
    abandon([object(), request])
    assert incomplete == 1
    assert comm._requests == []
    finish(request)


@spmd(2)
def test_messages_of_a_rank_that_has_left_are_not_compared(comm: Any) -> None:
    left = comm.Dup()
    if comm.rank == 0 and isinstance(left, ThreadComm):
        left.Isend(np.ones(1), 1)
        left.abandoned()


SAME = [
    *("bcast", "gather", "scatter", "allgather", "alltoall", "reduce", "Split"),
    *("Isend", "Send", "Irecv", "Recv", "Sendrecv"),
]


def test_what_is_left_out_is_what_mpi4py_takes() -> None:
    for name in SAME:
        ours, theirs = (
            [x for x in signature(getattr(kind, name)).parameters.values() if x.name != "status"]
            for kind in (ThreadComm, MPI.Intracomm)
        )
        for own, known in zip(ours, theirs, strict=True):
            assert own.name == known.name
            assert own.default in (known.default, None, own.empty)


@pytest.mark.parametrize(
    ("end", "free"), [("the end of the body", lambda _: None), ("Free", methodcaller("Free"))]
)
@pytest.mark.parametrize(
    ("begin", "begun"),
    [
        (
            lambda c: (c.Isend(ONE, 1 - c.rank), c.Recv(np.zeros(1), 1 - c.rank)),
            "to receive a message with tag 0",
        ),
        (lambda c: c.Iallreduce(ONE, np.zeros(1)), "a started "),
    ],
)
def test_what_was_begun_must_be_found_complete_before_the_end(
    begin: Call, begun: str, free: Call, end: str
) -> None:
    def body(comm: Any) -> None:
        twin = comm.Dup()
        begin(twin)
        free(twin)

    incomplete = f"{end} before these were found complete by Test or Wait"
    assert_fails(spmd(2)(body), "CollectiveMismatch", incomplete, begun)
