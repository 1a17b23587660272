"""Run contests: launches are data; types of options, files, resuming and tables are shared."""

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks import launching
from benchmarks.checkout import commit, digest
from benchmarks.launching import (
    REPORTS,
    ROOT,
    Launch,
    Options,
    Record,
    UsageError,
    about,
    writable,
    write_json,
)
from benchmarks.machine import busy_share, environment, fingerprint, gpus
from benchmarks.reporting import tables
from benchmarks.statistics import Requirement
from sp_core.launch.command import find_mpiexec, mpiexec_version

SCHEMA_VERSION = 3
CODE = (
    *("sp_core/**/*.py", "benchmarks/**/*.py", "benchmarks/**/*.sh"),
    *("tests/oracle/**/*.py", "tests/conformance/**/*.py"),
)
"""The files whose code a contest may run; --resume continues only with the same ones."""
MPIS = {"HYDRA": "mpich", "PRRTE": "openmpi", "Open MPI": "openmpi"}


class Wrong(str):  # noqa: SLOT000  # few, and none is kept
    """A complaint about a result, which makes the exit code 1."""


def at_least(least: float, kind: type[int | float] = int) -> Callable[[str], float]:
    """Return a type of an option: a finite number that is not less than `least`."""

    def parsed(text: str) -> float:
        if not least <= (value := kind(text)) < math.inf:
            raise argparse.ArgumentTypeError(f"{text} is not {least:g} or more.")
        return value

    parsed.__name__ = kind.__name__  # argparse names it where the text is no number
    return parsed


def some_of(*choices: str) -> Callable[[str], list[str]]:
    """Return a type of an option: one or more of these words, with commas between them."""

    def parsed(text: str) -> list[str]:
        for word in (words := text.split(",")):
            if word not in choices:
                raise argparse.ArgumentTypeError(f"{word!r} is none of {', '.join(choices)}.")
        return words

    return parsed


Part = tables.Table | str


@dataclass(frozen=True)
class Entry:
    """One launch.

    Args:
        name: the launch's unique name, which is shown and which --only matches.
        ranks: the number of ranks, which the record repeats.
        setting: the argument of the function that each rank calls.
        about: fields of the record that are known before the launch.
        launch: how ranks are started; the contest sets its timeout.
        measure: "module:function" that each rank calls; the contest's if empty.
        needed: whether later launches need this one: --only keeps it, and its failure ends the run.
        again: a failed launch is started once more if its output has this text.
    """

    name: str
    ranks: int
    setting: Any
    about: Record = field(default_factory=dict)
    launch: Launch = field(default_factory=Launch)
    measure: str = ""
    needed: bool = False
    again: str = ""


Plan = Callable[[argparse.Namespace], tuple[Record, list[Entry]]]
"""Returns the document's fields for all launches, and the launches; may raise UsageError."""


