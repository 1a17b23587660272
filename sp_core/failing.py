"""End all ranks when an error ends the program of one, as `python -m mpi4py` does.

Without this a rank of MPI waits in MPI_Finalize for ranks that wait for it, torchrun does not learn
that a thread has failed, and it takes the first of the other ranks that gives up for the cause.
"""

from __future__ import annotations

import atexit
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

from sp_core import progress
from sp_core.errors import AGREED

GRACE_SECONDS = 2.0
"""In which the other ranks can say what they found, before all are ended."""
hooked = False
"""Whether errors are left to somebody, as a test session says beforehand, or to this module."""
_head = ""
_stop: Callable[[int], Any] = sys.exit


def watch_over(rank: int, size: int, stop: Callable[[int], Any]) -> None:
    """Let an error that ends the program of this rank end all ranks, with its exit code.

    An error that the program catches ends nothing. Programs of one rank are left alone.

    Args:
        rank: of this process in its program.
        size: number of ranks of the program.
        stop: ends all ranks with an exit code, or this one if its launcher then ends the others.
    """
    global hooked, _head, _stop
    if hooked or size == 1:
        return
    hooked, _head, _stop = True, f"rank {rank} of {size}: ", stop
    usual, of_threads, ignored = sys.excepthook, threading.excepthook, sys.unraisablehook

    def ended(kind: type[BaseException], error: BaseException, trace: Any) -> None:
        end(error, partial(usual, kind, error, trace))

    def thread_ended(told: threading.ExceptHookArgs) -> None:
        tell = partial(of_threads, told)
        end(told.exc_value, tell) if isinstance(told.exc_value, Exception) else tell()

    def unraisable(told: sys.UnraisableHookArgs) -> None:
        ignored(told)
        if told.exc_value is not None and "atexit callback" in (told.err_msg or ""):
            end(told.exc_value, lambda: None)

    sys.excepthook, threading.excepthook, sys.unraisablehook = ended, thread_ended, unraisable


def end(error: BaseException, tell: Callable[[], Any]) -> None:
    """Print an error with its rank, and end all ranks after the grace.

    If another rank prints the same error in full, this one prints a line and gives it time.
    """
    agreed = getattr(error, AGREED, 0)
    try:
        if agreed and error.__cause__ is None:
            text = str(error).partition("\n")[0]
            print(f"{_head}{type(error).__name__}: {text}", file=sys.stderr)
        else:
            print(f"{_head}this error ends all ranks.", file=sys.stderr)
            tell()
        sys.stderr.flush()
        sys.stdout.flush()
        until = time.monotonic() + GRACE_SECONDS * (2 if agreed else 1)
        while time.monotonic() < until:
            with suppress(Exception):  # the error that is printed says more
                progress.of_this_rank().keep(())  # MPI passes on messages of other ranks meanwhile
            time.sleep(0.01)
    finally:  # also if the report fails or is interrupted
        _stop(exit_code(error))


def exit_code(error: BaseException) -> int:
    """Return the exit code of a program that this error ends."""
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    return 130 if isinstance(error, KeyboardInterrupt) else 1


def left_by(error: BaseException) -> None:
    """Prepare for the end of the program, of which `sys.exit` tells no hook."""
    if _head and isinstance(error, SystemExit) and exit_code(error):
        atexit.register(end, error, partial(traceback.print_exception, error))
