"""Trace one step of a transformer block on all ranks: `nox -s trace`.

Perfetto shows the trace. It names every communication. All times are by rank 0's clock.
"""

import argparse
import functools
import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec
from torch.profiler import ProfilerActivity, profile, record_function

import sp_core as sp
from benchmarks import launching, scaling
from benchmarks.cases.block import block
from benchmarks.cases.case import meshes, training, wait_for
from benchmarks.cases.setting import BlockSetting
from benchmarks.launching import Launch, Options, UsageError, about, writable
from benchmarks.machine import device
from benchmarks.records import AXIS
from benchmarks.reporting.tables import size
from benchmarks.sample import offset
from benchmarks.worker import Rank
from sp_core.transport import Done

NAMES: dict[str, Callable[..., object]] = {
    "run": lambda operation, _: operation.op,
    "start": lambda operation, *_: operation.op,
    "exchange": lambda sends, recvs, name="exchange", **_: name,
    "wait": lambda handle, name: name,
    "_agree": lambda *_: "control",
}
"""By method of a communicator, a function of its arguments that returns the operation's name."""
KINDS = {"exchange": "start", "_agree": "agree"}

DESCRIBED = ("scheme", "layout", "dtype", "ranks", "transport")
KEPT = ("ph", "cat", "name", "tid", "ts", "dur")
Event = dict[str, Any]
"""An event of a Chrome trace. Times are microseconds since 1970."""


class Log:
    """Collects a span of every communication of a rank.

    A span has the operation, named as in the communicator's counters, the kind, and the bytes that
    this rank sent since its last call of the operation. The kind is "run" (until it is done),
    "start" (without waiting), "wait" (for a started call) or "agree" (on arguments). The bytes of a
    wait include those of its start.
    """

    def __init__(self, comm: sp.Communicator) -> None:
        self.events: list[Event] = []
        self._comm, self._told = comm, Counter[str]()
        # holds the handle, because a new handle could get the id of a freed one
        self._begun: dict[int, tuple[object, Event]] = {}
        comm.counters.reset()
        for method in ("run", "start", "exchange", "wait", "_agree"):
            setattr(comm, method, functools.partial(self._span, method, getattr(comm, method)))

    def _span(self, method: str, act: Callable[..., Any], *arguments: Any, **more: Any) -> Any:
        waited = arguments[0] if method == "wait" else None
        if isinstance(waited, Done):
            return act(*arguments)  # nothing was sent
        _, begun = self._begun.pop(id(waited), (None, None))
        start = time.time_ns() / 1e3
        result = act(*arguments, **more)
        end = time.time_ns() / 1e3
        name = str(NAMES[method](*arguments, **more))
        kind = KINDS.get(method, method if begun or waited is None else "run")
        sent = self._comm.counters[name].bytes_sent - self._told[name]  # since the last call
        self._told[name] += sent
        sent += begun["args"]["bytes_sent"] if begun else 0
        verb, told = "" if kind == "run" else f"{kind} ", f"{size(sent)} sent"
        span = {
            "ph": "X",
            "cat": "communication",
            "name": f"{verb}{name}, {told}",
            "tid": threading.get_native_id(),
            "ts": start,
            "dur": end - start,
            "args": {"operation": name, "kind": kind, "bytes_sent": sent},
        }
        self.events.append(span)
        if kind == "start":
            self._begun[id(result)] = result, span
        if begun:  # viewers show an asynchronous span in a row of its own
            both = {"cat": "under way", "name": f"{name} under way, {told}", "tid": 0}
            both["id"] = f"{self._comm.rank}.{len(self.events)}"
            self.events += [{**both, "ph": "b", "ts": begun["ts"]}, {**both, "ph": "e", "ts": end}]
        return result


def measure(values: Any, rank: Rank) -> dict[str, Any]:
    """Trace one step. Return the merged trace on rank 0, and an empty dict on the others."""
    from mpi4py import MPI

    setting, world = msgspec.convert(values, BlockSetting), rank.world
    where = device(setting.device, world, share_gpu=setting.share_gpu)
    with meshes(setting.case, world, where) as mesh:
        step = stepping(setting, mesh)
        for _ in range(2):
            step()
        log, ahead = Log(mesh[AXIS]), offset(world, time.time)
        kinds = [ProfilerActivity.CPU, ProfilerActivity.CUDA][: 1 + (where.type == "cuda")]
        with profile(activities=kinds) as profiler:
            world.Barrier()
            with record_function("step"):
                step()
                wait_for(where)
    path = rank.folder / f"profile-{world.rank}.json"
    profiler.export_chrome_trace(str(path))
    events = [*spans(json.loads(path.read_text())), *log.events]
    place = f"{where} of {MPI.Get_processor_name()}"
    every = world.gather(shifted(world.rank, place, events, ahead))
    if every is None:
        return {}
    case = setting.case
    about = {
        **{name: getattr(case, name) for name in DESCRIBED},
        **case.shape,
        "direction": "forward and backward" if case.direction == "both" else "forward",
        "device": setting.device,
    }
    return {"trace": merge(every, about)}


