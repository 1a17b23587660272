"""End all ranks of an MPI job when an error ends the program of one, as `python -m mpi4py` does.

Without this the rank waits in MPI_Finalize for ranks that wait for it. A process group needs none
of it: torchrun ends the others.
"""

from __future__ import annotations

import atexit
import sys
import threading
import time
from functools import partial
from typing import Any

from sp_core.errors import AGREED

GRACE_SECONDS = 2.0
"""In which the other ranks can say what they found, before all are ended."""
hooked = False
"""Whether `watch_over` has been called in this process. A test session says so beforehand."""


def watch_over(comm: Any) -> None:
    """Let an error that ends the program of this rank end all ranks, with its exit code.

    An error that the program catches ends nothing. Other communicators than mpi4py's, and programs
    of one rank, are left alone.
    """
    global hooked
    if hooked or type(comm).__module__ != "mpi4py.MPI":
        return
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    if hooked := world.size > 1:
        usual, of_threads = sys.excepthook, threading.excepthook

        def ended(kind: type[BaseException], error: BaseException, trace: Any) -> None:
            say(world.rank, world.size, error, partial(usual, kind, error, trace))
            end(error)

        def thread_ended(told: threading.ExceptHookArgs) -> None:
            if told.exc_value is not None:
                say(world.rank, world.size, told.exc_value, partial(of_threads, told))
                end(told.exc_value)

        sys.excepthook, threading.excepthook = ended, thread_ended


def say(rank: int, size: int, error: BaseException, tell: Any) -> None:
    """Print an error with its rank: in one line if another rank prints the same one in full."""
    head = f"rank {rank} of {size}: "
    if getattr(error, AGREED, 0) and error.__cause__ is None:
        text = str(error).partition("\n")[0]
        print(f"{head}{type(error).__name__}: {text}", file=sys.stderr, flush=True)
        return
    print(f"{head}this error ends all ranks.", file=sys.stderr)
    tell()
    sys.stderr.flush()


def end(error: BaseException) -> None:
    """End all ranks after the grace, or after twice as long if another rank has the cause."""
    from mpi4py import MPI

    time.sleep(GRACE_SECONDS * (2 if getattr(error, AGREED, 0) else 1))
    MPI.COMM_WORLD.Abort(exit_code(error))


def exit_code(error: BaseException) -> int:
    """Return the exit code of a program that this error ends."""
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    return 130 if isinstance(error, KeyboardInterrupt) else 1


def left_by(error: BaseException) -> None:
    """Prepare for the end of the program, of which `sys.exit` tells no hook."""
    if hooked and isinstance(error, SystemExit) and (code := exit_code(error)):
        print(f"sys.exit({code}) has left a mesh: it ends all ranks.", file=sys.stderr, flush=True)
        atexit.register(end, error)
