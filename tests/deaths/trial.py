"""One launch in which a rank is lost, and what was seen of it from outside."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
import uuid
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deaths.ways import RAISED, SILENT
from kit.plugin import wanted
from mutants.catalogue import ROOT
from mutants.trial import run

RANKS = 3
EXAMPLE_SECONDS, PHASE_SECONDS, MORE_SECONDS = 5.0, 20.0, 15.0
"""Limits of an example and of anything else in these launches (30 and 300 unless told); what ending a launch may take beside."""
LAUNCH_SECONDS = 120.0
ENDING_SECONDS = 1.0
"""What was told to end, such as the MPI library's own helpers, may take so long to be gone."""
CASE = "tests/deaths/case_death.py"
BEFORE, END, AFTER = "test_of_before", "test_of_the_end", "test_of_after"


@dataclass(frozen=True)
class Death:
    """Which rank is lost, how, where, and from which example on."""

    way: str
    place: str
    rank: int
    first: int

    @property
    def in_body(self) -> bool:
        """Whether an example is under way."""
        return self.place in ("before", "inside", "after")

    @property
    def bound(self) -> float:
        """Seconds within which the launch has to be over."""
        return (EXAMPLE_SECONDS if self.in_body else PHASE_SECONDS) + MORE_SECONDS


@dataclass(frozen=True)
class Seen:
    """What was seen of a launch: seconds from the loss to the end of everything, and what is wrong with it."""

    seconds: float
    faults: tuple[str, ...]
    printed: str


def drawn(way: str, place: str, chosen: random.Random) -> Death:
    """A death at random: of any rank, from any example on."""
    return Death(way, place, chosen.randrange(RANKS), chosen.randrange(1, 10))


def tried(death: Death) -> Seen:
    """Launch a session in which this happens."""
    with tempfile.TemporaryDirectory(prefix="sp_core-death-") as name:
        folder, mark = Path(name), uuid.uuid4().hex
        told = {
            "way": death.way,
            "place": death.place,
            "rank": death.rank,
            "from": death.first,
            "folder": name,
            "mark": mark,
        }
        with (folder / "printed").open("w") as output:
            code = run(
                command(folder),
                ROOT,
                output.fileno(),
                environment(json.dumps(told)),
                LAUNCH_SECONDS + 30,
            )
        printed = (folder / "printed").read_text(errors="replace")
        lost = folder / "lost"
        seconds = time.time() - float(lost.read_text()) if lost.exists() else float("nan")
        faults = [*judged(death, code, seconds, printed, folder), *left(folder, mark)]
    return Seen(round(seconds, 1), tuple(faults), printed)


def judged(death: Death, code: int | None, seconds: float, printed: str, folder: Path) -> list[str]:
    """What is wrong with a launch.

    Args:
        death: what happened in it.
        code: its exit code; None where it had to be shot.
        seconds: from the loss to the end.
        printed: by it.
        folder: with the JUnit file.
    """
    return [*_ending(death, code, seconds), *_words(death, printed), *_results(death, folder)]


def command(folder: Path) -> list[str]:
    """What is launched."""
    launch = [
        sys.executable,
        "-m",
        "sp_core.testing.launch",
        "-n",
        str(RANKS),
        "--timeout",
        f"{LAUNCH_SECONDS:g}",
        "--",
    ]
    suite = [
        "python",
        "-m",
        "pytest",
        "--with-mpi",
        "-q",
        "--color=no",
        "-p",
        "no:cacheprovider",
        *wanted(),
    ]
    return [*launch, *suite, f"--junitxml={folder / 'junit.xml'}", CASE]


def environment(death: str) -> dict[str, str]:
    """Short limits, and the death; the mark in it is how what is left of the launch is found."""
    paths = os.pathsep.join(
        [str(ROOT / "tests"), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    )
    limits = {"SP_WATCHDOG_S": f"{EXAMPLE_SECONDS:g}", "SP_WATCHDOG_PHASE_S": f"{PHASE_SECONDS:g}"}
    kept = {name: value for name, value in os.environ.items() if not name.startswith("SP_")}
    return {**kept, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", **limits, "SP_DEATH": death}


def _ending(death: Death, code: int | None, seconds: float) -> Iterator[str]:
    if code is None:
        yield "it had to be shot"
    if code == 0:
        yield "exit code 0"
    if not seconds <= death.bound:
        yield f"{seconds:.0f} s to the end"


def _words(death: Death, printed: str) -> Iterator[str]:
    """What the report does not name."""
    rank = death.rank
    alone = (
        rf"rank {rank} (died first|waits for nobody|is stopped|could not collect|left collection)"
    )
    if not re.search(rf"{alone}|on rank {rank} of {RANKS}", printed):
        yield "no rank"
    if (CASE if death.place == "collection" else f"{CASE}::{END}") not in printed:
        yield "no test"
    if death.in_body and not re.search(
        rf"{END}\(nprocs={RANKS}, n=\d\)|@example\(nprocs={RANKS}, n={death.first}\)", printed
    ):
        yield "no example"
    wanted_line = (
        "last place: " if death.way in SILENT else r"(case_death|ways)\.py\"?(:|, line )\d+"
    )
    if not re.search(wanted_line, printed):
        yield "no stack"


def _results(death: Death, folder: Path) -> Iterator[str]:
    """What is not in the JUnit file."""
    xml = folder / "junit.xml"
    if not xml.exists():
        yield "no JUnit file"
        return
    if death.place == "collection":
        return
    outcomes = {
        case.get("name", ""): [bad.tag for bad in case]
        for case in ET.parse(xml).getroot().iter("testcase")
    }
    if outcomes.get(BEFORE) != []:
        yield "the test before is not in the JUnit file"
    if not set(outcomes.get(END, [])) & {"failure", "error"}:
        yield "the test is not red in the JUnit file"
    if death.way in RAISED and outcomes.get(AFTER) != []:
        yield "the session did not go on"


def left(folder: Path, mark: str) -> Iterator[str]:
    """What is left of a launch: files in shared memory that its ranks had mapped, and processes with its mark."""
    mapped = {path for file in folder.glob("mapped-*") for path in file.read_text().split()}
    yield from (f"{path} is left" for path in sorted(mapped) if Path(path).exists())
    deadline = time.monotonic() + ENDING_SECONDS
    while (found := _marked(mark)) and time.monotonic() < deadline:
        time.sleep(0.05)
    yield from (f"process {name} is left: {command}" for name, command in found.items())


def _marked(mark: str) -> dict[str, str]:
    """The processes with a mark in their environment, and what they run."""
    found = {}
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if mark.encode() in (process / "environ").read_bytes():
                found[process.name] = (
                    (process / "cmdline")
                    .read_bytes()
                    .replace(b"\0", b" ")
                    .decode(errors="replace")
                    .strip()
                )
    return found


def library() -> str:
    """The MPI library that this Python uses."""
    program = "from mpi4py import MPI; print(MPI.Get_library_version())"
    said = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60
    ).stdout
    return " ".join(said.splitlines()[0].split(",")[0].replace("\0", "").split())


def told(death: Death, seen: Seen) -> dict[str, Any]:
    """Plain data."""
    what = {"way": death.way, "place": death.place, "rank": death.rank, "from": death.first}
    return {**what, "seconds": seen.seconds, "bound": death.bound, "faults": list(seen.faults)}
