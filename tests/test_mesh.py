"""Test meshes and their communicators, from the time they are made until they are freed."""

import contextlib
import os
import sys
import time
from collections.abc import Callable
from threading import Thread
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, Mock

import numpy as np
import pytest
import torch
from kit.meshed import meshed
from refusals.calls import hybrid

import sp_core as sp
from sp_core import mesh as mesh_module, progress
from sp_core.mesh import _constants, _ranks_of, fingerprint, read_nodes
from sp_core.testing import run_threads, spmd
from sp_core.transport import HostTransport, named_device
from sp_core.transport.distributed import DistributedTransport


@pytest.mark.parametrize(
    ("asked", "sees", "current", "local", "found"),
    [
        ("cuda", "cuda", 2, "1", "cuda:2"),
        ("cuda", "cuda", 0, "1", "cuda:1"),
        ("cuda", "cuda", 0, "5", "cuda:2"),
        ("cuda", "cuda", 0, "0", "cuda:0"),
        ("cuda", "cuda", 0, "", "cuda:1"),
        ("cuda:0", "cuda", 1, "2", "cuda:0"),
        ("cuda:3", "cuda", 1, "2", "there are 3 CUDA devices, cuda:0 to cuda:2"),
        ("cuda", "mps", 1, "1", "torch sees no CUDA device"),
        ("cuda", "", 1, "1", "torch sees no CUDA device"),
        ("cpu:0", "", 1, "1", "cpu"),
        (None, "", 1, "1", "cpu"),
    ],
)
def test_a_gpu_is_the_one_chosen_or_has_the_number_of_the_rank_on_its_node(
    asked: str | None, sees: str, current: int, local: str, found: str, substitute: Any
) -> None:
    """Without a launcher's number on the node, the number in the communicator, here 4, counts."""
    substitute(os, environ={"LOCAL_RANK": local, "SLURM_LOCALID": local})
    accelerator = torch.device(sees) if sees else None
    substitute(
        torch.accelerator,
        current_accelerator=lambda check_available: accelerator,
        device_count=lambda: 3,
        current_device_index=lambda: current,
    )
    if found.startswith(("cuda", "cpu")):
        assert str(named_device(asked, 4)) == found
        return
    with pytest.raises(sp.DeviceError, match=found):
        named_device(asked, 4)


@pytest.mark.parametrize("transport", ["host", "window"])
def test_nobody_leaves_a_fence_before_all_have_come(transport: str) -> None:
    come = []

    @meshed(transport=transport, check="off")
    def body(mesh: sp.Mesh) -> None:
        if mesh["sp"].window is not None:  # else the ranks would wait in the kit
            mesh["sp"].window._announce = lambda what: None
        for turn in range(1, 4):
            time.sleep(0.02 * ((mesh.rank + turn) % 3))
            come.append(mesh.rank)
            sp.fence(comm=mesh["sp"])
            assert len(come) >= turn * mesh.size

    run_threads(3, body)


@spmd(2)
def test_what_was_under_way_when_a_mesh_was_left_is_not_waited_for(comm: Any) -> None:
    with (
        contextlib.suppress(KeyError),
        sp.Mesh(comm, transport="window", algorithm="window", check="off", sp=2) as mesh,
    ):
        assert mesh["sp"].window is not None
        # else the kit would raise an error, since rank 0 alone makes the call
        mesh["sp"].window._announce = lambda what: None
        pending = sp.all_reduce_start(torch.ones(3), comm=mesh["sp"]) if comm.rank == 0 else None
        raise KeyError("lost")
    if pending is not None:
        with pytest.raises(sp.RankError, match="has been freed"):
            pending.wait()


@spmd(1)
def test_a_wait_after_a_mesh_was_left_says_so_and_not_who_was_lost(comm: Any) -> None:
    """Over gloo a wait looks for lost ranks ten times a second. The error must not depend on it."""

    def lost() -> bool:
        raise sp.PeerFailed("rank 1 has left")

    with sp.Mesh(comm, sp=1) as mesh:
        group = mesh["sp"]
        with pytest.raises(sp.PeerFailed, match="has left"):
            group.wait(SimpleNamespace(test=lost), "all_reduce")
    with pytest.raises(sp.RankError, match="has been freed"):
        group.wait(SimpleNamespace(test=lost), "all_reduce")
    group.wait(SimpleNamespace(test=lambda: True), "all_reduce")


READ: dict[str, Callable[[sp.Communicator], object]] = {
    "SP_TRANSPORT": lambda group: group.transport.name,
    "SP_NODES": lambda group: group.nodes,
    "SP_ALGORITHM": lambda group: group.algorithms["all_reduce"],
}


