"""Run a launch in which a rank is lost or a system has a fault, and judge it from outside."""

import contextlib
import json
import random
import re
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from deaths.ways import RAISED, SILENT
from kit.faults import CRASH_MINIMUM, CRASHES, FAULTS
from studies import records
from studies.commands import RANKS as FAULT_RANKS, ROOT, on_ranks, outside, printed

RANKS = 3
EXAMPLE_SECONDS, PHASE_SECONDS, MORE_SECONDS = 5.0, 20.0, 15.0
"""Limits in seconds of an example and of any other phase of these launches (by default 30 and 300).

The third is the time that ending a launch may take beyond these limits.
"""
LIMITS = {"SP_WATCHDOG_S": f"{EXAMPLE_SECONDS:g}", "SP_WATCHDOG_PHASE_S": f"{PHASE_SECONDS:g}"}
LAUNCH_SECONDS = 120.0
ENDING_SECONDS = 1.0
"""Seconds that a process which is asked to end, such as a helper of the MPI library, may take."""
Row = dict[str, Any]
FAULT_SECONDS = 500.0
CASE, FAULT_CASE = "tests/deaths/case_death.py", "tests/deaths/case_fault.py"
OPTIONS = ("-q", "--color=no", "-p", "no:cacheprovider")
BEFORE, END, AFTER = "test_of_before", "test_of_the_end", "test_of_after"


@dataclass(frozen=True)
class Death:
    """Say which rank is lost, in which way, at which place, and from which example on."""

    way: str
    place: str
    rank: int
    first: int

    @property
    def in_body(self) -> bool:
        """Return whether the rank is lost while an example is under way."""
        return self.place in ("before", "inside", "after")

    @property
    def bound(self) -> float:
        """Return in how many seconds after the loss the launch has to be over."""
        return (EXAMPLE_SECONDS if self.in_body else PHASE_SECONDS) + MORE_SECONDS


def drawn(way: str, place: str, chosen: random.Random) -> Death:
    """Draw which rank is lost, and from which example on."""
    return Death(way, place, chosen.randrange(RANKS), chosen.randrange(1, 10))


def tried(death: Death) -> tuple[Row, str]:
    """Launch a session in which a rank is lost in this way.

    Returns:
        A row of the report, and the printed text.
    """
    with tempfile.TemporaryDirectory(prefix="sp_core-death-") as name:
        folder, mark = Path(name), uuid.uuid4().hex
        told = json.dumps({**asdict(death), "folder": name, "mark": mark})
        junit = f"--junitxml={folder / 'junit.xml'}"
        command = on_ranks(LAUNCH_SECONDS, *OPTIONS, junit, CASE, ranks=RANKS)
        code, text = printed(command, ROOT, outside(**LIMITS, SP_DEATH=told), FAULT_SECONDS)
        lost = folder / "lost"
        seconds = time.time() - float(lost.read_text()) if lost.exists() else float("nan")
        faults = [*judged(death, code, seconds, text, folder), *left(folder, mark)]
    row = {**asdict(death), "bound": death.bound}
    return {**row, "seconds": round(seconds, 1), "faults": faults}, text


def tried_fault(fault: str) -> tuple[Row, str]:
    """Run a property of a system with a fault. Check that the kit finds its smallest example.

    Returns:
        A row of the report, and the printed text.
    """
    begin = time.monotonic()
    code, text = printed(command_of(fault), ROOT, outside(**LIMITS, SUT_FAULT=fault), FAULT_SECONDS)
    known = {one.fault: one for one in FAULTS}.get(fault)
    minimum, words = CRASH_MINIMUM, ["RankFailure[RankCrashed"]
    if known is not None:
        minimum, words = f"{known.minimum}, seed=0", [f"RankFailure[{known.name}", known.told]
    found = [*re.findall(r"@example\((.*)\)", text), ""]
    wrong = {
        **{f"not said: {said}": said not in text for said in words},
        f"smallest example: {minimum} was expected": found[0] != minimum,
        f"exit code {code}": code != 1,
    }
    faults = [fault for fault, is_there in wrong.items() if is_there]
    starts = re.search(r"(\d+) launches", text)
    row = {"fault": fault, "minimum": found[0], "launches": int(starts[1]) if starts else 1}
    return {**row, "seconds": round(time.monotonic() - begin, 1), "faults": faults}, text


def command_of(fault: str) -> list[str]:
    """Return the command to run; a fault that ends a rank needs a search outside the launch."""
    if fault not in CRASHES:
        return on_ranks(FAULT_SECONDS - 60, *OPTIONS, FAULT_CASE)
    search = ("-m", "sp_core.testing.shrink_crash", "-n", str(FAULT_RANKS), "--losses", "12")
    return [sys.executable, *search, FAULT_CASE, "--", *OPTIONS]


def judged(death: Death, code: int | None, seconds: float, text: str, folder: Path) -> list[str]:
    """Return what is wrong with a launch.

    Args:
        death: the rank that was lost, and how.
        code: the exit code of the launch, or None if it had to be killed.
        seconds: the seconds from the loss to the end of the launch.
        text: the text that the launch printed.
        folder: the folder with the JUnit file.
    """
    xml, begun = folder / "junit.xml", death.place != "collection"
    red = {name.rpartition("::")[2]: bad is not None for name, bad in records.junit(xml)}
    alone = "died first|waits for nobody|is stopped|could not collect|left collection"
    rank = rf"rank {death.rank} ({alone})|on rank {death.rank} of {RANKS}"
    test = f"{CASE}::{END}" if begun else CASE
    example = rf"{END}\(nprocs={RANKS}, n=\d\)|@example\(nprocs={RANKS}, n={death.first}\)"
    stack = "last place: " if death.way in SILENT else r"(case_death|ways)\.py\"?(:|, line )\d+"
    told = begun and xml.exists()
    wrong = {
        "it had to be shot": code is None,
        "exit code 0": code == 0,
        f"{seconds:.0f} s to the end": not seconds <= death.bound,
        "no rank": not re.search(rank, text),
        "no test": test not in text,
        "no example": death.in_body and not re.search(example, text),
        "no stack": not re.search(stack, text),
        "no JUnit file": not xml.exists(),
        "the test before is not in the JUnit file": told and red.get(BEFORE) is not False,
        "the test is not red in the JUnit file": told and not red.get(END),
        "the session did not go on": told and death.way in RAISED and red.get(AFTER) is not False,
    }
    return [fault for fault, is_there in wrong.items() if is_there]


def left(folder: Path, mark: str) -> Iterator[str]:
    """Yield a text for each file and each process that is left of a launch.

    The files lie in shared memory, mapped by its ranks. The processes have its mark.
    """
    mapped = {path for file in folder.glob("mapped-*") for path in file.read_text().split()}
    yield from (f"{path} is left" for path in sorted(mapped) if Path(path).exists())
    deadline = time.monotonic() + ENDING_SECONDS
    while (found := _marked(mark)) and time.monotonic() < deadline:
        time.sleep(0.05)
    yield from (f"process {name} is left: {command}" for name, command in found.items())


def _marked(mark: str) -> dict[str, str]:
    """Return the ids of processes with a mark in their environment, and their command lines."""
    found = {}
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if mark.encode() in (process / "environ").read_bytes():
                words = (process / "cmdline").read_bytes().decode(errors="replace").split("\0")
                found[process.name] = " ".join(words).strip()
    return found
