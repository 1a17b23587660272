"""Test the calls of the CUDA runtime for shared memory, with a simulated runtime on the host."""

import ctypes
import os
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, Mock, call

import pytest
import torch

import sp_core as sp
from sp_core import transport
from sp_core.programs import SLOTS
from sp_core.scratch import used
from sp_core.testing import run_threads, spmd
from sp_core.transport import cuda, cuda_aware, shared
from sp_core.transport.cuda import CudaMemory, PinnedMemory
from sp_core.transport.shared import Regions
from sp_core.transport.window import Window

CPU = torch.device("cpu")


class Runtime:
    """A simulated CUDA runtime in host memory, whose handles hold addresses."""

    def __init__(self) -> None:
        self.failing = ""
        self.cleared = 0
        self.blocks: dict[int, Any] = {}
        self.opened: list[int] = []
        self.registered: set[int] = set()
        self.cudaGetErrorString = lambda code: b"peer access is not supported"

    def __getattr__(self, name: str) -> Callable[..., int]:
        return lambda *arguments: 217 if name == self.failing else self._done(name, *arguments)

    def _done(self, name: str, *arguments: Any) -> int:
        getattr(self, name.replace("cuda", "_"))(*arguments)
        return 0

    def _GetLastError(self) -> None:
        self.cleared += 1

    def _Malloc(self, pointer: Any, nbytes: ctypes.c_size_t) -> None:
        block = (ctypes.c_ubyte * nbytes.value)(*[7] * nbytes.value)
        self.blocks[ctypes.addressof(block)] = block
        pointer._obj.value = ctypes.addressof(block)

    def _Free(self, pointer: ctypes.c_void_p) -> None:
        del self.blocks[int(pointer.value or 0)]

    def _IpcGetMemHandle(self, handle: Any, pointer: ctypes.c_void_p) -> None:
        handle._obj.reserved[:8] = list(int(pointer.value or 0).to_bytes(8, "little"))

    def _IpcOpenMemHandle(self, pointer: Any, handle: cuda.Handle, flags: ctypes.c_uint) -> None:
        assert flags.value == 1  # cudaIpcMemLazyEnablePeerAccess
        pointer._obj.value = int.from_bytes(bytes(handle)[:8], "little")
        self.opened.append(pointer._obj.value)

    def _IpcCloseMemHandle(self, pointer: ctypes.c_void_p) -> None:
        self.opened.remove(int(pointer.value or 0))

    def _HostRegister(
        self, pointer: ctypes.c_void_p, nbytes: ctypes.c_size_t, flags: ctypes.c_uint
    ) -> None:
        self.registered.add(int(pointer.value or 0))

    def _HostUnregister(self, pointer: ctypes.c_void_p) -> None:
        self.registered.remove(int(pointer.value or 0))

    def _MemcpyAsync(
        self, into: Any, part: Any, nbytes: ctypes.c_size_t, direction: ctypes.c_int, stream: Any
    ) -> None:
        assert direction.value == 4  # cudaMemcpyDefault
        ctypes.memmove(into, part, nbytes.value)


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Runtime:
    """Replace the CUDA runtime by a simulated one, and streams by ones that do nothing."""
    made, stream = Runtime(), MagicMock(native_handle=0)
    monkeypatch.setattr(cuda, "_runtime", lambda: made)
    monkeypatch.setattr(torch, "Stream", lambda *_, **__: stream)
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda _: stream)
    return made


def test_a_copy_into_a_window_begins_after_what_was_queued_before() -> None:
    memory = MagicMock(**{"launch.return_value.test.return_value": True})
    shared._copy(memory, into := torch.ones(1), part := torch.ones(1))
    assert memory.mock_calls[:2] == [call.begin(), call.copying(into, part)]


def test_copies_wait_on_streams_of_their_own_for_what_was_queued_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    m, into, out = MagicMock(), [call.on().__enter__()], [call.on().__exit__(None, None, None)]
    monkeypatch.setattr(torch, "Stream", MagicMock(side_effect=[m.down, m.up, m.window]))
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda _: m.now)
    monkeypatch.setattr(cuda, "on_stream", m.on)
    streams, memory = cuda.CudaStreams(CPU), CudaMemory(CPU)
    streams.begin()
    streams.download(m.host, m.device)
    streams.upload(m.device, m.host)
    streams.finish()
    memory.begin()
    handles = [streams.downloaded(), streams.uploaded(), memory.launch([m.work])]
    assert m.mock_calls == [
        *(call.down.wait_stream(m.now), call.up.wait_stream(m.now)),
        *(call.on(m.down), *into, call.host.copy_(m.device, non_blocking=True), *out),
        *(call.on(m.up), *into, call.device.copy_(m.host, non_blocking=True), *out),
        *(call.now.wait_stream(m.up), call.window.wait_stream(m.now)),
        *(call.down.record_event(), call.up.record_event()),
        *(call.on(m.window), *into, call.work(), *out, call.window.record_event()),
    ]
    for stream, handle in zip((m.down, m.up, m.window), handles, strict=True):
        stream.record_event().query.side_effect = [False, True]
        assert [handle.test(), handle.test()] == [False, True]


