"""What is left when a rank hangs or dies: a time limit that works whatever it is stuck in, and files for the launcher to print.

At the limit the stacks of all threads go to a file. Five seconds later the kernel's alarm ends the process, and with it the
launch: neither needs the interpreter's lock, which a rank blocked inside MPI may hold.
"""

from __future__ import annotations

import faulthandler
import mmap
import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

RUN_DIR = "SP_RUN_DIR"
EXAMPLE_SECONDS = 30.0
PHASE_SECONDS = 300.0
GRACE_SECONDS = 5.0
PLACE_BYTES = 512
IN_FLIGHT = "in-flight.txt"
RESULT = "result.txt"
STARTED = "started.txt"


@dataclass
class Watch:
    """The files of one rank, open from start to end so that a dying process need not open anything.

    Args:
        directory: where the files of all ranks of a run lie.
        rank: of this process in the world.
    """

    directory: Path
    rank: int
    temporary: tempfile.TemporaryDirectory[str] | None = None
    limits: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.hang, self.stack = self._open("hang"), self._open("stack")
        self.flying: int | None = None
        place = self._file("place")
        place.write_bytes(bytes(PLACE_BYTES))
        with place.open("r+b") as file:
            self.place = mmap.mmap(file.fileno(), PLACE_BYTES)
        self.enable()
        faulthandler.register(signal.SIGTERM, self.stack, all_threads=True, chain=True)
        faulthandler.register(signal.SIGUSR1, self.stack, all_threads=True, chain=False)
        hold_life(self.directory, self.rank)
        self._file("pid").write_text(str(os.getpid()))  # last: the launcher may send a signal from now on

    def enable(self) -> None:
        """Write the stacks where they are looked for when a signal such as SIGSEGV ends the process."""
        faulthandler.enable(self.stack)

    def _open(self, kind: str) -> int:
        """A file for the launcher to print, or standard error where there is no launcher."""
        return os.dup(2) if self.temporary is not None else os.open(self._file(kind), os.O_CREAT | os.O_WRONLY)

    def _file(self, kind: str) -> Path:
        return file_of(self.directory, self.rank, kind)

    def arm(self, seconds: float) -> None:
        """Start the time limit anew."""
        faulthandler.dump_traceback_later(seconds, exit=False, file=self.hang)
        signal.setitimer(signal.ITIMER_REAL, seconds + GRACE_SECONDS)

    def disarm(self) -> None:
        """Stop the time limit."""
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        faulthandler.cancel_dump_traceback_later()

    def keep_in_flight(self, text: bytes) -> None:
        """Write what is about to be run. The file stays open and is never empty in between: file systems make that a slow write."""
        if self.flying is None:
            self.flying = os.open(self.directory / IN_FLIGHT, os.O_CREAT | os.O_WRONLY)
        os.pwrite(self.flying, text, 0)
        os.ftruncate(self.flying, len(text))

    def close(self) -> None:
        """Give everything back; the launcher's directory stays, one of our own goes."""
        self.disarm()
        faulthandler.unregister(signal.SIGTERM)
        faulthandler.unregister(signal.SIGUSR1)
        faulthandler.enable(sys.__stderr__ or 2)
        self.place.close()
        os.close(self.hang)
        os.close(self.stack)
        if self.flying is not None:
            os.close(self.flying)
        if self.temporary is not None:
            self.temporary.cleanup()


_watch: Watch | None = None


def file_of(directory: Path, rank: int, kind: str) -> Path:
    """What a rank leaves for the launcher, or shares with it."""
    return directory / f"rank{rank}.{kind}"


def hold_life(directory: Path, rank: int) -> int:
    """Hold a file that only the end of the process closes: the launcher hears of it as early as mpiexec hears of its own.

    The system first closes a process's files and then says that it is dead. In between mpiexec can have killed the others.

    Returns:
        The file descriptor; -1 where no launcher listens.
    """
    try:
        return os.open(file_of(directory, rank, "life"), os.O_WRONLY | os.O_NONBLOCK)
    except OSError:
        return -1


def start(rank: int) -> Watch:
    """Open this rank's files in the launcher's directory, or in a temporary one."""
    global _watch
    temporary = None if RUN_DIR in os.environ else tempfile.TemporaryDirectory(prefix="sp_core-")
    _watch = Watch(Path(os.environ.get(RUN_DIR) or (temporary.name if temporary else "")), rank, temporary)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    _watch.limits.append(phase_seconds())
    _watch.arm(phase_seconds())
    return _watch


def stop() -> None:
    """Close this rank's files."""
    global _watch
    if _watch is not None:
        _watch.close()
        _watch = None


def example_seconds() -> float:
    """The limit of one example; the environment's SP_WATCHDOG_S, else half a minute."""
    return float(os.environ.get("SP_WATCHDOG_S", EXAMPLE_SECONDS))


def phase_seconds() -> float:
    """The limit of what a test does between examples; never below that of an example."""
    return max(float(os.environ.get("SP_WATCHDOG_PHASE_S", PHASE_SECONDS)), example_seconds())


@contextmanager
def limit(seconds: float) -> Iterator[None]:
    """Limit the time of a block. The limit around it starts anew when the block ends, because the block was progress."""
    if _watch is None:
        yield
        return
    watch = _watch
    watch.limits.append(seconds)
    watch.arm(seconds)
    try:
        yield
    finally:
        watch.limits.pop()
        watch.arm(watch.limits[-1])


def progress() -> None:
    """Start the current limit anew."""
    if _watch is not None and _watch.limits:
        _watch.arm(_watch.limits[-1])


def note(text: str) -> None:
    """Keep the last place of this rank where it outlives the process."""
    if _watch is not None:
        raw = text.encode()[: PLACE_BYTES - 1]
        _watch.place[: len(raw) + 1] = raw + b"\0"


def tell(text: str) -> None:
    """Say something where pytest does not capture it: in the file that the launcher prints, or on standard error."""
    os.write(2 if _watch is None or _watch.temporary is not None else _watch.stack, text.encode())


def in_flight(text: str) -> None:
    """Keep what is about to be run, or nothing; only rank 0 calls this."""
    if _watch is not None:
        _watch.keep_in_flight(text.encode())


def mark(name: str, text: str = "") -> None:
    """Write a file for the launcher."""
    if _watch is not None:
        (_watch.directory / name).write_text(text)
