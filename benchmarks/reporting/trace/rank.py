"""Trace a block on one rank: name its communication, compare its clock with rank 0's."""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import msgspec
import torch
from torch.profiler import ProfilerActivity, profile, record_function

from benchmarks.cases.block import block
from benchmarks.cases.setting import BlockSetting
from benchmarks.machine import device
from benchmarks.records import AXIS
from benchmarks.reporting.tables import size
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
    """Describe the step, for the reader of the file."""
    case = setting.case
    names = ("scheme", "layout", "dtype", "ranks", "transport")
    return {
        **{name: getattr(case, name) for name in names},
        **case.shape,
        "direction": "forward and backward" if case.direction == "both" else "forward",
        "device": setting.device,
    }


Event = dict[str, Any]
COMMUNICATION = "communication"
ANCHOR = "clock anchor"
PREFIX = "communication #"
KEPT = ("ph", "cat", "name", "tid", "dur")
ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")


@dataclass(frozen=True)
class Profile:
    """What one rank brought back.

    Args:
        rank: which.
        where: its device and host.
        events: of torch.profiler's Chrome trace.
        calls: of its communicator, as `Log.calls` has them.
        anchors: seconds before and after each mark, by this rank's clock.
        offset: seconds that this clock is ahead of rank 0's.
    """

    rank: int
    where: str
    events: list[Event]
    calls: list[dict[str, Any]]
    anchors: list[tuple[float, float]]
    offset: float


def merge(profiles: Iterable[Profile], about: dict[str, Any]) -> dict[str, Any]:
    """Return one trace, whose time starts with the first event of any rank.

    Args:
        profiles: of all ranks.
        about: what was traced, for the reader of the file.

    Returns:
        The content of trace.json. Times are microseconds.
    """
    every = sorted(profiles, key=lambda profile: profile.rank)
    spans = [event for profile in every for event in _spans(profile)]
    start = min((event["ts"] for event in spans), default=0.0)
    for event in spans:
        event["ts"] = round(event["ts"] - start, 3)
    spans.sort(key=lambda event: (event["pid"], event["ts"], -event.get("dur", 0)))
    rows = [row for profile in every for row in _rows(profile, spans)]
    return {"displayTimeUnit": "ms", "otherData": about, "traceEvents": rows + spans}


def _spans(profile: Profile) -> Iterator[Event]:
    """Yield the spans of one rank by rank 0's clock, and what is under way until its wait."""
    shift = _shift(profile)
    begun: dict[int, float] = {}
    for event in profile.events:
        name: str = event["name"]
        about_itself = name.startswith(ANCHOR) or event.get("cat") in ("Trace", "overhead")
        if event.get("ph") != "X" or "dur" not in event or about_itself:
            continue
        span: Event = {part: event[part] for part in KEPT if part in event}
        span |= {"pid": profile.rank, "ts": event["ts"] + shift}
        if name.startswith(PREFIX):
            number = int(name.removeprefix(PREFIX))
            call, begun[number] = profile.calls[number], span["ts"]
            verb = "" if call["kind"] == "run" else f"{call['kind']} "
            sent = f"{size(call['bytes_sent'])} sent"
            told = {part: call[part] for part in ("operation", "kind", "bytes_sent")}
            span |= {"cat": COMMUNICATION, "name": f"{verb}{call['operation']}, {sent}"}
            span["args"] = told
            if call["transfer"] in begun:  # viewers show an asynchronous span in a row of its own
                identity = {"pid": profile.rank, "tid": 0, "id": f"{profile.rank}.{number}"}
                identity |= {
                    "cat": "under way",
                    "name": f"{call['operation']} under way, {sent}",
                }
                yield {**identity, "ph": "b", "ts": begun[call["transfer"]]}
                yield {**identity, "ph": "e", "ts": span["ts"] + span["dur"]}
        yield span


def _shift(profile: Profile) -> float:
    """Return the microseconds to add to a profiler's time, by the mark that was made fastest."""
    number, (start, end) = min(
        enumerate(profile.anchors), key=lambda anchor: anchor[1][1] - anchor[1][0]
    )
    mark = next(event for event in profile.events if event["name"] == f"{ANCHOR} {number}")
    return float(((start + end) / 2 - profile.offset) * 1e6 - (mark["ts"] + mark["dur"] / 2))


def _rows(profile: Profile, spans: list[Event]) -> Iterator[Event]:
    """Name the rows: the rank, and in it the threads of the program and the streams of a GPU."""

    def named(name: str, tid: Any, /, **args: Any) -> Event:
        return {"ph": "M", "name": name, "pid": profile.rank, "tid": tid, "args": args}

    yield named("process_name", 0, name=f"rank {profile.rank}, {profile.where}")
    yield named("process_sort_index", 0, sort_index=profile.rank)
    mine = [span for span in spans if span["pid"] == profile.rank and span["ph"] == "X"]
    streams = {span["tid"] for span in mine if span.get("cat") in ON_DEVICE}
    for tid in sorted({span["tid"] for span in mine}, key=str):
        kind = "stream" if tid in streams else "thread"
        yield named("thread_name", tid, name=f"{kind} {tid}")
