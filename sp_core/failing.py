"""End all ranks when an error ends the program of one rank, as `python -m mpi4py` does.

`Mesh` calls `watch_over`. Without it, a rank of MPI with an error waits in MPI_Finalize for the
other ranks, which wait for that rank in a collective. torchrun does not notice that a thread has
failed, and it reports the first rank that exits as the cause, which may be another rank.
"""

import atexit
import io
import mmap
import multiprocessing
import os
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

from sp_core import progress
from sp_core.errors import AGREED, PeerFailed, short_text
from sp_core.launch.watch import exit_code
from sp_core.machine import started_tasks

GRACE_SECONDS = 2.0
"""Time in which the other ranks can print their errors, before all ranks are ended."""
SETTLE_SECONDS = 60.0
"""How long a program that ends without an error first completes agreements for slower ranks. MPICH
does not complete them in MPI_Finalize."""
RESERVE_BYTES = 1 << 25
"""Address space that an error frees: after a MemoryError, closing a mesh may start a thread."""
hooked = False
"""Whether `watch_over` has nothing to do: it has been called, or a test session has set this in
order to handle errors itself."""
_head, _pid = "", os.getpid()
_stop: Callable[[int], Any] = sys.exit
_reserve: list[mmap.mmap] = []


def watch_over(rank: int, size: int, stop: Callable[[int], Any]) -> None:
    """End all ranks, with the error's exit code, if this rank's program does not catch an error.

    An error that ends a thread or an atexit function counts as well.
    This sets `sys.excepthook`, `threading.excepthook` and `sys.unraisablehook`. An error that the
    program catches ends nothing. In programs of one rank, and in a second call, nothing is set.
    Warn if the launcher has started more ranks than the program has.

    Args:
        rank: number of this process in its program.
        size: number of ranks of the program.
        stop: takes an exit code and ends all ranks (MPI's Abort), or only this process if its
            launcher then ends the other ranks (torchrun).
    """
    global hooked, _head, _pid, _stop
    by_torchrun = "TORCHELASTIC_RUN_ID" in os.environ
    tasks = int(os.environ.get("WORLD_SIZE", "1")) if by_torchrun else started_tasks()
    if size < tasks and not hooked:
        warnings.warn(
            f"the launcher has started {tasks} processes, but MPI has {size} rank(s): each process "
            "computes everything alone. Start with this MPI's own mpiexec; under torchrun write "
            "Mesh(None, ...).",
            stacklevel=4,
        )
    if size > 1 and not _reserve:
        with suppress(OSError):  # no page of it is ever used
            _reserve.append(mmap.mmap(-1, RESERVE_BYTES, mmap.MAP_PRIVATE))
    if not isinstance(sys.exc_info()[1], SystemExit):  # the program has caught an earlier one
        atexit.unregister(end)
    if hooked or size == 1:
        return
    hooked, _head, _pid, _stop = True, f"rank {rank} of {size}: ", os.getpid(), stop
    usual, of_threads, ignored = sys.excepthook, threading.excepthook, sys.unraisablehook

    def ended(kind: type[BaseException], error: BaseException, trace: Any) -> None:
        end(error, partial(usual, kind, error, trace))

    def thread_ended(told: threading.ExceptHookArgs) -> None:
        tell = partial(of_threads, told)
        end(told.exc_value, tell) if isinstance(told.exc_value, Exception) else tell()

    def unraisable(told: "sys.UnraisableHookArgs") -> None:
        ignored(told)
        if told.exc_value is not None and "atexit callback" in (told.err_msg or ""):
            end(told.exc_value, lambda: None)

    sys.excepthook, threading.excepthook, sys.unraisablehook = ended, thread_ended, unraisable
    progress.settle_at_exit(SETTLE_SECONDS)


def leave(code: int) -> None:
    """End this process at once, but first its daemonic children, as Python does in `atexit`."""
    try:
        for child in multiprocessing.active_children():
            if child.daemon:
                child.terminate()
    finally:  # there may be no memory for this
        os._exit(code)


def end(error: BaseException, tell: Callable[[], Any]) -> None:
    """Print an error with this rank's number, wait GRACE_SECONDS, and end all ranks.

    In a process that a rank has forked, only print the error, as Python does.

    If another rank prints the same error in full, print one line and wait twice as long. A rank
    that has lost a peer also waits twice as long, because torchrun names the rank that ends first.

    Args:
        error: the error that ends the program; it gives the exit code.
        tell: prints the error in full.
    """
    _reserve.clear()
    if os.getpid() != _pid:
        tell()
        return
    agreed = getattr(error, AGREED, 0)
    if isinstance(sys.stderr, io.StringIO):  # torch's hook would print it only after this function
        sys.stderr = sys.__stderr__ or sys.stderr
    try:
        text, is_short = "this error ends all ranks.", agreed and error.__cause__ is None
        if is_short:
            text = f"{type(error).__name__}: {short_text(error)}"
        with suppress(Exception):  # standard error may be closed, or None
            print(f"{_head}{text}", file=sys.stderr)
        with suppress(Exception):
            if not is_short:
                tell()
            sys.stderr.flush()
        with suppress(Exception):  # so may standard output
            sys.stdout.flush()
        follows = agreed or isinstance(error, PeerFailed)
        until = time.monotonic() + GRACE_SECONDS * (2 if follows else 1)
        while time.monotonic() < until:
            with suppress(Exception):  # do not hide the error that is printed
                progress.of_this_rank().advance()  # calls MPI, which then moves messages
            time.sleep(0.01)
    finally:  # also if the report fails or is interrupted
        _stop(exit_code(error))


def left_by(error: BaseException) -> None:
    """Let the exit of this program end all ranks if `error` is a SystemExit other than success.

    `Mesh` calls this when an error leaves its `with` block, since Python calls no excepthook for
    SystemExit. atexit then calls `end`, unless the program makes another mesh before. Without
    `watch_over`, and in a forked process, nothing happens.
    """
    _reserve.clear()
    is_rank = _head and os.getpid() == _pid
    if is_rank and isinstance(error, SystemExit) and exit_code(error):
        atexit.register(end, error, partial(traceback.print_exception, error))