def stepping(setting: BlockSetting, mesh: sp.Mesh) -> Callable[[], None]:
    """Return a function that runs one step of a block and names its phases in the profile."""
    names = {"attention": f"attention, {setting.case.scheme}", "other": "forward"}

    def named(phase: str) -> AbstractContextManager[Any]:
        return record_function(names.get(phase, phase))

    (layer, forward, _), x = block(setting, mesh, named)
    direction = setting.case.direction
    leaves = (x.requires_grad_(direction == "both"), *layer.parameters())
    return training(direction, lambda: forward(x), leaves, named)


def spans(trace: Event) -> Iterator[Event]:
    """Yield the spans of a torch.profiler trace, without those about the profiler itself."""
    for event in trace["traceEvents"]:
        about_itself = event.get("cat") in ("Trace", "overhead")
        if event.get("ph") == "X" and "dur" in event and not about_itself:
            span = {part: event[part] for part in KEPT if part in event}
            yield {**span, "ts": event["ts"] + trace["baseTimeNanoseconds"] / 1e3}


def shifted(rank: int, place: str, events: Sequence[Event], ahead: float) -> list[Event]:
    """Return the events of a rank by rank 0's clock, after events that name their rows.

    Args:
        rank: the rank's number.
        place: names the rank's device and host.
        events: the rank's events, by its own clock.
        ahead: seconds that this clock is ahead of rank 0's.
    """

    def named(name: str, tid: Any, /, **args: Any) -> Event:
        return {"ph": "M", "name": name, "pid": rank, "tid": tid, "args": args}

    rows = [named("process_name", 0, name=f"rank {rank}, {place}")]
    rows.append(named("process_sort_index", 0, sort_index=rank))
    shown = [event for event in events if event["ph"] == "X"]
    kernels = ("kernel", "gpu_memcpy", "gpu_memset")
    streams = {event["tid"] for event in shown if event.get("cat") in kernels}
    for tid in sorted({event["tid"] for event in shown}, key=str):
        kind = "stream" if tid in streams else "thread"  # of a GPU, or of the program
        rows.append(named("thread_name", tid, name=f"{kind} {tid}"))
    return [*rows, *({**event, "pid": rank, "ts": event["ts"] - ahead * 1e6} for event in events)]


def merge(ranks: Iterable[Sequence[Event]], about: dict[str, Any]) -> dict[str, Any]:
    """Return one trace, whose time starts with the first event of any rank.

    Args:
        ranks: the events of each rank, all by one clock; events without a time name rows.
        about: describes what was traced, for the reader of the file.

    Returns:
        The content of trace.json. Times are microseconds.
    """
    every = [*chain(*ranks)]
    timed = [event for event in every if "ts" in event]
    start = min((event["ts"] for event in timed), default=0.0)
    for event in timed:
        event["ts"] = round(event["ts"] - start, 3)
    every.sort(key=lambda one: ("ts" in one, one["pid"], one.get("ts", 0.0), -one.get("dur", 0)))
    return {"displayTimeUnit": "ms", "otherData": about, "traceEvents": every}


LEFT_OUT = ("--preset", "--iterations", "--warmup")
OPTIONS: Options = {
    **{flag: option for flag, option in scaling.OPTIONS.items() if flag not in LEFT_OUT},
    "--out": about(type=Path, default=Path("reports/trace.json"), help="default: %(default)s"),
}


@launching.program(
    "trace",
    "One step of a transformer block, all ranks side by side.",
    OPTIONS,
    scheme="ring",
    sharding="zigzag",
    mask="causal",
    ranks="4",
    backward=True,
    preset="trace",
    iterations=None,
    warmup=None,
)
def main(options: argparse.Namespace) -> int:
    """Write the trace. Return 0, or 1 for a failed run, or 2 for options that cannot be run."""
    launch = Launch(options.launcher, options.timeout)
    setting, *others = scaling.settings(options)
    if others or len(setting.case.mesh) > 1:
        raise UsageError("pass one number of --ranks, one --dtype, and no hybrid scheme.")
    out = writable(options.out.resolve())
    out.unlink(missing_ok=True)  # an older trace must not pass for the new one
    found = launching.run(setting.case.ranks, "benchmarks.reporting.trace:measure", setting, launch)
    if found["status"] != "ok":
        print(f"trace: the run failed: {found['reason']}\n{found['output']}")
        print("trace: nothing was written.")
        return 1
    out.write_text(json.dumps(found["trace"], separators=(",", ":"), allow_nan=False))
    what = f"{setting.case.ranks} ranks, {scaling.step(setting.case)}"
    print(f"{out}: {what}. Open it in ui.perfetto.dev or chrome://tracing.")
    return 0
