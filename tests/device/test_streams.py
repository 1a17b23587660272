"""Test collectives that begin on one stream of the device `late` and end on another one."""

from collections.abc import Iterator
from itertools import product
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from mpi4py import MPI

import sp_core as sp
from device.plugin import TRANSPORTS
from sp_core.programs import operation
from sp_core.testing import spmd
from sp_core.transport import Handle, on_stream
from sp_core.transport.cuda_aware import DeviceTransport
from sp_core.transport.distributed import DistributedTransport

LATE = torch.device("late", 0)


def two_streams() -> tuple[torch.Stream, torch.Stream]:
    """Return the current stream of the simulated device, and another one."""
    return torch.accelerator.current_stream(LATE), torch.Stream(LATE)


def three_streams() -> Iterator[list[torch.Stream]]:
    """Yield every way to start, poll and wait on one of two streams."""
    return map(list, product(two_streams(), repeat=3))


@pytest.mark.parametrize(
    ("transport", "op", "arguments"),
    [
        *(
            (transport, op, {"algorithm": algorithm})
            for transport in TRANSPORTS
            for op, algorithm in (
                *(("reduce_scatter", "ring"), ("all_gather", "bruck"), ("all_reduce", "mpi")),
                *([("all_reduce", "window")] * (transport in ("ipc", "pinned"))),
            )
        ),
        *((transport, "shift", {"offset": 0, "algorithm": "mpi"}) for transport in TRANSPORTS),
    ],
)
@spmd(2)
def test_a_stream_that_waits_sees_the_result_whichever_stream_polled(
    comm: Any, transport: str, op: str, arguments: dict[str, Any]
) -> None:
    for begins, polls, waits in three_streams():
        with sp.Mesh(comm, device=LATE, transport=transport, sp=comm.size) as mesh:
            group = mesh["sp"]
            x = torch.full((1000,), float(comm.rank + 1), device=LATE)
            torch.accelerator.synchronize(LATE)
            with on_stream(begins):
                pending = getattr(sp, f"{op}_start")(x, comm=group, **arguments)
            with on_stream(polls):
                while group._pending:
                    group.poll()
            with on_stream(waits):
                found = (pending.wait() * 1).cpu()
            torch.accelerator.synchronize(LATE)
            assert torch.equal(found, pending.wait().cpu())
            assert not found.isnan().any()


@pytest.mark.parametrize("transport", TRANSPORTS)
@spmd(2)
def test_scratch_memory_is_reused_only_after_its_last_use_on_any_stream(
    comm: Any, transport: str
) -> None:
    """The last copy or sum of a collective may be queued when another stream begins the next."""
    first, second = two_streams()
    values = torch.full((4000,), 1.0 + comm.rank), torch.full((4000,), 100.0)
    with sp.Mesh(comm, device=LATE, transport=transport, sp=comm.size) as mesh:
        found = []
        for waits in (False, True):
            one, two = (x.to(LATE) for x in values)
            torch.accelerator.synchronize(LATE)
            with on_stream(first):
                result = sp.all_gather(one, comm=mesh["sp"], algorithm="bruck")
            if waits:
                torch.accelerator.synchronize(LATE)
            with on_stream(second):
                sp.all_gather(two, comm=mesh["sp"], algorithm="bruck").cpu()
            found.append(result.cpu())
    assert torch.equal(*found)


@pytest.mark.parametrize("transport", TRANSPORTS)
@spmd(2)
def test_scratch_memory_that_a_mesh_drops_stays_until_its_last_use(
    comm: Any, transport: str
) -> None:
    """The memory was allocated on another stream than the one that used it last."""
    first, second = two_streams()
    x = torch.full((4000,), 1.0 + comm.rank).to(LATE)
    found = []
    for waits in (False, True):
        with sp.Mesh(comm, device=LATE, transport=transport, sp=comm.size) as mesh:
            sp.all_gather(x, comm=mesh["sp"], algorithm="bruck")
            torch.accelerator.synchronize(LATE)
            with on_stream(second):
                result = sp.all_gather(x, comm=mesh["sp"], algorithm="bruck")
                if waits:
                    second.synchronize()
        first.synchronize()  # the device gives freed memory back here, and overwrites it
        with on_stream(second):
            found.append(result.cpu())
    assert torch.equal(*found)


