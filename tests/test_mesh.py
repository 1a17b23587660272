"""The ranks of a mesh and its communicators, from their making to their end."""

from __future__ import annotations

import contextlib
import itertools
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from oracle.schedule_cases import nodes_of
from refusals.calls import hybrid

import sp_core as sp
from sp_core.counters import Count, Counters
from sp_core.mesh import _device
from sp_core.testing import given, run_threads, spmd
from sp_core.transport import HostTransport
from sp_core.transport.distributed import DistributedTransport

SHAPES = {
    1: (1, 1, 1),
    2: (2, 1, 1),
    3: (1, 3, 1),
    4: (2, 1, 2),
    5: (5, 1, 1),
    6: (3, 1, 2),
    7: (1, 1, 7),
    8: (2, 2, 2),
}


@given(
    names=st.permutations(["a", "b", "c"]),
    product=st.permutations(["a", "b", "c"]),
    axes=st.integers(1, 3),
)
def test_ranks_are_numbered_with_the_last_axis_fastest(
    comm: Any, names: list[str], product: list[str], axes: int
) -> None:
    lengths: dict[str, Any] = dict(zip(names, SHAPES[comm.size], strict=True))
    places = [
        dict(zip(names, place, strict=True))
        for place in itertools.product(*map(range, lengths.values()))
    ]
    mine = places[comm.rank]
    chosen = tuple(product[:axes])
    with sp.Mesh(comm, **lengths) as mesh:
        group = mesh[chosen]
        members = [
            rank
            for rank, place in enumerate(places)
            if all(place[n] == mine[n] for n in names if n not in chosen)
        ]
        members.sort(key=lambda rank: [places[rank][name] for name in chosen])
        assert group.size == len(members)
        assert members[group.rank] == comm.rank
        assert sp.all_gather(torch.tensor([comm.rank]), comm=group).tolist() == members
        assert [mesh[name].rank for name in names] == [mine[name] for name in names]
        assert mesh[chosen] is group


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        ("cuda", "cuda:1"),
        ("cuda:0", "cuda:0"),
        ("cuda:2", "there are 2 CUDA devices, cuda:0 to cuda:1"),
    ],
)
def test_a_gpu_is_the_current_one_unless_it_is_numbered(
    asked: str, found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda, answers = torch.device("cuda"), {"device_count": 2, "current_device_index": 1}
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: cuda)
    for name, value in answers.items():
        monkeypatch.setattr(torch.accelerator, name, lambda value=value: value)
    if found.startswith("cuda"):
        assert str(_device(asked)) == found
        return
    with pytest.raises(sp.DeviceError, match=found):
        _device(asked)


@pytest.mark.parametrize("transport", ["host", "window"])
def test_nobody_leaves_a_fence_before_all_have_come(transport: str) -> None:
    come = []

    def body(comm: Any) -> None:
        with sp.Mesh(comm, transport=transport, sp=comm.size) as mesh:
            for turn in range(1, 4):
                time.sleep(0.02 * ((comm.rank + turn) % 3))
                come.append(comm.rank)
                sp.fence(comm=mesh["sp"])
                assert len(come) >= turn * comm.size

    run_threads(3, body)


@spmd()
def test_a_communicator_is_freed_once_however_often_it_is_asked_for(comm: Any) -> None:
    with sp.Mesh(comm, a=comm.size, b=1) as mesh:
        mesh["a"].free()
        mesh["a"].free()
        with pytest.raises(sp.RankError, match="freed"):
            sp.all_reduce(torch.ones(1), comm=mesh["a"])
        assert sp.all_reduce(torch.ones(1), comm=mesh["a", "b"]).item() == comm.size


def test_an_error_inside_a_mesh_is_not_kept_waiting_by_what_is_under_way() -> None:
    """A rank that leaves with an error does not wait for a message that it still expects."""

    def body(comm: Any) -> str:
        try:
            with sp.Mesh(comm, sp=comm.size) as mesh:
                group = mesh["sp"]
                expected = [(0, torch.empty(3))] if comm.rank else []
                group.exchange([], expected)  # nobody sends it
                raise KeyError("lost")
        except KeyError as error:
            return str(error)

    class Unannounced:
        """A communicator that lets unmatched messages pass, as plain MPI does."""

        def __init__(self, inner: Any) -> None:
            self._inner = inner

        def __getattr__(self, name: str) -> Any:
            found = getattr(self._inner, name)
            return (lambda *args: Unannounced(found(*args))) if name in ("Dup", "Split") else found

        def Irecv(self, *arguments: Any) -> Any:
            return Never()

    class Never:
        def Test(self) -> bool:
            return False

    assert run_threads(2, lambda comm: body(Unannounced(comm))) == ["'lost'", "'lost'"]


@spmd(2)
def test_what_was_under_way_when_a_mesh_was_left_is_not_waited_for(comm: Any) -> None:
    with (
        contextlib.suppress(KeyError),
        sp.Mesh(comm, transport="window", check="off", sp=2) as mesh,
    ):
        assert mesh["sp"].window is not None
        mesh["sp"].window._announce = lambda what: (
            None
        )  # or the kit would tell rank 0 that it is alone
        pending = sp.all_reduce_start(torch.ones(3), comm=mesh["sp"]) if comm.rank == 0 else None
        raise KeyError("lost")
    if pending is not None:
        with pytest.raises(sp.RankError, match="has been freed"):
            pending.wait()


