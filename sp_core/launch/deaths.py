"""Find the rank of a launch that died first, and its cause, from a process that is not its parent.

`Deaths` watches the ranks, `shared_files` finds the MPI library's files in shared memory, and
`kill_session` kills what is left of a launch. The files of the ranks are those of `watch`. A stack
dump is the text that `faulthandler` writes; owners of files are explained there, too.
"""

import contextlib
import ctypes
import fcntl
import os
import re
import select
import signal
import struct
import time
from collections.abc import Callable
from pathlib import Path

from sp_core.launch.watch import ENDED, FAILED, RUN_DIR, STACKS, STARTED, file_of, owner
from sp_core.machine import require_linux

_FRAME = re.compile(r'\s*File "([^"]+)", line \d+')
DUMP_SECONDS = 2.0
"""Seconds to wait for stacks: half before the signal that asks ranks for them, half after."""
NOT_KNOWN = "its exit code is not known"
KILLED_BY_MPIEXEC = ("SIGKILL", "SIGTERM", "not known")
ATTEMPTS, RETRY_SECONDS, WRITE_SECONDS = 5, 0.01, 0.3
_LIBC, _PIDFD_OPEN = ctypes.CDLL(None), 434  # the call's number on every architecture but alpha
_SIGNALS = {number.value: number.name for number in signal.Signals}
_INFO = struct.Struct("<Q52xi")  # struct pidfd_info: mask, fields that are not used here, exit_code
_INFO_EXIT = 1 << 3
# _IOWR(PIDFS_IOCTL_MAGIC, 11, struct pidfd_info)
_GET_INFO = (3 << 30) | (_INFO.size << 16) | (0xFF << 8) | 11


