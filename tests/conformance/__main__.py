"""`nox -s conformance`: other libraries' attention and parallel layers under the laws of our own.

Exits with 1 where our own do not pass, a library is missing, a cell was not tried, a wrong result
is not shown by its script, or a fault planted in a library is not seen.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from datetime import date
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.launching import commit
from benchmarks.machine import environment
from conformance.launching import (
    CONDEMNED,
    ROOT,
    Found,
    Limits,
    installed,
    put_on_trial,
    try_planted,
)
from conformance.libraries import LIBRARIES, NOT_OFFERED, OURS, Library, named
from conformance.picture import draw
from conformance.planted import FAULTS
from conformance.report import document, joined, known_cells, read, tables, write
from conformance.script import last_words, script, shows

EXAMPLES = 20
RANKS = (2, 3, 4)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line.

    Returns:
        The exit code.
    """
    options = _parsed(arguments)
    if options.script:
        return _print_script(options.out / "REPORT.json", *options.script)
    code = commit()
    libraries = [one for one in LIBRARIES if not options.only or one.name in options.only]
    began = time.monotonic()
    options.out.mkdir(parents=True, exist_ok=True)
    for name in () if options.more else ("ranks.log", "verdicts.jsonl"):
        (options.out / name).unlink(missing_ok=True)
    old = read(options.out) if options.more or options.only else {}
    versions = {one.name: installed(one) for one in libraries}
    found = known_cells(old, [one.name for one in libraries]) if options.more else {}
    limits = Limits(options.examples, options.patience, options.out)
    faults: list[str] = []
    planted: list[dict[str, Any]] = []
    try:
        for adapter in dict.fromkeys(one.adapter for one in libraries if versions[one.name]):
            same = [one for one in libraries if one.adapter == adapter]
            put_on_trial(same, options.ranks, limits, found)
            planted += _planted({one.name for one in same}, options.ranks[0], limits)
            print(
                f"{time.monotonic() - began:4.0f} s  {', '.join(one.name for one in same)}",
                flush=True,
            )
    except KeyboardInterrupt:
        faults.append("interrupted: what is missing was not tried")
    verdicts = {one.name: _column(one, found, versions[one.name]) for one in libraries}
    faults += _show_alone(libraries, verdicts, versions, limits) + _faults(verdicts)
    faults += [
        f"{one['library']}: not seen that {one['what']}"
        for one in planted
        if one["verdict"] not in CONDEMNED
    ]
    seconds = {"seconds": round(time.monotonic() - began), "patience": options.patience}
    run = {"date": str(date.today()), "commit": code, **seconds, "mpi": _mpi(), **environment()}
    report = document(libraries, versions, verdicts, planted, run, options.examples)
    report = joined(old, report, [one.name for one in LIBRARIES]) if old else report
    write(options.out, report)
    draw(report, options.out / "REPORT.png")
    Console(width=max(200, Console().width)).print(*tables(report), sep="\n")
    print("\n".join([*faults, f"{run['seconds']} s; {options.out}/REPORT.md"]), flush=True)
    return int(bool(faults))


def _planted(libraries: set[str], size: int, limits: Limits) -> list[dict[str, Any]]:
    """Plant every fault that there is for these libraries; return what became of each."""
    found = []
    for number, fault in enumerate(FAULTS):
        if fault.library in libraries:
            said = {name: getattr(fault, name) for name in ("library", "capability", "what")}
            verdict = try_planted(number, size, limits)
            kept = {
                name: verdict.get(name) for name in ("verdict", "examples", "result", "relative")
            }
            found.append({**said, "ranks": [size], **kept})
    return found


