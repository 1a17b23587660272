"""Device tensors over an MPI library that reads and writes device memory by itself.

What a library says about itself is no proof, and a library that cannot do it ends the process when
it touches the first byte. So a child process tries it first, once per process that asks, and the
ranks compare what their children found.
"""

from __future__ import annotations

import ctypes
import functools
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from sp_core.errors import DeviceError
from sp_core.machine import bounded, last_line
from sp_core.schedules import Operation
from sp_core.transport.base import Done, Handle
from sp_core.transport.host import MAX_COUNT, HostTransport, as_numpy

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

PROBE_SECONDS = 60.0
OF_A_JOB = (
    "PMI",
    "PMIX",
    "OMPI_COMM",
    "OMPI_UNIVERSE",
    "OMPI_NUM",
    "OMPI_APP",
    "OMPI_FILE",
    "OMPI_FIRST",
    "HYDI",
    "MPI_LOCAL",
)
"""Variables of a rank that mpiexec has started begin so; with them the child would look for its
place in that job."""

PROBE = """
import sys, torch
from mpi4py import MPI
from sp_core.transport.cuda_aware import memory
x = torch.arange(1 << 18, dtype=torch.int32, device=sys.argv[1])
y, z = torch.zeros_like(x), torch.zeros_like(x)
settle = int if x.is_cpu else torch.accelerator.synchronize
settle()
MPI.COMM_SELF.Sendrecv(memory(x), 0, 0, memory(y), 0, 0)
MPI.COMM_SELF.Allreduce(memory(x), memory(z))
settle()
if not (torch.equal(x, y) and torch.equal(x, z)):
    raise SystemExit("what came is not what was sent")
"""


class DeviceTransport(HostTransport):
    """Hand addresses of device memory to the MPI library, after a wait for the current stream.

    Collectives that are started are carried out at once: libraries that read device memory do so in
    blocking collectives only.

    Args:
        comm: an mpi4py communicator that nobody else sends on.
        settle: waits until the device has done what it was asked to do on the current stream.
        max_count: elements per MPI call.

    Source: Open MPI 5 documentation, "CUDA": non-blocking collectives do not take device buffers.
    """

    def __init__(
        self, comm: Intracomm, settle: Callable[[], object], *, max_count: int = MAX_COUNT
    ) -> None:
        super().__init__(comm, "device", max_count=max_count)
        self._first = [settle]

    def start(self, operation: Operation, send: Tensor | None, recv: Tensor | None) -> Handle:
        """Carry a collective out."""
        self.prepare(operation, send, recv)()
        return Done()

    def _memory(self, x: Tensor | None) -> np.ndarray[Any, Any]:
        return memory(x)


def memory(x: Tensor | None) -> np.ndarray[Any, Any]:
    """Return an array that points to the memory of a flat tensor on any device, and keeps it.

    Only MPI may look into it.
    """
    if x is None:
        return as_numpy(None)
    kind = as_numpy(torch.empty(0, dtype=x.dtype)).dtype
    if not x.numel():
        return np.empty(0, kind)
    place: Any = (ctypes.c_ubyte * x.nbytes).from_address(x.data_ptr())
    place.tensor = x  # an address alone would let the memory go while MPI reads it
    return np.frombuffer(place, kind)


@functools.lru_cache(maxsize=4)
def no_device_memory(device: str, program: str = PROBE, seconds: float = PROBE_SECONDS) -> str:
    """Why the MPI library does not take memory of a device; empty where it does.

    A child process tries it.

    Args:
        device: "cuda"; "cpu" must always do.
        program: what the child runs.
        seconds: limit of the child.
    """
    code, output = bounded(
        [sys.executable, "-c", program, device], seconds=seconds, env=outside_of_job(os.environ)
    )
    if code == 0:
        return ""
    if code is None:
        return f"a process that tried it had not ended after {seconds:g} s"
    how = (
        f"was ended by signal {-code}"
        if code < 0
        else f"failed with exit code {code}: {last_line(output)}"
    )
    return f"a process that tried it {how}"


def outside_of_job(environment: Mapping[str, str]) -> dict[str, str]:
    """Remove the variables of an MPI job, and let a child find this package."""
    kept = {name: value for name, value in environment.items() if not name.startswith(OF_A_JOB)}
    here = str(Path(__file__).resolve().parents[2])
    return {
        **kept,
        "PYTHONPATH": os.pathsep.join(filter(None, (here, environment.get("PYTHONPATH")))),
    }


def refuse_host_only(comm: Intracomm, reason: Callable[[], str]) -> None:
    """Raise `DeviceError` on every rank where the MPI library of any cannot take device memory.

    Args:
        comm: all its ranks call this.
        reason: why not, on this rank; empty where it can.
    """
    reasons = comm.allgather(reason())
    rank = next((rank for rank, text in enumerate(reasons) if text), None)
    if rank is not None:
        raise DeviceError(
            f"transport 'device' needs an MPI library that reads device memory; that of rank "
            f"{rank} does not: {reasons[rank]}. "
            "Pass transport='pipelined' (or 'auto'), or install an MPI that is built for the "
            "device."
        )