class Deaths:
    """Watch the processes of a launch's ranks, and tell which of them died first.

    mpiexec usually kills the other ranks soon after one has died. So the exit codes do not tell
    which rank failed, but the order of the deaths does.

    Args:
        run_dir: directory in which each rank writes its process id, its stacks, and where in the
            program it was last.
        ranks: number of ranks.

    Raises:
        OSError: this system is not Linux.

    Attributes:
        dead: cause of death, by rank.
    """

    def __init__(self, run_dir: Path, ranks: int) -> None:
        require_linux()
        self.ranks = ranks
        self._dir = run_dir
        self._watched: dict[int, int] = {}  # rank: process id
        self._pid_of: dict[int, int] = {}  # pidfd: process id
        self._unreported: dict[int, int] = {}  # rank: process id, if it has no pidfd
        self._ends = select.epoll()  # reports events in the order in which they happened
        # ranks in the order in which their pipes were closed, else in which they died
        self._ended: dict[int, None] = {}
        self.dead: dict[int, str] = {}  # rank: cause
        self._stopped: dict[int, int] = {}  # rank: process id
        self._rank_of: dict[int, int] = {}  # by file descriptor, a pidfd or a pipe
        for rank in range(ranks):
            path = file_of(run_dir, rank, "life")
            os.mkfifo(path)  # `watch.hold_life` opens it; when that process ends, it hangs up
            pipe = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
            self._rank_of[pipe] = rank
            self._ends.register(pipe, 0)  # 0: only hang-ups

    def close(self) -> None:
        """Close the file descriptors."""
        self._ends.close()
        for fd in self._rank_of:
            os.close(fd)

    def look(self, seconds: float) -> None:
        """Wait up to `seconds` for a rank to die, and note the ranks that have started or died."""
        for rank in range(self.ranks):
            if rank in self._watched and rank not in self.dead:
                continue
            pid = int(self._text(rank, "pid") or 0)
            if pid not in (0, self._watched.get(rank)):  # a shell may run several sessions
                self._watch(rank, pid)
        for fd, _ in self._ends.poll(seconds):
            self._ends.unregister(fd)
            rank = self._rank_of[fd]
            self._ended.setdefault(rank)
            if fd in self._pid_of:
                self.dead[rank] = _cause(self._pid_of[fd], fd)
        ended = [n for n, pid in self._unreported.items() if stat(pid)[:1] in ([], ["Z"])]
        self.dead |= dict.fromkeys(ended, NOT_KNOWN)
        # ranks that opened no pipe
        self._ended |= dict.fromkeys(self.dead)

    def _watch(self, rank: int, pid: int) -> None:
        self._watched[rank] = pid
        for of_earlier in (self.dead, self._ended, self._unreported):
            of_earlier.pop(rank, None)
        # Pythons of conda and uv lack `os.pidfd_open`
        if (fd := _LIBC.syscall(_PIDFD_OPEN, pid, 0)) < 0:  # it has ended, or the system has none
            self._unreported[rank] = pid
        else:
            self._rank_of[fd], self._pid_of[fd] = rank, pid
            self._ends.register(fd, select.EPOLLIN)

    def alive(self) -> dict[int, int]:
        """Return {rank: process id} of the ranks that have started and not died."""
        self.look(0.0)
        return {rank: pid for rank, pid in self._watched.items() if rank not in self.dead}

    def dump(self) -> None:
        """Signal living ranks to write their stacks, and end ranks that are stopped (SIGSTOP).

        A stopped rank gets SIGTERM, then SIGCONT: it must run to write its stacks and to end. The
        report of `suspects` names it.
        """
        time.sleep(DUMP_SECONDS / 2)  # several ranks reach one time limit nearly together
        for rank, pid in self.alive().items():
            if stat(pid)[:1] == ["T"]:
                self._stopped[rank] = pid
            elif not self._text(rank, "hang"):
                _signal(pid, STACKS)
        time.sleep(DUMP_SECONDS / 2)
        for pid in self._stopped.values():
            _signal(pid, signal.SIGTERM)
            _signal(pid, signal.SIGCONT)
        time.sleep(WRITE_SECONDS if self._stopped else 0.0)

    def pass_on(self, number: int, seconds: float, ended: Callable[[], int | None]) -> None:
        """Send living ranks the signal that ends the launch, and wait until the launch has ended.

        Do nothing without a living rank or in a test session.

        Args:
            number: the signal, which a program may handle: it may save its state, or ignore it.
                A number below 1, as after a caller's `sys.exit(1)`, is not sent.
            seconds: the longest wait; with 0 nothing is sent.
            ended: returns None while the launch goes on.
        """
        is_sent = number > 0 and seconds > 0 and not (self._dir / STARTED).exists()
        ranks = self.alive() if is_sent else {}
        for pid in ranks.values():
            _signal(pid, number)
        until = time.monotonic() + seconds
        while ranks and ended() is None and time.monotonic() < until:
            time.sleep(RETRY_SECONDS)

    def first(self) -> int | None:
        """Return the rank that died first, or None if no rank is known to have died.

        A rank that ended by itself or noted an error is preferred to ranks that mpiexec may have
        killed. A rank that noted an error may be about to die.
        """
        self.look(0.0)
        dead = [rank for rank in self._ended if rank in self.dead]
        noted = [rank for rank in range(self.ranks) if self._text(rank, "place").startswith(FAILED)]
        by_themselves = [
            rank
            for rank in dead
            if rank in noted or not any(name in self.dead[rank] for name in KILLED_BY_MPIEXEC)
        ]
        return next(iter(by_themselves or (noted if dead else []) or dead), None)

    def failed(self) -> bool:
        """Return whether a rank is known to have ended with an error.

        The exit code of a process that ended before the launcher saw it is not known. Then its last
        place, the latest text given to `watch.note`, tells whether an error ended it.
        """
        return any(
            re.match(r"killed|exit code [1-9]", cause)
            or self._text(rank, "place").startswith(FAILED)
            for rank, cause in self.dead.items()
        )

    def exit_code(self) -> int:
        """Return 0 if every dead rank ended without an error; see `failed` for unknown codes.

        Else return the first exit code other than 0, or 1 if none is known.
        """
        succeeded = all(
            cause == "exit code 0" or (NOT_KNOWN in cause and self._text(rank, "place") == ENDED)
            for rank, cause in self.dead.items()
        )
        causes = (self.dead.get(rank, "") for rank in self._ended)
        codes = [int(cause[10:]) for cause in causes if re.match(r"exit code [1-9]", cause)]
        return 0 if succeeded else (codes or [1])[0]

    def story(self, rank: int) -> str:
        """Return text about one rank: its state, its latest `watch.note` and its stacks."""
        stacks = shortened(self._stacks(rank)) or "no stack was written"
        return f"---- rank {rank}: {self._state(rank)}{self._place(rank, chr(10))}\n{stacks}"

    def suspects(self) -> list[str]:
        """Return a line for each rank that may explain the end of the launch; [] if there is none.

        These are the stopped ranks, else the rank that died first. If no rank died in a test
        session, they are the ranks whose stacks show that they did not wait for other ranks.
        """
        if self._stopped:
            return [
                f"rank {rank} is stopped by a signal{self._place(rank, '; ')}"
                for rank in sorted(self._stopped)
            ]
        if (first := self.first()) is not None:
            died = f"died first: {self.dead[first]}" if first in self.dead else "failed first"
            return [f"rank {first} {died}{self._place(first, '; ')}"]
        if not (self._dir / STARTED).exists():  # a plain program's waits look like work
            return []
        return [
            f"rank {rank} waits for nobody: it is at {place}"
            for rank in range(self.ranks)
            if (place := innermost(self._stacks(rank)))
        ]

    def _place(self, rank: int, separator: str) -> str:
        place = self._text(rank, "place")
        return f"{separator}last place: {place}" if place else ""

    def _stacks(self, rank: int) -> str:
        hang, stack = (self._text(rank, kind) for kind in ("hang", "stack"))
        # a rank that is ended while it writes leaves a beginning without a frame
        return stack if stack and not _FRAME.search(hang) else hang

    def _state(self, rank: int) -> str:
        if rank not in self._watched:
            return "never seen: it runs no Python program, or ended before that began"
        state = "stopped by a signal" if rank in self._stopped else "alive"
        if rank in self.dead and rank not in self._stopped:
            first = ", the first to die" if rank == self.first() else ""
            state = f"dead{first}, {self.dead[rank]}"
        return f"{state} (process {self._watched[rank]})"

    def _text(self, rank: int, kind: str) -> str:
        path = file_of(self._dir, rank, kind)
        return (
            path.read_bytes().split(b"\0")[0].decode(errors="replace").strip()
            if path.exists()
            else ""
        )


