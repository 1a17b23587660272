"""Test transports that need hardware, on stand-ins that do everything as late as possible."""

import errno
import gc
import os
import sys
from dataclasses import replace
from fractions import Fraction
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import MagicMock, Mock, call

import pytest
import torch
from hypothesis import strategies as st
from kit.carriers import host_transport
from kit.meshed import meshed
from oracle.attention_check import check_attention
from oracle.collective_cases import Case, cases
from oracle.fake_device import DelayedMemory, DelayedStreams
from oracle.strategies import AttentionProblem, attention_problems

import sp_core as sp
from sp_core import transport
from sp_core.programs import operation
from sp_core.schemes import SCHEMES
from sp_core.testing import given, run_threads, session, spmd
from sp_core.transport import HostTransport, base, cuda, cuda_aware, distributed, shared, wait
from sp_core.transport.cuda_aware import (
    DeviceTransport,
    no_device_memory,
    outside_of_job,
    refuse_host_only,
)
from sp_core.transport.distributed import DistributedTransport
from sp_core.transport.host import MAX_COUNT, TAG, MpiCounter
from sp_core.transport.staged import PipelinedTransport, StagedTransport
from sp_core.transport.window import Window

CPU = torch.device("cpu")
MEBIBYTE = 1 << 20


@pytest.mark.parametrize(
    ("kind", "asked", "made", "name"),
    [
        ("cuda", "auto", PipelinedTransport, "ipc"),
        *(("cuda", name, PipelinedTransport, name) for name in ("ipc", "pinned", "pipelined")),
        ("cuda", "staged", StagedTransport, "staged"),
        # a library of collectives leaves messages to another transport
        ("cuda", "distributed", PipelinedTransport, "pipelined"),
        ("cpu", "distributed", HostTransport, "distributed"),
    ],
)
def test_the_transport_of_messages_is_the_one_that_is_named(
    kind: str, asked: str, made: type, name: str, substitute: Any
) -> None:
    substitute(cuda, CudaStreams=lambda device: DelayedStreams())
    substitute(
        distributed, make_group=MagicMock(), DistributedTransport=lambda comm, group, used, *_: used
    )
    device = torch.device(kind)
    for found in run_threads(2, lambda comm: transport.make_transport(asked, comm, device)):
        assert (type(found), found.name) == (made, name)
        assert isinstance(getattr(found, "_host", found), HostTransport)


@pytest.mark.parametrize("op", ["all_gather", "reduce_scatter", "all_reduce", "shift"])
@spmd(2, 3)
@meshed()
def test_mpi_reads_what_the_device_has_computed_last(mesh: sp.Mesh, op: str) -> None:
    """This holds for a call, for a call that is started, and for every run of a plan."""
    streams = DelayedStreams()
    group, x = mesh["sp"], torch.ones(3 * mesh.size)
    wanted = getattr(sp, op)(x, comm=group)
    group.transport = DeviceTransport(group._comm, streams.begin)
    call_, start = (partial(getattr(sp, name), x, comm=group) for name in (op, f"{op}_start"))
    plan = sp.plan(op, x, comm=group)
    for run in (call_, lambda: start().wait(), plan.run, plan.run):
        x.zero_()
        streams.compute(partial(x.fill_, 1.0))
        assert torch.equal(run(), wanted)


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
        pytest.param("#" * MEBIBYTE, "cannot be started", id="too long an argument"),
        ("", ""),
    ],
)
def test_a_child_finds_out(program: str, reason: str) -> None:
    found = no_device_memory("cpu", program, 0.5 if "sleep" in program else 60.0)
    assert reason in found
    assert bool(found) == bool(reason)


