"""Keep what a rank knows where it outlives the process.

Its process number, its stacks and its last place.

The launcher runs this file in front of a Python program: `python watch.py program.py arguments`. A
test session also sets a time limit. At the limit the stacks of all threads go to a file, and five
seconds later the kernel's alarm ends the process. Neither needs the interpreter's lock, which a
rank blocked inside MPI may hold. Nothing but the standard library is imported.
"""

from __future__ import annotations

import faulthandler
import mmap
import os
import runpy
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

RUN_DIR = "SP_RUN_DIR"
RANKS = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK")
EXAMPLE_SECONDS, PHASE_SECONDS, GRACE_SECONDS = 30.0, 300.0, 5.0
PLACE_BYTES = 512
ENDED = "the program has ended, and MPI_Finalize waits for the other ranks"
FAILED = "raised "
"""The last place of a rank begins with this, if an error has ended its program."""
IN_FLIGHT, RESULT, STARTED = "in-flight.txt", "result.txt", "started.txt"


class Watch:
    """The files of one rank.

    They are open from start to end, so that a dying process need not open any.

    Args:
        rank: of this process in the world.

    Attributes:
        directory: the launcher's, or a temporary one without a launcher. Then stacks go to standard
            error.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.temporary = (
            None if RUN_DIR in os.environ else tempfile.TemporaryDirectory(prefix="sp_core-")
        )
        self.directory = Path(
            os.environ[RUN_DIR] if self.temporary is None else self.temporary.name
        )
        self.limits: list[float] = []
        self.hang, self.stack, self.flying = self._open("hang"), self._open("stack"), -1
        place = file_of(self.directory, rank, "place")
        place.write_bytes(bytes(PLACE_BYTES))
        with place.open("r+b") as file:
            self.place = mmap.mmap(file.fileno(), PLACE_BYTES)
        self.enable()
        faulthandler.register(signal.SIGTERM, self.stack, all_threads=True, chain=True)
        signal.signal(
            signal.SIGUSR1, signal.SIG_IGN
        )  # as it is again in MPI_Finalize, after the interpreter's end
        faulthandler.register(signal.SIGUSR1, self.stack, all_threads=True, chain=False)
        hold_life(self.directory, rank)
        file_of(self.directory, rank, "pid").write_text(
            str(os.getpid())
        )  # last: the launcher may send a signal from now on

    def _open(self, kind: str) -> int:
        if self.temporary is not None:
            return os.dup(2)
        return os.open(file_of(self.directory, self.rank, kind), os.O_CREAT | os.O_WRONLY)

    def enable(self) -> None:
        """Write the stacks to this rank's file when a signal such as SIGSEGV ends the process."""
        faulthandler.enable(self.stack)

    def arm(self, seconds: float) -> None:
        """Start the time limit anew."""
        faulthandler.dump_traceback_later(seconds, exit=False, file=self.hang)
        signal.setitimer(signal.ITIMER_REAL, seconds + GRACE_SECONDS)

    def close(self) -> None:
        """End the time limit and close the files. The launcher's directory stays."""
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        faulthandler.cancel_dump_traceback_later()
        faulthandler.unregister(signal.SIGTERM)
        faulthandler.unregister(signal.SIGUSR1)
        faulthandler.enable(sys.__stderr__ or 2)
        self.place.close()
        for fd in (self.hang, self.stack, self.flying):
            if fd >= 0:
                os.close(fd)
        if self.temporary is not None:
            self.temporary.cleanup()


_watch: Watch | None = None


def file_of(directory: Path, rank: int, kind: str) -> Path:
    """Return the file that a rank leaves for the launcher, or shares with it."""
    return directory / f"rank{rank}.{kind}"


def hold_life(directory: Path, rank: int) -> int:
    """Open a pipe that only the end of the process closes.

    The launcher hears of it as early as mpiexec hears of its own.

    The system first closes a process's files and then says that it is dead. In between mpiexec can
    have killed the others.

    Returns:
        The file descriptor; -1 if no launcher listens.
    """
    try:
        return os.open(file_of(directory, rank, "life"), os.O_WRONLY | os.O_NONBLOCK)
    except OSError:
        return -1


def start(rank: int) -> Watch:
    """Open this rank's files."""
    global _watch  # noqa: PLW0603  # a process is one rank
    _watch = Watch(rank)
    return _watch


def limit_phases() -> None:
    """Limit the time of all that a test session does, each phase of a test by itself."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    if _watch is not None:
        _watch.limits.append(phase_seconds())
    progress()


def stop() -> None:
    """Close this rank's files."""
    global _watch  # noqa: PLW0603  # a process is one rank
    if _watch is not None:
        _watch.close()
        _watch = None


def example_seconds() -> float:
    """Return the time limit of one example: SP_WATCHDOG_S, or 30 s."""
    return float(os.environ.get("SP_WATCHDOG_S", EXAMPLE_SECONDS))


def phase_seconds() -> float:
    """Return the time limit of what a test does between examples.

    It is at least that of an example.
    """
    return max(float(os.environ.get("SP_WATCHDOG_PHASE_S", PHASE_SECONDS)), example_seconds())


@contextmanager
def limit(seconds: float) -> Iterator[None]:
    """Limit the time of a block.

    The limit around it starts anew when the block ends, because the block was progress.
    """
    limits = [] if _watch is None else _watch.limits
    limits.append(seconds)
    progress()
    try:
        yield
    finally:
        limits.pop()
        progress()


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
    """Print where pytest does not capture.

    To the file that the launcher prints, or to standard error.
    """
    os.write(2 if _watch is None else _watch.stack, text.encode())


def in_flight(text: str) -> None:
    """Keep the example that is about to be run, or nothing. Only rank 0 calls this.

    The file stays open and is never empty in between, which file systems make a slow write.
    """
    if _watch is not None:
        if _watch.flying < 0:
            _watch.flying = os.open(_watch.directory / IN_FLIGHT, os.O_CREAT | os.O_WRONLY)
        os.pwrite(_watch.flying, text.encode(), 0)
        os.ftruncate(_watch.flying, len(text.encode()))


def run_program(arguments: list[str]) -> None:
    """Run a Python program as the interpreter would.

    A file, `-m module` or `-c code`, with its arguments.
    """
    kind, *rest = arguments
    if sys.path[0] == os.path.dirname(os.path.abspath(__file__)):
        sys.path[0] = (
            ""
            if kind == "-c"
            else os.getcwd()
            if kind == "-m"
            else os.path.dirname(os.path.abspath(kind))
        )
    sys.argv = [kind, *rest[1:]] if kind == "-c" else rest if kind == "-m" else arguments
    try:
        if kind == "-m":
            runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
        elif kind == "-c":
            exec(compile(rest[0], "<string>", "exec"), vars(sys.modules["__main__"]))
        else:
            runpy.run_path(kind, run_name="__main__")
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        note(f"{FAILED}{error!r}" if code else ENDED)
        abort_at_exit(code)
        raise
    except BaseException as error:
        note(f"{FAILED}{error!r}")
        abort_at_exit(1)
        raise
    note(ENDED)


def abort_at_exit(code: int) -> None:
    """Let the end of this process end all ranks, which would wait for it in MPI for ever.

    A test session ends by itself.
    """
    mpi = sys.modules.get("mpi4py.MPI")
    is_session = (Path(os.environ.get(RUN_DIR, ".")) / STARTED).exists()
    if mpi is not None and code and not is_session:
        mpi._set_abort_status(int(code))


if __name__ == "__main__":
    for _name in RANKS:
        if _name in os.environ and _watch is None:
            start(int(os.environ[_name]))
    run_program(sys.argv[1:])
