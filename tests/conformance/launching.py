"""Launch all cells of one adapter on one number of ranks under one mpiexec.

A cell is one capability of one library. If the launch dies in a cell, the remaining cells are
launched again. The smallest number of ranks comes first; a cell that fails there is not tried on
more ranks.
"""

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
"""Limit of one problem on a rank, in seconds: more than a process group waits, and enough for
DTensor, which derives its sharding rules slowly."""
Cell = tuple[str, str]
"""The names of a library and of a capability."""
Found = dict[Cell, dict[str, Any]]
"""The verdict of each cell."""
DIED, RAISED = re.compile(r"rank \d+ died first: "), re.compile("E ")
HUNG = ("a rank has reached its time limit", "the launch has not ended after")
CONDEMNED = ("wrong", "hung", "crashed")
SETTLED = (*CONDEMNED, "slow")
"""The verdicts after which a cell is not tried on more ranks."""
ALONE = re.compile(r"^rank \d+ waits for nobody.*", re.MULTILINE)
"""The line of a rank that computes, and where it does so."""


def installed(library: Library) -> str:
    """Return the versions of a library's packages, or "" if one of them is missing."""
    first, *others = library.package.split()
    try:
        return ", ".join([version(first), *(f"{name} {version(name)}" for name in others)])
    except PackageNotFoundError:
        return ""


@dataclass(frozen=True)
class Limits:
    """Limits of a launch.

    Args:
        examples: the greatest number of problems of each cell.
        patience: a factor for every time limit.
        logs: the folder for the output of the ranks.
        planted: the indices in `FAULTS` of the faults that are planted first.
    """

    examples: int
    patience: float
    logs: Path
    planted: tuple[int, ...] = ()


def put_on_trial(
    libraries: Sequence[Library], ranks: Sequence[int], limits: Limits, found: Found
) -> None:
    """Test every capability that some libraries of one adapter offer, on each number of ranks.

    Args:
        libraries: libraries with the same adapter.
        ranks: the numbers of ranks, the smallest first.
        limits: the limits of each launch.
        found: a dict to which the verdicts are added as they come. Verdicts of more ranks are
            joined with those of fewer ranks.
    """
    # "backward" first: other capabilities compute gradients only if it passes.
    names = [(one.name, name) for one in libraries for name in one.tried()]
    cells = sorted(names, key=lambda cell: cell[1] != "backward")
    for size in ranks:
        left = [cell for cell in cells if found.get(cell, {}).get("verdict") not in SETTLED]
        for part in _launch_all(left, size, limits):
            found.update({cell: _joined(found.get(cell), new) for cell, new in part.items()})


def try_planted(number: int, size: int, limits: Limits) -> dict[str, Any]:
    """Plant a fault; return the verdict on its library.

    Args:
        number: the index of the fault in `FAULTS`.
        size: the number of ranks.
        limits: the limits of the launch.
    """
    cell = (FAULTS[number].library, FAULTS[number].capability)
    (found,) = _launch_all([cell], size, replace(limits, planted=(number,)), [cell[0]])
    return found[cell]


def _joined(old: dict[str, Any] | None, new: dict[str, Any]) -> dict[str, Any]:
    """Join the verdicts of a cell on fewer ranks (`old`, or None) and on more ranks (`new`)."""
    if old is None:
        return {**new, "ranks": [new["ranks"]]}
    joined = new if new["verdict"] in CONDEMNED or old["verdict"] == "pass" else old
    counts = {name: old[name] + new[name] for name in ("examples", "refused")}
    error = max(old["error"], new["error"])
    return {**joined, **counts, "ranks": [*old["ranks"], new["ranks"]], "error": error}


def _launch_all(
    cells: Sequence[Cell], size: int, limits: Limits, known: Sequence[str] = ()
) -> Iterator[Found]:
    """Launch until every cell has a verdict on `size` ranks, and yield the verdicts of each launch.

    A launch that dies gives a verdict to the cell that it was trying. Libraries in `known` compute
    gradients although "backward" was not tried before.
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
    """Return the verdicts of a launch."""
    lines = read_lines(folder / "verdicts.jsonl")
    return {(line["library"], line["capability"]): line for line in lines}


def _died(cells: Sequence[Cell], size: int, folder: Path, text: str) -> Found:
    """Return a verdict for the cell in which a launch died, or for all cells if none was begun."""
    begun = folder / "in_flight.json"
    if begun.exists():
        last = json.loads(begun.read_text())
        cell = (last["library"], last["capability"])
        return {} if cell in _told(folder) else {cell: last | _dead(size, text)}
    blank = {"ranks": size, "gradients": False, **_dead(size, text)}
    return {cell: {"library": cell[0], "capability": cell[1], **blank} for cell in cells}


def _launch(size: int, folder: Path, patience: float) -> str:
    """Run `laws.py` with the setting in a folder; return the output of the ranks."""
    settings = {"SP_CONFORMANCE": str(folder / "setting.json")}
    settings["SP_WATCHDOG_S"] = str(EXAMPLE_SECONDS * patience)
    quiet = ["-p", "no:cacheprovider", "-W", "ignore", "--sp-no-raw-replay", "-q"]
    seconds = LAUNCH_SECONDS * patience
    command = on_ranks(seconds, str(LAWS), *quiet, ranks=size)
    return printed(command, ROOT, outside(**settings), seconds + ENDING_SECONDS)[1]


def _dead(size: int, output: str) -> dict[str, Any]:
    """Return the verdict of a cell in which a launch died, from the output of the ranks."""
    hung, alone = any(words in output for words in HUNG), sorted(set(ALONE.findall(output)))
    slow = hung and len(alone) == size
    verdict = "slow" if slow else "hung" if hung else "crashed"
    lines = [text.strip() for text in output.splitlines() if text.strip()]
    died, raised = ([text for text in lines if sign.match(text)] for sign in (DIED, RAISED))
    said = alone if slow else died or raised or lines[-1:] or ["nothing was printed"]
    text = " ".join(said[0].removeprefix("E ").split())[:400]
    return {"verdict": verdict, "examples": 0, "refused": 0, "error": 0.0, "states": text}