def _parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="nox -s conformance --", description=__doc__)
    names = [one.name for one in LIBRARIES]
    parser.add_argument(
        "--only",
        nargs="+",
        default=[],
        choices=names,
        metavar="LIBRARY",
        help="the report keeps the others",
    )
    parser.add_argument(
        "--ranks",
        nargs="+",
        type=int,
        default=list(RANKS),
        help="numbers of ranks, from 2 (default: 2 3 4)",
    )
    parser.add_argument(
        "--examples",
        type=int,
        default=EXAMPLES,
        help="of each cell and number of ranks (default: %(default)s)",
    )
    parser.add_argument(
        "--patience",
        type=float,
        default=1.0,
        help="multiplies every time limit, for a machine that is busy",
    )
    parser.add_argument(
        "--out", type=Path, default=ROOT / "reports" / "conformance", help="folder of the report"
    )
    parser.add_argument(
        "--more", action="store_true", help="add these numbers of ranks to the report in --out"
    )
    parser.add_argument(
        "--script",
        nargs=2,
        metavar=("LIBRARY", "CAPABILITY"),
        help="print the script of something wrong in the report in --out",
    )
    options = parser.parse_args(arguments)
    if min(options.ranks) < 2 or options.examples < 1:
        parser.error("--ranks are 2 or more, --examples 1 or more")
    options.ranks = sorted(set(options.ranks))
    return options


def _column(library: Library, found: Found, version: str) -> dict[str, Any]:
    """Every verdict of a library, with those that its documentation gives."""
    said = library.excluded()
    column: dict[str, Any] = {}
    for capability in library.subject.CAPABILITIES:
        if capability in said:
            column[capability] = asdict(said[capability])
        elif not version:
            column[capability] = {"verdict": "not installed"}
        else:
            known = library.known.get(capability)
            tried = found.get((library.name, capability), {"verdict": "not tried"})
            column[capability] = {**tried, **({"known": known} if known else {})}
    return column


def _show_alone(
    libraries: Sequence[Library], verdicts: dict[str, Any], versions: dict[str, str], limits: Limits
) -> list[str]:
    """Write and run the script of everything that is wrong, hangs or crashes; what it does not show is a fault of ours."""
    faults = []
    for library in libraries:
        for capability, verdict in verdicts[library.name].items():
            if (
                verdict["verdict"] not in CONDEMNED
                or {"problem", "alone"} & set(verdict) != {"problem"}
                or library.name in OURS
            ):
                continue
            path = limits.logs / f"{library.name} {capability}.py".replace(" ", "_")
            path.write_text(script(library, verdict, versions[library.name]))
            verdict["alone"] = last_words(path, limits.patience)
            print(f"{path.name}: {verdict['alone']}", flush=True)
            if not shows(verdict):
                faults.append(f"{path} does not show what was found: {verdict['alone']}")
    return faults


def _faults(verdicts: dict[str, Any]) -> list[str]:
    missing = (
        name
        for name, column in verdicts.items()
        if any(v["verdict"] == "not installed" for v in column.values())
    )
    faults = [f"{name} is not installed" for name in missing]
    faults += [
        f"{name}, {cell}: not tried"
        for name, column in verdicts.items()
        for cell in column
        if _untried(column[cell])
    ]
    ours = (
        (name, cell, v["verdict"]) for name in OURS for cell, v in verdicts.get(name, {}).items()
    )
    return faults + [
        f"{name}, {cell}: {verdict}"
        for name, cell, verdict in ours
        if verdict not in ("pass", NOT_OFFERED)
    ]


def _untried(verdict: dict[str, Any]) -> bool:
    return bool(verdict["verdict"] == "not tried")


def _print_script(report: Path, name: str, capability: str) -> int:
    data = json.loads(report.read_text())
    verdict = data["verdicts"][name][capability]
    if "problem" not in verdict:
        print(
            f"{name}, {capability}: {verdict['verdict']}, so there is nothing to show",
            file=sys.stderr,
        )
        return 2
    version = next(column["version"] for column in data["libraries"] if column["name"] == name)
    print(script(named(name), verdict, version))
    return 0


def _mpi() -> str:
    """The MPI library, asked in a process of its own: this one must not start it."""
    import subprocess

    asked = "name, numbers = MPI.get_vendor(); print(name, '.'.join(map(str, numbers)))"
    program = f"import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI; {asked}"
    answer = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    return answer.stdout.strip() or "no MPI"


if __name__ == "__main__":
    sys.exit(main())