def _owners(stacks: str) -> list[tuple[str, str]]:
    """Return (line, owner) for each line of a stack dump.

    The owner is `watch.owner` of the source file that the line names, or "" if it names none.
    """
    return [
        (line, owner(match[1]) if (match := _FRAME.match(line)) else "")
        for line in stacks.splitlines()
    ]


def innermost(stacks: str) -> str:
    """Return the line of a stack dump that shows where its first thread is, in library or test.

    Return "" if the thread is in neither, or inside the kit (`sp_core.launch`, `sp_core.testing`),
    where it waits for other ranks.
    """
    frames = [(line, who) for line, who in _owners(stacks) if who]
    if not frames or frames[0][1] == "kit":
        return ""
    return next((line.strip() for line, who in frames if who in ("test", "library")), "")


def shortened(stacks: str) -> str:
    """Return a stack dump without the callers of the test and without the frames of the kit.

    The kit is `sp_core.launch` and `sp_core.testing`. A dump without a frame in the library or the
    test is returned unchanged.
    """
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
    """Return the cause of death as text: "killed by ...", "exit code ...", or that it is unknown.

    Linux since 6.15 tells the status at any time, older kernels only until the parent has reaped
    the process.
    """
    for _ in range(ATTEMPTS):
        status, fields = _status_of(fd), stat(pid)
        status = int(fields[-1]) if status is None and fields[1:] else status
        if status is not None:
            code = os.waitstatus_to_exitcode(status)
            name = _SIGNALS.get(-code, f"signal {-code}")
            return f"killed by {name}" if code < 0 else f"exit code {code}"
        # between reaping and the write to pidfs the kernel knows neither status
        time.sleep(RETRY_SECONDS)
    return f"{NOT_KNOWN} here, mpiexec may say it above"


