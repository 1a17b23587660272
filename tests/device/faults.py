"""Plant a fault in the code for CUDA, and run a law: `python -m device.faults NAME`.

The law must fail on the device `late`. Without a GPU no other test would find these faults.
"""

import ctypes
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from oracle.attention_check import check_attention
from oracle.strategies import AttentionProblem

import sp_core as sp
from device.plugin import NAME, pytest_configure
from sp_core.attention import cuda as kernels
from sp_core.schemes import SCHEMES
from sp_core.testing import run_threads
from sp_core.testing.run import ThreadsHung
from sp_core.transport import cuda, cuda_aware, staged, window
from sp_core.transport.base import Done, Transfer
from sp_core.transport.host import HostTransport

LATE = torch.device(NAME, 0)  # all ranks share its memory and its thread for backward
LENGTH = 1500
"""Elements of a collective's tensor: enough for several chunks, and several slots of a window."""

CHUNK_BYTES = 512
PADDED = AttentionProblem(
    *(2, 13, 13, 2, 2, 4),
    dtype="float32",
    layout="zigzag",
    kv_layout="zigzag",
    mask=sp.Mask(),
    softmax_scale=None,
    magnitude=1.0,
    values="normal",
    upstream="normal",
    needs_grad=(True, True, True),
    storage="padded",
    seed=7,
)


def collectives(comm: Any, *, transport: str, algorithm: str = "auto") -> None:
    """Check all_gather and all_reduce of numbers whose computation is still queued."""
    with sp.Mesh(comm, device=LATE, transport=transport, sp=comm.size) as mesh:
        group = mesh["sp"]
        if transport == "pipelined":
            host = HostTransport(group._comm)
            streams = cuda.CudaStreams(mesh.device)
            group.transport = staged.PipelinedTransport(
                host, streams, comm.size, chunk_bytes=CHUNK_BYTES
            )
        for turn in range(2):
            every = [torch.arange(LENGTH) % 50 + float(rank + turn) for rank in range(comm.size)]
            for op, expected in (
                ("all_gather", torch.cat(every)),
                ("all_reduce", torch.stack(every).sum(0)),
            ):
                x = every[comm.rank].to(mesh.device) * 1
                found = getattr(sp, op)(x, comm=group, algorithm=algorithm) * 1
                assert torch.equal(found.cpu(), expected), f"{op} over {transport} came out wrong"


def attention(
    comm: Any, *, name: str = "ring", transport: str = "pipelined", **changed: Any
) -> None:
    """Compare a scheme with the reference, for tensors that are views of larger ones."""
    problem = replace(PADDED, **changed)
    with sp.Mesh(comm, device=LATE, transport=transport, sp=comm.size) as mesh:
        scheme = partial(SCHEMES[name], comm=mesh["sp"])
        check_attention(name, scheme, problem, mesh["sp"])


def message(comm: Any, *, transport: str) -> None:
    """Send a tensor to the next rank, and free it before the message is complete."""
    with sp.Mesh(comm, device=LATE, transport=transport, sp=comm.size) as mesh:
        group = mesh["sp"]
        x = torch.arange(100, device=mesh.device) + comm.rank
        found = torch.empty_like(x)
        after, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
        handle = group.exchange([(after, x)], [(before, found)], "a message", longest=x.nbytes)
        del x
        torch.accelerator.synchronize()  # freed memory is overwritten
        group.wait(handle, "a message")
        assert torch.equal(found.cpu(), torch.arange(100) + before), "the message came out wrong"


def backward(comm: Any, *, op: str) -> None:
    """Run the backward of a collective, in which each rank's gradient needs that of the other."""
    with sp.Mesh(comm, device=LATE, sp=comm.size) as mesh:
        x = torch.ones(8, device=mesh.device, requires_grad=True)
        getattr(sp, op)(x, comm=mesh["sp"]).sum().backward()
        assert x.grad is not None
        assert torch.equal(x.grad.cpu(), torch.full((8,), float(comm.size)))


LAWS: dict[str, Callable[[Any], None]] = {
    "pipelined": partial(collectives, transport="pipelined"),
    "window": partial(collectives, transport="ipc", algorithm="window"),
    "device": partial(collectives, transport="device"),
    "attention": attention,
    "ring in a window": partial(attention, transport="ipc"),
    "masked": partial(attention, mask=sp.Mask(window=5)),
    "message": partial(message, transport="ipc"),
    "pinned message": partial(message, transport="pinned"),
    "documents": partial(
        attention,
        mask=sp.Mask(causal=True, documents=tuple(range(0, 53, 4))),
        seq_len=52,
        kv_len=52,
        head_dim=8,
        dtype="bfloat16",
    ),
    "half": partial(attention, head_dim=8, dtype="bfloat16"),
    "half, masked": partial(attention, mask=sp.Mask(window=5), head_dim=8, dtype="bfloat16"),
    "all_gather": partial(backward, op="all_gather"),
    "all_reduce": partial(backward, op="all_reduce"),
}
WRONG, MISALIGNED, HUNG = "came out wrong", "misaligned address", "hung"
Plant = Callable[[pytest.MonkeyPatch], None]


class Fault(NamedTuple):
    """A planted fault.

    Args:
        plant: a function that plants the fault.
        law: the name in `LAWS` of the law that must then fail.
        says: a part of the text that the process then prints.
        ends: the exit code of the process.
    """

    plant: Plant
    law: str
    says: str = WRONG
    ends: int = 1


def put(owner: Any, name: str, value: Any) -> Plant:
    """Return a fault that replaces an attribute."""
    return lambda patch: patch.setattr(owner, name, value)


