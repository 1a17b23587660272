"""Who of a launch's ranks died first, and of what, as far as the system tells somebody who is not their parent."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import select
import signal
import struct
import time
from pathlib import Path

from sp_core.testing.places import owner
from sp_core.testing.watchdog import file_of

_FRAME = re.compile(r'\s*File "([^"]+)", line \d+')
KILLED_BY_MPIEXEC = ("SIGKILL", "SIGTERM", "not known")
ATTEMPTS = 5
PAUSE_SECONDS, WRITE_SECONDS = 0.01, 0.3
_INFO = struct.Struct("<Q52xi")  # struct pidfd_info: mask, what is of no use here, exit_code
_INFO_EXIT = 1 << 3
_GET_INFO = (3 << 30) | (_INFO.size << 16) | (0xFF << 8) | 11  # _IOWR(PIDFS_IOCTL_MAGIC, 11, struct pidfd_info)


class Deaths:
    """Watches the ranks of a launch by the process numbers that they leave.

    mpiexec kills the others as soon as one rank has died; only the order of deaths tells which one it was.

    Args:
        run_dir: where the ranks leave their numbers.
        ranks: how many there are.
    """

    def __init__(self, run_dir: Path, ranks: int) -> None:
        self.ranks = ranks
        self._dir = run_dir
        self._watched: dict[int, tuple[int, int]] = {}  # rank: process number, file descriptor
        self._ends = select.epoll()  # tells what has happened since it was last asked in the order of the events, not of the ranks
        self._ended: dict[int, None] = {}  # ranks in the order in which they closed their files, or died where they held none
        self._dead: dict[int, str] = {}  # rank: how
        self._stopped: set[int] = set()
        self._rank_of: dict[int, int] = {}  # by file descriptor: of its process, and of the file that it holds
        for rank in range(ranks):
            self._listen(_held(run_dir, rank), rank, 0)  # which leaves the hang-up

    def close(self) -> None:
        """Give the files back."""
        self._ends.close()
        for fd in self._rank_of:
            os.close(fd)

    def _listen(self, fd: int, rank: int, events: int) -> None:
        self._rank_of[fd] = rank
        self._ends.register(fd, events)

    def look(self, seconds: float) -> None:
        """Watch for a while."""
        self._find()
        for fd, _ in self._ends.poll(seconds):
            self._ends.unregister(fd)
            rank = self._rank_of[fd]
            self._ended.setdefault(rank)
            pid, end = self._watched.get(rank, (0, -1))
            if fd == end:
                self._dead[rank] = _how(pid, fd)
        for rank in self._dead:  # those that held nothing and were gone before they were seen
            self._ended.setdefault(rank)

    def alive(self) -> dict[int, int]:
        """Rank and process number of those that live."""
        self.look(0.0)
        return {rank: pid for rank, (pid, _) in self._watched.items() if rank not in self._dead}

    def end_stopped(self) -> None:
        """End ranks that were stopped by a signal: only when they go on they can write their stacks, and then no further."""
        stopped = self._find_stopped()
        for pid in stopped.values():
            os.kill(pid, signal.SIGTERM)
            os.kill(pid, signal.SIGCONT)
        time.sleep(WRITE_SECONDS if stopped else 0.0)

    def running(self) -> dict[int, int]:
        """Rank and process number of those that live and are not stopped."""
        stopped = self._find_stopped()
        return {rank: pid for rank, pid in self.alive().items() if rank not in stopped}

    def _find_stopped(self) -> dict[int, int]:
        found = {rank: pid for rank, pid in self.alive().items() if _is_stopped(pid)}
        self._stopped.update(found)
        return found

    def first(self) -> int | None:
        """The rank that died first, if one has died."""
        self.look(0.0)
        return self._first() if self._dead else None

    def story(self, rank: int) -> str:
        """What is known of one rank."""
        self.look(0.0)
        lines = [f"---- rank {rank}: {self._state(rank)}"]
        if place := self._text(rank, "place"):
            lines.append(f"last place: {place}")
        return "\n".join([*lines, shortened(self._stacks(rank)) or "no stack: the process ended without a chance to write it"])

    def suspects(self) -> list[str]:
        """One line for each rank that explains the end: the first to die, else those that did not wait for the others."""
        self.look(0.0)
        if self._stopped:
            return [
                f"rank {rank} is stopped by a signal; last place: {self._text(rank, 'place')}" for rank in sorted(self._stopped)
            ]
        if self._dead:
            first = self._first()
            return [f"rank {first} died first: {self._dead[first]}; last place: {self._text(first, 'place')}"]
        busy = {rank: innermost(self._stacks(rank)) for rank in range(self.ranks)}
        return [f"rank {rank} waits for nobody: it is at {place}" for rank, place in busy.items() if place]

    def _first(self) -> int:
        """The first to die. One that ended by itself goes before those that mpiexec kills, which may be seen earlier."""
        dead = [rank for rank in self._ended if rank in self._dead]
        by_themselves = [rank for rank in dead if not any(name in self._dead[rank] for name in KILLED_BY_MPIEXEC)]
        return (by_themselves or dead)[0]

    def _stacks(self, rank: int) -> str:
        return self._text(rank, "hang") or self._text(rank, "stack")

    def _state(self, rank: int) -> str:
        if rank not in self._watched:
            return "never started a test session"
        number = f"(process {self._watched[rank][0]})"
        if rank in self._stopped:
            return f"stopped by a signal {number}"
        if rank not in self._dead:
            return f"alive {number}"
        first = ", the first to die" if rank == self._first() else ""
        return f"dead{first}, {self._dead[rank]} {number}"

    def _text(self, rank: int, kind: str) -> str:
        path = file_of(self._dir, rank, kind)
        return path.read_bytes().split(b"\0")[0].decode(errors="replace").strip() if path.exists() else ""

    def _find(self) -> None:
        for rank in range(self.ranks):
            path = file_of(self._dir, rank, "pid")
            if rank not in self._watched and path.exists() and (text := path.read_text()):
                self._watch(rank, int(text))

    def _watch(self, rank: int, pid: int) -> None:
        try:
            self._watched[rank] = (pid, os.pidfd_open(pid))
        except OSError:  # gone before it was seen
            self._watched[rank] = (pid, -1)
            self._dead.setdefault(rank, "how is not known here")
        else:
            self._listen(self._watched[rank][1], rank, select.EPOLLIN)


def _held(run_dir: Path, rank: int) -> int:
    """The other end of what `watchdog.hold_life` opens."""
    path = file_of(run_dir, rank, "life")
    os.mkfifo(path)
    return os.open(path, os.O_RDONLY | os.O_NONBLOCK)


def _frames(stacks: str) -> list[tuple[str, str]]:
    """Each line of a dump with the file it names, if it does."""
    found = [(line, _FRAME.match(line)) for line in stacks.splitlines()]
    return [(line, match[1] if match else "") for line, match in found]


def innermost(stacks: str) -> str:
    """Where the first thread of a dump is, or nothing where it is inside the kit: then it waits for other ranks."""
    frames = [(line, file) for line, file in _frames(stacks) if file]
    if not frames or owner(frames[0][1]) == "kit":
        return ""
    return next((line.strip() for line, file in frames if owner(file) in ("test", "library")), "")


def shortened(stacks: str) -> str:
    """A dump without the frames of the kit and of what called the test, unless nothing else is there."""
    frames = _frames(stacks)
    own = [index for index, (_, file) in enumerate(frames) if file and owner(file) in ("test", "library")]
    if not own:
        return stacks
    kept = [line for index, (line, file) in enumerate(frames) if not file or (index <= own[-1] and owner(file) != "kit")]
    return "\n".join(kept)


def _how(pid: int, fd: int) -> str:
    """The cause of death. The system tells it after the fact on new kernels, else only until the parent has asked for it."""
    for _ in range(ATTEMPTS):
        status = _status_of(fd)
        status = _status_of_zombie(pid) if status is None else status
        if status is not None:
            break
        time.sleep(PAUSE_SECONDS)  # between the two: no zombie any more, and not yet among the remembered
    else:
        return "how is not known here, mpiexec may say above"
    code = os.waitstatus_to_exitcode(status)
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def _status_of(fd: int) -> int | None:
    """From the process's file descriptor: `PIDFD_GET_INFO` with `PIDFD_INFO_EXIT` of linux/pidfd.h, since Linux 6.15."""
    info = bytearray(_INFO.pack(_INFO_EXIT, 0))
    try:
        fcntl.ioctl(fd, _GET_INFO, info)
    except OSError:
        return None
    mask, status = _INFO.unpack(info)
    return int(status) if mask & _INFO_EXIT else None


def _status_of_zombie(pid: int) -> int | None:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rsplit(maxsplit=1)[1])
    except (OSError, ValueError):
        return None


def _is_stopped(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "T"
    except (OSError, IndexError):
        return False


def kill_session(leader: int) -> None:
    """Kill every process of a launch; launchers put ranks into process groups of their own, MPICH's also into sessions."""
    for path in processes_of(leader):
        with contextlib.suppress(OSError):
            os.kill(int(path.name), signal.SIGKILL)
    with contextlib.suppress(OSError):
        os.killpg(leader, signal.SIGKILL)


def processes_of(leader: int) -> list[Path]:
    """The processes of the session that `leader` leads, and what descends from it, as folders of /proc."""
    parents, found = {}, set()
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            _, parent, _, session = (path / "stat").read_text().rsplit(")", 1)[1].split()[:4]
            parents[int(path.name)] = int(parent)
            found |= {int(path.name)} if int(session) == leader or int(path.name) == leader else set()
    while new := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= new
    return [Path(f"/proc/{pid}") for pid in sorted(found)]