def _status_of(fd: int) -> int | None:
    """Return the wait status of a process that has ended, given its pidfd; None if it is not known.

    It needs Linux 6.15 or newer: `PIDFD_GET_INFO` with `PIDFD_INFO_EXIT` of linux/pidfd.h.
    """
    with contextlib.suppress(OSError):
        info = fcntl.ioctl(fd, _GET_INFO, _INFO.pack(_INFO_EXIT, 0))
        mask, status = _INFO.unpack(info)
        return int(status) if mask & _INFO_EXIT else None
    return None


NAMES = ("mpich_shm_", "ucx_shm_posix_", "sm_segment.")
"""How names of files in shared memory begin that MPICH, UCX and Open MPI make."""
_SHARED = re.compile(
    rf" (/dev/shm/(?:{'|'.join(map(re.escape, NAMES))})[^/\n]*)(?<! \(deleted\))$", re.MULTILINE
)
"""The files of this kind in /proc/PID/maps."""


def stat(pid: int | str) -> list[str]:
    """Return the fields of /proc/PID/stat that follow the process's name; the first is its state.

    Return [] if the process does not exist any more, and ["?"] if the file cannot be read.
    """
    try:
        # the system may have cut the name inside a letter
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rsplit(")", 1)[1].split()
    except (FileNotFoundError, ProcessLookupError):
        return []
    except OSError:  # such as no free file descriptor
        return ["?"]


def processes_of(leader: int) -> set[int]:
    """Return the ids of the processes in the session of `leader`, and of their descendants."""
    stats = {int(path.name): stat(path.name) for path in Path("/proc").glob("[0-9]*")}
    living = {pid: fields for pid, fields in stats.items() if fields[1:]}
    new = {pid for pid, fields in living.items() if int(fields[3]) == leader} | {leader}
    found = set[int]()
    while new:
        found |= new
        new = {pid for pid, fields in living.items() if int(fields[1]) in new} - found
    return found


def _marked(run_dir: Path) -> set[int]:
    """Return the ids of the processes whose environment names `run_dir` in SP_RUN_DIR."""
    mark, found = f"{RUN_DIR}={run_dir}".encode(), set[int]()
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):  # it has ended, or belongs to another user
            if mark in path.read_bytes().split(b"\0"):
                found.add(int(path.parent.name))
    return found


def _signal(pid: int, number: int) -> None:
    """Send a signal to a process, if it has not ended and belongs to this user."""
    with contextlib.suppress(OSError):
        os.kill(pid, number)


def kill_session(leader: int, run_dir: Path | None = None) -> None:
    """Kill (SIGKILL) all processes of a launch.

    Killing the leader's process group would not do: mpiexec starts ranks in groups of their own,
    and MPICH's mpiexec even in sessions of their own. If a rank has ended, its children no longer
    descend from the leader. They are found by the variable SP_RUN_DIR, which they have inherited.

    Args:
        leader: process id of mpiexec, which leads the launch's session.
        run_dir: the launch's directory, the value of SP_RUN_DIR, if it has one.
    """
    killed = set[int]()  # those that live may start others
    while new := (processes_of(leader) | (_marked(run_dir) if run_dir else set())) - killed:
        for pid in sorted(new):  # parents first: a shell would print that its child was killed
            _signal(pid, signal.SIGKILL)
        killed |= new
    with contextlib.suppress(OSError):
        os.killpg(leader, signal.SIGKILL)


def shared_files(leader: int) -> set[Path]:
    """Return the files of MPI libraries in /dev/shm that processes of a launch have mapped.

    `leader`: id of the process that leads the launch's session.
    """
    found: set[Path] = set()
    for pid in processes_of(leader):
        with contextlib.suppress(OSError):
            maps = os.fsdecode(Path(f"/proc/{pid}/maps").read_bytes())
            found.update(map(Path, _SHARED.findall(maps)))
    return found