@spmd()
def test_what_the_child_does(comm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """In CPU memory the probe finds that messages arrive unchanged. It notices a changed one."""
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
        "OMPI_MCA_ess": "^singleton",  # Open MPI 4
        "OMPI_MCA_ess_base_vpid": "1",
        "OMPI_MCA_orte_local_daemon_uri": "1;tcp://h:5",
        "OMPI_MCA_pmix": "^s1,s2,cray",
        "SLURM_STEP_ID": "0",
        "OMPI_MCA_btl": "self",
        "PYTHONPATH": "/p",
    }
    assert {**outside_of_job(environment), "PYTHONPATH": ""} == {
        "OMPI_MCA_btl": "self",
        "PYTHONPATH": "",
    }
    here, given_ = outside_of_job(environment)["PYTHONPATH"].split(":")
    assert (Path(here, "sp_core").is_dir(), given_) == (True, "/p")


STAGED_OPS = ["all_gather", "reduce_scatter", "all_reduce", "shift", "broadcast", "reduce"]


def pipelined(
    comm: sp.Communicator, streams: DelayedStreams, chunk_bytes: int
) -> PipelinedTransport:
    return PipelinedTransport(host_transport(comm), streams, comm.size, chunk_bytes=chunk_bytes)


@pytest.mark.parametrize("on_device", [False, True], ids=["pipelined", "window"])
@given(
    max_examples=16,
    case=cases(["float64", "bfloat16"], STAGED_OPS),
    nbytes=st.sampled_from([1, 40, 200, 10**6]),
    polls=st.integers(0, 4),
)
@meshed()
def test_results_are_right_however_late_the_device_is(
    mesh: sp.Mesh, on_device: bool, case: Case, nbytes: int, polls: int
) -> None:
    """The device computes inputs late and copies late. Results are read after its work."""
    case = replace(case, dim=0, view="plain")
    streams = DelayedStreams(polls, lazy=True)
    memory = DelayedMemory(polls=(polls + mesh.rank) % 5)
    group, late = mesh["sp"], memory if on_device else streams
    if on_device:
        group.window = Window(group._comm, nbytes, memory)
        group.window.slots[mesh.rank].fill_(0xFF)
        group.algorithms = dict.fromkeys(group.algorithms, "window")  # as "auto" on a device
    else:
        group.transport = pipelined(group, streams, nbytes)
    inputs = case.inputs(mesh.size)
    for _ in range(2):  # the second call reuses the buffers of the first
        x = torch.full_like(inputs[mesh.rank], torch.nan)
        late.compute(partial(x.copy_, inputs[mesh.rank]))
        result = case.call(x, group)
        streams.begin()
        streams.settle()
        stays = case.op == "shift" and case.offset % mesh.size == 0
        if stays or (case.op == "broadcast" and mesh.rank == case.root(mesh.size)):
            result = x  # data that stay on a rank do not use the transport
        assert torch.equal(result, case.expected(inputs, mesh.rank, mesh.size))


