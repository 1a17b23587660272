"""Transports that need hardware, against stand-ins: torch.distributed, device-aware MPI, IPC."""

from __future__ import annotations

import functools
import sys
import threading
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from hypothesis import strategies as st
from kit.carriers import CARRIERS
from oracle.collective_cases import OPS, Case, cases
from oracle.fake_device import DelayedMemory, DelayedStreams
from torch._C import _distributed_c10d

import sp_core as sp
from sp_core import transport
from sp_core.testing import given, run_threads, session, spmd
from sp_core.transport import HostTransport, cuda, cuda_aware, distributed
from sp_core.transport.cuda_aware import (
    DeviceTransport,
    no_device_memory,
    outside_of_job,
    refuse_host_only,
)
from sp_core.transport.distributed import DistributedTransport, is_complete
from sp_core.transport.shared import NotShared, Offer
from sp_core.transport.staged import PipelinedTransport, StagedTransport
from sp_core.transport.window import Window

CPU = torch.device("cpu")
FEW = 2  # a group of torch.distributed takes a while to connect


def by_distributed(comm: sp.Communicator, seconds: float = 60) -> None:
    """Let a communicator use torch.distributed; it gives the group up in the end."""
    made = distributed.make_group(comm._comm, CPU, seconds)
    comm.transport = DistributedTransport(
        comm._comm, made, HostTransport(comm._comm), CPU, comm.poll
    )


@given(max_examples=FEW, some=st.tuples(*(cases(ops=[op]) for op in OPS)))
def test_torch_distributed_gives_what_is_defined(comm: Any, some: tuple[Case, ...]) -> None:
    """Every collective, one after the other over one group."""
    with sp.Mesh(comm, sp=comm.size) as mesh:
        by_distributed(mesh["sp"])
        for case in some:
            inputs = case.inputs(comm.size)
            result = case.call(inputs[comm.rank], mesh["sp"])
            expected = case.expected(inputs, comm.rank, comm.size)
            torch.testing.assert_close(
                result, expected, rtol=0, atol=0, msg=functools.partial("{}: {}".format, case.op)
            )
            assert torch.equal(inputs[comm.rank], case.inputs(comm.size)[comm.rank])


@given(
    max_examples=6,
    counts=st.lists(st.integers(0, 4), min_size=64, max_size=64),
    algorithm=st.sampled_from(["ring", "bruck"]),
)
def test_messages_beside_torch_distributed(comm: Any, counts: list[int], algorithm: str) -> None:
    """Several to one rank, none to another, empty ones; and those of a schedule."""
    size, rank = comm.size, comm.rank
    with sp.Mesh(comm, sp=size) as mesh:
        group_ = mesh["sp"]
        by_distributed(group_)
        many = [
            (source, dest, n)
            for n in range(2)
            for source in range(size)
            for dest in range(size)
            if (source + dest + n) % 3
        ]
        lengths = {message: counts[place % len(counts)] for place, message in enumerate(many)}
        sends = [
            (d, torch.full((lengths[s, d, n],), float(s * 10 + n))) for s, d, n in many if s == rank
        ]
        recvs = [(s, torch.empty(lengths[s, d, n])) for s, d, n in many if d == rank]
        group_.wait(group_.exchange(sends, recvs), "exchange")
        for (_, x), (s, n) in zip(recvs, [(s, n) for s, d, n in many if d == rank], strict=True):
            assert (x == s * 10 + n).all()
        gathered = sp.all_gather(torch.full((3,), rank), comm=group_, algorithm=algorithm)
        assert gathered.tolist() == [value for value in range(size) for _ in range(3)]


@given(
    max_examples=12,
    carrier=st.sampled_from(sorted(CARRIERS)),
    count=st.integers(0, 9),
    order=st.permutations(range(3)),
)
def test_exchanges_under_way_are_finished_in_any_order(
    comm: Any, carrier: str, count: int, order: list[int]
) -> None:
    with sp.Mesh(comm, sp=comm.size) as mesh:
        group = mesh["sp"]
        group.transport = CARRIERS[carrier](group)
        begun = [
            sp.shift_start(torch.full((count,), 10 * comm.rank + n), comm=group, algorithm="mpi")
            for n in order
        ]
        source = (comm.rank - 1) % comm.size
        for n in range(3):
            came = begun[order.index(n)].wait()
            assert came.tolist() == [10 * source + n] * count


