"""Run contests: launches are data, and options, files, resuming and tables are the same for all."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import launching
from benchmarks.launching import (
    REPORTS,
    Launch,
    Options,
    Record,
    UsageError,
    about,
    commit,
    writable,
    write_json,
)
from benchmarks.machine import busy_share
from benchmarks.reporting import tables
from benchmarks.statistics import Requirement
from sp_core.launch.command import find_mpiexec, mpiexec_version

SCHEMA_VERSION = 3
MPIS = {"HYDRA": "mpich", "PRRTE": "openmpi", "Open MPI": "openmpi"}
Plan = Callable[[argparse.Namespace], tuple[Record, list["Entry"]]]
"""Returns what the document says of all launches, and the launches; raises UsageError."""


class Wrong(str):  # noqa: SLOT000  # few, and none is kept
    """A complaint about a result, which makes the exit code 1."""


Part = tables.Table | str
Show = Callable[[Record], Iterable[Part]]
"""Yields what a document says: tables, lines and complaints."""


@dataclass(frozen=True)
class Entry:
    """One launch.

    Args:
        name: for people and for --only; no other launch of the contest has it.
        ranks: how many.
        measure: "module:function" that each rank calls.
        setting: its argument.
        launch: how ranks are started.
        about: part of the record that is known before.
        needed: the launches after it need it, so --only does not leave it out.
        again: a text in the output of a failure after which it is started once more.
    """

    name: str
    ranks: int
    measure: str
    setting: Any
    launch: Launch = field(default_factory=Launch)
    about: Record = field(default_factory=dict)
    needed: bool = False
    again: str = ""

    def run(self) -> Record:
        """Start the ranks and return their record."""
        job = (self.ranks, self.measure, self.setting, self.launch)
        record = launching.run(*job)
        is_again = self.again and self.again in record.get("output", "")
        return launching.run(*job) if is_again else record


@dataclass(frozen=True)
class Contest:
    """A program that runs launches one after the other, keeps their records and shows tables.

    Args:
        name: of the program.
        text: of its --help.
        options: its own.
        plan: makes the launches.
        show: says what the records say.
        file: of the document, in reports; {mpi} stands for the installed MPI.
        timeout: seconds of a launch.
        draw: draws the document into a PNG beside it.
    """

    name: str
    text: str | None
    options: Options
    plan: Plan
    show: Show
    file: str
    timeout: float
    draw: Callable[[Record, Path], None] | None = None

    def __call__(self, arguments: Sequence[str] | None = None) -> int:
        """Return the exit code: 0, 1 if something failed or is wrong, 2 for bad options, 130."""
        return launching.program(self.name, self.text, self._options())(self._main)(arguments)

    def _main(self, options: argparse.Namespace) -> int:
        if options.show:
            for path in options.show:
                self._tell(_finished(json.loads(path.read_text())))
            return 0
        known, entries = self.plan(options)
        entries = [one for one in entries if one.needed or options.only in one.name]
        if options.list:
            print("\n".join(one.name for one in entries))
            return 0
        if not entries:
            raise UsageError(f"no launch has {options.only!r} in its name. --list prints all.")
        path = str(options.out)
        out = writable(Path(path.format(mpi=installed()) if "{mpi}" in path else path))
        fresh = {"schema_version": SCHEMA_VERSION, "commit": commit(), **known}
        document = begun(out, fresh) if options.resume and out.exists() else fresh
        return self._run(entries, {"busy_before": busy_share(), "launches": [], **document}, out)

    def _options(self) -> Options:
        return {
            **self.options,
            "--only": about(default="", metavar="TEXT", help="launches with this in their names"),
            "--list": about(action="store_true", help="print the names of the launches"),
            "--out": about(
                type=Path,
                default=REPORTS / self.file,
                metavar="FILE",
                help="default: reports/" + self.file,
            ),
            "--resume": about(action="store_true", help="do the launches that --out does not hold"),
            "--timeout": about(
                type=float,
                default=self.timeout,
                metavar="S",
                help="limit of a launch (default: %(default)g)",
            ),
            "--show": about(
                type=Path, nargs="+", metavar="FILE", help="show records, and measure nothing"
            ),
        }

    def _run(self, entries: Iterable[Entry], document: Record, out: Path) -> int:
        """Run the launches that the document does not hold, and write it after each of them."""
        document, interrupted = _finished(document), False
        have = {record["name"] for record in document["launches"]}
        try:
            for entry in (one for one in entries if one.name not in have):
                record = {"name": entry.name, **entry.about, **entry.run()}
                document["launches"].append(record)
                told = f"{record['status']}, {record.get('took_s', 0.0):.0f} s"
                tables.say(f"{self.name}: {entry.name}: {told}")
                write_json(out, document)
                if record["status"] != "ok":
                    tables.say(f"{record['reason']}\n{record.get('output', '')}", "red")
                    if entry.needed:
                        break
        except KeyboardInterrupt:
            interrupted = True
            print(f"\n{self.name}: interrupted; what is complete follows.", file=sys.stderr)
        done = _finished(document)
        wrong = self._tell(done)
        if self.draw is not None and done["launches"]:
            self.draw(done, out.with_suffix(".png"))
        failed = len(done["launches"]) < len(document["launches"])
        return launching.INTERRUPTED if interrupted else int(wrong or failed)

    def _tell(self, document: Record) -> bool:
        """Print what a document says; return whether something is wrong."""
        nothing = [Wrong("no launch was completed.")]
        parts = list(self.show(document)) if document["launches"] else nothing
        for part in sorted(parts, key=lambda part: isinstance(part, Wrong)):
            if isinstance(part, tables.Table):
                tables.show(part)
            elif isinstance(part, Wrong):
                tables.say(f"{self.name}: {part}", "red")
            else:
                tables.say(part)
        return any(isinstance(part, Wrong) for part in parts)


def begun(path: Path, fresh: Record) -> Record:
    """Return the document of an earlier run, if it measured the same.

    Raises:
        UsageError: the file holds something else.
    """
    try:
        found: Record = json.loads(path.read_text())
    except ValueError:
        found = {}
    differing = [name for name, value in fresh.items() if found.get(name) != value]
    if differing:
        raise UsageError(
            f"--resume: {path} differs in {', '.join(differing)} from what is asked for; "
            "pass another --out."
        )
    return found


def installed() -> str:
    """Return the MPI of the mpiexec beside this Python, "openmpi" or "mpich".

    Raises:
        UsageError: it is another one, or there is none.
    """
    try:
        said = mpiexec_version()
    except FileNotFoundError as error:
        raise UsageError(str(error)) from error
    for word, name in MPIS.items():
        if word in said:
            return name
    raise UsageError(f"{find_mpiexec()} is neither of Open MPI nor of MPICH. Install one with pip.")


def requirements(title: str, lines: Iterable[Requirement], note: str = "") -> tables.Table:
    """Return a table of requirements."""
    columns = ("requirement", "must be", "median, interval", "")
    return tables.make(title, columns, ((line.text, *line.cells()) for line in lines), note)


def _finished(document: Record) -> Record:
    """Return a document without the launches that failed."""
    launches = [one for one in document["launches"] if one.get("status", "ok") == "ok"]
    return {**document, "launches": launches}
