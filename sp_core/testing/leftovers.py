"""Files that an MPI library makes in shared memory, and leaves there when its ranks are killed.

Source: MPICH 5.0 keeps `mpich_shm_*` until its finalization, and UCX inside it `ucx_shm_posix_*`; Open MPI 5.0 `sm_segment.*`,
which its daemon removes unless it is killed.
"""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

from sp_core.testing.deaths import processes_of

FOLDER = Path("/dev/shm")
NAMES = ("mpich_shm_", "ucx_shm_posix_", "sm_segment.")
SLACK_SECONDS = 5.0  # between the clock of a file system and ours
FIRST_SECONDS, FIRST_PAUSE, PAUSE = 5.0, 0.25, 2.0


class Leftovers:
    """The files of one launch: those that its processes have mapped, made since it began, with a name that MPI libraries give.

    Args:
        leader: the process that leads the launch's session.
    """

    def __init__(self, leader: int) -> None:
        self._leader = leader
        self._begin = time.time()
        self._next = 0.0
        self.found: set[Path] = set()

    def look(self) -> None:
        """Note what is there now; most calls do nothing, because looking costs some milliseconds."""
        now = time.time()
        if now < self._next:
            return
        self._next = now + (FIRST_PAUSE if now < self._begin + FIRST_SECONDS else PAUSE)
        for process in processes_of(self._leader):
            with contextlib.suppress(OSError):
                lines = (process / "maps").read_text().splitlines()
                self.found.update(path for path in map(_mapped, lines) if path is not None and self._ours(path))

    def remove(self) -> None:
        """Remove what is still there; the launch has ended."""
        for path in self.found:
            path.unlink(missing_ok=True)

    def _ours(self, path: Path) -> bool:
        return path.exists() and path.stat().st_ctime > self._begin - SLACK_SECONDS


def _mapped(line: str) -> Path | None:
    """The file that a line of /proc/.../maps names, where it is one that an MPI library makes."""
    _, found, name = line.partition(f"{FOLDER}/")
    return FOLDER / name if found and name.startswith(NAMES) and "/" not in name and not name.endswith(" (deleted)") else None
