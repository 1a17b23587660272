"""Find out which rank of a launch died first, and of what, in a process that is not its parent."""

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

from sp_core.launch.places import owner
from sp_core.launch.watch import FAILED, STARTED, file_of

_FRAME = re.compile(r'\s*File "([^"]+)", line \d+')
KILLED_BY_MPIEXEC = ("SIGKILL", "SIGTERM", "not known")
ATTEMPTS, PAUSE_SECONDS, WRITE_SECONDS = 5, 0.01, 0.3
_INFO = struct.Struct("<Q52xi")  # struct pidfd_info: mask, fields that are not used here, exit_code
_INFO_EXIT = 1 << 3
_GET_INFO = (
    (3 << 30) | (_INFO.size << 16) | (0xFF << 8) | 11
)  # _IOWR(PIDFS_IOCTL_MAGIC, 11, struct pidfd_info)


class Deaths:
    """Watch the ranks of a launch by the process numbers that they leave.

    mpiexec kills the other ranks as soon as one has died. Only the order of deaths tells which one
    it was.

    Args:
        run_dir: where the ranks leave their numbers.
        ranks: how many there are.
    """

    def __init__(self, run_dir: Path, ranks: int) -> None:
        self.ranks = ranks
        self._dir = run_dir
        self._watched: dict[int, tuple[int, int]] = {}  # rank: process number, file descriptor
        self._ends = select.epoll()  # tells events in the order in which they happened
        self._ended: dict[
            int, None
        ] = {}  # ranks in the order in which their files were closed, else in which they died
        self._dead: dict[int, str] = {}  # rank: cause
        self._stopped: set[int] = set()
        self._rank_of: dict[int, int] = {}  # by file descriptor, of the process or of its pipe
        for rank in range(ranks):
            self._listen(_pipe(run_dir, rank), rank, 0)  # 0 leaves the hang-up

    def close(self) -> None:
        """Close the files."""
        self._ends.close()
        for fd in self._rank_of:
            os.close(fd)

    def _listen(self, fd: int, rank: int, events: int) -> None:
        self._rank_of[fd] = rank
        self._ends.register(fd, events)

    def look(self, seconds: float) -> None:
        """Watch for some time."""
        for rank in range(self.ranks):
            path = file_of(self._dir, rank, "pid")
            if rank not in self._watched and path.exists() and (text := path.read_text()):
                self._watch(rank, int(text))
        for fd, _ in self._ends.poll(seconds):
            self._ends.unregister(fd)
            rank = self._rank_of[fd]
            self._ended.setdefault(rank)
            pid, end = self._watched.get(rank, (0, -1))
            if fd == end:
                self._dead[rank] = _cause(pid, fd)
        self._ended |= {
            rank: None for rank in self._dead if rank not in self._ended
        }  # ranks without a pipe

    def _watch(self, rank: int, pid: int) -> None:
        try:
            self._watched[rank] = (pid, os.pidfd_open(pid))
        except OSError:  # the process ended before it was seen
            self._watched[rank] = (pid, -1)
            self._dead.setdefault(rank, "how is not known here")
        else:
            self._listen(self._watched[rank][1], rank, select.EPOLLIN)

    def alive(self) -> dict[int, int]:
        """Return the process number of each rank that lives."""
        self.look(0.0)
        return {rank: pid for rank, (pid, _) in self._watched.items() if rank not in self._dead}

    def stopped(self) -> dict[int, int]:
        """Return the process number of each rank that is stopped (SIGSTOP)."""
        found = {rank: pid for rank, pid in self.alive().items() if stat(pid)[:1] == ["T"]}
        self._stopped.update(found)
        return found

    def end_stopped(self) -> None:
        """Terminate ranks that are stopped.

        They are continued first, because a stopped process cannot write its stacks.
        """
        stopped = self.stopped()
        for pid in stopped.values():
            os.kill(pid, signal.SIGTERM)
            os.kill(pid, signal.SIGCONT)
        time.sleep(WRITE_SECONDS if stopped else 0.0)

    def first(self) -> int | None:
        """Return the rank that died first.

        One that ended by itself goes before those that mpiexec kills.
        """
        self.look(0.0)
        dead = [rank for rank in self._ended if rank in self._dead]
        by_themselves = [
            rank for rank in dead if not any(name in self._dead[rank] for name in KILLED_BY_MPIEXEC)
        ]
        return next(iter(by_themselves or dead), None)

    def was_killed(self) -> bool:
        """Return whether a signal has ended the rank that died first."""
        first = self.first()
        return first is not None and self._dead[first].startswith("killed")

    def failed(self) -> bool:
        """Return whether a rank is known to have ended with an error.

        The exit code of a process that was gone before it was seen is not known. Its last place
        then names the error.
        """
        return any(
            re.match(r"killed|exit code [1-9]", cause)
            or self._text(rank, "place").startswith(FAILED)
            for rank, cause in self._dead.items()
        )

    def story(self, rank: int) -> str:
        """Return what is known of one rank."""
        stacks = shortened(self._stacks(rank)) or "no stack was written"
        return f"---- rank {rank}: {self._state(rank)}{self._place(rank, chr(10))}\n{stacks}"

    def suspects(self) -> list[str]:
        """Return a line for each rank that explains the end.

        The first to die, or those that did not wait for the others.
        """
        first = self.first()
        if self._stopped:
            return [
                f"rank {rank} is stopped by a signal{self._place(rank, '; ')}"
                for rank in sorted(self._stopped)
            ]
        if first is not None:
            return [f"rank {first} died first: {self._dead[first]}{self._place(first, '; ')}"]
        if not (self._dir / STARTED).exists():  # only the kit's waits can be told from work
            return []
        busy = {rank: innermost(self._stacks(rank)) for rank in range(self.ranks)}
        return [
            f"rank {rank} waits for nobody: it is at {place}"
            for rank, place in busy.items()
            if place
        ]

    def _place(self, rank: int, separator: str) -> str:
        place = self._text(rank, "place")
        return f"{separator}last place: {place}" if place else ""

    def _stacks(self, rank: int) -> str:
        return self._text(rank, "hang") or self._text(rank, "stack")

    def _state(self, rank: int) -> str:
        if rank not in self._watched:
            return "never seen: it runs no Python program, or ended before that began"
        number = f"(process {self._watched[rank][0]})"
        if rank in self._stopped:
            return f"stopped by a signal {number}"
        if rank not in self._dead:
            return f"alive {number}"
        first = ", the first to die" if rank == self.first() else ""
        return f"dead{first}, {self._dead[rank]} {number}"

    def _text(self, rank: int, kind: str) -> str:
        path = file_of(self._dir, rank, kind)
        return (
            path.read_bytes().split(b"\0")[0].decode(errors="replace").strip()
            if path.exists()
            else ""
        )


