"""Contestants on the emulated hosts, each checked before it is timed."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec
import torch
from torch import Tensor

import sp_core as sp
from benchmarks.contests.netlab.table import LIBRARY, STREAM, STREAM_BYTES, Setting
from benchmarks.launching import Record
from benchmarks.machine import environment
from benchmarks.sample import Span, makespans, race
from benchmarks.worker import Intracomm, Rank
from sp_core.attention import Logits
from sp_core.collectives.plans import plan
from sp_core.schedules import ALGORITHMS
from sp_core.schemes.problem import Problem
from sp_core.schemes.ring import circulate
from sp_core.transport import Done, Handle, HostTransport, Messages
from tests.oracle.collective_cases import Case
from tests.oracle.link import LinkModel

Step = Callable[[], object]
PORT = 7077
LEAD_SECONDS = 0.02  # until the last rank has heard of it, over links of a few milliseconds
LATE_SECONDS = 3e-4  # a rank that begins later than this makes the sample be taken again
NAP_SECONDS = 2e-4
TRIES = 5
TOKENS, HEADS, HEAD_DIM = (
    2048,
    8,
    64,
)  # of each rank; attention to a block takes longer than the block's way at 1 Gbit/s


def all_reduces(setting: Setting, mesh: sp.Mesh) -> dict[str, Step]:
    """Return the contestants, each found to be right.

    Raises:
        RuntimeError: one is wrong.
    """
    base, size = torch.arange(setting.nbytes // 4).remainder(97).float(), mesh.size
    x, wanted = base + mesh.rank, base * size + size * (size - 1) // 2
    found: dict[str, Step] = {}
    for name in setting.contestants:
        if name != LIBRARY or not setting.modelled:
            algorithm = "mpi" if name == LIBRARY else name
            made = plan("all_reduce", x, comm=mesh["hosts", "ranks"], algorithm=algorithm)
            check(f"all_reduce by {name}", made.run(), wanted)
            found[name] = made.run
    return found


def check(what: str, got: object, expected: Tensor) -> None:
    """Raise where a result is not exactly what it must be."""
    if not isinstance(got, Tensor) or not torch.equal(got, expected):
        raise RuntimeError(f"{what} is wrong: {got} instead of {expected}")


class Stream:
    """One TCP stream from the first host to the last, without MPI: what the link can carry."""

    def __init__(self, world: Intracomm, address: str) -> None:
        self._buffer = bytearray(STREAM_BYTES)
        self._sends, self._receives = world.rank == 0, world.rank == world.size - 1
        listener = socket.create_server((address, PORT)) if self._sends else None
        world.Barrier()
        if self._receives:
            self._end = socket.create_connection((address, PORT), timeout=30)
        if listener is not None:
            self._end = listener.accept()[0]

    def __call__(self) -> None:
        """Carry the bytes once; ranks at neither end do nothing."""
        if self._sends:
            self._end.sendall(self._buffer)
            self._end.recv(1)  # else the next stream would begin while this one still arrives
        if self._receives:
            left = memoryview(self._buffer)
            while left:
                left = left[self._end.recv_into(left) :]
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
    problem = Problem(comm, sharding, sharding, sp.Mask(), Logits(1.0))
    result = sp.ring_attention(q, k, v, comm=comm, sharding=sharding)
    torch.testing.assert_close(
        result, sp.allgather_kv_attention(q, k, v, comm=comm, sharding=sharding)
    )
    silent.transport = _Nowhere(world)
    return {
        "both": partial(sp.ring_attention, q, k, v, comm=comm, sharding=sharding),
        "compute": partial(sp.ring_attention, q, k, v, comm=silent, sharding=sharding),
        "communication": lambda: [None for _ in circulate(k, v, problem)],
    }


def begin(world: Intracomm) -> tuple[float, float]:
    """Wait for the time that rank 0 has chosen, mostly asleep; return it, and how late this was.

    A barrier would let ranks go a link's delay apart; spinning would keep ranks that share a core
    from it; and in sleep alone a library that sends only when it is called would keep the news to
    itself.
    """
    start: float = world.bcast(time.perf_counter() + LEAD_SECONDS)
    while (left := start - time.perf_counter()) > 0:
        world.Iprobe()
        time.sleep(min(left, NAP_SECONDS))
    return start, time.perf_counter() - start


def sample(world: Intracomm, step: Step) -> Span:
    """Time a step of this rank from the common beginning on; of some tries take the least late."""
    tries: list[tuple[float, float, float]] = []
    for _ in range(TRIES):
        start, late = begin(world)
        step()
        end = time.perf_counter()
        tries.append((max(world.allgather(late)), start, end))
        if tries[-1][0] < LATE_SECONDS:
            break
    _, start, end = min(tries)
    return start, end


def check_all(comm: sp.Communicator, *, library: bool) -> int:
    """Compare every collective by every algorithm with its definition; return their number."""
    absent = (*(() if library else ("auto", "mpi")), *(("window",) if comm.window is None else ()))
    chosen = [
        (op, name) for op, names in ALGORITHMS.items() for name in names if name not in absent
    ]
    for number, (op, algorithm) in enumerate(chosen):
        case = Case(op, 0, 1, "float32", "plain", 1, True, False, number, algorithm)
        inputs = case.inputs(comm.size)
        check(
            f"{op} by {algorithm}",
            case.call(inputs[comm.rank], comm),
            case.expected(inputs, comm.rank, comm.size),
        )
    return len(chosen)


def measure(values: Any, rank: Rank) -> Record:
    """Carry out one launch."""
    from mpi4py import MPI

    setting, world = msgspec.convert(values, Setting), rank.world
    hosts = sorted(set(world.allgather(socket.gethostname())))
    library = MPI.Get_library_version().splitlines()[0].strip("\0 ")
    known = {"mpi": library, "env": environment(), "hosts": hosts}
    make = partial(sp.Mesh, world, hosts=setting.hosts, ranks=setting.per_host)
    carrier: Any = LinkModel(setting.delay, setting.rate / 8) if setting.modelled else "auto"
    usual = "ring" if setting.modelled else "auto"  # the model carries no collective of the library
    with (
        make(transport=carrier) as mesh,
        make(check="off", transport=carrier, algorithm=usual) as quick,
        make(check="off") as idle,
    ):
        if setting.kind == "check":
            checked = check_all(mesh["hosts", "ranks"], library=not setting.modelled)
            return {**known, "checked": checked}
        steps = (
            all_reduces(setting, quick)
            if setting.kind == "all_reduce"
            else overlaps(world, quick, idle)
        )
        if not setting.modelled:
            address: str = world.bcast(socket.gethostbyname(socket.gethostname()))  # of rank 0
            steps = {STREAM: Stream(world, address), **steps}
        runners = {name: partial(sample, world, step) for name, step in steps.items()}
        spans = race(world, runners, setting.rounds + 1, seed=0)
    # contestants take turns; the first round only warms up
    seconds = {name: makespans(by_rank)[1:] for name, by_rank in spans.items()}
    modelled = {STREAM: [STREAM_BYTES * 8 / setting.rate] * setting.rounds}
    return {**known, "seconds": {**modelled, **seconds}}
