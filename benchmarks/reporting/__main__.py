"""Report on records: `python -m benchmarks.reporting RECORDS.jsonl... [--compare RESULT.json] [--trace TRACE.json] --out DIR`.

Writes report.md, report.html and report.png. With `--history` only what changed over the commits: history.md, history.html and
history.png; the changes are printed too.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.records import Record, read
from benchmarks.reporting import comparison, console, derive, history, plots, tables, timeline
from benchmarks.reporting.foreign import ForeignError
from benchmarks.reporting.page import Page, Section, write
from benchmarks.reporting.style import styled

NOTHING, USAGE = 1, 2


@dataclass
class Material:
    """What the files held.

    Args:
        records: of all files, in their order.
        problems: what could not be used, each naming its file.
    """

    records: list[Record] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def part(self, reader: Callable[[Path], Section], path: Path | None) -> Iterator[Section]:
        """The section on a file, if there is one; a file that cannot be used is a problem, not the end."""
        try:
            if path is not None:
                yield reader(path)
        except ForeignError as error:
            self.problems.append(str(error))


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(prog="report", description="Tables and plots of benchmark records.")
    made.add_argument("records", type=Path, nargs="*", metavar="RECORDS", help="files of JSON lines")
    made.add_argument("--compare", type=Path, metavar="RESULT", help="result.json of a comparison")
    made.add_argument("--trace", type=Path, help="trace.json of nox -s trace")
    made.add_argument("--history", action="store_true", help="only times over commits, and where they changed")
    made.add_argument("--out", type=Path, default=Path("reports"), help="folder (default: %(default)s)")
    return made


def main(arguments: list[str] | None = None) -> int:
    """Write a report; the exit code is 0, 1 if nothing could be used, 2 for arguments that make no sense."""
    options = parser().parse_args(arguments)
    if not (options.records or options.compare or options.trace):
        print("report: name a file of records, or pass --compare or --trace.", file=sys.stderr)
        return USAGE
    material = _material(options.records)
    with styled():
        found = _history(material) if options.history else _sections(material, options)
        name = "history" if options.history else "report"
        page = Page("Benchmark history" if options.history else "Benchmark report", tuple(material.problems), tuple(found))
        paths = write(page, options.out, name)
    for problem in page.complaints:
        print(f"not used: {problem}", file=sys.stderr)
    if options.history:
        console.show(page)
    print(*paths, sep="\n")
    return 0 if page.sections else NOTHING


def _material(paths: Sequence[Path]) -> Material:
    material = Material()
    for path in paths:
        reading = read(path)
        material.records += reading.records
        material.problems += reading.problems
        if not reading.records and not reading.problems:
            material.problems.append(f"{path}: it holds no record.")
    return material


def _sections(material: Material, options: argparse.Namespace) -> list[Section]:
    """The verdicts, the newest setting in full, the history, a timeline."""
    compared = list(material.part(comparison.read, options.compare))
    traced = list(material.part(timeline.read, options.trace))
    groups = derive.by_setting(material.records)
    run = list(_run(groups)) if groups else []
    return [*compared, *run, *_history(material), *traced]


def _run(groups: dict[derive.Setting, list[Record]]) -> Iterator[Section]:
    """What was measured, and the newest of it as plots and tables."""
    newest, records = list(groups.items())[-1]
    rows = derive.rows(records)
    text = f"Below: commit {newest.commit}{', head of the comparison' * (newest.side == 'head')}." if len(groups) > 1 else ""
    failed = tables.failures(records)
    yield Section("What was measured", text, (tables.settings(groups), *([failed] if failed else [])))
    for title, note, made in (
        ("Scaling", "Every line is the same work on more ranks. Hollow points say nothing about scaling.", plots.scaling),
        ("Communication", "Phases of a step, mean over the ranks.", plots.shares),
        ("Bandwidth", "Bus bandwidth as points, algorithm bandwidth dashed.", plots.bandwidth),
    ):
        pictures = tuple(made(rows))
        if pictures:
            shown = pictures[: plots.MAX_PICTURES]
            left_out = f" {len(pictures) - len(shown)} more plots are left out." if len(pictures) > len(shown) else ""
            yield Section(title, note + left_out, (), shown)
    if rows:
        yield Section("Numbers", tables.LEGEND, tuple(tables.per_ranks(rows)))


def _history(material: Material) -> list[Section]:
    """Times over commits, where there are several runs."""
    series = history.collect(material.records)
    alerts = tuple(history.alerts(series))
    pictures = tuple(history.pictures(series))[: plots.MAX_PICTURES]
    text = "One point for each run: the median over its launches. Only runs on the same machine and software are compared."
    return [Section("History", text, alerts, pictures)] if series else []


if __name__ == "__main__":
    sys.exit(main())
