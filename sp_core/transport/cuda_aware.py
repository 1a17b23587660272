"""Move device tensors by a CUDA-aware MPI library: one that reads and writes device memory itself.

A library's own statement about this is no proof. A library that cannot read device memory ends the
process at the first access. So `no_device_memory` first tries the library in a child process, and
`refuse_host_only` raises an error on all ranks if the trial of any rank has failed.
`DeviceTransport` is the transport.
"""

import ctypes
import functools
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sp_core.errors import DeviceError
from sp_core.launch.bounded import bounded, last_line
from sp_core.machine import python
from sp_core.programs import Operation
from sp_core.transport.base import Done, Handle, Intracomm, ordered
from sp_core.transport.host import HostTransport, as_numpy

PROBE_SECONDS = 60.0
"""Time limit of the child process that tries the MPI library."""
OF_A_JOB = (
    "PMI",
    "PMIX",
    "OMPI_COMM",
    "OMPI_UNIVERSE",
    "OMPI_NUM",
    "OMPI_APP",
    "OMPI_FILE",
    "OMPI_FIRST",
    "OMPI_MCA_ess",  # this one and the next two are of Open MPI 4
    "OMPI_MCA_orte_",
    "OMPI_MCA_pmix",
    "HYDI",
    "MPI_LOCAL",
    "SLURM_STEP",
)
"""Beginnings of the environment variables that mpiexec or srun sets for a rank.

A child that had them would try to join the same MPI job."""

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
"""Program of the child: sends a device tensor to itself, reduces it, and compares the results."""


class DeviceTransport(HostTransport):
    """Pass addresses of device memory to MPI, after waiting for the current stream.

    `start` completes a collective before it returns, waiting for the other ranks. Libraries that
    read device memory do so in blocking collectives only.

    Args:
        comm: an mpi4py communicator on which only this transport sends.
        settle: waits until the device has done the work queued on the current stream.

    Source: Open MPI 5 documentation, "CUDA": non-blocking collectives do not take device buffers.
    """

    def __init__(self, comm: Intracomm, settle: Callable[[], object]) -> None:
        super().__init__(comm, "device")
        self._first = [settle]

    def start(self, operation: Operation, send: Tensor | None, recv: Tensor | None) -> Handle:
        """Run a collective by the blocking call, and return a handle that is complete."""
        self.prepare(operation, send, recv)()
        return Done() if recv is None else ordered(Done(), recv.device)

    def _memory(self, x: Tensor) -> np.ndarray[Any, Any]:
        return memory(x)


def memory(x: Tensor) -> np.ndarray[Any, Any]:
    """Return a NumPy array whose address is the memory of a flat tensor, on any device.

    Only MPI may read it: for a device tensor the address is not host memory. The array keeps the
    tensor alive.
    """
    kind = as_numpy(torch.empty(0, dtype=x.dtype, device="cpu")).dtype
    place: Any = (ctypes.c_ubyte * x.nbytes).from_address(x.data_ptr())
    place.tensor = x  # keeps the memory alive while MPI reads it
    return np.frombuffer(place, kind)


@functools.lru_cache(maxsize=4)
def no_device_memory(device: str, program: str = PROBE, seconds: float = PROBE_SECONDS) -> str:
    """Return why the MPI library cannot send memory of a device, or "" if it can.

    A child process, alone in its own MPI, sends a device tensor to itself and reduces it. The
    caller waits for the child. The answer is kept for later calls in this process.

    Args:
        device: a type of device, such as "cuda". For "cpu" the answer is "" on every working MPI.
        program: the Python text that the child runs.
        seconds: time limit. A child that runs longer is ended, and counts as failed.
    """
    command, env = [*python(), "-c", program, device], outside_of_job(os.environ)
    try:
        code, output = bounded(command, seconds=seconds, env=env)
    except OSError as error:  # such as no writable TMPDIR
        return f"a process that tries it cannot be started ({error})"
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
    """Return an environment for a child process outside of this MPI job.

    The child can import this package.

    Args:
        environment: the environment of this process; it is not changed.
    """
    kept = {name: value for name, value in environment.items() if not name.startswith(OF_A_JOB)}
    places = str(Path(__file__).resolve().parents[2]), environment.get("PYTHONPATH")
    return kept | {"PYTHONPATH": os.pathsep.join(filter(None, places))}


def refuse_host_only(comm: Intracomm, reason: Callable[[], str]) -> None:
    """Raise `DeviceError` on every rank if the MPI library of any rank cannot read device memory.

    Args:
        comm: the communicator; all ranks of it call this.
        reason: returns why this rank's library cannot, or "" if it can.

    Communication:
        One all-gather of the reasons.
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
