"""Merge the profiles of all ranks into one Chrome trace, by one clock.

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
