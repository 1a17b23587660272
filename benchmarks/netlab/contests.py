"""What is timed on the ranks: contestants by name, each checked before it is timed."""

from __future__ import annotations

import socket
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

import sp_core as sp
from benchmarks.netlab.setting import Setting
from sp_core.collectives.plans import plan
from sp_core.schedules import ALGORITHMS
from sp_core.schemes.blocks import circulate
from sp_core.schemes.problem import Problem
from sp_core.transport import Done, Handle, HostTransport, Messages
from tests.oracle.link import LinkModel

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

Step = Callable[[], object]
PORT = 7077
STREAM_BYTES = 1 << 24
LIBRARY, BY_AXES = "library", "by axes"
TOKENS, HEADS, HEAD_DIM = 2048, 8, 64  # of each rank; attention to a block takes longer than the block's way at 1 Gbit/s


def transport(setting: Setting) -> Any:
    """What the mesh takes: the real thing, or the model of the link."""
    wire = setting.wire
    return LinkModel(wire.delay, wire.rate / 8) if setting.modelled else "auto"


def all_reduces(setting: Setting, mesh: sp.Mesh) -> dict[str, Step]:
    """The contestants that this version has, each found to be right.

    Raises:
        RuntimeError: one is wrong.
    """
    x = torch.arange(setting.nbytes // 4).remainder(97).float() + mesh.rank
    expected = torch.arange(setting.nbytes // 4).remainder(97).float() * mesh.size + mesh.size * (mesh.size - 1) // 2
    found: dict[str, Step] = {}
    for name in setting.contestants:
        step = _all_reduce(name, x, mesh)
        if step is not None:
            check(f"all_reduce by {name}", step(), expected)
            found[name] = step
    return found


def _all_reduce(name: str, x: Tensor, mesh: sp.Mesh) -> Callable[[], Tensor] | None:
    everyone = mesh["hosts", "ranks"]
    if name == BY_AXES:
        return _by_axes(x, mesh)
    algorithm = "mpi" if name == LIBRARY else name
    return plan("all_reduce", x, comm=everyone, algorithm=algorithm).run if algorithm in ALGORITHMS["all_reduce"] else None


def _by_axes(x: Tensor, mesh: sp.Mesh) -> Callable[[], Tensor]:
    """Hierarchy by hand: each rank of a host sums a part over the host, then over the hosts; the host gathers the parts."""
    inside, between = mesh["ranks"], mesh["hosts"]
    parted = plan("reduce_scatter", x, comm=inside, algorithm="pairwise")
    summed = plan("all_reduce", parted.run(), comm=between, algorithm="segmented_ring")
    gathered = plan("all_gather", summed.run(), comm=inside)

    def step() -> Tensor:
        parted.run()
        summed.run()
        return gathered.run()

    return step


def check(what: str, got: object, expected: Tensor) -> None:
    """Raise where a result is not exactly what it must be."""
    if not isinstance(got, Tensor) or not torch.equal(got, expected):
        raise RuntimeError(f"{what} is wrong: {got} instead of {expected}")


class Stream:
    """One TCP stream from the first host to the last, without MPI: what the link can carry."""

    def __init__(self, world: Intracomm, address: str) -> None:
        self._buffer = bytearray(STREAM_BYTES)
        self._end: socket.socket | None = None
        self._sends = world.rank == 0
        listener = socket.create_server((address, PORT)) if self._sends else None
        world.Barrier()
        if world.rank == world.size - 1:
            self._end = socket.create_connection((address, PORT), timeout=30)
        if listener is not None:
            listener.settimeout(30)
            self._end = listener.accept()[0]
            listener.close()

    def __call__(self) -> None:
        """Carry the bytes once; ranks at neither end do nothing."""
        if self._end is None:
            return
        if self._sends:
            self._end.sendall(self._buffer)
            self._end.recv(1)  # else the next stream would begin while this one still arrives
            return
        view = memoryview(self._buffer)
        while view:
            view = view[self._end.recv_into(view) :]
        self._end.sendall(b".")


class _Nowhere(HostTransport):
    """A transport in which every message is complete at once and brings nothing."""

    def exchange(self, sends: Messages, recvs: Messages) -> Handle:
        return Done()


def overlaps(world: Intracomm, mesh: sp.Mesh, idle: sp.Mesh) -> dict[str, Step]:
    """Ring attention; the same without its messages; its messages without the rest."""
    torch.manual_seed(mesh.rank)
    q, k, v = (torch.randn(1, TOKENS, HEADS, HEAD_DIM) for _ in range(3))
    sharding = sp.Sharding.contiguous(TOKENS * mesh.size, mesh.size)
    comm, silent = mesh["hosts", "ranks"], idle["hosts", "ranks"]
    problem = Problem(comm, sharding, sharding, sp.Mask(), 1.0)
    result = sp.ring_attention(q, k, v, comm=comm, sharding=sharding)
    reference = sp.allgather_kv_attention(q, k, v, comm=comm, sharding=sharding)
    torch.testing.assert_close(result, reference)
    silent.transport = _Nowhere(world)
    return {
        "both": partial(sp.ring_attention, q, k, v, comm=comm, sharding=sharding),
        "compute": partial(sp.ring_attention, q, k, v, comm=silent, sharding=sharding),
        "communication": lambda: [None for _ in circulate(k, v, problem)],
    }
