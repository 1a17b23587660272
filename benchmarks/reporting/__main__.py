"""Report on records: `python -m benchmarks.reporting RECORDS.jsonl... --out DIR`.

Writes report.md, report.html and report.png. With `--history` only changes over the commits:
history.md, history.html and history.png; the changes are printed too.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.files import ForeignError
from benchmarks.launching import Options, UsageError, about, main as start, parse, program, writable
from benchmarks.records import Record, read
from benchmarks.reporting import derive, foreign, history, plots, tables
from benchmarks.reporting.page import Page, Section, write
from benchmarks.reporting.style import Picture, styled

NO_HISTORY = (
    "no case was measured in two runs or more on the same machine. "
    "A history needs the records of several runs. "
    "Measure again, after the next commit, into the same file: nox -s bench -- --out RECORDS.jsonl"
)
OPTIONS: Options = {
    "records": about(type=Path, nargs="*", metavar="RECORDS", help="files of JSON lines"),
    "--compare": about(type=Path, metavar="RESULT", help="result.json of a comparison"),
    "--trace": about(type=Path, help="trace.json of nox -s trace"),
    "--history": about(action="store_true", help="only times over commits, and where they changed"),
    "--out": about(type=Path, default=Path("reports"), help="folder (default: %(default)s)"),
}


@program("report")
def main(arguments: Sequence[str] | None = None) -> int:
    """Write a report; return 0, 1 if nothing could be used, 2 for arguments that make no sense."""
    options = parse("report", "Tables and plots of benchmark records.", OPTIONS, arguments)
    name, problems = "history" if options.history else "report", list[str]()
    writable(options.out / f"{name}.html")
    if not (options.records or options.compare or options.trace):
        raise UsageError("name a file of records, or pass --compare or --trace.")
    records = list(_records(options.records, problems))
    with styled():
        sections = _history(records) if options.history else _sections(records, options, problems)
        problems += [NO_HISTORY] if options.history and not sections else []
        page = Page(
            "Benchmark history" if options.history else "Benchmark report",
            tuple(problems),
            tuple(sections),
        )
        paths = write(page, options.out, name)
    for problem in page.complaints:
        print(f"not used: {problem}", file=sys.stderr)
    if options.history:
        for table in (table for section in sections for table in section.tables):
            tables.show(tables.console(), table)
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


def _sections(
    records: Sequence[Record], options: argparse.Namespace, problems: list[str]
) -> list[Section]:
    """Return the verdicts, the newest setting in full, the history, a timeline."""

    def left(reader: Callable[[Path], Section], path: Path | None) -> list[Section]:
        try:
            return [] if path is None else [reader(path)]
        except ForeignError as error:
            problems.append(str(error))
            return []

    return [
        *left(foreign.read_comparison, options.compare),
        *_run(derive.by_setting(records)),
        *_history(records),
        *left(foreign.read_trace, options.trace),
    ]


def _run(groups: dict[derive.Setting, list[Record]]) -> Iterator[Section]:
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
        if found := numbered(pictures):
            more = len(found) - plots.MAX_PICTURES
            left_out = f" {more} more plots are left out." * (more > 0)
            yield Section(title, note + left_out, (), found[: plots.MAX_PICTURES])
    if rows:
        yield Section("Numbers", tables.LEGEND, tuple(tables.per_ranks(rows)))


def numbered(pictures: Iterable[Picture]) -> tuple[Picture, ...]:
    """Return pictures of which no two have the same title."""
    every = tuple(pictures)
    total, seen = Counter(picture.title for picture in every), Counter[str]()
    found = []
    for picture in every:
        title, same = picture.title, total[picture.title]
        seen[title] += 1
        part = f" ({seen[title]} of {same})" if same > 1 else ""
        found.append(replace(picture, title=title + part))
    return tuple(found)


def _history(records: Sequence[Record]) -> list[Section]:
    """Return times over commits, if there are several runs."""
    series = history.collect(records)
    pictures = numbered(history.pictures(series))[: plots.MAX_PICTURES]
    text = (
        "One point for each run: the median over its launches. "
        "Only runs on the same machine and software are compared."
    )
    return [Section("History", text, tuple(history.alerts(series)), pictures)] if series else []


if __name__ == "__main__":
    start(main)
