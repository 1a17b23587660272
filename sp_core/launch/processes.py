"""The processes of a launch, and the files that an MPI library keeps in shared memory for them.

Source: MPICH 5.0 keeps `mpich_shm_*` until its finalization, and UCX inside it `ucx_shm_posix_*`. Open MPI 5.0 keeps
`sm_segment.*`, which its daemon removes unless it is killed.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

FOLDER = Path("/dev/shm")
NAMES = ("mpich_shm_", "ucx_shm_posix_", "sm_segment.")
SLACK_SECONDS = 5.0  # between the clock of a file system and that of this process
FIRST_SECONDS, FIRST_PAUSE, PAUSE = 5.0, 0.25, 2.0


def stat(pid: int | str) -> list[str]:
    """Return the fields of /proc/PID/stat after the name of the program, from the state on; none if it has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except OSError:
        return []


def processes_of(leader: int) -> set[int]:
    """Return the processes of the session that `leader` leads, and all that descend from them."""
    stats = {int(path.name): stat(path.name) for path in Path("/proc").glob("[0-9]*")}
    found = {pid for pid, fields in stats.items() if pid == leader or (fields and int(fields[3]) == leader)}
    while new := {pid for pid, fields in stats.items() if fields and int(fields[1]) in found} - found:
        found |= new
    return found


def kill_session(leader: int) -> None:
    """Kill every process of a launch. Launchers put ranks into process groups, and MPICH into sessions, of their own."""
    for pid in processes_of(leader):
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)
    with contextlib.suppress(OSError):
        os.killpg(leader, signal.SIGKILL)


class SharedFiles:
    """The files in shared memory that the processes of one launch have mapped, made since the launch began.

    Args:
        leader: the process that leads the launch's session.
    """

    def __init__(self, leader: int) -> None:
        self._leader = leader
        self._begin = time.time()
        self._next = 0.0
        self.found: set[Path] = set()

    def look(self) -> None:
        """Note the files that are mapped now. Most calls return at once, because looking takes milliseconds."""
        now = time.time()
        if now < self._next:
            return
        self._next = now + (FIRST_PAUSE if now < self._begin + FIRST_SECONDS else PAUSE)
        for pid in processes_of(self._leader):
            with contextlib.suppress(OSError):
                mapped = map(mpi_file, Path(f"/proc/{pid}/maps").read_text().splitlines())
                self.found |= {path for path in mapped if path is not None and self._is_new(path)}

    def _is_new(self, path: Path) -> bool:
        return path.exists() and path.stat().st_ctime > self._begin - SLACK_SECONDS


def mpi_file(line: str) -> Path | None:
    """Return the file that a line of /proc/PID/maps names, if an MPI library gives files such a name."""
    _, found, name = line.partition(f"{FOLDER}/")
    return FOLDER / name if found and name.startswith(NAMES) and "/" not in name and not name.endswith(" (deleted)") else None
