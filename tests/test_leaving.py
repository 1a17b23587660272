"""Test that an error which leaves a mesh on one rank ends the waits of the other ranks."""

import gc
import sys
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from itertools import chain
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from kit.case_leaving import BEGUN, CASES, LOST, Lost, outcomes, wanted
from kit.meshed import meshed
from studies.commands import ROOT, output_of, outside
from torch.multiprocessing.reductions import StorageWeakRef

import sp_core as sp
from sp_core import observer, progress
from sp_core.collectives.execution import Running
from sp_core.launch.command import AS_ROOT, ENVIRONMENT, find_mpiexec
from sp_core.observer import Notices, observer_of
from sp_core.testing import run_threads, spmd
from sp_core.transport import Done, Transfer, Window


@pytest.mark.mpi_skip
@pytest.mark.parametrize("name", sorted(BEGUN))
@spmd(2, 3)
def test_a_wait_for_a_rank_that_has_left_ends(
    comm: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(observer, "GRACE_SECONDS", 0.01)
    assert [*outcomes(comm, name)] == wanted(comm)


def test_a_wait_gets_what_a_rank_sent_before_it_left() -> None:
    """The message arrives in the wait's fortieth test, when it has long heard that rank 1 left."""
    arrives = Mock(**{"test.side_effect": [False] * 40 + [True] * 9})

    def body(comm: Any) -> None:
        with suppress(Lost), sp.Mesh(comm, sp=2) as mesh:
            group = mesh["sp"]
            while comm.rank != LOST and observer_of(group._comm).first_left() is None:
                group.poll()
            if comm.rank != LOST:
                group.wait(arrives, "message")
            raise Lost

    run_threads(2, body)
    assert arrives.test.call_count > 40


def test_the_lowest_rank_that_has_left_is_named() -> None:
    comm = Mock(size=4)
    for left in ([], [3], [1, 2], [0]):
        comm.Iprobe = lambda rank=None, tag=0, left=left: (
            bool(left) if rank is None else rank in left
        )
        assert Notices(comm).first_left() == min(left, default=None)


@spmd(4)
def test_the_rank_that_has_left_has_its_number_in_the_usual_order_of_axes(comm: Any) -> None:
    """Rank 1 of `mesh["b", "a"]`, which a message has come from, is rank 2 of the mesh."""
    with suppress(Lost), sp.Mesh(comm, a=2, b=2) as mesh:
        group: Any = mesh["b", "a"]
        group.ensure_open()
        group._comm = Mock(size=4, Iprobe=lambda rank=None, tag=0: rank in (None, 1))
        group._heard = -9.0
        with pytest.raises(sp.PeerFailed, match="rank 2 has left"):
            group.look()
        raise Lost


@pytest.mark.parametrize("elsewhere", [False, True])
@spmd(4)
def test_a_wait_after_the_end_of_a_mesh_returns_the_result(comm: Any, *, elsewhere: bool) -> None:
    """Also if rank 0 frees its mesh in a thread that made none, before the others' last steps."""
    mesh = sp.Mesh(comm, sp=4)
    pending = sp.all_reduce_start(torch.ones(9), comm=mesh["sp"], algorithm="ring")
    if elsewhere and comm.rank == 0:
        helper = threading.Thread(target=mesh.free)
        helper.start()
        helper.join()
    elif elsewhere:
        pending.wait()
    mesh.free()
    assert torch.equal(pending.wait(), torch.full((9,), 4.0))


def failing_once(begin: Callable[[], Any]) -> Callable[[], Any]:
    """Return `begin` for handles whose first test raises an error."""

    def begun() -> object:
        handle = begin()
        return SimpleNamespace(test=Mock(side_effect=chain([Lost], iter(handle.test, 2))))

    return begun


@pytest.mark.parametrize("way", ["ring", "window"])
@spmd(2)
@meshed(transport="window")
def test_the_memory_of_a_run_that_an_error_ends_outlives_its_plan(mesh: sp.Mesh, way: str) -> None:
    """After an error in a wait, its transfers go on, and the MPI library may use their memory."""
    plan = sp.plan("all_gather", torch.ones(3), comm=mesh["sp"], algorithm=way)
    memory = StorageWeakRef(plan.run().untyped_storage())
    vars(plan._bound)["begin"] = failing_once(plan._bound.begin)
    with pytest.raises(Lost):
        plan.run()
    del plan
    gc.collect()
    assert not memory.expired()


def of_a_program(comm: Any, work: Any) -> Callable[[], object]:
    """Return the test of a run with one step, which has no messages."""
    bound: Any = Mock(steps=[((), (), (work,), 1)], depth=1)
    return Running(bound, Done()).test


def of_a_window(comm: Any, work: Any) -> Callable[[], object]:
    """Return the test of one step in shared memory."""
    window = Window(comm)
    window._queue.append((0, [work], False))
    return window.advance


def of_a_transfer(comm: Any, work: Any) -> Callable[[], object]:
    """Return the test of a transfer whose result is copied at the end."""
    return Transfer([lambda: True], after=work).test


@pytest.mark.parametrize("test_of", [of_a_program, of_a_window, of_a_transfer])
@spmd(1)
def test_a_sum_that_an_error_has_interrupted_is_neither_repeated_nor_left_out(
    comm: Any, test_of: Any
) -> None:
    """A signal handler may raise an error in the middle of it, and the program may wait again."""
    test = test_of(comm, work := Mock(side_effect=TimeoutError))
    with pytest.raises(TimeoutError):
        test()
    for _ in range(2):
        with pytest.raises(sp.RankError, match="an error has interrupted"):
            test()
    work.assert_called_once_with()


@spmd(2)
@meshed()
def test_a_signal_handler_may_poll_in_the_middle_of_a_sum(mesh: sp.Mesh) -> None:
    """No sum is made twice or left out."""
    plan = sp.plan("all_reduce", torch.ones(4), comm=mesh["sp"], algorithm="ring")
    bound: Any = plan._bound
    handle: Any = Mock(side_effect=lambda: handle.call_count > 1 or mesh["sp"].poll())
    bound.steps = [(*sides, (*work, handle), until) for *sides, work, until in bound.steps]
    assert plan.finish(plan.start()).tolist() == [2.0] * 4
    assert handle.call_count == len(bound.steps)


@spmd(2)
@meshed()
def test_a_wait_that_an_error_has_interrupted_may_be_repeated(mesh: sp.Mesh) -> None:
    """A signal handler may raise an error in it. The next wait returns the whole result."""
    pending = sp.all_reduce_start(torch.ones(4), comm=mesh["sp"], algorithm="ring")
    waits = Mock(side_effect=[TimeoutError, pending._wait])
    pending._wait = lambda: waits()()
    with pytest.raises(TimeoutError):
        pending.wait()
    assert pending.wait().tolist() == [2.0] * 4


@spmd(1)
def test_the_memory_of_a_transfer_outlives_a_mesh_that_nobody_holds(comm: Any) -> None:
    """It is freed when the transfer is complete, which any wait or poll of the rank finds out."""
    ended: list[int] = []

    def lose() -> weakref.ref[Any]:
        handle = Mock(**{"test.side_effect": lambda: bool(ended)})
        sp.Mesh(comm, sp=1)["sp"].track(handle)
        return weakref.ref(handle)

    handle = lose()
    for _ in range(2):
        gc.collect()
        assert handle() is not None
        progress.of_this_rank().poll()
    ended.append(1)
    progress.of_this_rank().poll()
    gc.collect()
    assert handle() is None


@pytest.mark.parametrize("error", [None, Lost()])
@spmd(1)
@meshed()
def test_a_forked_process_leaves_the_mesh_to_its_rank(
    mesh: sp.Mesh, error: Exception | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that leaves the block but did not make the mesh calls no MPI and frees nothing."""
    with monkeypatch.context() as child:
        child.setattr("sp_core.mesh.os", Mock(**{"getpid.return_value": -1}))
        mesh.__exit__(None if error is None else type(error), error, None)
    assert sp.all_reduce(torch.ones(1), comm=mesh["sp"]).item() == 1


@pytest.mark.mpi_skip
@pytest.mark.every_mpi
def test_a_wait_for_a_process_that_has_left_ends() -> None:
    case = str(ROOT / "tests" / "kit" / "case_leaving.py")
    command = (find_mpiexec(), "-n", "3", sys.executable, case)
    text = output_of(command, ROOT, ENVIRONMENT | AS_ROOT | outside(), 120)
    assert all(f"rank {rank}: {len(CASES)} cases" in text for rank in range(3)), text
