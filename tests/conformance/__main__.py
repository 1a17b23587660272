"""`nox -s conformance`: other libraries' attention under the laws of our schemes.

Exits with 1 where our own schemes do not pass, a library is missing, a cell was not tried, or a wrong result is not shown by its
script.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.machine import environment
from conformance.capabilities import CAPABILITIES
from conformance.launching import CONDEMNED, ROOT, Found, installed, put_on_trial
from conformance.libraries import LIBRARIES, NOT_OFFERED, Library, named
from conformance.picture import draw
from conformance.report import document, joined, known_cells, read, table, write
from conformance.script import last_words, script, shows

EXAMPLES = 20
RANKS = (2, 3, 4)
OURS = LIBRARIES[0].name


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line.

    Returns:
        The exit code.
    """
    options = _parsed(arguments)
    if options.script:
        return _print_script(options.out / "REPORT.json", *options.script)
    libraries = [one for one in LIBRARIES if not options.only or one.name in options.only]
    began = time.monotonic()
    options.out.mkdir(parents=True, exist_ok=True)
    for name in () if options.more else ("ranks.log", "verdicts.jsonl"):
        (options.out / name).unlink(missing_ok=True)
    old = read(options.out) if options.more or options.only else {}
    versions = {one.name: installed(one) for one in libraries}
    found = known_cells(old, [one.name for one in libraries]) if options.more else {}
    faults: list[str] = []
    try:
        for adapter in dict.fromkeys(one.adapter for one in libraries if versions[one.name]):
            same = [one for one in libraries if one.adapter == adapter]
            put_on_trial(same, options.ranks, options.examples, options.out, found)
            print(f"{time.monotonic() - began:4.0f} s  {', '.join(one.name for one in same)}", flush=True)
    except KeyboardInterrupt:
        faults.append("interrupted: what is missing was not tried")
    verdicts = {one.name: _column(one, found, versions[one.name]) for one in libraries}
    faults += _show_alone(libraries, verdicts, versions, options.out) + _faults(verdicts)
    setting = {"examples": options.examples, "seconds": round(time.monotonic() - began)}
    report = document(libraries, versions, verdicts, {**environment(), "mpi": _mpi()}, setting)
    report = joined(old, report, [one.name for one in LIBRARIES]) if old else report
    write(options.out, report)
    draw(report, options.out / "REPORT.png")
    Console(width=max(200, Console().width)).print(table(report))
    print("\n".join([*faults, f"{setting['seconds']:.0f} s; {options.out}/REPORT.md"]), flush=True)
    return int(bool(faults))


def _parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="nox -s conformance --", description=__doc__)
    names = [one.name for one in LIBRARIES]
    parser.add_argument("--only", nargs="+", default=[], choices=names, metavar="LIBRARY", help="the report keeps the others")
    parser.add_argument("--ranks", nargs="+", type=int, default=list(RANKS), help="numbers of ranks, from 2 (default: 2 3 4)")
    parser.add_argument("--examples", type=int, default=EXAMPLES, help="of each cell and number of ranks (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=ROOT / "reports" / "conformance", help="folder of the report")
    parser.add_argument("--more", action="store_true", help="add these numbers of ranks to the report in --out")
    parser.add_argument(
        "--script", nargs=2, metavar=("LIBRARY", "CAPABILITY"), help="print the script of something wrong in the report in --out"
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
    for capability in CAPABILITIES:
        if capability in said:
            column[capability] = asdict(said[capability])
        elif not version:
            column[capability] = {"verdict": "not installed"}
        else:
            known = library.known.get(capability)
            tried = found.get((library.name, capability), {"verdict": "not tried"})
            column[capability] = {**tried, **({"known": known} if known else {})}
    return column


def _show_alone(libraries: Sequence[Library], verdicts: dict[str, Any], versions: dict[str, str], out: Path) -> list[str]:
    """Write and run the script of everything that is wrong, hangs or crashes; what it does not show is a fault of ours."""
    faults = []
    for library in libraries:
        for capability, verdict in verdicts[library.name].items():
            if verdict["verdict"] not in CONDEMNED or {"problem", "alone"} & set(verdict) != {"problem"} or library.name == OURS:
                continue
            path = out / f"{library.name} {capability}.py".replace(" ", "_")
            path.write_text(script(library, verdict, versions[library.name]))
            verdict["alone"] = last_words(path)
            print(f"{path.name}: {verdict['alone']}", flush=True)
            if not shows(verdict):
                faults.append(f"{path} does not show what was found: {verdict['alone']}")
    return faults


def _faults(verdicts: dict[str, Any]) -> list[str]:
    missing = (name for name, column in verdicts.items() if any(v["verdict"] == "not installed" for v in column.values()))
    faults = [f"{name} is not installed" for name in missing]
    faults += [f"{name}, {cell}: not tried" for name, column in verdicts.items() for cell in column if _untried(column[cell])]
    ours = verdicts.get(OURS, {}).items()
    return faults + [f"{OURS}, {name}: {v['verdict']}" for name, v in ours if v["verdict"] not in ("pass", NOT_OFFERED)]


def _untried(verdict: dict[str, Any]) -> bool:
    return bool(verdict["verdict"] == "not tried")


def _print_script(report: Path, name: str, capability: str) -> int:
    data = json.loads(report.read_text())
    verdict = data["verdicts"][name][capability]
    if "problem" not in verdict:
        print(f"{name}, {capability}: {verdict['verdict']}, so there is nothing to show", file=sys.stderr)
        return 2
    version = next(column["version"] for column in data["libraries"] if column["name"] == name)
    print(script(named(name), verdict, version))
    return 0


def _mpi() -> str:
    """The MPI library, asked in a process of its own: this one must not start it."""
    import subprocess

    asked = "name, numbers = MPI.get_vendor(); print(name, '.'.join(map(str, numbers)))"
    program = f"import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI; {asked}"
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    return answer.stdout.strip() or "no MPI"


if __name__ == "__main__":
    sys.exit(main())