@spmd()
def test_a_group_that_cannot_connect_is_the_same_error_on_every_rank(
    comm: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the ranks go on with another transport."""

    def fails(store: Any, made_for: Any, *rest: Any) -> Any:
        if made_for.rank == made_for.size - 1:
            raise RuntimeError("no route to host")

    monkeypatch.setattr(distributed, "_connected", fails)
    with pytest.raises(
        sp.DeviceError, match=rf"rank {comm.size - 1} has none: no route.*Pass another transport"
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
        mine = torch.full((5,), float(comm.rank))
        for root in range(comm.size):
            sp.reduce(mine, comm=mesh["sp"], root=root)
        assert mine.tolist() == [float(comm.rank)] * 5  # the group overwrites what it is given
    total = functools.reduce(torch.add, (x.float() for x in inputs))
    assert torch.equal(part, total.bfloat16().chunk(comm.size)[comm.rank])
    exact = torch.stack([x.double() for x in inputs])
    allowed = exact.sum(0).abs() * 2.0**-8 + exact.abs().sum(0) * comm.size * 2.0**-23
    assert ((whole.double() - exact.sum(0)).abs() <= allowed).all()


def test_a_transfer_that_fails_in_the_group_says_so() -> None:
    def fails() -> None:
        raise RuntimeError("Connection closed by peer [127.0.0.1]:1\nand much more")

    work = SimpleNamespace(is_completed=lambda: True, wait=fails)
    with pytest.raises(
        sp.PeerFailed, match=r"an all_gather failed: Connection closed by peer \[127.0.0.1\]:1 See"
    ):
        is_complete(work, "an all_gather", lambda what: None)


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


def test_nccl_is_not_asked_to_share_a_gpu() -> None:
    distributed.refuse_shared_gpus(["a", "b", "c"])
    with pytest.raises(
        sp.DeviceError, match=r"4 ranks have 2 \(ranks 0, 2, 3: a\).*transport='ipc'"
    ):
        distributed.refuse_shared_gpus(["a", "b", "a", "a"])


def test_nccl_gets_the_store_the_rank_the_size_and_the_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def made(store: str, rank: int, size: int, options: SimpleNamespace) -> tuple[object, ...]:
        return store, rank, size, options._timeout

    nccl = type(
        "NCCL",
        (),
        {"Options": SimpleNamespace, "__new__": lambda cls, *arguments: made(*arguments)},
    )
    monkeypatch.setattr(_distributed_c10d, "ProcessGroupNCCL", nccl, raising=False)
    comm, limit = cast("Any", SimpleNamespace(rank=1, size=4)), timedelta(seconds=7)
    assert distributed._connected("store", comm, torch.device("cuda"), False, limit) == (
        "store",
        1,
        4,
        limit,
    )


@pytest.mark.parametrize("name", ["auto", "ipc", "pinned", "pipelined", "staged"])
def test_a_gpu_gets_the_transport_that_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "CudaStreams", lambda device: DelayedStreams())
    device = torch.device("cuda")
    kind = StagedTransport if name == "staged" else PipelinedTransport
    for made in run_threads(2, lambda comm: transport.make_transport(name, comm, device)):
        assert (type(made), made.name) == (kind, "ipc" if name == "auto" else name)


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
        ("import os; os.kill(os.getpid(), 11)", "was ended by signal 11"),
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
    assert outside_of_job(environment)["PYTHONPATH"].endswith(":/p")


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


class Unmappable(DelayedMemory):
    """Memory that one rank cannot make or map, or maps in the wrong place."""

    def __init__(self, how: str, rank: int) -> None:
        super().__init__()
        self._how = how if rank else ""

    def allocate(self, nbytes: int) -> tuple[torch.Tensor, Offer]:
        if self._how == "allocate":
            raise OSError("out of memory")
        return super().allocate(nbytes)

    def open(self, offer: Offer) -> torch.Tensor:
        if self._how == "open":
            raise OSError("peer access is not supported")
        return (
            torch.ones(offer.nbytes, dtype=torch.uint8)
            if self._how == "misread"
            else super().open(offer)
        )


REASONS = {
    "allocate": "rank 1 cannot allocate .* out of memory",
    "open": "rank 1 cannot map the memory of rank 0: peer access",
    "misread": "rank 1 finds something else in the memory of rank 0",
}


@pytest.mark.parametrize("how", sorted(REASONS))
@spmd(2)
def test_memory_that_one_rank_cannot_map_is_refused_by_all(comm: Any, how: str) -> None:
    with pytest.raises(NotShared, match=REASONS[how]):
        Window(comm, memory=Unmappable(how, comm.rank))
    with sp.Mesh(comm, sp=comm.size) as mesh:
        assert sp.all_reduce(torch.ones(2), comm=mesh["sp"])[0] == comm.size


def test_the_environment_says_what_auto_is_where_there_is_such_a_thing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def used(comm: Any) -> str:
        with sp.Mesh(comm, sp=1) as mesh:
            return mesh["sp"].transport.name

    for named, name in (("window", "window"), ("staged", "host"), ("auto", "host")):
        monkeypatch.setenv("SP_TRANSPORT", named)
        assert run_threads(1, used) == [name]
    monkeypatch.setenv("SP_TRANSPORT", "magic")
    with pytest.raises(Exception, match="magic"):
        run_threads(1, used)
