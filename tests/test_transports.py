"""Transports that need hardware, against stand-ins that do everything as late as they can."""

from __future__ import annotations

import functools
import sys
import threading
from contextlib import nullcontext
from dataclasses import replace
from datetime import timedelta
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import MagicMock, Mock, call

import pytest
import torch
from hypothesis import strategies as st
from oracle.attention_check import check_attention
from oracle.collective_cases import Case, cases
from oracle.fake_device import DelayedMemory, DelayedStreams
from oracle.strategies import AttentionProblem, attention_problems
from oracle.ways import offered
from torch._C import _distributed_c10d

import sp_core as sp
from sp_core import transport
from sp_core.schedules import operation
from sp_core.schemes import SCHEMES
from sp_core.testing import given, run_threads, session, spmd
from sp_core.transport import HostTransport, base, cuda, cuda_aware, distributed, wait
from sp_core.transport.cuda_aware import (
    DeviceTransport,
    no_device_memory,
    outside_of_job,
    refuse_host_only,
)
from sp_core.transport.distributed import DistributedTransport, is_complete
from sp_core.transport.host import TAG
from sp_core.transport.staged import PipelinedTransport, StagedTransport
from sp_core.transport.window import Window

CPU = torch.device("cpu")
MEBIBYTE = 1 << 20


def by_distributed(comm: sp.Communicator, seconds: float = 60) -> None:
    """Let a communicator use torch.distributed; it gives the group up in the end."""
    made = distributed.make_group(comm._comm, CPU, seconds)
    comm.transport = DistributedTransport(
        comm._comm, made, HostTransport(comm._comm), CPU, comm.poll
    )