def _device_aware(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(cuda_aware, "no_device_memory", lambda kind: "")
    patch.setitem(sp.transport.NAMES, NAME, ("device",))


def _touching(self: Any, into: torch.Tensor, part: torch.Tensor) -> Callable[[], object]:
    return lambda: np.copyto(cuda_aware.memory(into), cuda_aware.memory(part))


def _on_the_host(address: int, nbytes: int, device: torch.device) -> torch.Tensor:
    memory = (ctypes.c_ubyte * nbytes).from_address(address)
    return torch.frombuffer(memory, dtype=torch.uint8)


def in_window(name: str, fake: Callable[..., Any]) -> Plant:
    """Return a fault that replaces a method of every window's memory, once the window is made."""
    made = window.Window.__init__

    def init(self: Any, *arguments: Any) -> None:
        made(self, *arguments)
        setattr(self.memory, name, partial(fake, self.memory))

    return put(window.Window, "__init__", init)


_copying = cuda.CudaStream.copying
_launch = cuda.CudaStream.launch
_added = kernels.added


def _unkept(self: Any, into: torch.Tensor, part: torch.Tensor) -> Callable[[], object]:
    return lambda: _copying(self, into, part.clone())()


def _not_waited_for(self: Any, work: Any) -> Done:
    _launch(self, work)
    return Done()


def _tight(allowed: torch.Tensor | None, q: torch.Tensor) -> torch.Tensor | None:
    made = _added(allowed, q)
    return None if made is None else made.clone(memory_format=torch.contiguous_format)


def _one_slot(patch: pytest.MonkeyPatch) -> None:
    slot = staged._Slot
    made: list[Any] = []

    def shared(*buffers: Any) -> Any:
        made.append(slot(*buffers))
        return made[len(made) - 1 - (len(made) - 1) % 2]

    patch.setattr(staged, "_Slot", shared)


TOUCHED = ("the host touched device memory", -11)
"""The text and the exit code of a process that ends by SIGSEGV."""
nothing: Callable[..., None] = lambda *_: None  # noqa: E731
done: Callable[..., Done] = lambda *_: Done()  # noqa: E731
as_it_is: Callable[[torch.Tensor], torch.Tensor] = lambda x: x  # noqa: E731
one_thread = put(torch.autograd, "set_multithreading_enabled", nothing)
"""A fault that runs the backwards of two ranks in one thread of the device, so that they hang."""


_made = window.Window.__init__


def _unheeding(self: Any, *given: Any, **named: Any) -> None:
    """Make a window that does not look at the flags of other ranks."""
    _made(self, *given, **named)
    self._others = []


FAULTS = {
    "MPI gets device memory": Fault(_device_aware, "device", *TOUCHED),
    "the host copies in a window": Fault(
        put(cuda.CudaStream, "copying", _touching), "window", *TOUCHED
    ),
    "a CPU tensor over device memory": Fault(
        put(cuda, "tensor_at", _on_the_host), "window", *TOUCHED
    ),
    # Memory is read without waiting for the work that writes it.
    "downloads": Fault(put(cuda.CudaStreams, "downloaded", done), "pipelined"),
    "computation before downloads": Fault(put(cuda.CudaStreams, "begin", nothing), "pipelined"),
    "computation before a window": Fault(in_window("begin", nothing), "window"),
    "copies into a window": Fault(in_window("launch", _not_waited_for), "window"),
    "uploads": Fault(put(cuda.CudaStreams, "finish", nothing), "pipelined"),
    # A buffer is reused too early.
    "a host buffer before its upload": Fault(put(cuda.CudaStreams, "uploaded", done), "pipelined"),
    "one host buffer for two chunks": Fault(_one_slot, "pipelined"),
    "a slot that others still read": Fault(put(window.Window, "__init__", _unheeding), "window"),
    "a copy of memory that was freed": Fault(in_window("copying", _unkept), "window"),
    "a message that nobody keeps": Fault(
        put(window, "Transfer", lambda tests, _, after: Transfer(tests, after=after)),
        "message",
    ),
    # A kernel is given rows that are not aligned.
    "no look at alignment": Fault(put(kernels, "aligned", as_it_is), "attention", MISALIGNED),
    "too small a unit": Fault(put(kernels, "LOAD_BYTES", 4), "attention", MISALIGNED),
    "a look at the last dim only": Fault(
        put(kernels, "aligned", lambda x: x if x.stride(-1) == 1 else x.contiguous()),
        *("half", MISALIGNED),
    ),
    "a mask without room between its rows": Fault(
        put(kernels, "added", _tight), "masked", MISALIGNED
    ),
    "out in another layout": Fault(
        put(kernels, "tokens_first", as_it_is), "half, masked", "ring d"
    ),
    "all_gather": Fault(one_thread, "all_gather", HUNG),
    "all_reduce": Fault(one_thread, "all_reduce", HUNG),
    "attention": Fault(one_thread, "attention", HUNG),
}
HANG_SECONDS = 5.0


def main(name: str) -> None:
    """Plant a fault and run its law. Print HUNG and exit with 1 if the ranks hang."""
    pytest_configure()
    fault = FAULTS[name]
    with pytest.MonkeyPatch.context() as patch:
        fault.plant(patch)
        try:
            run_threads(2, LAWS[fault.law], timeout=HANG_SECONDS if fault.says == HUNG else None)
        except ThreadsHung:
            print(HUNG, flush=True)
            os._exit(1)


if __name__ == "__main__":
    main(sys.argv[1])
