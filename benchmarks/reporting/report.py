"""Report on records: `nox -s report -- RECORDS.jsonl... --out DIR`.

Write report.md, report.html and report.png. With `--history` show only changes over the commits, in
history.md, history.html and history.png, and print them. Runs are ordered by their ids, which begin
with the time; records that cannot be compared with the newest run are named and left out.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Annotated, Any

import msgspec

from benchmarks.launching import Options, UsageError, about, program, writable
from benchmarks.records import ForeignError, Record, read, read_bytes
from benchmarks.reporting import derive, history, plots, tables
from benchmarks.reporting.page import (
    COLOURS,
    GRID,
    Axes,
    Page,
    Section,
    case_rows,
    picture,
    short,
    write,
)
from benchmarks.reporting.tables import count, make, milliseconds, percent, plain, size

NO_HISTORY = (
    "no case was measured in two runs or more on the same machine by the same harness. "
    "A history needs the records of several runs. "
    "Measure again, after the next commit, into the same file: nox -s bench -- --out RECORDS.jsonl"
)
OPTIONS: Options = {
    "records": about(type=Path, nargs="*", metavar="RECORDS", help="files of JSON lines"),
    "--trace": about(type=Path, help="trace.json of nox -s trace"),
    "--history": about(action="store_true", help="only times over commits, and where they changed"),
    "--out": about(type=Path, default=Path("reports"), help="folder (default: %(default)s)"),
}


@program("report", "Tables and plots of benchmark records.", OPTIONS)
def main(options: argparse.Namespace) -> int:
    """Write a report. Return 0, or 1 if there is nothing to report, or 2 for bad arguments."""
    name, problems = "history" if options.history else "report", list[str]()
    writable(options.out / f"{name}.html")
    if not (options.records or options.trace):
        raise UsageError("name a file of records, or pass --trace.")
    records, left_out = derive.comparable(_records(options.records, problems))
    problems += left_out
    sections = _history(records)
    if not options.history:
        sections = [*newest(derive.by_setting(records)), *sections]
        try:
            sections += [read_trace(options.trace)] if options.trace else []
        except ForeignError as error:
            problems.append(str(error))
    elif not sections:
        problems.append(NO_HISTORY)
    page = Page(f"Benchmark {name}", tuple(problems), tuple(sections))
    paths = write(page, options.out, name)
    for problem in page.complaints:
        print(f"not used: {problem}", file=sys.stderr)
    if options.history:
        for table in chain(*(section.tables for section in sections)):
            tables.show(table)
    print(*paths, sep="\n")
    return 0 if sections else 1


def _records(paths: Sequence[Path], problems: list[str]) -> Iterator[Record]:
    """Yield the records of all files, in their order; add problems, each naming its file."""
    for path in paths:
        reading = read(path)
        yield from reading.records
        problems += reading.problems or (
            [] if reading.records else [f"{path}: it holds no record."]
        )


def newest(groups: dict[derive.Setting, list[Record]]) -> Iterator[Section]:
    """Yield the sections of a report: all settings, then plots and tables of the newest one."""
    if not groups:
        return
    newest, records = list(groups)[-1], derive.latest(groups)
    rows = derive.rows(records)
    side = ", head of the comparison" * (newest.side == "head")
    text = f"Below: commit {newest.commit}{side}." * (len(groups) > 1)
    yield Section("What was measured", text, (tables.settings(groups), *tables.failures(records)))
    for title, note, pictures in (
        (
            "Scaling",
            "Every line is the same work on more ranks. Hollow points say nothing about scaling.",
            plots.scaling(rows),
        ),
        ("Communication", "Phases of a step, mean over the ranks.", plots.shares(rows)),
        (
            "Bandwidth",
            "Bus bandwidth as points, algorithm bandwidth dashed.",
            plots.bandwidth(rows),
        ),
    ):
        if found := tuple(pictures):
            more = len(found) - plots.MAX_PICTURES
            left_out = f" {more} more plots are left out." * (more > 0)
            yield Section(title, note + left_out, (), found[: plots.MAX_PICTURES])
    if rows:
        yield Section("Numbers", tables.LEGEND, tuple(tables.per_ranks(rows)))


def _history(records: Sequence[Record]) -> list[Section]:
    """Return the section on times over commits; an empty list if no case has several runs."""
    series = history.collect(records)
    pictures = tuple(history.pictures(series))[: plots.MAX_PICTURES]
    text = (
        "One point for each run: the median over its launches. "
        "Only runs on the same machine and software, measured by the same harness, are compared."
    )
    return [Section("History", text, tuple(history.alerts(series)), pictures)] if series else []


RANKS = 32  # at most so many are in the picture
COLUMNS = ("rank", "step (ms)", "communication (ms)", "share", "calls", "bytes sent")
TOLD = ("scheme", "direction", "layout", "dtype", "device")
Microseconds = Annotated[float, msgspec.Meta(ge=0, le=1e12)]


class Call(msgspec.Struct, frozen=True):
    """The arguments of an event that is a communication."""

    operation: str = "other"
    kind: str = ""
    bytes_sent: int = 0


class Event(msgspec.Struct):
    """The fields that are read of an event in a Chrome trace."""

    ph: str
    name: str
    pid: Annotated[int, msgspec.Meta(ge=0, le=65535)]
    cat: str = ""
    ts: Microseconds = 0.0
    dur: Microseconds = 0.0
    args: Call = Call()


class Trace(msgspec.Struct, rename="camel"):
    """The fields that are read of a Chrome trace."""

    trace_events: Annotated[list[Event], msgspec.Meta(max_length=1_000_000)]
    other_data: dict[str, Any] = {}


def read_trace(path: Path) -> Section:
    """Return the section on a trace.

    Args:
        path: trace.json of `nox -s trace`.

    Raises:
        ForeignError: the file is no trace, or has no step of any rank.
    """
    try:
        trace = msgspec.json.decode(read_bytes(path), type=Trace)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise ForeignError(f"{path}: {error}") from error
    spans = [event for event in trace.trace_events if event.ph == "X"]
    steps = sorted((e for e in spans if e.name == "step"), key=lambda step: step.pid)
    if not steps:
        raise ForeignError(f"{path}: no span named step. Make the trace by nox -s trace.")
    calls = [event for event in spans if event.cat == "communication"]
    told = ", ".join(plain(trace.other_data[n], 40) for n in TOLD if n in trace.other_data)
    table = make("Communication of one step", COLUMNS, (_cells(step, calls) for step in steps))
    shown = steps[:RANKS]
    broad = (9.0, 1.7 + 0.42 * len(shown))
    drawn = picture("One step on every rank", draw_steps, shown, calls, size=broad, columns=4)
    return Section("Timeline", f"One step: {told}.", (table,), (drawn,))


def _cells(step: Event, calls: Sequence[Event]) -> tuple[str, ...]:
    mine = [call for call in calls if call.pid == step.pid]
    spent = covered(step, mine)
    sent = [call.args.bytes_sent for call in mine if call.args.kind not in ("wait", "agree")]
    return (
        str(step.pid),
        milliseconds(step.dur / 1e6),
        milliseconds(spent / 1e6),
        percent(spent / step.dur if step.dur else None),
        count(len(mine)),
        size(sum(sent)),  # without waits, which repeat the bytes of their start, and agreement
    )


def covered(step: Event, calls: Sequence[Event]) -> float:
    """Return the microseconds of a step in which any of the calls was under way."""
    spent, reached = 0.0, step.ts
    for call in sorted(calls, key=lambda call: call.ts):
        first, last = max(call.ts, reached), min(call.ts + call.dur, step.ts + step.dur)
        spent, reached = spent + max(last - first, 0.0), max(reached, last)
    return spent


def draw_steps(axes: Axes, steps: Sequence[Event], calls: Sequence[Event]) -> None:
    """Draw a grey bar for the step of each rank, and its communication over it."""
    rows = {step.pid: place for place, step in enumerate(steps)}
    start = min(step.ts for step in steps)

    def bars(events: Sequence[Event], **looks: Any) -> None:
        lefts = [(event.ts - start) / 1e3 for event in events]
        widths = [event.dur / 1e3 for event in events]
        axes.barh([rows[event.pid] for event in events], widths, 0.62, lefts, **looks)

    bars(steps, color=GRID, alpha=0.35, label="computation")
    shown = [call for call in calls if call.pid in rows]
    by_name = derive.grouped(shown, lambda call: call.args.operation)
    for number, (name, mine) in enumerate(sorted(by_name, key=lambda pair: pair[0] == "control")):
        bars(mine, color=COLOURS[min(number, len(COLOURS) - 1)], label=short(name))
    case_rows(axes, [f"rank {step.pid}" for step in steps], "rank (number)")
    axes.set_xlabel("time since the first rank began (ms)")
