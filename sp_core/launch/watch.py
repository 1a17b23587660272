"""Write what a rank knows about itself to files that outlive its process.

The files hold its process id, its stacks and its last place: the latest text given to `note`.

The launcher runs this file in front of a Python program: `python watch.py program.py arguments`. A
test session also sets time limits. At a limit the stacks of all threads go to a file, and five
seconds later the kernel's alarm ends the process. Neither needs Python's global lock, which a rank
blocked inside MPI may hold. Only the standard library is imported.

Places are source lines. Every source file has an owner: "kit" (`sp_core.launch` and
`sp_core.testing`), "library" (the rest of sp_core), "foreign" (Python, installed packages and
Cython) or "test" (every other file).
"""

import atexit
import faulthandler
import functools
import io
import os
import pkgutil
import runpy
import shutil
import signal
import sys
import sysconfig
import tempfile
import textwrap
import traceback
import types
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

LIBRARY = Path(__file__).parent.parent
KIT = tuple(f"{LIBRARY / name}{os.sep}" for name in ("launch", "testing"))
_STDLIB, _PACKAGES = sysconfig.get_path("stdlib"), {"site-packages", "dist-packages"}
RUN_DIR, HOST = "SP_RUN_DIR", "SP_RUN_HOST"
STACKS = signal.SIGRTMIN + 11 if hasattr(signal, "SIGRTMIN") else signal.SIGUSR1
"""The signal at which a rank writes its stacks. Programs have handlers of their own for SIGUSR1."""
RANKS = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK")
EXAMPLE_SECONDS, PHASE_SECONDS, GRACE_SECONDS = 30.0, 300.0, 5.0
LONGEST_SECONDS = 1e8  # the system refuses to wait longer than some centuries
PLACE_BYTES = 512
ENDED = "the program has ended, and MPI_Finalize waits for the other ranks"
FAILED = "raised "
"""The last place of a rank begins with this if an error has ended its program."""
IN_FLIGHT, RESULT, STARTED = "in-flight.txt", "result.txt", "started.txt"


class Watch:
    """The open files of one rank.

    They are opened at the start, because a dying process may be unable to open files.

    Args:
        rank: this process's rank in MPI.COMM_WORLD.

    Raises:
        SystemExit: the launcher runs on another host.

    Attributes:
        directory: the launcher's directory (SP_RUN_DIR), or a temporary one without a launcher.
            Without a launcher stacks go to standard error.
        hang: file descriptor for stacks at a time limit.
        stack: file descriptor for stacks at a signal.
        flying: file descriptor for the example under way.
        place: file descriptor for the last place.
    """

    def __init__(self, rank: int) -> None:
        run_dir = os.environ.get(RUN_DIR)
        self.directory = Path(run_dir or tempfile.mkdtemp(prefix="sp_core-"))
        _refuse_other_host(is_heard=hold_life(self.directory, rank) >= 0)
        files = [file_of(self.directory, rank, kind) for kind in ("hang", "stack", "place")]
        self.hang, self.stack, self.place, self.flying = (
            os.open(file, os.O_CREAT | os.O_RDWR) for file in (*files, self.directory / IN_FLIGHT)
        )
        os.pwrite(self.place, bytes(PLACE_BYTES), 0)  # takes its block, while the disk has one
        if run_dir is None:
            atexit.register(shutil.rmtree, self.directory, ignore_errors=True)
            self.hang = self.stack = os.dup(2)
        self.enable()
        faulthandler.register(signal.SIGTERM, self.stack, all_threads=True, chain=True)
        faulthandler.unregister(STACKS)  # else a second watch of the process would keep SIG_IGN
        # in effect once faulthandler has ended, so in MPI_Finalize
        signal.signal(STACKS, signal.SIG_IGN)
        faulthandler.register(STACKS, self.stack, all_threads=True, chain=False)
        # last: the launcher may send a signal from now on
        file_of(self.directory, rank, "pid").write_text(str(os.getpid()))

    def enable(self) -> None:
        """Let faulthandler write to the stack file if a signal such as SIGSEGV ends the process."""
        faulthandler.enable(self.stack)


_watch: Watch | None = None
_limits: list[float] = []
"""The time limits of nested blocks in seconds, the innermost last."""


def file_of(directory: Path, rank: int, kind: str) -> Path:
    """Return the path of a rank's file of the given kind.

    Args:
        directory: the directory of the launch.
        rank: the rank that writes the file.
        kind: "pid"; "hang", stacks at a time limit; "stack", stacks at a signal; "place", where in
            the program the rank was last; or "life", a pipe that closes when the rank ends.
    """
    return directory / f"rank{rank}.{kind}"


