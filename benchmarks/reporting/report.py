"""Report on records: `nox -s report -- RECORDS.jsonl... --out DIR`.

Writes report.md, report.html and report.png. With `--history` only changes over the commits:
history.md, history.html and history.png; the changes are printed too.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.launching import Options, UsageError, about, program, writable
from benchmarks.records import ForeignError, Record, read
from benchmarks.reporting import derive, history, plots, tables, timeline
from benchmarks.reporting.page import Page, Section, write

NO_HISTORY = (
    "no case was measured in two runs or more on the same machine. "
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
    """Write a report; return 0, 1 if nothing could be used, 2 for arguments that make no sense."""
    name, problems = "history" if options.history else "report", list[str]()
    writable(options.out / f"{name}.html")
    if not (options.records or options.trace):
        raise UsageError("name a file of records, or pass --trace.")
    records = list(_records(options.records, problems))
    sections = _history(records)
    if not options.history:
        sections = [*newest(derive.by_setting(records)), *sections]
        sections += _timeline(options.trace, problems) if options.trace else []
    elif not sections:
        problems.append(NO_HISTORY)
    page = Page(f"Benchmark {name}", tuple(problems), tuple(sections))
    paths = write(page, options.out, name)
    for problem in page.complaints:
        print(f"not used: {problem}", file=sys.stderr)
    if options.history:
        for table in (table for section in sections for table in section.tables):
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


def _timeline(path: Path, problems: list[str]) -> list[Section]:
    """Return the section on a trace; none if the file is not one, which is added to problems."""
    try:
        return [timeline.read_trace(path)]
    except ForeignError as error:
        problems.append(str(error))
        return []


def newest(groups: dict[derive.Setting, list[Record]]) -> Iterator[Section]:
    """Yield the settings, and the newest of them as plots and tables."""
    if not groups:
        return
    newest, records = list(groups.items())[-1]
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
    """Return times over commits, if there are several runs."""
    series = history.collect(records)
    pictures = tuple(history.pictures(series))[: plots.MAX_PICTURES]
    text = (
        "One point for each run: the median over its launches. "
        "Only runs on the same machine and software are compared."
    )
    return [Section("History", text, tuple(history.alerts(series)), pictures)] if series else []
