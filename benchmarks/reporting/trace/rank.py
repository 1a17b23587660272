"""Trace a block on one rank: name its communication, compare its clock with rank 0's."""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

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
from sp_core.transport import Done

WARMUP = 2
TRIES = 20
KINDS = {"start": "start", "exchange": "start", "wait": "wait", "_agree": "agree"}
"""What the trace calls each method of a communicator that communicates by itself."""


def offset(world: Intracomm) -> float:
    """Return the seconds that this rank's `perf_counter` is ahead of rank 0's.

    Returns:
        0 where the difference is less than its own uncertainty, as for ranks of one node, which
        share one clock.

    Communication:
        20 short messages to and from every rank, one rank after another.

    Source: Cristian 1989, Probabilistic clock synchronization, doi:10.1007/BF01784024.
    """
    trips = []
    for rank in range(1, world.size):
        for _ in range(TRIES):
            if world.rank == 0:
                world.send(time.perf_counter(), rank)
                world.recv(source=rank)
            elif world.rank == rank:
                start, theirs, end = time.perf_counter(), world.recv(source=0), time.perf_counter()
                world.send(None, 0)
                trips.append((start, theirs, end))
    return _best(trips) if trips else 0.0


def _best(trips: list[tuple[float, float, float]]) -> float:
    """Return the offset from the shortest trip, which leaves the least room for error."""
    start, theirs, end = min(trips, key=lambda trip: trip[2] - trip[0])
    found, doubt = (start + end) / 2 - theirs, (end - start) / 2
    return 0.0 if abs(found) <= doubt else found


def anchors() -> list[tuple[float, float]]:
    """Leave marks in the profile; return between which times of `perf_counter` each was made."""
    made = []
    for number in range(TRIES):
        start = time.perf_counter()
        with record_function(f"{ANCHOR} {number}"):
            pass
        made.append((start, time.perf_counter()))
    return made


class Log:
    """Gives every communication of a rank a span in the profile, named PREFIX and a number.

    `calls` has, by that number: the operation, as in the communicator's counters; the kind, which
    is "run" until it is done, "start" without waiting, "wait" for what was started, or "agree" on
    arguments; the bytes that this rank sent since its last call of the operation, of a wait those
    of its start too; and the transfer, the number of the call that started what is waited for.
    """

    def __init__(self, comm: Communicator) -> None:
        self.calls: list[dict[str, Any]] = []
        self._comm = comm
        self._started: dict[int, tuple[object, int]] = {}
        counters = comm.counters
        self._told = {name: counters[name].bytes_sent for name in counters.snapshot()}
        for method in KINDS:
            act = getattr(comm, method)
            setattr(comm, method, functools.partial(self._span, method, act))
        self._prepare = comm.prepare
        comm.prepare = self._prepared  # type: ignore[method-assign]

    def _prepared(
        self, operation: Operation, send: torch.Tensor | None, recv: torch.Tensor | None
    ) -> Callable[[], None]:
        run = self._prepare(operation, send, recv)
        return functools.partial(self._span, "run", lambda _: run(), operation)

    def _span(self, method: str, act: Callable[..., Any], *arguments: Any, **more: Any) -> Any:
        if method == "wait" and isinstance(arguments[0], Done):
            return act(*arguments)  # nothing was sent
        number, call = len(self.calls), self._describe(method, *arguments, **more)
        self.calls.append(call)
        with record_function(f"{PREFIX}{number}"):
            result = act(*arguments, **more)
        name, sent = call["operation"], self._comm.counters[call["operation"]].bytes_sent
        call["bytes_sent"] += sent - self._told.get(name, 0)
        self._told[name] = sent
        if call["kind"] == "start":  # a handle is held, or its id would be given to another
            self._started[id(result)] = (result, number)
        return result

    def _describe(self, method: str, *arguments: Any, **more: Any) -> dict[str, Any]:
        kind, transfer = KINDS.get(method, "run"), None
        if method in ("run", "start"):
            name = arguments[0].op.value
        elif method == "exchange":
            name = more.get("name", [*arguments, "exchange"][2])
        else:
            name = arguments[1] if method == "wait" else "control"
        if method == "wait":  # an algorithm of this library posts messages as it goes: no start
            _, transfer = self._started.pop(id(arguments[0]), (None, None))
            kind = "run" if transfer is None else "wait"
        sent = 0 if transfer is None else self.calls[transfer]["bytes_sent"]
        return {"operation": name, "kind": kind, "bytes_sent": sent, "transfer": transfer}


def measure(values: Any, rank: Rank) -> dict[str, Any]:
    """Trace one step; return the merged trace on rank 0."""
    from mpi4py import MPI

    setting, world = msgspec.convert(values, BlockSetting), rank.world
    where = device(setting.device, world, share_gpu=setting.share_gpu)
    axes: dict[str, Any] = {AXIS: setting.case.ranks}
    with Mesh(world, device=where, transport=setting.case.transport, check="off", **axes) as mesh:
        step = stepping(setting, mesh, where)
        for _ in range(WARMUP):
            step()
        log, ahead = Log(mesh[AXIS]), offset(world)
        kinds = [ProfilerActivity.CPU, ProfilerActivity.CUDA][: 1 + (where.type == "cuda")]
        with profile(activities=kinds) as profiler:
            marks = anchors()
            world.Barrier()
            with record_function("step"):
                step()
    path = rank.folder / f"profile-{world.rank}.json"
    profiler.export_chrome_trace(str(path))
    events = json.loads(path.read_text())["traceEvents"]
    place = f"{where} of {MPI.Get_processor_name()}"
    profiles = world.gather(Profile(world.rank, place, events, log.calls, marks, ahead))
    return {} if profiles is None else {"trace": merge(profiles, about(setting))}


def stepping(setting: BlockSetting, mesh: Mesh, where: torch.device) -> Callable[[], None]:
    """Return a function that runs one step of a block, whose parts are named in the profile."""
    case = setting.case
    backward = case.direction == "both"

    def named(name: str) -> AbstractContextManager[Any]:
        return record_function(f"{name}, {case.scheme}" if name == "attention" else name)

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

    return step


def about(setting: BlockSetting) -> dict[str, Any]:
    """Say what was traced, for the reader of the file."""
    case = setting.case
    names = ("scheme", "layout", "dtype", "ranks", "transport")
    return {
        **{name: getattr(case, name) for name in names},
        **case.shape,
        "direction": "forward and backward" if case.direction == "both" else "forward",
        "device": setting.device,
    }