@pytest.mark.parametrize(
    ("op", "size", "piece"),
    [
        ("all_gather", 2, MEBIBYTE),
        ("all_gather", 4, MEBIBYTE),
        ("all_gather", 16, MEBIBYTE // 2),
        ("all_reduce", 4, MEBIBYTE),
        ("all_reduce", 16, MEBIBYTE),
    ],
)
def test_a_long_vector_is_copied_in_pieces_of_a_mebibyte(op: str, size: int, piece: int) -> None:
    """To start a copy from Python costs as much as to copy some 100 KiB, so pieces are large.

    The pieces of all ranks together have at most 8 MiB, so one of 16 pieces is 512 KiB.
    """
    copies: list[int] = []

    class Counted(DelayedStreams):
        def upload(self, device: torch.Tensor, host: torch.Tensor) -> None:
            copies.append(host.nbytes)
            super().upload(device, host)

    @meshed()
    def body(mesh: sp.Mesh) -> None:
        group = mesh["sp"]
        group.transport = PipelinedTransport(host_transport(group), Counted(), mesh.size)
        x = torch.ones(2 * piece, dtype=torch.uint8)
        getattr(sp, op)(x, comm=group, algorithm="mpi")

    run_threads(size, body)
    assert set(copies) == {piece}


@pytest.mark.parametrize("name", sorted(SCHEMES))
@given(max_examples=8, problem=attention_problems(17))
@meshed()
def test_schemes_do_not_know_that_they_share_memory_of_a_device(
    mesh: sp.Mesh, name: str, problem: AttentionProblem
) -> None:
    """With such memory a ring sends no message through the host.

    `domains/attention.py` tests schemes over staged and pipelined messages.
    """
    group = mesh["sp"]
    group.transport = pipelined(group, DelayedStreams(), 256)
    group.window = Window(group._comm, 256, DelayedMemory())
    if name == "ring":
        vars(group.transport)["exchange"] = None
    check_attention(name, partial(SCHEMES[name], comm=group), problem, group)


@spmd(3, 4)
@meshed(check="off")
def test_ranks_whose_copies_take_longer_call_in_the_same_order(mesh: sp.Mesh) -> None:
    """A collective whose input is still being copied is not overtaken by a later one."""
    group, x = mesh["sp"], torch.ones(9)
    group.transport = pipelined(group, DelayedStreams(1 + 99 * (mesh.rank % 2)), 256)
    group.window = Window(group._comm, 256, DelayedMemory(), group.transport.in_order)
    begin = partial(sp.all_reduce_start, comm=group)
    begun = [begin(x, algorithm=way) for way in ("mpi", "ring", "mpi", "window", "mpi")]
    shared = sp.shared_empty((9,), comm=group)
    begun.append(begin(shared + 1, algorithm="mpi"))
    sp.fence(comm=group)
    assert {each.wait()[0].item() for each in begun} == {float(mesh.size)}


def test_mpi_has_all_messages_before_a_call_blocks() -> None:
    """Another rank may need one of them, on any communicator, before it makes that call.

    Stages of a pipeline had waited for each other for ever, in the sums of their tensor ranks. A
    transport that was closed is not asked.
    """
    sending, calling = Mock(), Mock()
    closed, posted = (PipelinedTransport(host, DelayedStreams(30), 2) for host in (Mock(), sending))
    for each in (closed, posted):
        each.post([(1, torch.ones(3))], [], tag=7)
    closed.close(together=False)
    assert not sending.post.called
    calling.prepare.side_effect = lambda *given: sending.post.assert_called_once  # makes the call
    made = PipelinedTransport(calling, DelayedStreams(0), 2)
    made.prepare(operation("all_reduce", 0, 2, (5,)), torch.ones(5), torch.zeros(5))()
    assert calling.prepare.called
    assert not closed._host.post.called  # type: ignore[attr-defined]


def test_a_failed_transfer_fails_everything_behind_it_and_again_when_asked_again() -> None:
    host = Mock(**{"start_early.side_effect": OSError("the network is gone")})
    made, one = PipelinedTransport(host, DelayedStreams(), 1), operation("all_reduce", 0, 1, (5,))
    for handle in [made.start(one, torch.ones(5), torch.zeros(5)) for _ in range(2)] * 2:
        with pytest.raises(OSError, match="network"):
            wait(handle)


def test_a_transfer_ends_once_however_often_it_is_tested() -> None:
    made = base.Transfer([lambda: True], after=(after := Mock()))
    assert [made.test(), made.test()] == [True, True]
    after.assert_called_once_with()


def test_what_a_transport_leaves_to_another_is_passed_on() -> None:
    host, group = Mock(), Mock(size=2)
    for made in (
        StagedTransport(host, CPU),
        PipelinedTransport(host, DelayedStreams(), 2),
        DistributedTransport(cast("Any", group), group, host, CPU),
    ):
        host.reset_mock()
        made.announce("sends", "recvs")  # type: ignore[arg-type]
        made.close(together=False)
        assert host.mock_calls == [call.announce("sends", "recvs"), call.close(together=False)]
    copying = PipelinedTransport(host, DelayedStreams(), 2)
    PipelinedTransport(host, DelayedStreams(0), 2).exchange([], [])  # begins at once
    host.exchange.assert_called_once_with([], [])
    for together, left in ((False, 2), (True, 0)):  # MPI may use slots until all have left
        copying.close(together=together)
        assert len(copying._slots) == left


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128], ids=str)
@spmd(2)
@meshed(transport="host")
def test_a_message_may_be_complex(mesh: sp.Mesh, dtype: torch.dtype) -> None:
    x, received = torch.full((3,), 1j + mesh.rank, dtype=dtype), torch.zeros(3, dtype=dtype)
    other = 1 - mesh.rank
    mesh["sp"].wait(mesh["sp"].exchange([(other, x)], [(other, received)]), "exchange")
    assert received.tolist() == [1j + other] * 3


