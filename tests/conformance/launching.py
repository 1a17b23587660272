"""The launches: all cells of one adapter on one number of ranks under one mpiexec, again without a cell that a launch has died of.

The cheapest number of ranks comes first, and what is found wrong there is not tried on more.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from conformance.capabilities import in_order
from conformance.libraries import Library

ROOT = Path(__file__).resolve().parents[2]
LAWS = Path(__file__).with_name("laws.py")
LAUNCH_SECONDS = 240.0
Cell = tuple[str, str, bool]
"""A library, a capability, and whether gradients are asked for."""
Found = dict[tuple[str, str], dict[str, Any]]
"""The verdict of each library and capability."""
FORWARD_ONLY = ("full", "causal")
CONDEMNED = ("wrong", "hung", "crashed")


def installed(library: Library) -> str:
    """The version of a library; nothing where it is not there."""
    try:
        return version(library.package)
    except PackageNotFoundError:
        return ""


def put_on_trial(libraries: Sequence[Library], ranks: Sequence[int], examples: int, logs: Path) -> Found:
    """Every capability that these libraries of one adapter offer, on each number of ranks.

    Args:
        libraries: with the same adapter.
        ranks: numbers of ranks, the smallest first.
        examples: of each cell.
        logs: folder for what the ranks print.
    """
    found: Found = {}
    for size in ranks:
        backward = _launch_all([(library, ["backward"]) for library in libraries], size, examples, logs, found)
        found = merged(found, backward)
        rest = [(library, [name for name in library.tried() if name != "backward"]) for library in libraries]
        found = merged(found, _launch_all(rest, size, examples, logs, found))
    return found


def merged(before: Found, now: Found) -> Found:
    """The verdicts of fewer and of more ranks as one."""
    total = dict(before)
    for cell, verdict in now.items():
        old = before.get(cell)
        total[cell] = {**verdict, "ranks": [verdict["ranks"]]} if old is None else _joined(old, verdict)
    return total


def _joined(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    joined = new if new["verdict"] in CONDEMNED or old["verdict"] == "pass" else old
    counts = {name: old[name] + new[name] for name in ("examples", "refused")}
    return {**joined, **counts, "ranks": [*old["ranks"], new["ranks"]], "error": max(old["error"], new["error"])}


def _launch_all(wanted: Sequence[tuple[Library, list[str]]], size: int, examples: int, logs: Path, before: Found) -> Found:
    """Cells on one number of ranks; each launch that dies takes one of them with it."""
    cells = [cell for library, names in wanted for cell in _cells(library, names, before)]
    found: Found = {}
    while cells:
        with tempfile.TemporaryDirectory(prefix="sp_core-conformance-") as folder:
            seconds, printed = _launch(cells, size, examples, Path(folder))
            lines, in_flight = _lines(Path(folder)), _in_flight(Path(folder))
        told = {(line["library"], line["capability"]): line for line in lines if "verdict" in line}
        died = [line for line in lines if "begins" in line and (line["library"], line["capability"]) not in told]
        first = [cell for cell in cells if cell[:2] not in told][:1] if not died else []
        for line in died:
            told[line["library"], line["capability"]] = _dead(line, seconds, printed) | in_flight
        for name, capability, gradients in first:  # the launch did not even come to its first cell
            line = {"library": name, "capability": capability, "ranks": size, "gradients": gradients}
            told[name, capability] = _dead(line, seconds, printed)
        _log(logs, cells, size, printed, told)
        found |= told
        cells = [cell for cell in cells if cell[:2] not in told]
    return found


def _cells(library: Library, names: Sequence[str], before: Found) -> list[Cell]:
    """What of a library is still to be tried. Gradients only where the plain ones are right, so that each fault shows once."""
    right = before.get((library.name, "backward"), {}).get("verdict") == "pass"
    open_ones = [
        name for name in in_order(names) if before.get((library.name, name), {}).get("verdict", "pass") in ("pass", "refused")
    ]
    return [(library.name, name, name == "backward" or (right and name not in FORWARD_ONLY)) for name in open_ones]


def _launch(cells: Sequence[Cell], size: int, examples: int, folder: Path) -> tuple[float, str]:
    setting = {"cells": cells, "examples": examples, "folder": str(folder)}
    (folder / "setting.json").write_text(json.dumps(setting))
    chosen = {"SP_CONFORMANCE": str(folder / "setting.json"), "SP_WATCHDOG_S": "90", "OMP_NUM_THREADS": "1"}
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests"), *filter(None, [os.environ.get("PYTHONPATH")])])
    launch = [sys.executable, "-m", "sp_core.testing.launch", "-n", str(size), "--timeout", str(LAUNCH_SECONDS), "--"]
    quiet = ["-p", "no:cacheprovider", "-W", "ignore", "--no-raw-replay", "-q"]
    suite = [sys.executable, "-m", "pytest", str(LAWS), "--only-mpi", "--expect-ranks", str(size), *quiet]
    began = time.monotonic()
    with (folder / "printed").open("w") as printed:
        environment = {**os.environ, **chosen, "PYTHONPATH": path}
        subprocess.run([*launch, *suite], cwd=ROOT, env=environment, stdout=printed, stderr=subprocess.STDOUT, check=False)
    return time.monotonic() - began, (folder / "printed").read_text(errors="replace")


def _lines(folder: Path) -> list[dict[str, Any]]:
    file = folder / "verdicts.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def _in_flight(folder: Path) -> dict[str, Any]:
    """The problem that was tried last."""
    file = folder / "in_flight.json"
    return {"problem": json.loads(file.read_text())} if file.exists() else {}


def _dead(line: dict[str, Any], seconds: float, printed: str) -> dict[str, Any]:
    """The verdict of a cell that a launch has died of, or that failed outside the library."""
    cell = {name: line[name] for name in ("library", "capability", "ranks", "gradients")}
    hung = seconds >= LAUNCH_SECONDS or "time limit" in printed
    words = [text for text in printed.splitlines() if text.startswith("E ")] or printed.splitlines()
    text = " ".join(words[-1].removeprefix("E ").split())[:400] if words else "nothing was printed"
    return {**cell, "verdict": "hung" if hung else "crashed", "examples": 0, "refused": 0, "error": 0.0, "states": text}


def _log(logs: Path, cells: Sequence[Cell], size: int, printed: str, told: Found) -> None:
    """Leave what is known so far, for a session that is ended early."""
    logs.mkdir(parents=True, exist_ok=True)
    with (logs / "ranks.log").open("a") as file:
        file.write(f"==== {size} ranks: {cells}\n{printed}\n")
    with (logs / "verdicts.jsonl").open("a") as file:
        file.writelines(json.dumps(verdict) + "\n" for verdict in told.values())
