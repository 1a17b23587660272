"""Test process groups of torch.distributed: making them, sending, and finding lost ranks."""

import errno
import functools
import os
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import MagicMock, Mock

import pytest
import torch
from kit.meshed import meshed
from torch import distributed as torch_distributed
from torch._C import _distributed_c10d
from torch._C._distributed_c10d import HashStore, TCPStore
from torch.distributed.device_mesh import DeviceMesh

import sp_core as sp
from sp_core.launch import deaths
from sp_core.programs import operation
from sp_core.testing import run_threads, spmd
from sp_core.transport import distributed, groups
from sp_core.transport.base import Done
from sp_core.transport.distributed import DistributedTransport, is_complete
from sp_core.transport.groups import GroupComm, communicator_of, over_ranks
from sp_core.transport.window import Window

CPU, SEVEN = torch.device("cpu"), timedelta(seconds=7)


@pytest.mark.parametrize("part", ["_served", "_connected"])
@spmd()
def test_a_group_that_cannot_connect_is_the_same_error_on_every_rank(
    comm: Any, part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the error, the ranks can make a mesh with another transport."""
    broken = comm.size - 1 if part == "_connected" else 0

    def fails(*given: Any) -> Any:
        if part == "_served" or given[1].rank == broken:
            raise OSError("no route to host")

    monkeypatch.setattr(distributed, part, fails)
    with pytest.raises(
        sp.DeviceError, match=rf"rank {broken} has none: no route.*Pass another transport"
    ):
        sp.Mesh(comm, transport="distributed", sp=comm.size)
    with sp.Mesh(comm, sp=comm.size) as mesh:
        assert sp.all_reduce(torch.ones(2), comm=mesh["sp"])[0] == comm.size


@spmd()
@meshed(transport="distributed")
def test_half_types_are_added_in_float32_by_torch_distributed_too(mesh: sp.Mesh) -> None:
    """reduce_scatter adds in this project, and is bitwise right; all_reduce is near a rounding."""
    inputs = [
        torch.randn(64 * mesh.size, generator=torch.Generator().manual_seed(rank)).bfloat16()
        for rank in range(mesh.size)
    ]
    part = sp.reduce_scatter(inputs[mesh.rank], comm=mesh["sp"])
    whole = sp.all_reduce(inputs[mesh.rank], comm=mesh["sp"])
    total = functools.reduce(torch.add, (x.float() for x in inputs))
    assert torch.equal(part, total.bfloat16().chunk(mesh.size)[mesh.rank])
    exact = torch.stack([x.double() for x in inputs])
    allowed = exact.sum(0).abs() * 2.0**-8 + exact.abs().sum(0) * mesh.size * 2.0**-23
    assert ((whole.double() - exact.sum(0)).abs() <= allowed).all()


@spmd(2, 3)
@meshed(transport="distributed")
def test_whole_numbers_are_added_exactly_by_torch_distributed(mesh: sp.Mesh) -> None:
    """Float64 has no 2**53 + 1."""
    x = torch.full((mesh.size,), 2**53 + 1)
    for call in (sp.reduce_scatter, sp.all_reduce):
        assert {*call(x, comm=mesh["sp"]).tolist()} == {mesh.size * (2**53 + 1)}


@spmd(2, 3)
@meshed(transport="distributed")
def test_one_element_of_any_stride_is_sent_by_torch_distributed(mesh: sp.Mesh) -> None:
    x = torch.arange(10 * mesh.size).view(-1, 10)[mesh.rank : mesh.rank + 1, 0]
    found = sp.all_gather(x, comm=mesh["sp"])
    assert found.tolist() == [10 * rank for rank in range(mesh.size)]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("Connection closed by peer [127.0.0.1]:1\nmore", r"peer \[127.0.0.1\]:1"),
        ("", "RuntimeError"),
    ],
)
def test_a_transfer_that_fails_in_the_group_says_so(text: str, said: str) -> None:
    """While a transfer is incomplete, each test of it looks for lost ranks."""
    work: Any = MagicMock(**{"wait.side_effect": RuntimeError(text)})
    work.is_completed.side_effect, watch = [False, True], Mock()
    assert not is_complete(work, "an all_gather", watch)
    watch.assert_called_once_with("an all_gather")
    with pytest.raises(sp.PeerFailed, match=rf"an all_gather failed: .*{said} See"):
        is_complete(work, "an all_gather", watch)


@pytest.mark.parametrize("completed", [False, True])
@pytest.mark.parametrize("by", ["group", "window"])
def test_a_rank_may_end_once_it_has_completed_a_transfer(by: str, completed: bool) -> None:
    """It may do so between the test of the transfer and the look for lost ranks."""
    states, watch = iter([False, completed]), Mock(side_effect=sp.PeerFailed("rank 1 has died"))
    work, window = Mock(is_completed=states.__next__), Mock(watch=watch)
    window.advance = lambda: window.configure_mock(made=next(states))
    lost = pytest.raises(sp.PeerFailed, match="rank 1 has died")
    with nullcontext() if completed else lost:
        assert (
            is_complete(work, "an exchange", watch)
            if by == "group"
            else Window._is_made(window, 1, "an all_gather", Done())
        )


@pytest.mark.mpi_skip
@spmd(4)
def test_a_transport_that_some_ranks_of_a_mesh_cannot_have_is_refused_by_all(
    comm: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If one group along an axis cannot be made, the ranks of the other groups fail, too."""

    def made(made_for: Any, device: torch.device) -> Any:
        if made_for.size == 2 and "rank 3" in made_for.allgather(threading.current_thread().name):
            raise sp.DeviceError("rank 3 has no way out")
        return SimpleNamespace(shutdown=int)

    monkeypatch.setattr(distributed, "make_group", made)
    with pytest.raises(sp.DeviceError, match="no way out"):
        sp.Mesh(comm, transport="distributed", a=2, b=2)
    assert [str(made) for made in comm.family.members if "freed" not in str(made)] == [str(comm)]
    with sp.Mesh(comm, a=2, b=2) as mesh:
        assert sp.all_reduce(torch.ones(2), comm=mesh["a", "b"])[0] == comm.size


@pytest.mark.parametrize(
    ("device", "name", "near", "last"),
    [
        *(("cuda", "NCCL", near, SimpleNamespace(_timeout=SEVEN)) for near in (False, True)),
        ("cpu", "Gloo", True, SimpleNamespace(_timeout=SEVEN, _devices=["127.0.0.1"])),
        ("cpu", "Gloo", False, SEVEN),
    ],
)
def test_a_group_gets_the_store_the_rank_the_size_and_the_limit(
    device: str, name: str, near: bool, last: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gloo gets the loopback interface if all ranks are on one machine, else torch chooses."""
    group = Mock(Options=SimpleNamespace, _Options=SimpleNamespace)
    group.create_device = lambda hostname: hostname
    monkeypatch.setattr(_distributed_c10d, f"ProcessGroup{name}", group, raising=False)
    comm = cast("Any", SimpleNamespace(rank=1, size=4))
    found = distributed._connected("store", comm, torch.device(device), near, SEVEN)
    assert found is group.return_value
    group.assert_called_once_with("store", 1, 4, last)


def test_between_machines_gloo_takes_the_interfaces_that_the_environment_names(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "none_such")
    comm, store = cast("Any", SimpleNamespace(rank=0, size=1)), _distributed_c10d.HashStore()
    with pytest.raises(RuntimeError, match="none_such"):
        distributed._connected(store, comm, torch.device("cpu"), near=False, limit=SEVEN)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("near", [False, True])
def test_ranks_find_each_other_at_the_store_of_rank_0(
    near: bool, device: str, substitute: Any
) -> None:
    """The store accepts other machines only if ranks run there. NCCL may not share a GPU."""
    server = Mock(**{"getsockname.return_value": ("", 1234), "detach.return_value": 5})
    sockets, names = Mock(**{"create_server.return_value": server}), Mock(node=lambda: "here")
    substitute(
        distributed,
        socket=sockets,
        platform=names,
        this_machine=lambda: 0 if near else threading.get_ident(),
        uuid_of=lambda _: threading.get_ident(),
        _store=lambda *given: given,
        _connected=lambda store, comm, *given: (store, *given),
    )
    kind, host = torch.device(device), "127.0.0.1" if near else "here"

    def make(comm: Any) -> Any:
        if near:  # as a GroupComm
            comm.limit = timedelta(seconds=9)
        return distributed.make_group(comm, kind)

    def found() -> list[Any]:
        return run_threads(3, make)

    rest = kind, near, timedelta(seconds=9 if near else 300)
    assert found() == [((host, 1234, 5), *rest), *[((host, 1234), *rest)] * 2]
    sockets.create_server.assert_called_once_with(("127.0.0.1" * near, 0))
    substitute(distributed, uuid_of=lambda _: threading.current_thread().name == "rank 1")
    refused = pytest.raises(
        Exception, match=r"3 ranks have 2 \(ranks 0, 2: GPU False of here\).*'ipc'"
    )
    with refused if device == "cuda" else nullcontext():
        found()


def test_messages_of_a_group_are_packed_only_if_there_are_several() -> None:
    """Several are packed in the order of the ranks. A single message is not copied."""
    group: Any = Mock(**{"alltoall_base.return_value.is_completed.return_value": True})
    made = DistributedTransport(cast("Any", Mock(size=4)), group, Mock(), CPU)
    made._say = Mock()
    a, b, c, d = (torch.full((length,), float(length)) for length in (2, 3, 4, 5))
    for sends, recvs, sent, received in (
        ([(1, a)], [(2, b)], [0, 8, 0, 0], [0, 0, 12, 0]),
        ([(3, a), (1, b)], [(2, c), (0, d)], [0, 12, 0, 8], [20, 0, 16, 0]),
        ([], [], [0] * 4, [0] * 4),
    ):
        handle = made.exchange(sends, recvs)
        room, packed, *lengths = group.alltoall_base.call_args.args
        assert lengths == [received, sent]
        made._say.assert_called_with("messages by torch.distributed")
        if len(sends) == 1:
            assert (packed.data_ptr(), room.data_ptr()) == (a.data_ptr(), b.data_ptr())
            continue
        assert packed.view(torch.float32).tolist() == ([3.0] * 3 + [2.0] * 2) * bool(sends)
        room.view(torch.float32).copy_(torch.tensor([6.0] * 5 + [7.0] * 4)[: room.numel() // 4])
        assert handle.test()
    assert (c.tolist(), d.tolist()) == ([7.0] * 4, [6.0] * 5)
    assert made.start(operation("all_reduce", 0, 4, (0,)), a[:0], b[:0]).test()
    made._say.assert_called_with("all_reduce by torch.distributed")
    group.allreduce.assert_not_called()


def test_a_barrier_of_a_group_waits_for_every_rank() -> None:
    """A communicator made from another one knows the numbers of its ranks in torch."""
    store, came = HashStore(), threading.Event()

    def arrived(rank: int) -> bool:
        comm = GroupComm(store, "all", rank, 2, timedelta(seconds=30), 5 + rank).Dup()
        assert comm._near == {6 - rank: os.getpid()}
        if rank:
            time.sleep(0.2)
            came.set()
        comm.Barrier()
        return came.is_set()

    with ThreadPoolExecutor(2) as pool:
        assert all(pool.map(arrived, range(2)))


@pytest.fixture
def alone() -> Iterator[None]:
    """Make torch's default group, of this process only. Before it, there is no communicator."""
    assert communicator_of(None) is None
    torch_distributed.init_process_group(
        "gloo", timeout=timedelta(seconds=33), store=HashStore(), rank=0, world_size=1
    )
    yield
    torch_distributed.destroy_process_group()


@pytest.mark.usefixtures("alone")
def test_whatever_torch_calls_a_group_is_a_communicator_of_its_ranks() -> None:
    limit, made = timedelta(seconds=33), list[Any]()
    for given in (None, torch_distributed.group.WORLD, DeviceMesh("cpu", torch.tensor([[0]]))):
        made.append(communicator_of(given))
        assert (made[-1].rank, made[-1].size, made[-1].allgather(7)) == (0, 1, [7])
    assert communicator_of(object()) is None
    gone = torch_distributed.new_group([0])
    torch_distributed.destroy_process_group(gone)
    assert communicator_of(gone) is None
    with pytest.raises(sp.RankError, match=r"rank 0 is not one of the ranks \[1\] of"):
        over_ranks([1], limit)
    assert [comm.limit for comm in made] == [limit] * 3
    assert len({comm._name for comm in made}) == 3


def test_ranks_connect_after_a_restart_though_one_failed_before_its_mesh(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The agent of torchrun keeps its store when it starts its ranks again."""
    this, store = threading.local(), HashStore()
    monkeypatch.setattr(torch_distributed.distributed_c10d, "_get_default_store", lambda: store)
    monkeypatch.setattr(torch_distributed, "get_rank", lambda: this.rank)
    monkeypatch.setenv("GROUP_WORLD_SIZE", "1")

    def connected(rank: int, seconds: int = 30) -> list[int]:
        this.rank = rank
        return over_ranks([0, 1], timedelta(seconds=seconds)).allgather(rank)

    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    with pytest.raises(sp.PeerFailed, match="rank 0 of 2 cannot connect"):
        connected(0, seconds=1)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    with ThreadPoolExecutor(2) as pool:
        assert [*pool.map(connected, range(2))] == [[0, 1]] * 2


class WithoutOptions:
    """A backend of torch without options, such as UCC."""

    @property
    def options(self) -> object:
        raise RuntimeError("Backend ucc does not implement getBackendOptions.")


@pytest.mark.usefixtures("alone")  # before monkeypatch, which then ends first
@pytest.mark.parametrize("backend", [WithoutOptions(), object()], ids=["refused", "unknown"])
def test_a_backend_that_names_no_timeout_has_that_of_torch(
    backend: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit, group = timedelta(seconds=7), torch_distributed.ProcessGroup
    monkeypatch.setattr(group, "_get_backend", lambda *_: backend)
    monkeypatch.setattr(torch_distributed, "default_pg_timeout", limit)
    comm = communicator_of(None)
    assert comm is not None
    assert (comm.limit, comm.world_rank) == (limit, 0)


def test_a_rank_whose_store_has_ended_still_looks_for_dead_processes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The process with the store, such as rank 0, may end before the ranks of other meshes."""
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = TCPStore("127.0.0.1", server.port, is_master=False)
    comm = GroupComm(client, "all", 0, 1, timedelta(seconds=30))
    del server
    comm._near = {1: os.getpid()}
    comm.watch("a call")
    comm._near, comm._next_look = {1: 2**30}, 0.0
    with pytest.raises(sp.PeerFailed, match=r"a call cannot end: rank 1 of torch.* has died"):
        comm.watch("a call")
    monkeypatch.setattr(torch_distributed.distributed_c10d, "_get_default_store", lambda: client)
    monkeypatch.setattr(torch_distributed, "get_rank", lambda: 0)
    with pytest.raises(sp.PeerFailed, match="rank 0 cannot reach torch's store"):
        over_ranks([0], timedelta(seconds=30))


def test_a_rank_without_free_file_descriptors_calls_nobody_dead(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    comm = GroupComm(HashStore(), "all", 0, 1, timedelta(seconds=30))
    comm._near, comm._next_look = {1: os.getpid()}, 0.0
    monkeypatch.setattr(Path, "read_text", Mock(side_effect=OSError(errno.EMFILE, "")))
    comm.watch("a call")
    deaths.processes_of(os.getpid())  # raises nothing


def test_a_freed_communicator_releases_the_port_of_the_store() -> None:
    """A later store may then use the port, and it does not find earlier keys."""
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port, until, refused = server.port, time.monotonic() + 10, 0
    comm = GroupComm(server, "all", 0, 1, timedelta(seconds=30))
    comm.Free()
    del server
    while not refused and time.monotonic() < until:
        with socket.socket() as client:
            refused = client.connect_ex(("127.0.0.1", port))
    assert refused
    comm.watch("a call")  # it must not ask the store


def test_a_rank_that_waits_looks_ten_times_a_second_for_one_that_is_lost(substitute: Any) -> None:
    now, states = [5.0], {11: ["S", "1"], 12: ["R"]}
    substitute(groups, time=SimpleNamespace(monotonic=lambda: now[0]), stat=states.__getitem__)
    comm = GroupComm(HashStore(), "all", 0, 1, timedelta(seconds=30))
    comm._near = {1: 11, 2: 12}
    comm.watch("a call")
    for state in (["Z", "1"], ["X"], []):
        states[12] = state
        now[0] += 0.09
        comm.watch("a call")
        now[0] += 0.02
        with pytest.raises(sp.PeerFailed, match=r"a call cannot end: rank 2 of torch.* has died"):
            comm.watch("a call")
    for comm.world_rank in (3, 4):
        comm.abandoned()
    now[0] += 0.11
    with pytest.raises(sp.PeerFailed, match=r"a call cannot end: rank 3 of torch.* has left"):
        comm.watch("a call")