@spmd(2)
def test_a_message_stays_in_its_slot_until_it_is_read(comm: Any) -> None:
    """Rank 0 sends its second message before rank 1 reads the first one."""
    window, other, begun, found = Window(comm), 1 - comm.rank, list[Any](), torch.zeros(2)
    window._announce = lambda what: None  # else the kit waits for the other rank
    for turn, rank in ((0, 1), (0, 0), (1, 0), (1, 1)):
        if rank == comm.rank:
            x, into = torch.tensor([10.0 * turn + rank]), found[turn : turn + 1]
            begun.append(window.exchange([(other, x)], [(other, into)], 4))
        comm.Barrier()
    for handle in begun:
        wait(handle)
    wrong: Any = ([(other, found)], []), ([], [(other, found)]), ([(other, found[:1])] * 2, [])
    for sends, recvs in wrong:
        with pytest.raises(sp.ShapeError, match=r"longest=4\. Pass the bytes of the longest"):
            window.exchange(sends, recvs, 4)
    assert found.tolist() == [other, 10.0 + other]
    window.close(together=True)


def test_messages_are_announced_and_posted_in_parts_that_mpi_can_count() -> None:
    assert MAX_COUNT < 2**31  # counts of MPI are C ints
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


def test_a_wait_spins_for_20_us_yields_up_to_200_us_and_then_sleeps(substitute: Any) -> None:
    times = iter([Fraction(5) + Fraction(moment) for moment in (0, 2e-5, 2.1e-5, 2e-4, 2.1e-4)])
    did: list[object] = []
    clock = SimpleNamespace(perf_counter=times.__next__, sleep=did.append)
    substitute(base, time=clock, os=SimpleNamespace(sched_yield=lambda: did.append("yields")))
    handle, poll = Mock(**{"test.side_effect": [False] * 5 + [True]}), Mock()
    wait(handle, poll)
    assert did == ["yields", "yields", 5e-5]
    assert poll.call_count == 5


def test_a_counter_of_mpi_is_zero_before_any_rank_takes_a_number(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    m, memory, seen = MagicMock(), bytearray(b"\xff" * 8), list[bytes]()
    m.Win.Allocate.return_value.tomemory.return_value = memory
    m.comm.Barrier.side_effect = lambda: seen.append(bytes(memory))
    monkeypatch.setitem(sys.modules, "mpi4py", SimpleNamespace(MPI=m))
    MpiCounter(m.comm)
    assert seen == [bytes(8)]
    assert m.mock_calls[-2:] == [
        call.comm.Barrier(),
        call.Win.Allocate().Lock_all(m.MODE_NOCHECK),
    ]


def test_memory_that_the_system_does_not_have_leaves_no_file(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "posix_fallocate", Mock(side_effect=OSError(errno.ENOSPC, "no pages")))
    gc.collect()  # closes what earlier tests have left open
    open_files = {*Path("/proc/self/fd").iterdir()}
    with pytest.raises(OSError, match="no pages"):
        shared.HOST.allocate(8)
    assert {*Path("/proc/self/fd").iterdir()} <= open_files