@pytest.mark.parametrize(
    ("name", "value", "found", "asked"),
    [
        ("SP_TRANSPORT", "window", "window", "host"),
        ("SP_TRANSPORT", "staged", "host", "host"),  # only for GPUs
        ("SP_TRANSPORT", "", "host", "host"),
        ("SP_NODES", " 7, -3 ,7", (0, 1, 0), (0, 0, 0)),
        ("SP_ALGORITHM", "recursive_doubling", "recursive_doubling", "ring"),
        ("SP_ALGORITHM", "", "auto", "ring"),
    ],
)
@spmd(3)
def test_the_environment_says_what_no_argument_does(
    comm: Any, name: str, value: str, found: object, asked: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    arguments: Any = {"transport": "host", "nodes": [5, 5, 5], "algorithm": "ring"}
    with sp.Mesh(comm, sp=3) as mesh, sp.Mesh(comm, sp=3, **arguments) as other:
        assert [READ[name](each["sp"]) for each in (mesh, other)] == [found, asked]


@spmd(1)
def test_a_transport_of_the_environment_that_is_none_is_refused(
    comm: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert read_nodes(["1", 2], 2) == [1, 2]
    monkeypatch.setenv("SP_TRANSPORT", "magic")
    with pytest.raises(sp.DeviceError, match="magic"):
        sp.Mesh(comm, sp=1)


@pytest.mark.parametrize("loaded", [True, False])
def test_a_machine_is_told_apart_by_its_mpi(loaded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mesh over ranks of torch.distributed does not use constants measured with MPI."""
    mpi = SimpleNamespace(get_vendor=lambda: ("Good MPI", (1, 2, 3)))
    monkeypatch.setitem(sys.modules, "mpi4py.MPI", mpi if loaded else None)
    assert fingerprint()["mpi"] == ("Good MPI 1.2.3" if loaded else "none ")
    monkeypatch.setattr("sp_core.mesh.find", lambda fingerprint, _: fingerprint()["mpi"])
    for over_torch in (True, False):
        comm: Any = SimpleNamespace(rank=0, **{"world_rank": 0} if over_torch else {})
        found: Any = _constants(None, comm)
        assert found == ("Good MPI 1.2.3" if loaded and not over_torch else "none ")


@spmd(2)
@meshed()
def test_checks_are_made_again_after_an_error_in_a_block_without_them(mesh: sp.Mesh) -> None:
    with pytest.raises(KeyError), mesh["sp"].agreed():
        raise KeyError
    with pytest.raises(sp.CollectiveMismatch, match="shape"):
        sp.all_reduce(torch.ones(1 + mesh.rank), comm=mesh["sp"])


@spmd(2)
def test_equal_arguments_may_be_written_differently(comm: Any) -> None:
    """The sum of short lengths does not fit their type."""
    two: Any = np.int64(2) if comm.rank else 2
    named = {"all_reduce": "ring", "all_gather": "bruck"}
    algorithm = named if comm.rank else "all_gather=bruck,all_reduce=ring"
    lengths: Any = [np.uint8(200) if comm.rank else 200] * 2
    with sp.Mesh(comm, algorithm=algorithm, sp=two) as mesh:
        last: Any = np.int64(-1)
        for several in (list, tuple):
            mine = sp.reduce_scatter(torch.ones(400), comm=mesh["sp"], sizes=several(lengths))
            whole = sp.all_gather(mine, comm=mesh["sp"], sizes=several(lengths), dim=last)
            assert whole.tolist() == [2.0] * 400


@pytest.mark.parametrize("others", ["call", "free", "end"])
@spmd(2, 3, 4)
def test_ranks_that_have_heard_of_an_error_wait_for_nobody(comm: Any, others: str) -> None:
    """Each later call raises the error again, and no agreement stays open for ever.

    The last rank raises KeyError; with "free" it frees a communicator first. The other ranks are
    inside a collective, or leave the mesh as usual ("end").
    """
    here = comm.rank == comm.size - 1
    kinds = (KeyError if here else sp.PeerFailed, sp.CollectiveMismatch)
    said = "free() of mesh['ring']" if others == "free" else "KeyError: 'mine'"

    def work() -> None:
        with sp.Mesh(comm, data=1, ring=comm.size) as mesh:
            if here and others == "free":
                mesh["ring"].free()
            if here:
                raise KeyError("mine")
            for _ in range(0 if others == "end" else 3):
                with pytest.raises(kinds) as told:
                    sp.all_reduce(torch.ones(1), comm=mesh["ring"])
                assert f"rank {comm.size - 1}: {said}" in str(told.value)
                assert here or "rank 0: all_reduce(tensor" in str(told.value)

    with pytest.raises(kinds) as caught:
        work()
    assert here or said in str(caught.value)
    told_first = f"rank {comm.size - 1} has left", "rank 0: free() of mesh"
    assert here or others != "end" or all(text in str(caught.value) for text in told_first)
    mine = progress.of_this_rank()
    mine.settle(60)
    assert mine.kept == []
    with sp.Mesh(comm, data=1, ring=comm.size) as mesh:
        for _ in range(2):
            mesh["ring"].free()
        assert sp.all_reduce(torch.ones(1), comm=mesh["data", "ring"]).item() == comm.size


@pytest.mark.parametrize("wrong", [("ring", "tp"), ("ring", "missing"), ("ring",), None])
@spmd(4)
def test_wrong_axes_of_a_hybrid_on_a_mesh_with_three_are_an_error_on_all(
    comm: Any, wrong: Any
) -> None:
    """If one rank passes them, all later calls fail. If all ranks do, the mesh still works."""
    lengths: dict[str, Any] = {"ring": 2, "tp": 1, "ulysses": 2}

    def go_on() -> None:
        with sp.Mesh(comm, **lengths) as mesh:
            with contextlib.suppress(sp.ShapeError, sp.PeerFailed):
                hybrid(axes=wrong)(mesh, comm.rank == 0)
            hybrid(axes=("ring", "ulysses"))(mesh, True)

    with pytest.raises(sp.PeerFailed, match="rank 0: axes="):
        go_on()
    with pytest.raises((sp.ShapeError, sp.PeerFailed)) as caught, sp.Mesh(comm, **lengths) as mesh:
        hybrid(axes=wrong)(mesh, comm.rank == 0)
    assert isinstance(caught.value, sp.ShapeError) == (comm.rank == 0)
    assert "axes=" in str(caught.value) or comm.rank
    with sp.Mesh(comm, **lengths) as mesh:
        with pytest.raises(sp.ShapeError, match="Name two axes of the mesh"):
            hybrid(axes=wrong)(mesh, True)
        hybrid(axes=("ring", "ulysses"))(mesh, True)


@spmd(4, 6)
def test_lengths_and_nodes_are_those_of_ranks_in_another_order_of_axes(comm: Any) -> None:
    """One rank may ask for `mesh["b", "a"]` or `mesh[()]` before others do: asking sends nothing.

    Nor does asking for an attribute that is not there. `mesh[()]` has one rank, so that a rank can
    also use it alone. The mesh frees communicators in the same order on all ranks, in whatever
    order they were asked for.
    """
    half = comm.size // 2
    nodes = [0] * half + [1] * half
    with sp.Mesh(comm, transport="window", nodes=nodes, a=2, b=half, c=1) as mesh:
        if comm.rank == 1:
            assert mesh["c", "b", "a"].size == comm.size
            assert not hasattr(mesh["b", "a"], "nothing")
            assert sp.all_reduce(torch.ones(1), comm=mesh[()]).item() == 1
        wrong = torch.complex64 if comm.rank == 0 else torch.float32
        with pytest.raises(sp.DtypeError, match="rank 0"):  # found by the agreement
            sp.all_reduce(torch.ones(1, dtype=wrong), comm=mesh["b", "a"], algorithm="window")
        assert sp.all_reduce(torch.ones(1), comm=mesh["a", "b"]).item() == comm.size
        group = mesh["b", "a"]
        assert (group.rank, group.nodes) == (mesh["b"].rank * 2 + mesh["a"].rank, (0, 1) * half)
        found = sp.all_gather(torch.full((group.rank,), group.rank), comm=group).tolist()
        assert found == [rank for rank in range(comm.size) for _ in range(rank)]
        for other in (mesh["b", "c", "a"], mesh["c", "b", "a"]):
            sp.fence(comm=other)


@spmd(4)
@meshed(axes={"a": 2, "b": 2})
def test_a_product_in_another_order_lives_as_long_as_the_usual_one(mesh: sp.Mesh) -> None:
    """Whoever has asked for it first, a wait of the mesh lets it make progress, and it checks."""
    asked = list[Any]()
    thread = Thread(target=lambda: asked.append(mesh["b", "a"]))
    with mesh["a", "b"].agreed():
        thread.start()
        thread.join()
    assert (asked[0]._progress, asked[0].check) == (mesh["a", "b"]._progress, "agree")
    sp.fence(comm=asked[0])
    mesh["a", "b"].free()
    with pytest.raises(sp.RankError, match="has been freed"):
        sp.fence(comm=asked[0])


@spmd(4)
def test_a_product_that_no_rank_has_used_is_left_without_a_message(comm: Any) -> None:
    def use(mesh: sp.Mesh) -> None:
        assert mesh["b", "a"].size == 4
        if comm.rank == 0:
            raise LookupError
        sp.fence(comm=mesh["a", "b"])

    with (
        pytest.raises(LookupError if comm.rank == 0 else sp.PeerFailed),
        sp.Mesh(comm, a=2, b=2) as mesh,
    ):
        use(mesh)


@pytest.mark.mpi_skip
@spmd(1)
def test_a_rank_of_a_group_takes_the_device_of_its_number_in_the_world(
    comm: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = Mock(return_value=torch.device("cpu"))
    monkeypatch.setattr(mesh_module, "named_device", asked)
    comm.world_rank = 5
    sp.Mesh(comm, sp=1).free()
    asked.assert_called_once_with(None, 5)


def test_a_group_is_shut_down_when_every_rank_has_done_with_it() -> None:
    """If NCCL's group was dropped without a shutdown, it would abort transfers of other ranks."""
    done: list[int] = []

    def body(comm: Any) -> None:
        seen: list[int] = []
        group = SimpleNamespace(shutdown=lambda: seen.append(len(done)))
        made = DistributedTransport(comm, group, HostTransport(comm), torch.device("cpu"))
        time.sleep(0.02 * comm.rank)
        done.append(comm.rank)
        made.close(together=True)
        assert seen == [comm.size]

    run_threads(3, body)


@spmd(2)
def test_errors_end_all_ranks_of_mpi_and_no_other_ones(
    comm: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mesh calls `failing.watch_over` on a communicator of MPI, but not on one of threads.

    The communicator of no axes, `mesh[()]`, is of the same kind as that of the mesh.
    """
    watched: list[int] = []
    monkeypatch.setattr("sp_core.failing.watch_over", lambda *given: watched.append(comm.rank))
    with sp.Mesh(comm, a=2) as mesh:
        assert type(mesh[()]._comm) is type(comm)
    assert bool(watched) == hasattr(comm, "py2f")


@pytest.mark.parametrize("size", [1, 4])
def test_errors_end_all_ranks_of_a_subclass_of_the_communicators_of_mpi(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A communicator with ranks that MPI has spawned is larger than COMM_WORLD.

    A freed communicator of mpi4py is false, and cannot end any ranks.
    """
    kind = type("Comm", (MagicMock,), {"Split": None})
    world, given = kind(rank=1, size=2), type("Own", (kind,), {})(rank=0, size=size)
    mpi = SimpleNamespace(Comm=kind, COMM_WORLD=world, Is_initialized=lambda: True)
    monkeypatch.setitem(sys.modules, "mpi4py.MPI", mpi)
    monkeypatch.setattr("sp_core.failing.watch_over", watch_over := Mock())
    _ranks_of(given, {})
    most = given if size > 2 else world
    ((rank, ranks, stop),) = (one.args for one in watch_over.call_args_list)
    assert (rank, ranks) == (most.rank, most.size)
    stop(3)
    most.Abort.assert_called_once_with(3)
    given.__bool__.return_value = False
    stop(4)
    world.Abort.assert_called_with(4)
    mpi.Is_initialized = lambda: False  # so it is a communicator of an MPI session
    with pytest.raises(TypeError, match=r"after MPI.Init\(\)"):
        _ranks_of(given, {})


@spmd(2)
@meshed()
def test_a_counter_is_made_after_all_messages_that_were_begun_before(mesh: sp.Mesh) -> None:
    """MPI's calls then have the same order on every rank."""
    begun = Mock(**{"test.side_effect": [False, True]})
    mesh["sp"].transport.in_order = Mock(return_value=begun)  # type: ignore[method-assign]
    mesh["sp"].counter().free()
    assert begun.test.call_count == 2


@spmd(1, 2, 4)
def test_a_counter_gives_each_number_to_one_rank(comm: Any) -> None:
    with sp.Mesh(comm, sp=comm.size) as mesh:
        for _ in range(2):
            counter = mesh["sp"].counter()
            mine = []
            while (number := counter.take()) < 50:
                mine.append(number)
            counter.free()
            found = sorted(number for numbers in comm.allgather(mine) for number in numbers)
            assert found == list(range(50))
