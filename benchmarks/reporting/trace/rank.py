"""One rank of a traced step: a transformer block, its communication named, its clock compared with that of rank 0."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

import msgspec
import torch
from torch.profiler import ProfilerActivity, profile, record_function

from benchmarks.cases.block import block
from benchmarks.cases.setting import BlockSetting
from benchmarks.machine import device
from benchmarks.records import AXIS
from benchmarks.reporting.trace.merge import ANCHOR, PREFIX, Profile, merge
from benchmarks.worker import Intracomm, Rank
from sp_core.communicator import Communicator
from sp_core.mesh import Mesh
from sp_core.schedules import Operation
from sp_core.transport import Done, Handle, Messages

WARMUP = 2
T = TypeVar("T")
TRIES = 20


def offset(world: Intracomm) -> float:
    """Seconds that this rank's `perf_counter` is ahead of rank 0's.

    Returns:
        0 where the difference is less than its own uncertainty, as for ranks of one node, which
        share one clock.

    Communication:
        20 short messages to and from every rank, one rank after another.

    Source: Cristian 1989, Probabilistic clock synchronization, doi:10.1007/BF01784024.
    """
    mine = 0.0
    for rank in range(1, world.size):
        if world.rank == 0:
            for _ in range(TRIES):
                world.send(time.perf_counter(), rank)
                world.recv(source=rank)
        elif world.rank == rank:
            mine = _best([_round_trip(world) for _ in range(TRIES)])
    return mine


def _round_trip(world: Intracomm) -> tuple[float, float, float]:
    """When this rank began to wait, what rank 0's clock said meanwhile, and when the answer was there."""
    start = time.perf_counter()
    theirs = world.recv(source=0)
    end = time.perf_counter()
    world.send(None, 0)
    return start, theirs, end


def _best(trips: list[tuple[float, float, float]]) -> float:
    """The offset from the shortest trip, which leaves the least room for error."""
    start, theirs, end = min(trips, key=lambda trip: trip[2] - trip[0])
    found, doubt = (start + end) / 2 - theirs, (end - start) / 2
    return 0.0 if abs(found) <= doubt else found


def anchors() -> list[tuple[float, float]]:
    """Leave marks in the profile, and say between which times of `perf_counter` each was made."""
    made = []
    for number in range(TRIES):
        start = time.perf_counter()
        with record_function(f"{ANCHOR} {number}"):
            pass
        made.append((start, time.perf_counter()))
    return made


@dataclass
class Call:
    """One call of a communicator.

    Args:
        operation: as in its counters.
        kind: "run" until it is done, "start" without waiting, "wait" for what was started, "agree"
            on arguments.
        bytes_sent: by this rank since its last call of the operation, from the counters; of a wait,
            those of its start too.
        transfer: number of the call that started what is waited for.
    """

    operation: str
    kind: str
    bytes_sent: int = 0
    transfer: int | None = None


class Log:
    """Gives every communication of a rank a span in the profile, named PREFIX and the number of its `Call`."""

    def __init__(self, comm: Communicator) -> None:
        self.calls: list[Call] = []
        self._comm = comm
        self._started: dict[int, tuple[Handle, int]] = {}
        self._told = Counter(
            {name: comm.counters[name].bytes_sent for name in comm.counters.snapshot()}
        )
        run, start, exchange, wait, agree = (
            comm.run,
            comm.start,
            comm.exchange,
            comm.wait,
            comm._agree,
        )

        def named_run(operation: Operation, *buffers: Any) -> None:
            self._span(Call(operation.op.value, "run"), lambda: run(operation, *buffers))

        def named_start(operation: Operation, *buffers: Any) -> Handle:
            return self._begin(
                Call(operation.op.value, "start"), lambda: start(operation, *buffers)
            )

        def named_exchange(sends: Messages, recvs: Messages, name: str = "exchange") -> Handle:
            return self._begin(Call(name, "start"), lambda: exchange(sends, recvs, name))

        def named_wait(handle: Handle, name: str) -> None:
            if isinstance(handle, Done):
                return wait(handle, name)  # nothing was sent
            if (
                id(handle) not in self._started
            ):  # an algorithm of this library, which posts its messages as it goes
                return self._span(Call(name, "run"), lambda: wait(handle, name))
            number = self._started.pop(id(handle))[1]
            return self._span(
                Call(name, "wait", self.calls[number].bytes_sent, number),
                lambda: wait(handle, name),
            )

        def named_agree(*arguments: Any) -> tuple[int, ...]:
            return self._span(Call("control", "agree"), lambda: agree(*arguments))

        named = {
            "run": named_run,
            "start": named_start,
            "exchange": named_exchange,
            "wait": named_wait,
            "_agree": named_agree,
        }
        for name, method in named.items():
            setattr(comm, name, method)

    def as_dicts(self) -> list[dict[str, Any]]:
        """All calls as plain values, in the order of their numbers."""
        return [asdict(call) for call in self.calls]

    def _begin(self, call: Call, act: Callable[[], Handle]) -> Handle:
        number = len(self.calls)
        handle = self._span(call, act)
        self._started[id(handle)] = (
            handle,
            number,
        )  # the handle is held, or its id would be given to another
        return handle

    def _span(self, call: Call, act: Callable[[], T]) -> T:
        number = len(self.calls)
        self.calls.append(call)
        with record_function(f"{PREFIX}{number}"):
            result = act()
        sent = self._comm.counters[call.operation].bytes_sent
        call.bytes_sent += sent - self._told[call.operation]
        self._told[call.operation] = sent
        return result


def measure(values: Any, rank: Rank) -> dict[str, Any]:
    """Trace one step; return the merged trace on rank 0."""
    from mpi4py import MPI

    setting, world = msgspec.convert(values, BlockSetting), rank.world
    case = setting.case
    backward = case.direction == "both"

    def named(name: str) -> AbstractContextManager[Any]:
        return record_function(f"{name}, {case.scheme}" if name == "attention" else name)

    where = device(setting.device, world, share_gpu=setting.share_gpu)
    axes: dict[str, Any] = {AXIS: case.ranks}
    with Mesh(world, device=where, transport=case.transport, check="off", **axes) as mesh:
        (layer, forward, _), x = block(setting, mesh, named)

        def step() -> None:
            with record_function("forward"), torch.set_grad_enabled(backward):
                y = forward(x)
            if backward:
                with record_function("backward"):
                    y.sum().backward()
                layer.zero_grad()
            if where.type == "cuda":
                torch.cuda.synchronize(where)

        for _ in range(WARMUP):
            step()
        log, ahead = Log(mesh[AXIS]), offset(world)
        kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if where.type == "cuda" else [])]
        with profile(activities=kinds) as profiler:
            marks = anchors()
            world.Barrier()
            with record_function("step"):
                step()
    path = rank.folder / f"profile-{world.rank}.json"
    profiler.export_chrome_trace(str(path))
    events = json.loads(path.read_text())["traceEvents"]
    mine = Profile(
        world.rank, f"{where} of {MPI.Get_processor_name()}", events, log.as_dicts(), marks, ahead
    )
    profiles = world.gather(mine)
    return {} if profiles is None else {"trace": merge(profiles, about(setting))}


def about(setting: BlockSetting) -> dict[str, Any]:
    """Say what was traced, for the reader of the file."""
    case = setting.case
    direction = "forward and backward" if case.direction == "both" else "forward"
    names = ("scheme", "layout", "dtype", "ranks", "transport")
    return {
        **{name: getattr(case, name) for name in names},
        **case.shape,
        "direction": direction,
        "device": setting.device,
    }