def test_what_a_handle_leads_to_is_the_memory_it_was_made_for(runtime: Runtime) -> None:
    memory = CudaMemory(CPU)
    x, offer = memory.allocate(100)
    assert x.tolist() == [0] * 100
    y = memory.open(offer._replace(process=-1))  # as if another process had made it
    numbers = torch.arange(4, dtype=torch.uint8)
    memory.copying(y[10:14], numbers)()
    assert x[8:16].tolist() == [0, 0, 0, 1, 2, 3, 0, 0]
    # this process made it, and cannot open its own handles
    assert memory.open(offer).data_ptr() == x.data_ptr()
    assert len(runtime.opened) == 1
    memory.close(y)
    memory.close(x)
    assert runtime.opened == []
    memory.free(x)
    assert runtime.blocks == {}


@pytest.mark.parametrize("call", ["cudaMalloc", "cudaIpcGetMemHandle", "cudaIpcOpenMemHandle"])
def test_a_call_that_fails_says_so_and_leaves_nothing(runtime: Runtime, call: str) -> None:
    memory = CudaMemory(CPU)
    runtime.failing = call
    with pytest.raises(OSError, match=f"{call}: peer access is not supported"):
        memory.open(memory.allocate(10)[1]._replace(process=-1))
    assert runtime.cleared == 1
    assert len(runtime.blocks) == (call == "cudaIpcOpenMemHandle")


@pytest.mark.parametrize("step", ["allocate", "copying", "open"])
@pytest.mark.parametrize("kind", [CudaMemory, PinnedMemory])
def test_a_gpu_that_is_full_for_torch_on_one_rank_is_an_error_on_all(
    runtime: Runtime, kind: Callable[[torch.device], Any], step: str
) -> None:
    def body(comm: Any) -> None:
        memory = kind(CPU)
        if comm.rank == 1:
            setattr(memory, step, Mock(side_effect=torch.OutOfMemoryError("CUDA is full")))
        with pytest.raises(shared.NotShared, match=r"rank 1 cannot .*: CUDA is full"):
            shared.share(comm, memory, 100)

    run_threads(3, body)
    assert (runtime.blocks, runtime.registered) == ({}, set())