def hold_life(directory: Path, rank: int) -> int:
    """Open this rank's end of a named pipe, and leave it open: the end of this process closes it.

    When a process ends, the system closes its files and then reports its death. mpiexec sees its
    closed connection to the process, and can kill other ranks before that report. The pipes tell
    the launcher in which order the ranks really ended.

    Args:
        directory: the launch's directory.
        rank: this process's rank in MPI.COMM_WORLD.

    Returns:
        The file descriptor; -1 if no launcher listens.
    """
    try:
        return os.open(file_of(directory, rank, "life"), os.O_WRONLY | os.O_NONBLOCK)
    except OSError:
        return -1


def this_host() -> str:
    """Return the name of this host and, after a space, the name of its space of process ids."""
    return f"{os.uname().nodename} {os.readlink('/proc/self/ns/pid')}"


def _refuse_other_host(*, is_heard: bool) -> None:
    """End all ranks if the launcher that has started this one runs on another host, or has ended.

    `is_heard`: whether the launcher has the other end of this rank's pipe.
    """
    host = os.environ.get(HOST)
    if not host or (is_heard and host.split()[1:] == this_host().split()[1:]):
        return
    text = (
        f"sp-core run on host {host} cannot watch this rank on {this_host()}. It watches the ranks "
        "of one machine. Start programs on several nodes with mpiexec or srun directly. "
        "If it has ended, unset SP_RUN_DIR and SP_RUN_HOST.\n"
    )
    os.write(2, text.encode())
    with suppress(KeyError, OSError):  # else MPICH lets the others wait in MPI_Init
        os.write(int(os.environ["PMI_FD"]), b"cmd=abort exitcode=1\n")
    raise SystemExit(1)


def start(rank: int) -> Watch:
    """Open the files of this process, which is rank `rank` of MPI.COMM_WORLD, and return them."""
    global _watch  # noqa: PLW0603  # a process is one rank
    _watch = Watch(rank)
    return _watch


def limit_phases() -> None:
    """Limit the time of each phase: collection of a file; setup, call or teardown of a test.

    The limit is the environment's SP_WATCHDOG_PHASE_S, or 300 seconds, and at least
    `example_seconds()`. If a phase takes longer, the stacks of all threads are written, and
    GRACE_SECONDS later SIGALRM ends the process. The first phase begins now. A call of `progress`
    after each phase begins the next one.
    """
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    _limits[:] = [max(_given("SP_WATCHDOG_PHASE_S", PHASE_SECONDS), example_seconds())]
    progress()


def stop() -> None:
    """Cancel this rank's time limit, for the rest of the process."""
    _limits.clear()
    signal.setitimer(signal.ITIMER_REAL, 0.0)
    faulthandler.cancel_dump_traceback_later()


def example_seconds() -> float:
    """Return the seconds that a test example may take: the environment's SP_WATCHDOG_S, or 30."""
    return _given("SP_WATCHDOG_S", EXAMPLE_SECONDS)


def _given(name: str, default: float) -> float:
    """Return the seconds in an environment variable, or the default if it is empty or not set."""
    text = os.environ.get(name) or str(default)
    with suppress(ValueError):
        if (seconds := float(text)) > 0:
            return min(seconds, LONGEST_SECONDS)
    raise ValueError(f"the environment has {name}={text!r}; set it to a number of seconds above 0.")


@contextmanager
def limit(seconds: float) -> Iterator[None]:
    """Limit the time of a `with` block to `seconds`. `progress` says what happens at the limit.

    When the block ends, the limit of the enclosing block starts anew.
    """
    _limits.append(seconds)
    progress()
    try:
        yield
    finally:
        _limits.pop()
        progress()


def progress() -> None:
    """Restart the time limit of the innermost block, because the rank has made progress.

    At the limit the stacks are written, and GRACE_SECONDS later the process is ended.
    """
    if _watch is not None and _limits:
        faulthandler.dump_traceback_later(_limits[-1], exit=False, file=_watch.hang)
        signal.setitimer(signal.ITIMER_REAL, _limits[-1] + GRACE_SECONDS)


def note(text: str) -> None:
    """Write `text`, cut to 511 bytes, to this rank's file "place", which outlives the process.

    What a full disk has no room for is not written, here and in `tell` and `in_flight`.
    """
    if _watch is not None:
        with suppress(OSError):
            os.pwrite(_watch.place, encoded(text)[: PLACE_BYTES - 1] + b"\0", 0)


def encoded(text: str) -> bytes:
    """Return the text in UTF-8. Lone surrogates, as in odd file names, become escapes."""
    return text.encode(errors="backslashreplace")


def tell(text: str) -> None:
    """Print text where pytest does not capture it.

    The text goes to the stack file, which the launcher prints, or without one to standard error.
    """
    with suppress(OSError):
        os.write(2 if _watch is None else _watch.stack, encoded(text))


