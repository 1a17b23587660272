"""Programs of which one rank fails, by the place where it fails and by what starts the ranks."""

from __future__ import annotations

import re
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from studies.commands import ROOT, outside, printed

from sp_core.launch.command import AS_ROOT, ENVIRONMENT, find_mpiexec

CASE = str(ROOT / "tests" / "kit" / "case_failing.py")
RANKS, LOST, BOUND = 3, 1, 10.0
SECONDS = 120
"""A bound for a whole launch on a loaded machine; a launch that nobody ends never ends."""
KILLED = r"(SIGTERM|signal:? 15)"
EXITED = r"(code *:? +3\b|Abort\(3\))"
ERROR = "LookupError: this rank is lost"
PLACES = {
    **dict.fromkeys(("before", "inside", "after", "started", "wait", "backward"), ERROR),
    **dict.fromkeys(("thread", "slow", "again", "free", "behind", "atexit", "early"), ERROR),
    "import": "ModuleNotFoundError: No module named 'not_here'",
    "memory": "MemoryError",
    "interrupt": "KeyboardInterrupt",
    "exit": "SystemExit: 3",
    "exit behind": EXITED,
    "_exit": EXITED,
    "SIGTERM": KILLED,
}
"""The places, and what the report says of the cause."""
UNSEEN = ("import", "early", "exit behind", "_exit", "SIGTERM")
"""Here no code of sp_core runs: the launcher says which rank it was."""
STARTS = {
    "mpiexec": [],
    "mpi4py": ["-m", "mpi4py"],
    "sp-core run": ["-m", "sp_core", "run", "-n", str(RANKS), "--", "python"],
    "torchrun": ["-m", "torch.distributed.run", "--nproc-per-node", str(RANKS)],
}
"""What starts the ranks: arguments of Python."""
UNKNOWN = {"early": ["mpi4py"], "exit behind": ["mpi4py"], "import": [], "_exit": []}
"""Places of which mpiexec alone does not learn or say enough, and what to start instead.

A rank waits in MPI_Finalize for the others; or MPICH's knows no rank that ends before MPI_Init, and
prints nothing about an exit code.
"""
NAMED = (
    rf"rank {LOST} of {RANKS}: |rank {LOST} died first|process rank {LOST} with|"
    rf"rank {LOST} in comm|\d@1,{LOST}\]|rank +: {LOST} \(local_rank: {LOST}\)"
)


def rows() -> Iterator[tuple[str, str]]:
    """All places with all that starts ranks, as far as it can know of the place."""
    for place in PLACES:
        starts = [*UNKNOWN.get(place, ["mpiexec"]), "sp-core run", "torchrun"]
        yield from ((place, start) for start in starts)


def launched(place: str, start: str) -> tuple[int | None, str, tuple[str, float]]:
    """Let a rank fail.

    Returns:
        The exit code; what was printed; the process number of the rank, and the seconds from its
        failure to the end of all.
    """
    of_mpi = start in ("mpiexec", "mpi4py")
    head = [find_mpiexec(), "-n", str(RANKS)] if of_mpi else []
    variables = ENVIRONMENT | AS_ROOT | outside()
    with tempfile.TemporaryDirectory(prefix="sp_core-") as folder:
        lost = Path(folder) / "lost"
        command = (*head, sys.executable, *STARTS[start], CASE, place, str(lost))
        code, text = printed(command, ROOT, variables, SECONDS)
        pid, when = lost.read_text().split() if lost.exists() else ("-1", "nan")
    return code, text, (pid, time.time() - float(when))


def wrong(place: str, start: str, code: int | None, text: str, pid: str) -> list[str]:
    """Return what is wrong with the end of a launch, apart from its time."""
    seen = place not in UNSEEN
    named = rf"rank {LOST} of {RANKS}: " if seen else NAMED
    if start == "mpiexec" and not seen:  # MPICH's names the process only
        named += rf"|PID {pid} "
    root = text.partition("Root Cause")[2]
    faults = {
        "exit code 0": code == 0,
        "no cause": not re.search(PLACES[place], text, re.IGNORECASE),
        "no rank": not re.search(named, text),
        "another rank is torchrun's root cause": start == "torchrun" and not re.search(NAMED, root),
        "no stack": seen and CASE not in text,
    }
    return [fault for fault, is_there in faults.items() if is_there]


def tried_program(place: str, start: str) -> tuple[dict[str, Any], str]:
    """Let a rank of a program fail. Return a row of the report, and what was printed."""
    code, text, (pid, seconds) = launched(place, start)
    late = [f"{seconds:.0f} s to the end"] * (not seconds <= BOUND)
    faults = wrong(place, start, code, text, pid) + late
    return {"place": place, "start": start, "seconds": round(seconds, 1), "faults": faults}, text
