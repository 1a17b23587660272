"""Test what the device `late` does, and what only streams and memory of a device can show."""

import sys
from typing import Any

import pytest
import torch

import sp_core as sp
from device.build import load
from sp_core.attention.cuda import on_device
from sp_core.launch.bounded import bounded
from sp_core.testing import device, spmd
from sp_core.transport import cuda, on_stream

LATE = torch.device("late", 0)
POISON = 255
LARGE = 1 << 20
"""A size in bytes that no other test of this file allocates."""


def ones(count: int = 8) -> torch.Tensor:
    """Return a tensor of ones whose computation is still queued on the device."""
    return torch.ones(count, dtype=torch.uint8, device=LATE) * 1


def test_a_copy_to_pinned_memory_is_made_when_its_event_has_been_asked_for_twice() -> None:
    host = torch.empty(8, dtype=torch.uint8, pin_memory=True)
    host.copy_(ones(), non_blocking=True)
    event = torch.accelerator.current_stream(LATE).record_event()
    assert host.tolist() == [POISON] * 8
    assert [event.query() for _ in range(3)] == [False, True, True]
    assert host.tolist() == [1] * 8


def test_a_copy_from_pinned_memory_reads_it_late_and_from_other_memory_at_once() -> None:
    pinned, pageable = torch.ones(8, pin_memory=True), torch.ones(8)
    copies = [x.to(LATE, non_blocking=True) for x in (pinned, pageable)]
    pinned.zero_()
    pageable.zero_()
    assert [x.cpu()[0].item() for x in copies] == [0, 1]