@given(layout=st.integers(0, 12), names=st.permutations(["a", "b", "c"]))
def test_every_communicator_knows_the_node_of_each_of_its_ranks(
    comm: Any, layout: int, names: list[str]
) -> None:
    lengths: dict[str, Any] = dict(zip("abc", SHAPES[comm.size], strict=True))
    nodes = nodes_of(comm.size, layout)
    with sp.Mesh(comm, nodes=nodes, **lengths) as mesh:
        for axes in (tuple(names[:1]), tuple(names[1:]), tuple(names)):
            group = mesh[axes]
            members = sp.all_gather(torch.tensor([nodes[comm.rank]]), comm=group).tolist()
            order = list(dict.fromkeys(members))
            assert group.nodes == tuple(order.index(node) for node in members)


def test_the_environment_says_where_the_nodes_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SP_NODES", "7,3,7")

    def body(comm: Any) -> tuple[int, ...]:
        with sp.Mesh(comm, sp=3) as mesh:
            return mesh["sp"].nodes

    assert run_threads(3, body) == [(0, 1, 0)] * 3


def test_an_operation_that_was_never_called_has_counted_nothing() -> None:
    assert Counters()["all_reduce"] == Count(
        calls=0, messages=0, bytes_sent=0, seconds=0.0, scratch=0
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without CUDA")
@spmd(2)
def test_a_device_that_is_not_there_on_one_rank(comm: Any) -> None:
    with pytest.raises(sp.DeviceError, match=r"rank 1.*CUDA"):
        sp.Mesh(comm, device="cuda" if comm.rank else "cpu", sp=comm.size)


@pytest.mark.parametrize("others", ["call", "leave"])
@spmd(2, 3, 4)
def test_an_error_that_leaves_a_mesh_on_one_rank_reaches_all(comm: Any, others: str) -> None:
    """Of the caller's own code; the others are inside a collective, or leave the mesh as usual."""
    here = comm.rank == comm.size - 1

    def work() -> None:
        with sp.Mesh(comm, data=1, ring=comm.size) as mesh:
            if here:
                raise KeyError("mine")
            if others == "call":
                sp.all_reduce(torch.ones(1), comm=mesh["ring"])

    with pytest.raises(KeyError if here else sp.PeerFailed) as caught:
        work()
    assert here or f"rank {comm.size - 1} has left" in str(caught.value)
    assert (
        here
        or f"rank 0: {'all_reduce(tensor' if others == 'call' else 'free() of mesh'}"
        in str(caught.value)
    )
    with sp.Mesh(comm, ring=comm.size) as mesh:
        assert sp.all_reduce(torch.ones(1), comm=mesh["ring"]).item() == comm.size


@pytest.mark.parametrize("wrong", [("ring", "tp"), ("ring", "missing"), ("ring",), None])
@spmd(4)
def test_wrong_axes_of_a_hybrid_on_a_mesh_with_three_are_an_error_on_all(
    comm: Any, wrong: Any
) -> None:
    """First on one rank, then on all, after which the mesh still works."""
    lengths: dict[str, Any] = {"tp": 1, "ring": 2, "ulysses": 2}
    with pytest.raises((sp.ShapeError, sp.PeerFailed)) as caught, sp.Mesh(comm, **lengths) as mesh:
        hybrid(axes=wrong)(mesh, comm.rank == 0)
    assert isinstance(caught.value, sp.ShapeError) == (comm.rank == 0)
    assert "axes=" in str(caught.value) or comm.rank
    with sp.Mesh(comm, **lengths) as mesh:
        with pytest.raises(sp.ShapeError, match="Name two axes of the mesh"):
            hybrid(axes=wrong)(mesh, True)
        hybrid(axes=("ring", "ulysses"))(mesh, True)


@spmd(4, 6)
def test_a_product_in_another_order_is_asked_for_by_one_rank(comm: Any) -> None:
    """Also that of no axes. Asking sends nothing; a rank alone can use the latter."""
    with sp.Mesh(comm, a=2, b=comm.size // 2) as mesh:
        if comm.rank == 1:
            assert mesh["b", "a"].rank == mesh["b"].rank * 2 + mesh["a"].rank
            assert sp.all_reduce(torch.ones(1), comm=mesh[()]).item() == 1
        assert sp.all_reduce(torch.ones(1), comm=mesh["a", "b"]).item() == comm.size
        order = sp.all_gather(torch.tensor([comm.rank]), comm=mesh["b", "a"]).tolist()
        assert order == [rank for b in range(comm.size // 2) for rank in (b, b + comm.size // 2)]


def test_a_group_is_shut_down_when_every_rank_has_done_with_it() -> None:
    """A group that is only dropped aborts what others still do, if it is NCCL's."""
    done: list[int] = []

    def body(comm: Any) -> None:
        seen: list[int] = []
        group = SimpleNamespace(shutdown=lambda: seen.append(len(done)))
        messages = HostTransport(comm)
        made = DistributedTransport(comm, group, messages, torch.device("cpu"))
        time.sleep(0.02 * comm.rank)
        done.append(comm.rank)
        made.close(together=True)
        assert seen == [comm.size]

    run_threads(3, body)