@pytest.mark.parametrize(
    ("transport", "op", "given", "wanted"),
    [
        ("staged", "all_reduce", {"op": "max"}, 4.0),
        ("staged", "all_reduce", {"op": "min"}, 2.0),
        *((transport, "broadcast", {"root": 0}, 2.0) for transport in TRANSPORTS),
    ],
)
@spmd(2)
def test_what_a_started_collective_uses_stays_until_the_waiting_stream_has_read_it(
    comm: Any,
    transport: str,
    op: str,
    given: dict[str, Any],
    wanted: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The host frees it while the copy is queued. For max and min x has no NaN."""
    compare = torch.ne
    monkeypatch.setattr(torch.Tensor, "masked_fill_", lambda self, *_: self)
    monkeypatch.setattr(torch, "ne", lambda a, b, out: compare(a, b, out=out) if a is b else out)
    first, second = two_streams()
    with sp.Mesh(comm, device=LATE, transport=transport, sp=comm.size) as mesh:
        x = torch.full((4000,), 1.0 + comm.rank).to(LATE)
        first.synchronize()
        start = getattr(sp, f"{op}_start")
        pending = start(x * 2, comm=mesh["sp"], **given, algorithm="mpi")
        with on_stream(second):
            out = pending.wait()
        first.synchronize()  # freed memory is overwritten
        with on_stream(second):
            assert out.cpu().unique().tolist() == [wanted]


@spmd(2)
def test_marks_of_nan_are_not_written_into_memory_that_was_freed(
    comm: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The waiting stream has yet to write them when the host drops them. No call needs the host."""
    first, second = two_streams()
    compare, kept = torch.ne, list[torch.Tensor]()

    def copied(a: torch.Tensor, b: Any, *, out: torch.Tensor) -> torch.Tensor:
        if a is b:
            return compare(a, b, out=out)
        kept.append(a)  # else the first stream would wait for the second one to free it
        return out.copy_(a)

    monkeypatch.setattr(torch, "ne", copied)
    monkeypatch.setattr(torch.Tensor, "masked_fill_", lambda self, *_: self)
    with sp.Mesh(comm, device=LATE, transport="staged", sp=comm.size) as mesh:
        x = torch.full((4000,), torch.nan).to(LATE)
        pending = sp.all_reduce_start(x, comm=mesh["sp"], op="max", algorithm="mpi")
        with on_stream(second):
            pending.wait()
        first.synchronize()
        fresh = [torch.zeros(4000, dtype=torch.bool, device=LATE) for _ in range(40)]
        first.synchronize()
        second.synchronize()
        assert not any(x.cpu().any() for x in fresh)


@pytest.mark.parametrize("keeps", [False, True])
@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("transport", TRANSPORTS)
@spmd(2)
def test_the_memory_of_a_plan_stays_until_the_stream_that_ran_it_has_read_it(
    comm: Any, transport: str, rows: int, keeps: bool
) -> None:
    """The plan copies its input first: a single row as it is, several rows in pieces."""
    first, second = two_streams()
    with sp.Mesh(comm, device=LATE, transport=transport, sp=comm.size) as mesh:
        x = torch.full((20, rows, 200), 3.0).to(LATE).movedim(0, 2)
        dims = {"split_dim": 1, "concat_dim": 0}
        plan = sp.plan("all_to_all", x, comm=mesh["sp"], **dims, algorithm="pairwise")
        first.synchronize()
        with on_stream(second):
            out = plan.run()
            out = out if keeps else out.clone()
        del plan
        first.synchronize()  # freed memory is overwritten
        with on_stream(second):
            assert out.cpu().unique().tolist() == [3.0]


class Group:
    """Stand in for NCCL's group or MPI's communicator of one rank: the data come at once."""

    rank, size = 0, 1

    def alltoall_base(self, room: torch.Tensor, packed: torch.Tensor, *_: Any) -> Any:
        """Copy `packed` into `room`, and return a handle that is complete."""
        room.copy_(packed)
        torch.accelerator.synchronize(LATE)
        return SimpleNamespace(is_completed=lambda: True, wait=lambda: None)

    def allreduce(self, totals: list[torch.Tensor], options: Any) -> Any:
        """Return a complete handle: the sum of one rank's tensor is that tensor."""
        return self.alltoall_base(totals[0], totals[0])

    def Allreduce(self, send: torch.Tensor, recv: torch.Tensor) -> None:
        """Copy `send` into `recv`, as MPI does."""
        self.alltoall_base(recv, send)


class OneDevice(DeviceTransport):
    """Give tensors to the stand-in for MPI, which cannot use their addresses."""

    def _memory(self, x: torch.Tensor) -> Any:
        return x


def started(way: str, send: torch.Tensor, recv: torch.Tensor) -> Handle:
    """Begin to copy `send` to `recv` by a transport whose end makes copies or sums of its own."""
    host: Any = SimpleNamespace(close=lambda **_: None)
    one = operation(way.partition(" ")[0], 0, 1, (send.numel(),), itemsize=send.itemsize)
    if "device" in way:
        fake: Any = Group()
        return OneDevice(fake, torch.accelerator.synchronize).start(one, send, recv)
    made = DistributedTransport(MPI.COMM_SELF, Group(), host, LATE)
    if "messages" in way:
        return made.exchange(*([(0, part) for part in x.chunk(2)] for x in (send, recv)))
    return made.start(one, send, recv)


@pytest.mark.parametrize(
    "way", ["reduce_scatter", "all_reduce", "all_reduce of messages", "all_reduce by the device"]
)
def test_what_is_copied_or_added_at_the_end_is_seen_by_the_stream_that_waits(way: str) -> None:
    for begins, polls, waits in three_streams():
        send = torch.ones(8, device=LATE, dtype=torch.bfloat16)
        recv = torch.empty_like(send)
        torch.accelerator.synchronize(LATE)
        with on_stream(begins):
            handle = started(way, send, recv)
        with on_stream(polls):
            assert handle.test()
        with on_stream(waits):
            assert handle.test()
            found = (recv * 1).cpu()
        assert found.tolist() == [1] * 8
        torch.accelerator.synchronize(LATE)
        assert recv.cpu().tolist() == [1] * 8


def test_float32_sums_stay_until_the_stream_that_made_them_has_rounded_them() -> None:
    first, second = two_streams()
    send = torch.ones(4000, device=LATE, dtype=torch.bfloat16)
    recv = torch.empty_like(send)
    one, fake = operation("all_reduce", 0, 1, (4000,), itemsize=2), cast("Any", Group())
    run = OneDevice(fake, torch.accelerator.synchronize).prepare(one, send, recv)
    with on_stream(second):
        run()
    del run
    first.synchronize()  # freed memory is overwritten
    with on_stream(second):
        assert recv.cpu().unique().tolist() == [1]