def test_a_stream_sees_what_another_one_does_only_if_it_waits() -> None:
    host = [torch.empty(8, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    for waits, found in zip((True, False), host, strict=True):
        x, stream = ones(), torch.Stream(LATE)
        if waits:
            stream.wait_stream(torch.accelerator.current_stream(LATE))
        with stream:
            found.copy_(x, non_blocking=True)
        stream.synchronize()
        x.cpu()  # keep the memory of x until here
    assert [found.tolist() for found in host] == [[1] * 8, [POISON] * 8]


def test_a_stream_can_be_entered_twice() -> None:
    """`on_stream` allows it, although in torch 2.11 the stream object itself does not."""
    stream, entered = torch.Stream(LATE), []
    for context in (stream, on_stream(stream), on_stream(stream)):
        with context:
            entered.append(torch.accelerator.current_stream(LATE))
    with on_stream(stream), on_stream(stream):
        entered.append(torch.accelerator.current_stream(LATE))
    assert entered == [stream] * 4
    assert on_stream(stream) is not stream
    assert torch.accelerator.current_stream(LATE).stream_id == 0


def test_freed_memory_is_kept_for_streams_that_are_recorded_alone() -> None:
    host = [torch.empty(8, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    for recorded, found in zip((True, False), host, strict=True):
        x, stream = ones(), torch.Stream(LATE)
        stream.wait_stream(torch.accelerator.current_stream(LATE))
        with stream:
            found.copy_(x, non_blocking=True)
        if recorded:
            x.record_stream(stream)
        del x
        torch.accelerator.current_stream(LATE).synchronize()
        stream.synchronize()
    assert [found.tolist() for found in host] == [[1] * 8, [POISON] * 8]


def test_a_kept_copy_is_not_freed_while_a_stream_uses_it() -> None:
    """Another stream than the one on which the copy was made may use it last."""
    found = torch.empty(8, dtype=torch.uint8, pin_memory=True)
    x, stream = torch.ones(8, dtype=torch.uint8), torch.Stream(LATE)
    kept = on_device(x, LATE)
    with stream:
        again = on_device(x, LATE)
        found.copy_(again, non_blocking=True)
    assert kept is again
    del x, kept, again
    torch.accelerator.current_stream(LATE).synchronize()
    stream.synchronize()
    assert found.tolist() == [1] * 8


def test_the_runtime_does_not_open_its_own_handles() -> None:
    """CUDA's runtime does not do so either, and `CudaMemory` takes care of it."""
    memory = cuda.CudaMemory(LATE)
    x, offer = memory.allocate(100)
    with pytest.raises(OSError, match="cudaIpcOpenMemHandle: invalid argument"):
        memory.open(offer._replace(process=-1))
    assert memory.open(offer).data_ptr() == x.data_ptr()
    memory.free(x)
    with pytest.raises(OSError, match="cudaFree: invalid argument"):
        memory.free(x)


@pytest.mark.parametrize("kind", [cuda.CudaMemory, cuda.PinnedMemory])
def test_new_shared_memory_is_zero_for_whoever_reads_it_first(kind: type[cuda.CudaStream]) -> None:
    """The zeros that fill it are not freed before they have been copied."""
    memory = kind(LATE)
    x, _ = memory.allocate(100)
    assert x.cpu().tolist() == [0] * 100
    memory.free(x)


@spmd(2, 4)
def test_ranks_have_devices_of_one_kind_but_other_numbers(comm: Any) -> None:
    """Collectives work although every rank's current device stays the first one."""
    own = torch.device("late", comm.rank % torch.accelerator.device_count())
    for transport in ("ipc", "pinned", "pipelined", "staged"):
        with sp.Mesh(comm, device=own, transport=transport, sp=comm.size) as mesh:
            x = torch.full((700,), float(comm.rank), device=own)
            found = sp.all_gather(x, comm=mesh["sp"])
            assert found.device == own
            assert found.cpu().view(-1, 700)[:, 0].tolist() == list(range(comm.size))


@pytest.mark.mpi_skip
@spmd(2)
def test_threads_with_gpus_of_their_own_send_messages(comm: Any) -> None:
    """Only IPC asks for peer access, with which kernels of a GPU read the memory of another."""
    with sp.Mesh(comm, device=torch.device("late", comm.rank), sp=comm.size) as mesh:
        assert "cannot map" in mesh["sp"].no_window
        assert "threads of one process on different GPUs" in mesh["sp"].no_window


@pytest.mark.parametrize("transport", ["ipc", "pinned"])
@spmd(2, 4)
def test_ranks_read_each_other_between_fences(comm: Any, transport: str) -> None:
    """Writes before a fence and reads before the next one are right although they run late."""
    with sp.Mesh(comm, device=device(), transport=transport, sp=comm.size) as mesh:
        group = mesh["sp"]
        x = sp.shared_empty((2, 100), comm=group)
        for turn in range(3):
            x.copy_(torch.full((2, 100), float(comm.rank + turn), device=mesh.device))
            sp.fence(comm=group)
            beside = sp.peer(x, (comm.rank + 1) % comm.size, comm=group) * 1
            sp.fence(comm=group)
            x.zero_()
            assert beside.cpu().unique().tolist() == [(comm.rank + 1) % comm.size + turn]
            total = sp.plan("all_reduce", x + 1, comm=group, algorithm="window").run()
            assert total.cpu().unique().tolist() == [comm.size]


@pytest.mark.parametrize("transport", ["ipc", "pinned"])
@spmd(2, 4)
def test_shared_memory_is_given_back(comm: Any, transport: str) -> None:
    """A loop that makes a shared tensor in each turn frees that of an earlier turn each time."""
    counts = []
    with sp.Mesh(comm, device=device(), transport=transport, sp=comm.size) as mesh:
        for turn in range(4):
            x = sp.shared_empty((LARGE // 4,), comm=mesh["sp"])
            x[:9].copy_(torch.arange(9.0) + turn)
            sp.fence(comm=mesh["sp"])
            counts.append(load().late_blocks(LARGE))
            beside = sp.peer(x, (comm.rank + 1) % comm.size, comm=mesh["sp"])[:9] * 1
            sp.fence(comm=mesh["sp"])
            assert beside.cpu().tolist() == [turn + number for number in range(9)]
    assert counts == [*counts[:2], counts[1], counts[1]]
    assert counts[1] > counts[0]


@pytest.mark.parametrize("transport", ["ipc", "pinned"])
@spmd(2)
def test_an_error_about_shared_memory_advises_a_transport_of_the_device(
    comm: Any, transport: str
) -> None:
    with (
        sp.Mesh(comm, device=device(), transport=transport, sp=comm.size) as mesh,
        pytest.raises(sp.RankError, match=r"empty_cache\(\).* transport='pipelined'"),
    ):
        sp.shared_empty((1 << 40,), comm=mesh["sp"])


def test_two_threads_of_a_rank_go_backward_at_once() -> None:
    """One communicates over a mesh of CPUs, and one over a mesh of the device."""
    launch = (sys.executable, "-m", "sp_core.testing.launch", "-n", "2", "--timeout", "60", "--")
    code, output = bounded([*launch, sys.executable, "-m", "device.two_threads"])
    assert code == 0, output
