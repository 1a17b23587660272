"""Run programs in which one rank fails, at any place and under anything that starts ranks."""

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
"""Limit of a whole launch in seconds on a loaded machine; a failed launch may never end itself."""
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
"""Places at which a rank fails, each with a pattern of the cause that the report must name."""
UNSEEN = ("import", "early", "exit behind", "_exit", "SIGTERM")
"""Places at which no code of sp_core runs: the launcher must say which rank failed."""
STARTS = {
    "mpiexec": [],
    "mpi4py": ["-m", "mpi4py"],
    "sp-core run": ["-m", "sp_core", "run", "-n", str(RANKS), "--", "python"],
    "torchrun": ["-m", "torch.distributed.run", "--nproc-per-node", str(RANKS)],
}
"""The arguments of Python that start the ranks, by name."""
UNKNOWN = {"early": ["mpi4py"], "exit behind": ["mpi4py"], "import": [], "_exit": []}
"""Places of which mpiexec alone learns or says too little, each with what starts ranks instead.

The failing rank waits in MPI_Finalize for the others. Or MPICH's mpiexec knows no rank that ends
before MPI_Init, and prints nothing about an exit code.
"""
NAMED = (
    rf"rank {LOST} of {RANKS}: |rank {LOST} died first|process rank {LOST} with|"
    rf"rank {LOST} in comm|\d@1,{LOST}\]|rank +: {LOST} \(local_rank: {LOST}\)"
)


def rows() -> Iterator[tuple[str, str]]:
    """Yield each place with everything that starts ranks and can learn of a failure there."""
    for place in PLACES:
        starts = [*UNKNOWN.get(place, ["mpiexec"]), "sp-core run", "torchrun"]
        yield from ((place, start) for start in starts)


def launched(place: str, start: str) -> tuple[int | None, str, tuple[str, float]]:
    """Launch a program in which a rank fails.

    Returns:
        The exit code; the printed text; the process id of the failed rank, and the seconds from its
        failure to the end of the launch.
    """
    head = [find_mpiexec(), "-n", str(RANKS)] if start in ("mpiexec", "mpi4py") else []
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
    if start == "mpiexec" and not seen:  # MPICH's mpiexec names the process only
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
    """Launch a program in which a rank fails. Return a row of the report, and the printed text."""
    code, text, (pid, seconds) = launched(place, start)
    late = [f"{seconds:.0f} s to the end"] * (not seconds <= BOUND)
    faults = wrong(place, start, code, text, pid) + late
    return {"place": place, "start": start, "seconds": round(seconds, 1), "faults": faults}, text