def _pipe(run_dir: Path, rank: int) -> int:
    """Open the other end of the pipe that `watch.hold_life` opens."""
    path = file_of(run_dir, rank, "life")
    os.mkfifo(path)
    return os.open(path, os.O_RDONLY | os.O_NONBLOCK)


def _owners(stacks: str) -> list[tuple[str, str]]:
    """Return each line of a stack dump with the owner of the file that it names, or ""."""
    return [
        (line, owner(match[1]) if (match := _FRAME.match(line)) else "")
        for line in stacks.splitlines()
    ]


def innermost(stacks: str) -> str:
    """Return where the first thread of a dump is.

    Return "" if it is inside the kit, where it waits for other ranks.
    """
    frames = [(line, who) for line, who in _owners(stacks) if who]
    if not frames or frames[0][1] == "kit":
        return ""
    return next((line.strip() for line, who in frames if who in ("test", "library")), "")


def shortened(stacks: str) -> str:
    """Remove the frames of the kit and of the test's callers from a dump, if others are left."""
    lines = _owners(stacks)
    last = max(
        (index for index, (_, who) in enumerate(lines) if who in ("test", "library")), default=None
    )
    if last is None:
        return stacks
    return "\n".join(
        line
        for index, (line, who) in enumerate(lines)
        if not who or (index <= last and who != "kit")
    )


def _cause(pid: int, fd: int) -> str:
    """Return the cause of death.

    New kernels tell it at any time, old ones only until the parent has asked for it.
    """
    for _ in range(ATTEMPTS):
        status, fields = _status_of(fd), stat(pid)
        status = int(fields[-1]) if status is None and fields else status
        if status is not None:
            code = os.waitstatus_to_exitcode(status)
            return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        time.sleep(
            PAUSE_SECONDS
        )  # between reaping and the write to pidfs the kernel knows neither status
    return "how is not known here, mpiexec may say above"


def _status_of(fd: int) -> int | None:
    """Ask the process's file descriptor.

    `PIDFD_GET_INFO` with `PIDFD_INFO_EXIT` of linux/pidfd.h, since Linux 6.15.
    """
    info = bytearray(_INFO.pack(_INFO_EXIT, 0))
    try:
        fcntl.ioctl(fd, _GET_INFO, info)
    except OSError:
        return None
    mask, status = _INFO.unpack(info)
    return int(status) if mask & _INFO_EXIT else None


FOLDER = Path("/dev/shm")
NAMES = ("mpich_shm_", "ucx_shm_posix_", "sm_segment.")
SLACK_SECONDS = 5.0  # between the clock of a file system and that of this process
FIRST_SECONDS, FIRST_PAUSE, PAUSE = 5.0, 0.25, 2.0


def stat(pid: int | str) -> list[str]:
    """Return the fields of /proc/PID/stat after the name of the program, from the state on.

    Return None if the process has ended.
    """
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except OSError:
        return []


def processes_of(leader: int) -> set[int]:
    """Return the processes of the session that `leader` leads, and all that descend from them."""
    stats = {int(path.name): stat(path.name) for path in Path("/proc").glob("[0-9]*")}
    found = {
        pid
        for pid, fields in stats.items()
        if pid == leader or (fields and int(fields[3]) == leader)
    }
    while (
        new := {pid for pid, fields in stats.items() if fields and int(fields[1]) in found} - found
    ):
        found |= new
    return found


def kill_session(leader: int) -> None:
    """Kill every process of a launch.

    Launchers put ranks into process groups, and MPICH into sessions, of their own.
    """
    for pid in processes_of(leader):
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)
    with contextlib.suppress(OSError):
        os.killpg(leader, signal.SIGKILL)


class SharedFiles:
    """The files in shared memory that processes of one launch have mapped and made.

    Args:
        leader: the process that leads the launch's session.
    """

    def __init__(self, leader: int) -> None:
        self._leader = leader
        self._begin = time.time()
        self._next = 0.0
        self.found: set[Path] = set()

    def look(self) -> None:
        """Note the files that are mapped now.

        Most calls return at once, because looking takes milliseconds.
        """
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
    """Return the file that a line of /proc/PID/maps names, if its name is an MPI library's."""
    _, found, name = line.partition(f"{FOLDER}/")
    return (
        FOLDER / name
        if found and name.startswith(NAMES) and "/" not in name and not name.endswith(" (deleted)")
        else None
    )
