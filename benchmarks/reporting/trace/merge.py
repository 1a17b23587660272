"""The profiles of all ranks as one Chrome trace: a row for each rank, communication by name and size, everything by one clock.

Source: Trace Event Format, docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from benchmarks.reporting.tables import size

Event = dict[str, Any]
COMMUNICATION = "communication"
ANCHOR = "clock anchor"
PREFIX = "communication #"
KEPT = ("ph", "cat", "name", "tid", "dur")


@dataclass(frozen=True)
class Profile:
    """What one rank brought back.

    Args:
        rank: which.
        where: its device and host.
        events: of torch.profiler's Chrome trace.
        calls: of its communicator, as `Log.as_dicts` gives them.
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
    """One trace, whose time starts with the first event of any rank.

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
    """The spans of one rank by rank 0's clock, with what is under way between start and wait."""
    shift = _shift(profile)
    begun: dict[int, float] = {}
    for event in profile.events:
        if event.get("ph") != "X" or "dur" not in event or _ours(event):
            continue
        span: Event = {name: event[name] for name in KEPT if name in event}
        span |= {"pid": profile.rank, "ts": event["ts"] + shift}
        number = _number(event)
        if number is not None:
            call = profile.calls[number]
            span |= _named(call)
            begun[number] = span["ts"]
            if call["transfer"] in begun:
                yield from _under_way(
                    profile.rank, call, begun[call["transfer"]], span["ts"] + span["dur"]
                )
        yield span


def _ours(event: Event) -> bool:
    """Marks of this tool, and what the profiler says about itself."""
    return event["name"].startswith(ANCHOR) or event.get("cat") in ("Trace", "overhead")


def _number(event: Event) -> int | None:
    """Which call of the communicator an event shows."""
    name = event["name"]
    return int(name.removeprefix(PREFIX)) if name.startswith(PREFIX) else None


def _named(call: dict[str, Any]) -> Event:
    verb = "" if call["kind"] == "run" else f"{call['kind']} "
    return {
        "cat": COMMUNICATION,
        "name": f"{verb}{call['operation']}, {size(call['bytes_sent'])} sent",
        "args": {name: call[name] for name in ("operation", "kind", "bytes_sent")},
    }


def _under_way(rank: int, call: dict[str, Any], start: float, end: float) -> Iterator[Event]:
    """An asynchronous span, which the viewers show in a row of its own: from the start of a transfer to the end of its wait."""
    name = f"{call['operation']} under way, {size(call['bytes_sent'])} sent"
    identity = {
        "cat": "under way",
        "name": name,
        "pid": rank,
        "tid": 0,
        "id": f"{rank}.{call['transfer']}",
    }
    yield {**identity, "ph": "b", "ts": start}
    yield {**identity, "ph": "e", "ts": end}


def _shift(profile: Profile) -> float:
    """Microseconds to add to a time of the profiler, by the mark that was made fastest."""
    marks = {
        event["name"]: event
        for event in profile.events
        if event.get("ph") == "X" and event["name"].startswith(ANCHOR)
    }
    number = min(
        range(len(profile.anchors)), key=lambda n: profile.anchors[n][1] - profile.anchors[n][0]
    )
    mark, (start, end) = marks[f"{ANCHOR} {number}"], profile.anchors[number]
    return float(((start + end) / 2 - profile.offset) * 1e6 - (mark["ts"] + mark["dur"] / 2))


def _rows(profile: Profile, spans: list[Event]) -> Iterator[Event]:
    """Names of the rows: the rank, and in it the threads of the program and the streams of a GPU."""
    rank = profile.rank
    yield {
        "ph": "M",
        "name": "process_name",
        "pid": rank,
        "tid": 0,
        "args": {"name": f"rank {rank}, {profile.where}"},
    }
    yield {
        "ph": "M",
        "name": "process_sort_index",
        "pid": rank,
        "tid": 0,
        "args": {"sort_index": rank},
    }
    mine = [span for span in spans if span["pid"] == rank and span["ph"] == "X"]
    on_device = {
        span["tid"] for span in mine if span.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")
    }
    for tid in sorted({span["tid"] for span in mine}, key=str):
        kind = "stream" if tid in on_device else "thread"
        yield {
            "ph": "M",
            "name": "thread_name",
            "pid": rank,
            "tid": tid,
            "args": {"name": f"{kind} {tid}"},
        }