@dataclass(frozen=True)
class Contest:
    """A program that runs launches one after the other, keeps their records and shows tables.

    Args:
        name: the program's name.
        text: the text of its --help.
        options: the options that only this contest has.
        plan: makes the launches.
        measure: "module:function" that each rank calls.
        show: yields the tables, lines and complaints that a document results in.
        file: the name of the document's file in reports; {mpi} stands for the installed MPI.
        timeout: the limit of a launch in seconds.
        draw: draws the document into a PNG beside it.
    """

    name: str
    text: str | None
    options: Options
    plan: Plan
    measure: str
    show: Callable[[Record], Iterable[Part]]
    file: str
    timeout: float
    draw: Callable[[Record, Path], None] | None = None

    def __call__(self, arguments: Sequence[str] | None = None) -> int:
        """Run the program. Return 0, 1 for a failure, 2 for bad options, 130 if interrupted."""
        options = {
            **self.options,
            "--only": about(default="", metavar="TEXT", help="launches with this in their names"),
            "--list": about(action="store_true", help="print the names of the launches"),
            "--out": about(
                type=Path,
                default=REPORTS / self.file,
                metavar="FILE",
                help=f"default: reports/{self.file}; an earlier file gets its time into its name",
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
        return launching.program(self.name, self.text, options)(self._main)(arguments)

    def _main(self, options: argparse.Namespace) -> int:
        if options.show:
            return max(map(self._again, options.show))
        known, entries = self.plan(options)
        entries = [
            replace(one, launch=replace(one.launch, timeout=options.timeout))
            for one in entries
            if one.needed or options.only in one.name
        ]
        if options.list:
            print("\n".join(one.name for one in entries))
            return 0
        if not any(options.only in one.name for one in entries):
            raise UsageError(f"no launch has {options.only!r} in its name. --list prints all.")
        path = str(options.out)
        out = writable(Path(path.replace("{mpi}", installed()) if "{mpi}" in path else path))
        code = digest(ROOT, *CODE)  # not all need be committed
        fresh = {"schema_version": SCHEMA_VERSION, "commit": commit(), "code": code}
        fresh["machine"] = machine(getattr(options, "device", "cpu"))
        document = {**fresh, **known}
        if options.resume and out.exists():
            document = begun(out, document)
        elif out.exists():
            written = datetime.fromtimestamp(out.stat().st_mtime, UTC)
            for old in filter(Path.exists, (out, out.with_suffix(".png"))):
                old.replace(old.with_suffix(f".{written:%Y%m%dT%H%M%SZ}{old.suffix}"))
        document = {"busy_before": busy_share(), "env": environment(), "launches": [], **document}
        return self._run(entries, _finished(document), out)

    def _run(self, entries: Iterable[Entry], document: Record, out: Path) -> int:
        """Run the launches that the document lacks; write it after each. Return the exit code."""
        have, interrupted = {record["name"] for record in document["launches"]}, False
        try:
            for entry in (one for one in entries if one.name not in have):
                found = self._launch(entry)
                known = {"name": entry.name, "ranks": entry.ranks, **entry.about}
                document["launches"].append({**known, **found})
                write_json(out, document)
                if found["status"] != "ok" and entry.needed:
                    break
        except KeyboardInterrupt:
            interrupted = True
            print(f"\n{self.name}: interrupted; what is complete follows.", file=sys.stderr)
        code, done = int(self._tell(document)), _finished(document)
        if self.draw is not None and done["launches"]:
            self.draw(done, out.with_suffix(".png"))
        return launching.INTERRUPTED if interrupted else code

    def _again(self, path: Path) -> int:
        """Print an earlier run from its file. Return the exit code of the launches in it."""
        document = read(path)
        try:
            return int(self._tell(document))
        except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError) as error:
            text = (
                f"{path} is no record of {self.name}: {error!r}. Pass a file that it has written."
            )
            raise UsageError(text) from error

    def _launch(self, entry: Entry) -> Record:
        """Start the ranks, print how the launch ended, and return its record."""
        job = (entry.ranks, entry.measure or self.measure, entry.setting, entry.launch)
        found = launching.run(*job)
        if entry.again and entry.again in found.get("output", ""):
            found = launching.run(*job)
        told = f"{found['status']}, {found.get('took_s', 0.0):.0f} s"
        tables.say(f"{self.name}: {entry.name}: {told}")
        if found["status"] != "ok":
            tables.say(f"{found['reason']}\n{found.get('output', '')}", "red")
        return found

    def _tell(self, document: Record) -> bool:
        """Print tables, lines and complaints. Return whether one is there, or a launch failed."""
        done = _finished(document)
        parts = list(self.show(done)) if done["launches"] else []
        parts = parts or [Wrong("no launch was completed that can be shown.")]
        for part in sorted(parts, key=lambda part: isinstance(part, Wrong)):
            if isinstance(part, tables.Table):
                tables.show(part)
            elif isinstance(part, Wrong):
                tables.say(f"{self.name}: {part}", "red")
            else:
                tables.say(part)
        failed = len(done["launches"]) < len(document["launches"])
        return failed or any(isinstance(part, Wrong) for part in parts)


def read(path: Path) -> Record:
    """Read the document of an earlier run.

    Raises:
        UsageError: the file is missing, or holds no document of a contest.
    """
    try:
        found: Record = json.loads(path.read_text())
        if not all(isinstance(one, dict) for one in found["launches"]):
            raise TypeError("not every launch is an object")
    except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
        text = f"{path} is no record of a contest: {error!r}. Pass a file that one has written."
        raise UsageError(text) from error
    return found


def machine(device: str) -> str:
    """Return a name of this machine, its software and its MPI; the same in every run.

    With a `device` other than "cpu" the GPUs of this node, their driver and their power limits
    count, too.
    """
    mpi = ""
    with suppress(FileNotFoundError):
        mpi = mpiexec_version()
    return fingerprint(environment(), {"name": None if device == "cpu" else gpus()}, {"mpi": mpi})


def begun(path: Path, fresh: Record) -> Record:
    """Return the document of an earlier run, if it measured the same on the same machine.

    Raises:
        UsageError: the file holds the document of a different run.
    """
    found = read(path)
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
        UsageError: the mpiexec belongs to another MPI, or there is none.
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


def unmet(lines: Iterable[Requirement], where: str) -> Iterator[Wrong]:
    """Yield a complaint for each requirement that is not reached."""
    for line in lines:
        if line.mark.startswith("not reached"):
            yield Wrong(f"{where}: {line.text}: {line.cells()}")


def _finished(document: Record) -> Record:
    """Return a copy of a document without the launches that failed."""
    launches = [one for one in document["launches"] if one.get("status", "ok") == "ok"]
    return {**document, "launches": launches}
