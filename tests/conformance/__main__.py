"""`nox -s conformance`: test other libraries' attention and parallel layers by our own laws.

The exit code is 1 if this project's own columns do not pass, a library is missing, or a cell was
not tried. It is also 1 if a script does not repeat what was found, or a planted fault is not found.
"""

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from studies.commands import ROOT, mpi_library
from studies.records import write

from benchmarks import launching
from benchmarks.checkout import commit
from benchmarks.launching import Options, UsageError
from benchmarks.machine import environment
from conformance.launching import (
    CONDEMNED,
    Found,
    Limits,
    installed,
    put_on_trial,
    try_planted,
)
from conformance.libraries import LIBRARIES, NOT_OFFERED, OURS, Library, named
from conformance.planted import FAULTS
from conformance.report import document, draw, joined, markdown, read
from conformance.script import last_words, script, shows

NAMES = [one.name for one in LIBRARIES]
OPTIONS: Options = {
    "--only": {"nargs": "+", "default": [], "choices": NAMES, "metavar": "LIBRARY"},
    "--ranks": {"nargs": "+", "type": int, "default": [2, 3, 4], "help": "from 2"},
    "--examples": {"type": int, "default": 20, "help": "of each cell and number of ranks"},
    "--patience": {"type": float, "default": 1.0, "help": "multiplies every time limit"},
    "--out": {"type": Path, "default": ROOT / "reports" / "conformance", "help": "folder"},
    "--script": {"nargs": 2, "metavar": ("LIBRARY", "CAPABILITY"), "help": "of a wrong result"},
}


@launching.program("conformance", __doc__, OPTIONS)
def main(options: argparse.Namespace) -> int:
    """Run the command line; return the exit code."""
    if min(options.ranks) < 2 or options.examples < 1:
        raise UsageError("--ranks are 2 or more, --examples 1 or more")
    if options.script:
        return _print_script(options.out, *options.script)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "ranks.log").unlink(missing_ok=True)
    code, began = commit(), time.monotonic()
    libraries = [one for one in LIBRARIES if not options.only or one.name in options.only]
    versions = {one.name: installed(one) for one in libraries}
    old = read(options.out) if options.only else {}
    limits = Limits(options.examples, options.patience, options.out)
    ranks = sorted({*options.ranks})
    found, planted, faults = _tried([x for x in libraries if versions[x.name]], ranks, limits)
    verdicts = {one.name: _column(one, found, versions[one.name]) for one in libraries}
    faults += _show_alone(libraries, verdicts, versions, limits) + _faults(verdicts)
    seconds = {"seconds": round(time.monotonic() - began), "patience": options.patience}
    run = {
        "date": time.strftime("%Y-%m-%d"),
        "commit": code,
        **seconds,
        "mpi": mpi_library(),
        **environment(),
    }
    report = document(libraries, versions, verdicts, planted, run, options.examples)
    report = joined(old, report, NAMES) if old else report
    write(options.out, "REPORT", markdown(report), report)
    draw(report, options.out / "REPORT.png")
    print(*faults, f"{run['seconds']} s; {options.out}/REPORT.md", sep="\n", flush=True)
    return int(bool(faults))


def _tried(
    libraries: Sequence[Library], ranks: Sequence[int], limits: Limits
) -> tuple[Found, list[dict[str, Any]], list[str]]:
    """Test all libraries; return the verdicts, those of planted faults, and a line per failure."""
    found: Found = {}
    planted: list[dict[str, Any]] = []
    faults = []
    try:
        for adapter in dict.fromkeys(one.adapter for one in libraries):
            same = [one for one in libraries if one.adapter == adapter]
            put_on_trial(same, ranks, limits, found)
            names = {one.name for one in same}
            planted += [
                _planted(number, ranks[0], limits)
                for number, fault in enumerate(FAULTS)
                if fault.library in names
            ]
            print(", ".join(one.name for one in same), flush=True)
    except KeyboardInterrupt:
        faults.append("interrupted: what is missing was not tried")
    unseen = [one for one in planted if one["verdict"] not in CONDEMNED]
    faults += [f"{one['library']}: not seen that {one['what']}" for one in unseen]
    return found, planted, faults


def _planted(number: int, size: int, limits: Limits) -> dict[str, Any]:
    """Plant the fault FAULTS[number]; return the fault and its verdict."""
    fault, verdict = FAULTS[number], try_planted(number, size, limits)
    said = {name: getattr(fault, name) for name in ("library", "capability", "what")}
    kept = {name: verdict.get(name) for name in ("verdict", "examples", "result", "relative")}
    return {**said, "ranks": [size], **kept}


def _column(library: Library, found: Found, version: str) -> dict[str, Any]:
    """Return the verdicts of a library by capability, also those that its documentation gives."""
    said = library.excluded()
    known = {name: {"known": text} for name, text in library.known.items() if version}
    untried = {"verdict": "not tried" if version else "not installed"}
    return {
        name: said.get(name) or found.get((library.name, name), untried) | known.get(name, {})
        for name in library.subject.CAPABILITIES
    }


def _show_alone(
    libraries: Sequence[Library], verdicts: dict[str, Any], versions: dict[str, str], limits: Limits
) -> list[str]:
    """Write and run a script for every verdict that is wrong, hung or crashed.

    Return a line for each script that does not repeat what was found: that is a fault of ours.
    """
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
    """Return a line for each cell that was not tried, and each of our own that does not pass."""
    told = [
        (name, cell, found["verdict"])
        for name, column in verdicts.items()
        for cell, found in column.items()
    ]
    return [
        f"{name}, {cell}: {verdict}"
        for name, cell, verdict in told
        if verdict in ("not tried", "not installed")
        or (name in OURS and verdict not in ("pass", NOT_OFFERED))
    ]


def _print_script(folder: Path, name: str, capability: str) -> int:
    data, unknown = read(folder), {"verdict": f"not in {folder}/REPORT.json"}
    verdict = data.get("verdicts", {}).get(name, {}).get(capability, unknown)
    if "problem" not in verdict:
        raise UsageError(f"{name}, {capability}: {verdict['verdict']}, so nothing can be shown")
    version = next(column["version"] for column in data["libraries"] if column["name"] == name)
    print(script(named(name), verdict, version))
    return 0


if __name__ == "__main__":
    launching.main(main)