@pytest.mark.parametrize("kind", [CudaMemory, PinnedMemory])
def test_memory_that_torch_cannot_take_over_is_given_back(
    runtime: Runtime, kind: Callable[[torch.device], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda, "tensor_at", Mock(side_effect=torch.OutOfMemoryError))
    with pytest.raises(torch.OutOfMemoryError):
        kind(CPU).allocate(100)
    assert (runtime.blocks, runtime.registered) == ({}, set())


@pytest.mark.parametrize("kind", [CudaMemory, PinnedMemory])
def test_a_window_over_it(runtime: Runtime, kind: Callable[[torch.device], Any]) -> None:
    """A window of this memory is used and freed. If the memory cannot be had, making it fails."""

    def body(comm: Any) -> None:
        with sp.Mesh(comm, sp=comm.size) as mesh:
            group = mesh["sp"]
            group.window = Window(group._comm, 64, kind(CPU))
            x = torch.arange(50.0) + comm.rank
            # a tensor without elements has the address 0, which no function frees
            assert sp.shared_empty((0,), comm=group).tolist() == []
            for op in ("all_reduce", "all_gather"):
                found = getattr(sp, op)(x, comm=group)
                every = [torch.arange(50.0) + rank for rank in range(comm.size)]
                assert torch.equal(
                    found, sum(every, torch.zeros(50)) if op == "all_reduce" else torch.cat(every)
                )

    run_threads(3, body)
    assert runtime.blocks == {}
    assert runtime.registered == set()
    runtime.failing = "cudaMalloc" if kind is CudaMemory else "cudaHostRegister"
    with pytest.raises(Exception, match=f"cannot allocate .* {runtime.failing}"):
        run_threads(2, lambda comm: Window(comm, 64, kind(CPU)))


@pytest.mark.mpi_skip
@spmd(2)
def test_one_rank_takes_no_device_memory_for_slots(
    comm: Any, runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mesh with four axes has 15 communicators. Here 7 of them have one rank."""
    monkeypatch.setitem(transport.NAMES, "cpu", ("ipc",))
    monkeypatch.setattr(transport, "DEVICE_SLOT_BYTES", 64)
    unused, slots = [8 + 8] * 7, [SLOTS * 64 + 8] * 8  # a random number takes 8 bytes
    with sp.Mesh(comm, dp=1, pp=1, ring=2, tp=1) as mesh:
        comm.Barrier()
        assert sorted(map(len, runtime.blocks.values())) == sorted((unused + slots) * 2)
        comm.Barrier()
        x = torch.arange(50.0)
        for op, more in (("all_gather", {}), ("all_reduce", {}), ("broadcast", {"root": 0})):
            found = getattr(sp, op)(x, comm=mesh["tp"], algorithm="window", **more)
            assert torch.equal(found, x)


@pytest.mark.parametrize("kind", [CudaMemory, PinnedMemory])
def test_memory_that_no_rank_uses_any_more_is_given_back(
    runtime: Runtime, kind: Callable[[torch.device], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such memory is freed in the next call that makes memory, or with the communicator.

    A view of another rank's tensor keeps the memory of all ranks, even if only one rank has such a
    view. Each rank has its own handles, as if it were a process.
    """
    monkeypatch.setattr(cuda, "os", SimpleNamespace(getpid=threading.get_ident, close=os.close))

    def pieces() -> int:
        return len(runtime.blocks) + len(runtime.opened) + len(runtime.registered)

    def body(comm: Any) -> tuple[list[int], torch.Tensor]:
        with sp.Mesh(comm, sp=comm.size) as mesh:
            group, held = mesh["sp"], []
            group.window = Window(group._comm, 64, kind(CPU))

            def count() -> None:
                comm.Barrier()
                held.append(pieces())
                comm.Barrier()

            for _ in range(3):
                count()
                x = sp.shared_empty((30,), comm=group)
                sp.fence(comm=group)
                last: Any = sp.peer(x, (comm.rank + 1) % comm.size, comm=group)[3:]
            count()
            x = last if comm.rank == 1 else last.clone()
            del last
            sp.shared_empty((1,), comm=group)
            count()
            del x
            x = sp.shared_empty((2,), comm=group).fill_(comm.rank)
            count()
            kept = sp.shared_empty((3,), comm=group)
            del kept
        return held, x

    (held, *_), kept = zip(*run_threads(3, body), strict=True)
    one = 3 * 3
    assert [count - held[0] for count in held] == [0, one, 2 * one, 2 * one, 2 * one, one]
    assert pieces() == one
    assert [x.tolist() for x in kept] == [[0, 0], [1, 1], [2, 2]]


def test_without_a_runtime_there_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "loaded_library", lambda name: None)
    cuda._runtime.cache_clear()
    with pytest.raises(OSError, match="no libcudart"):
        cuda._runtime()


def test_each_transport_shares_memory_of_its_own_kind(substitute: Any) -> None:
    substitute(transport, Window=lambda comm, *given: given)
    substitute(
        cuda, PinnedMemory=lambda device: "of the host", CudaMemory=lambda device: "of the device"
    )
    made: dict[str, Any] = {}
    for name in ("host", "window", "pinned", "ipc"):
        messages: Any = SimpleNamespace(name=name, in_order="in order")
        made[name], _ = transport.make_window(messages, MagicMock(), torch.device("cpu"))
    assert made == {
        "host": None,
        "window": (),
        "pinned": (4 << 20, "of the host", "in order"),
        "ipc": (64 << 20, "of the device", "in order"),
    }


def test_one_rank_of_a_machine_tries_memory_of_a_device(substitute: Any) -> None:
    tried = MagicMock(return_value="")
    substitute(
        cuda_aware,
        no_device_memory=tried,
        refuse_host_only=lambda comm, why: why(),
        DeviceTransport=MagicMock(),
    )
    run_threads(3, lambda comm: transport.make_transport("device", comm, torch.device("cuda")))
    tried.assert_called_once_with("cuda")


@spmd(2)
def test_a_region_that_is_large_enough_stays(comm: Any) -> None:
    regions, specs = Regions(comm, 1), [((64,), torch.uint8)]
    places = [regions.enter(specs)[0].data_ptr() for _ in range(2)]
    assert places[0] == places[1]


def test_a_region_is_memory_of_one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    counted = MagicMock(wraps=shared.demand)
    monkeypatch.setattr(shared, "demand", counted)
    run_threads(3, lambda comm: Regions(comm, 1).enter([((shared.ALIGNMENT,), torch.uint8)]))
    assert sorted(each.args[2] for each in counted.call_args_list) == [0, 0, shared.ALIGNMENT]


def test_pages_of_the_host_are_provided_in_short_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under a periodic signal a long call might never end: many kernels undo it each time."""
    provide = MagicMock()
    monkeypatch.setattr(os, "posix_fallocate", provide)
    shared.HOST._extend(0, (5 << 20) + 8)
    pieces = [each.args[1:] for each in provide.call_args_list]
    assert pieces == [*((start << 20, 1 << 20) for start in range(5)), (5 << 20, 8)]


def test_memory_that_torch_did_not_allocate_may_be_used_on_any_stream(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With cudaMallocAsync torch refuses to note the stream. Other errors are raised."""
    monkeypatch.setattr(torch.accelerator, "current_stream", MagicMock())
    x = MagicMock(device=torch.device("cuda:0"))
    refused, other = RuntimeError("ptr not found in ptr_info"), RuntimeError("out of order")
    x.record_stream.side_effect = [refused, other]
    assert used(x) is x
    with pytest.raises(RuntimeError, match="out of order"):
        used(x)


def test_a_handle_is_as_long_as_that_of_cuda() -> None:
    """CUDA's driver_types.h gives the length as CUDA_IPC_HANDLE_SIZE."""
    assert ctypes.sizeof(cuda.Handle) == 64
