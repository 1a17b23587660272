"""Launch all cells of one adapter on one number of ranks under one mpiexec.

If the launch dies of a cell, the others are launched again.
The cheapest number of ranks comes first, and what is found wrong there is not tried on more.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from studies.commands import ROOT, on_ranks, outside, printed
from studies.records import read_lines

from conformance.libraries import Library
from conformance.planted import FAULTS

LAWS = Path(__file__).with_name("laws.py")
LAUNCH_SECONDS = 600.0
ENDING_SECONDS = 30.0
EXAMPLE_SECONDS = 120
"""Limit of one problem on a rank: more than a process group waits; DTensor derives rules slowly."""
Cell = tuple[str, str]
"""A library and a capability."""
Found = dict[Cell, dict[str, Any]]
"""The verdict of each."""
DIED, RAISED = re.compile(r"rank \d+ died first: "), re.compile("E ")
HUNG = ("a rank has reached its time limit", "the launch has not ended after")
CONDEMNED = ("wrong", "hung", "crashed")
SETTLED = (*CONDEMNED, "slow")
"""Not tried on more ranks."""
ALONE = re.compile(r"^rank \d+ waits for nobody.*", re.MULTILINE)
"""A rank that computes, and where."""


def installed(library: Library) -> str:
    """Return the version of a library, and of what it comes with; nothing where one is missing."""
    first, *others = library.package.split()
    try:
        return ", ".join([version(first), *(f"{name} {version(name)}" for name in others)])
    except PackageNotFoundError:
        return ""


@dataclass(frozen=True)
class Limits:
    """How much is tried, and for how long.

    Args:
        examples: of each cell.
        patience: every time limit is multiplied by this.
        logs: folder for what the ranks print.
        planted: numbers of the faults that are planted first.
    """

    examples: int
    patience: float
    logs: Path
    planted: tuple[int, ...] = ()


def put_on_trial(
    libraries: Sequence[Library], ranks: Sequence[int], limits: Limits, found: Found
) -> None:
    """Try every capability that these libraries of one adapter offer, on each number of ranks.

    Args:
        libraries: with the same adapter.
        ranks: numbers of ranks, the smallest first.
        limits: for each launch.
        found: verdicts of fewer ranks; those of each number of ranks are put in as they come.
    """
    # Backward first: whether gradients are asked for elsewhere depends on the plain ones.
    names = [(one.name, name) for one in libraries for name in one.tried()]
    cells = sorted(names, key=lambda cell: cell[1] != "backward")
    for size in ranks:
        left = [cell for cell in cells if found.get(cell, {}).get("verdict") not in SETTLED]
        for part in _launch_all(left, size, limits):
            found.update({cell: _joined(found.get(cell), new) for cell, new in part.items()})


def try_planted(number: int, size: int, limits: Limits) -> dict[str, Any]:
    """Plant a fault; return the verdict on its library.

    Args:
        number: of the fault in `FAULTS`.
        size: number of ranks.
        limits: for the launch.
    """
    cell = (FAULTS[number].library, FAULTS[number].capability)
    (found,) = _launch_all([cell], size, replace(limits, planted=(number,)), [cell[0]])
    return found[cell]


def _joined(old: dict[str, Any] | None, new: dict[str, Any]) -> dict[str, Any]:
    """Return the verdict of a cell on fewer and on more ranks as one."""
    if old is None:
        return {**new, "ranks": [new["ranks"]]}
    joined = new if new["verdict"] in CONDEMNED or old["verdict"] == "pass" else old
    counts = {name: old[name] + new[name] for name in ("examples", "refused")}
    error = max(old["error"], new["error"])
    return {**joined, **counts, "ranks": [*old["ranks"], new["ranks"]], "error": error}


def _launch_all(
    cells: Sequence[Cell], size: int, limits: Limits, known: Sequence[str] = ()
) -> Iterator[Found]:
    """Yield the verdicts of each launch on one number of ranks; one that dies settles one cell.

    The plain gradients of libraries that are `known` to be right need not be tried first.
    """
    right = list(known)
    while cells:
        with tempfile.TemporaryDirectory(prefix="sp_core-conformance-") as name:
            folder = Path(name)
            how = {name: getattr(limits, name) for name in ("examples", "patience", "planted")}
            setting = {"cells": cells, "right_gradients": right, "folder": str(folder), **how}
            (folder / "setting.json").write_text(json.dumps(setting))
            try:
                text = _launch(size, folder, limits.patience)
            except KeyboardInterrupt:
                yield _told(folder)
                raise
            told = _told(folder) | _died(cells, size, folder, text)
        with (limits.logs / "ranks.log").open("a") as file:
            file.write(f"==== {size} ranks: {cells}\n{text}\n")
        yield told
        right += [
            name
            for (name, capability), one in told.items()
            if (capability, one["verdict"]) == ("backward", "pass")
        ]
        cells = [cell for cell in cells if cell not in told]


def _told(folder: Path) -> Found:
    """The verdicts of a launch."""
    lines = read_lines(folder / "verdicts.jsonl")
    return {(line["library"], line["capability"]): line for line in lines}


def _died(cells: Sequence[Cell], size: int, folder: Path, text: str) -> Found:
    """The cell that a launch has died of; all of them where it came to none."""
    begun = folder / "in_flight.json"
    if begun.exists():
        last = json.loads(begun.read_text())
        cell = (last["library"], last["capability"])
        return {} if cell in _told(folder) else {cell: last | _dead(size, text)}
    blank = {"ranks": size, "gradients": False, **_dead(size, text)}
    return {cell: {"library": cell[0], "capability": cell[1], **blank} for cell in cells}


def _launch(size: int, folder: Path, patience: float) -> str:
    """Run the laws with the setting in a folder; returns what the ranks printed."""
    settings = {"SP_CONFORMANCE": str(folder / "setting.json")}
    settings["SP_WATCHDOG_S"] = str(EXAMPLE_SECONDS * patience)
    quiet = ["-p", "no:cacheprovider", "-W", "ignore", "--sp-no-raw-replay", "-q"]
    seconds = LAUNCH_SECONDS * patience
    command = on_ranks(seconds, str(LAWS), *quiet, ranks=size)
    return printed(command, ROOT, outside(**settings), seconds + ENDING_SECONDS)[1]


def _dead(size: int, output: str) -> dict[str, Any]:
    """The verdict of a cell that a launch has died of, or that failed outside the library."""
    hung, alone = any(words in output for words in HUNG), sorted(set(ALONE.findall(output)))
    slow = hung and len(alone) == size
    verdict = "slow" if slow else "hung" if hung else "crashed"
    lines = [text.strip() for text in output.splitlines() if text.strip()]
    died, raised = ([text for text in lines if sign.match(text)] for sign in (DIED, RAISED))
    said = alone if slow else died or raised or lines[-1:] or ["nothing was printed"]
    text = " ".join(said[0].removeprefix("E ").split())[:400]
    return {"verdict": verdict, "examples": 0, "refused": 0, "error": 0.0, "states": text}