def in_flight(text: str) -> None:
    """Write the text of the test example about to be run, or "" for none. Only rank 0 calls this.

    The file stays open and is never emptied before a write, because some file systems make that
    slow.
    """
    if _watch is not None:
        with suppress(OSError):
            os.ftruncate(_watch.flying, os.pwrite(_watch.flying, encoded(text), 0))


def run_program(arguments: list[str]) -> None:
    """Run a Python program in this process as the interpreter would, and note how it ended.

    After an error, the exit of this process ends all ranks (`abort_at_exit`). Nothing is noted of
    the end of a process that the program has forked.

    Args:
        arguments: a file, folder or zip archive, `-m` and a module, or `-c` and code; then the
            program's arguments.

    Raises:
        BaseException: the program raised it.
    """
    kind, *rest = arguments
    is_folder = kind not in ("-c", "-m") and pkgutil.get_importer(kind) is not None
    places = [os.path.abspath(kind)] if is_folder else []
    if sys.path[0] == os.path.dirname(os.path.abspath(__file__)):
        del sys.path[0]
        beside = os.path.dirname(os.path.realpath(kind))
        places = places or [{"-c": "", "-m": os.getcwd()}.get(kind, beside)]
    sys.path[:0] = places
    sys.argv = {"-c": [kind, *rest[1:]], "-m": rest}.get(kind, arguments)
    # a module of its own, and for good: threads and functions for the exit may pickle its classes
    pid, main = os.getpid(), types.ModuleType("__main__")
    sys.modules["__main__"] = main
    as_main = vars(runpy)["_run_module_as_main"]  # which `python -m` calls
    try:
        if kind == "-m":
            as_main(rest[0])
        elif is_folder:
            as_main("__main__", alter_argv=False)
        else:
            exec(_code_of(kind, rest, main), vars(main))
    except BaseException as error:
        code = exit_code(error)
        if os.getpid() == pid:
            abort_at_exit(code)
            note(f"{FAILED}{traceback.format_exception_only(error)[-1].strip()}" if code else ENDED)
        raise
    if os.getpid() == pid:
        note(ENDED)


def _code_of(kind: str, rest: list[str], main: types.ModuleType) -> Any:
    """Return the code of a file, or of the text after `-c`; name the file in the module `main`."""
    if kind == "-c":
        lines = textwrap.dedent(rest[0]) if sys.version_info >= (3, 14) else rest[0]
        return compile(lines, "<string>", "exec", dont_inherit=True)
    main.__file__ = os.path.abspath(kind)
    text = Path(kind).read_bytes()
    code = pkgutil.read_code(io.BytesIO(text))  # None if the file is not compiled
    return code or compile(text, main.__file__, "exec", dont_inherit=True)


def exit_code(error: BaseException) -> int:
    """Return the exit code with which Python ends a program because of this error."""
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    return 130 if isinstance(error, KeyboardInterrupt) else 1


def abort_at_exit(code: int) -> None:
    """Make MPI abort all ranks when this process exits; they would wait for it forever.

    Nothing is changed if `code` is 0, if mpi4py was not imported, or in a test session, which ends
    its ranks itself.

    Args:
        code: the exit code of this process, with which MPI aborts the ranks.
    """
    mpi = sys.modules.get("mpi4py.MPI")
    is_session = (Path(os.environ.get(RUN_DIR, ".")) / STARTED).exists()
    if mpi is not None and code and not is_session:
        mpi._set_abort_status(code)


@functools.lru_cache(1024)
def owner(filename: str) -> str:
    """Return the owner of a source file: "kit", "library", "foreign" or "test"."""
    path = os.path.abspath(filename)
    if path.startswith(KIT):
        return "kit"
    if path.startswith(f"{LIBRARY}{os.sep}"):
        return "library"
    foreign = path.startswith(_STDLIB) or not _PACKAGES.isdisjoint(path.split(os.sep))
    foreign = foreign or filename.startswith("<") or filename.endswith((".pxi", ".pyx"))
    return "foreign" if foreign else "test"


@functools.lru_cache(1024)
def short(filename: str) -> str:
    """Return the last two parts of a path, such as "sp_core/mesh.py"."""
    return os.sep.join(Path(filename).parts[-2:])


def here() -> str:
    """Return the place of the innermost caller in the library or the test, as "file:line".

    After a place in the library the test's is added: "file:line (called from file:line)". Frames of
    the kit and foreign frames are skipped. Without any place return "an unknown place".
    """
    inner = ""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        who = owner(frame.f_code.co_filename)
        if who == "test" or (who == "library" and not inner):
            place = f"{short(frame.f_code.co_filename)}:{frame.f_lineno}"
            if who == "test":
                return f"{inner} (called from {place})" if inner else place
            inner = place
        frame = frame.f_back
    return inner or "an unknown place"


if __name__ == "__main__":
    for _name in RANKS:
        if _name in os.environ and _watch is None:
            start(int(os.environ[_name]))
    run_program(sys.argv[1:])