@pytest.mark.parametrize("part", ["_served", "_connected"])
@spmd()
def test_a_group_that_cannot_connect_is_the_same_error_on_every_rank(
    comm: Any, part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the ranks go on with another transport."""
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
def test_half_types_are_added_in_float32_by_torch_distributed_too(comm: Any) -> None:
    """Bitwise where the pieces are added here, within a rounding where the group adds."""
    inputs = [
        torch.randn(64 * comm.size, generator=torch.Generator().manual_seed(rank)).bfloat16()
        for rank in range(comm.size)
    ]
    with sp.Mesh(comm, sp=comm.size) as mesh:
        by_distributed(mesh["sp"])
        part = sp.reduce_scatter(inputs[comm.rank], comm=mesh["sp"])
        whole = sp.all_reduce(inputs[comm.rank], comm=mesh["sp"])
    total = functools.reduce(torch.add, (x.float() for x in inputs))
    assert torch.equal(part, total.bfloat16().chunk(comm.size)[comm.rank])
    exact = torch.stack([x.double() for x in inputs])
    allowed = exact.sum(0).abs() * 2.0**-8 + exact.abs().sum(0) * comm.size * 2.0**-23
    assert ((whole.double() - exact.sum(0)).abs() <= allowed).all()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("Connection closed by peer [127.0.0.1]:1\nmore", r"peer \[127.0.0.1\]:1"),
        ("", "RuntimeError"),
    ],
)
def test_a_transfer_that_fails_in_the_group_says_so(text: str, said: str) -> None:
    """While it goes on, lost ranks are looked for."""
    work: Any = MagicMock(**{"wait.side_effect": RuntimeError(text)})
    work.is_completed.side_effect, watch = [False, True], Mock()
    assert not is_complete(work, "an all_gather", watch)
    watch.assert_called_once_with("an all_gather")
    with pytest.raises(sp.PeerFailed, match=rf"an all_gather failed: .*{said} See"):
        is_complete(work, "an all_gather", watch)


def test_a_transport_that_some_ranks_of_a_mesh_cannot_have_is_refused_by_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A group along an axis fails: the ranks of the other groups must not go on alone."""

    def made(made_for: Any, device: torch.device) -> Any:
        if made_for.size == 2 and "rank 3" in made_for.allgather(threading.current_thread().name):
            raise sp.DeviceError("rank 3 has no way out")
        return SimpleNamespace(shutdown=int)

    def body(comm: Any) -> None:
        with pytest.raises(sp.DeviceError, match="no way out"):
            sp.Mesh(comm, transport="distributed", a=2, b=2)
        assert [str(made) for made in comm.family.members if "freed" not in str(made)] == [
            str(comm)
        ]
        with sp.Mesh(comm, a=2, b=2) as mesh:
            assert sp.all_reduce(torch.ones(2), comm=mesh["a", "b"])[0] == comm.size

    monkeypatch.setattr(distributed, "make_group", made)
    run_threads(4, body)


@pytest.mark.parametrize("near", [False, True])
@pytest.mark.parametrize(("device", "name"), [("cuda", "NCCL"), ("cpu", "Gloo")])
def test_a_group_gets_the_store_the_rank_the_size_and_the_limit(
    device: str, name: str, near: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over gloo also the interface: if all are near, the one that no other machine reaches."""
    group = Mock(**{"create_default_device.return_value": ""})
    group.create_device = lambda hostname: hostname
    monkeypatch.setattr(_distributed_c10d, f"ProcessGroup{name}", group, raising=False)
    comm, limit = cast("Any", SimpleNamespace(rank=1, size=4)), timedelta(seconds=7)
    found = distributed._connected("store", comm, torch.device(device), near, limit)
    assert found is group.return_value
    *told, options = group.call_args.args
    assert (told, options._timeout) == (["store", 1, 4], limit)
    assert device == "cuda" or options._devices == ["127.0.0.1" * near]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("near", [False, True])
def test_ranks_find_each_other_at_the_store_of_rank_0(
    near: bool, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other machines reach it only if a rank is there. NCCL is not asked to share a GPU."""
    server = Mock(**{"getsockname.return_value": ("", 1234), "detach.return_value": 5})
    sockets, names = Mock(**{"create_server.return_value": server}), Mock(node=lambda: "here")
    for name, stand_in in {
        "socket": sockets,
        "platform": names,
        "this_machine": lambda: 0 if near else threading.get_ident(),
        "uuid_of": lambda _: threading.get_ident(),
        "_store": lambda *given: given,
        "_connected": lambda store, comm, *given: (store, *given),
    }.items():
        monkeypatch.setattr(distributed, name, stand_in)
    kind, host = torch.device(device), "127.0.0.1" if near else "here"

    def found() -> list[Any]:
        limit = (9,) if near else ()
        return run_threads(3, lambda comm: distributed.make_group(comm, kind, *limit))

    rest = kind, near, timedelta(seconds=9 if near else 300)
    assert found() == [((host, 1234, 5), *rest), *[((host, 1234), *rest)] * 2]
    sockets.create_server.assert_called_once_with(("127.0.0.1" * near, 0))
    monkeypatch.setattr(
        distributed, "uuid_of", lambda _: threading.current_thread().name == "rank 1"
    )
    refused = pytest.raises(
        Exception, match=r"3 ranks have 2 \(ranks 0, 2: GPU False of here\).*'ipc'"
    )
    with refused if device == "cuda" else nullcontext():
        found()


@pytest.mark.parametrize("name", ["auto", "ipc", "pinned", "pipelined", "staged"])
def test_a_gpu_gets_the_transport_that_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "CudaStreams", lambda device: DelayedStreams())
    device = torch.device("cuda")
    kind = StagedTransport if name == "staged" else PipelinedTransport
    for made in run_threads(2, lambda comm: transport.make_transport(name, comm, device)):
        assert (type(made), made.name) == (kind, "ipc" if name == "auto" else name)


def test_tests_draw_the_transports_that_every_machine_with_a_gpu_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ranks that share one have no NCCL, and few MPI libraries read its memory."""
    monkeypatch.delenv("SP_TRANSPORT", raising=False)
    assert set(offered("cuda")) == {*transport.NAMES["cuda"]} - {"device", "distributed"}
    monkeypatch.setenv("SP_TRANSPORT", "device")
    assert offered("cuda") == ("device",)


@given(max_examples=16, case=cases())
def test_mpi_reads_what_the_device_has_computed_last(comm: Any, case: Case) -> None:
    """MPI gets addresses, and sees what was computed before the call."""
    streams = DelayedStreams()
    with sp.Mesh(comm, sp=comm.size) as mesh:
        mesh["sp"].transport = DeviceTransport(mesh["sp"]._comm, streams.begin)
        inputs = case.inputs(comm.size)
        x = inputs[comm.rank].clone(memory_format=torch.preserve_format)
        expected = case.expected(inputs, comm.rank, comm.size)
        direct = (
            x.is_contiguous() and case.view == "plain" and case.dim == 0 and case.dtype == "float64"
        )
        if direct:
            x.zero_()
            streams.compute(functools.partial(x.copy_, inputs[comm.rank]))
        result = case.call(x, mesh["sp"])
        stays = direct and (
            case.op in ("copy_to_group", "shift")
            or (case.op == "broadcast" and comm.rank == case.root(comm.size))
        )
        assert stays or torch.equal(result, expected)


@spmd()
def test_a_plan_waits_for_the_device_in_every_run(comm: Any) -> None:
    streams = DelayedStreams()
    with sp.Mesh(comm, sp=comm.size) as mesh:
        mesh["sp"].transport = DeviceTransport(mesh["sp"]._comm, streams.begin)
        x = torch.zeros(3)
        plan = sp.plan("all_reduce", x, comm=mesh["sp"])
        for turn in range(1, 3):
            streams.compute(functools.partial(x.fill_, float(turn)))
            assert plan.run().tolist() == [float(turn * comm.size)] * 3


@spmd()
def test_a_rank_whose_mpi_cannot_see_the_device_is_an_error_on_all(comm: Any) -> None:
    refuse_host_only(comm, lambda: "")
    with pytest.raises(
        sp.DeviceError,
        match=rf"that of rank {comm.size - 1} does not: it broke. Pass transport='pipelined'",
    ):
        refuse_host_only(comm, lambda: "it broke" if comm.rank == comm.size - 1 else "")


@pytest.mark.mpi_skip
@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("import os; os.kill(os.getpid(), 1)", "was ended by signal 1"),
        (
            "raise SystemExit('what came is not what was sent')",
            "failed with exit code 1: what came is not what was sent",
        ),
        ("import time; time.sleep(60)", "had not ended after 0.5 s"),
        ("", ""),
    ],
)
def test_a_child_finds_out(program: str, reason: str) -> None:
    found = no_device_memory("cpu", program, 0.5 if "sleep" in program else 60.0)
    assert reason in found
    assert bool(found) == bool(reason)


@spmd()
def test_what_the_child_does(comm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory of a CPU comes as it was sent; a difference is noticed."""
    if session.tier() == "mpi":
        monkeypatch.setattr(sys, "argv", ["probe", "cpu"])
        exec(cuda_aware.PROBE, {})
        with pytest.raises(SystemExit, match="what came is not what was sent"):
            exec(cuda_aware.PROBE.replace("if not (", "x += 1\nif not ("), {})


def test_the_child_is_no_rank() -> None:
    environment = {
        "PMI_RANK": "1",
        "PMIX_NAMESPACE": "x",
        "OMPI_COMM_WORLD_SIZE": "2",
        "OMPI_MCA_btl": "self",
        "PYTHONPATH": "/p",
    }
    assert {**outside_of_job(environment), "PYTHONPATH": ""} == {
        "OMPI_MCA_btl": "self",
        "PYTHONPATH": "",
    }
    here, given_ = outside_of_job(environment)["PYTHONPATH"].split(":")
    assert (Path(here, "sp_core").is_dir(), given_) == (True, "/p")


@given(
    max_examples=16, case=cases(), slot_bytes=st.sampled_from([40, 200]), polls=st.integers(0, 4)
)
def test_a_window_on_a_device_however_late_it_is(
    comm: Any, case: Case, slot_bytes: int, polls: int
) -> None:
    """The input is computed late, steps are carried out late, at another time on each rank."""
    memory = DelayedMemory(polls=(polls + comm.rank) % 5)
    with sp.Mesh(comm, sp=comm.size) as mesh:
        on_device(mesh["sp"], memory, slot_bytes)
        inputs = case.inputs(comm.size)
        x = inputs[comm.rank]
        late = (
            case.view == "plain"
            and case.dim == 0
            and case.op in ("all_gather", "all_reduce", "reduce_scatter", "reduce")
        )
        for _ in range(2):
            if late:
                x = torch.zeros_like(inputs[comm.rank])
                memory.compute(functools.partial(x.copy_, inputs[comm.rank]))
            assert torch.equal(
                case.call(x, mesh["sp"]), case.expected(inputs, comm.rank, comm.size)
            ), case.op


def on_device(comm: sp.Communicator, memory: DelayedMemory, slot_bytes: int) -> None:
    """Give a communicator device memory, full of what no test expects; every rank calls this."""
    comm.window = Window(comm._comm, slot_bytes, memory)
    comm.window.slots[comm.rank].fill_(0xFF)
    comm.algorithms = dict.fromkeys(comm.algorithms, "window")  # as "auto" does on a device


STAGED_OPS = ["all_gather", "reduce_scatter", "all_reduce", "shift", "broadcast", "reduce"]


def pipelined(
    comm: sp.Communicator, streams: DelayedStreams, chunk_bytes: int
) -> PipelinedTransport:
    return PipelinedTransport(
        HostTransport(comm._comm), streams, comm.size, chunk_bytes=chunk_bytes
    )


@given(
    case=cases(["float64", "bfloat16"], STAGED_OPS),
    chunk_bytes=st.sampled_from([1, 64, 200, 10**6]),
    polls=st.integers(0, 4),
)
def test_results_are_right_however_late_the_device_is(
    comm: Any, case: Case, chunk_bytes: int, polls: int
) -> None:
    """The input is computed late, copies run late, and the results are read after them."""
    case = replace(case, dim=0, view="plain")
    streams = DelayedStreams(polls=polls, lazy=True)
    with sp.Mesh(comm, sp=comm.size) as mesh:
        mesh["sp"].transport = pipelined(mesh["sp"], streams, chunk_bytes)
        inputs = case.inputs(comm.size)
        for _ in range(2):  # the second call finds the buffers of the first
            x = torch.full_like(inputs[comm.rank], torch.nan)
            streams.compute(functools.partial(x.copy_, inputs[comm.rank]))
            result = case.call(x, mesh["sp"])
            streams.begin()
            streams.settle()
            stays = case.op == "shift" and case.offset % comm.size == 0
            if stays or (case.op == "broadcast" and comm.rank == case.root(comm.size)):
                result = x  # what stays at a rank is copied by the device, not by the transport
            assert torch.equal(result, case.expected(inputs, comm.rank, comm.size))


@pytest.mark.parametrize("size", [2, 4])
def test_a_long_vector_is_copied_in_pieces_of_a_mebibyte(size: int) -> None:
    """Each copy is started from Python, which costs as much as a copy of some 100 KiB."""
    copies: list[int] = []

    class Counted(DelayedStreams):
        def upload(self, device: torch.Tensor, host: torch.Tensor) -> None:
            copies.append(host.nbytes)
            super().upload(device, host)

        def download(self, host: torch.Tensor, device: torch.Tensor) -> None:
            copies.append(host.nbytes)
            super().download(host, device)

    def body(comm: Any) -> None:
        with sp.Mesh(comm, sp=comm.size) as mesh:
            group = mesh["sp"]
            group.transport = PipelinedTransport(HostTransport(group._comm), Counted(), comm.size)
            x = torch.full((4 * MEBIBYTE // comm.size,), comm.rank, dtype=torch.uint8)
            found = sp.all_gather(x, comm=group, algorithm="mpi")
            assert found.view(comm.size, -1)[:, -1].tolist() == list(range(comm.size))

    run_threads(size, body)
    assert set(copies) == {MEBIBYTE}


@pytest.mark.parametrize("name", sorted(SCHEMES))
@given(
    max_examples=8,
    problem=attention_problems(17),
)
def test_schemes_do_not_know_that_they_share_memory_of_a_device(
    comm: Any, name: str, problem: AttentionProblem
) -> None:
    """Staged and pipelined messages carry schemes in `domains/attention.py`."""
    with sp.Mesh(comm, sp=comm.size) as mesh:
        group = mesh["sp"]
        group.transport = pipelined(group, DelayedStreams(), 256)
        group.window = Window(group._comm, 256, DelayedMemory())
        check_attention(
            name,
            functools.partial(SCHEMES[name], comm=group),
            problem,
            group,
        )


class Failing(HostTransport):
    """A host transport that fails."""

    def start(self, *arguments: Any) -> Any:
        raise OSError("the network is gone")


def test_a_failed_transfer_fails_everything_behind_it_and_again_when_asked_again() -> None:
    def body(comm: Any) -> None:
        with sp.Mesh(comm, sp=comm.size) as mesh:
            host, x = Failing(mesh["sp"]._comm), torch.ones(5)
            transport = PipelinedTransport(host, DelayedStreams(polls=3), comm.size)
            one = operation("all_reduce", 0, 1, (5,))
            handles = [transport.start(one, x, torch.zeros(5)) for _ in range(2)]
            for handle in handles * 2:
                with pytest.raises(OSError, match="network"):
                    wait(handle)

    run_threads(1, body)


def test_what_a_transport_leaves_to_another_is_passed_on() -> None:
    host, group = Mock(), Mock(size=2)
    for made in (
        StagedTransport(host),
        PipelinedTransport(host, DelayedStreams(), 2),
        DistributedTransport(cast("Any", group), group, host, CPU),
    ):
        host.reset_mock()
        made.announce("sends", "recvs")  # type: ignore[arg-type]
        made.close(together=False)
        assert host.mock_calls == [call.announce("sends", "recvs"), call.close(together=False)]
    copying = PipelinedTransport(host, DelayedStreams(), 2)
    for together, left in ((False, 2), (True, 0)):  # MPI may use them until all have left
        copying.close(together=together)
        assert len(copying._slots) == left
    of_size = {size: PipelinedTransport(host, DelayedStreams(), size) for size in (1, 8, 16)}
    buffers = {size: made._slots[1].recv.nbytes for size, made in of_size.items()}
    assert buffers == {1: MEBIBYTE, 8: 8 * MEBIBYTE, 16: 8 * MEBIBYTE}


def test_messages_are_announced_and_posted_in_parts_that_mpi_can_count() -> None:
    comm, said = Mock(), list[Any]()
    made = HostTransport(comm, max_count=3)
    made._observer = Mock()
    made._observer.announce_exchange = lambda *messages, later: said.append(
        ([[*each] for each in messages], later)
    )
    given_: Any = [(1, torch.arange(5.0))], [(0, torch.zeros(2))]
    made.exchange(*given_)
    made.announce(*given_)
    assert said == [([[(1, 12), (1, 8)], [(0, 8)]], later) for later in (False, True)]
    posted = [
        [(x.tolist(), *rest) for x, *rest in (each.args for each in calls.call_args_list)]
        for calls in (comm.Isend, comm.Irecv)
    ]
    assert posted == [[([0, 1, 2], 1, TAG), ([3, 4], 1, TAG)], [([0, 0], 0, TAG)]]


def test_messages_of_a_group_are_packed_only_if_there_are_several() -> None:
    """In the order of the ranks. A single one is sent and received where it lies."""
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


def test_a_wait_spins_for_20_us_yields_up_to_200_us_and_then_sleeps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    times = iter([Fraction(5) + Fraction(moment) for moment in (0, 2e-5, 2.1e-5, 2e-4, 2.1e-4)])
    did: list[object] = []
    clock = SimpleNamespace(perf_counter=times.__next__, sleep=did.append)
    monkeypatch.setattr(base, "time", clock)
    monkeypatch.setattr(base, "os", SimpleNamespace(sched_yield=lambda: did.append("yields")))
    handle, poll = Mock(**{"test.side_effect": [False] * 5 + [True]}), Mock()
    wait(handle, poll)
    assert did == ["yields", "yields", 5e-5]
    assert poll.call_count == 5
