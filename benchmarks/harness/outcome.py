"""How all ranks learn how a case ended on each of them, also where one of them failed and the others wait for it."""

from __future__ import annotations

import sys
import time
import traceback
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

PATIENCE_SECONDS = 10.0
PAUSE_SECONDS = 0.001
SHOWN = 1500  # characters of an error that a record keeps
NO_MEMORY = ("OutOfMemoryError", "MemoryError", "out of memory", "can't allocate memory")


def meet(world: Intracomm, error: Exception | None) -> list[str]:
    """Tell the other ranks how the case ended here.

    A rank that failed does not wait for ever: the others may be waiting for it inside the case. It then ends the whole launch.

    Args:
        world: a communicator that the case did not use.
        error: what the case raised on this rank.

    Returns:
        What it raised on each rank that failed; the same on all.
    """
    mine = "" if error is None else f"rank {world.rank}: {describe(error)}"
    arrived = world.Ibarrier()
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not arrived.Test():
        if error is not None and time.monotonic() > deadline:
            traceback.print_exception(error)
            print(f"{mine}\nThe others did not arrive within {PATIENCE_SECONDS:g} s: the launch ends.", file=sys.stderr, flush=True)
            world.Abort(1)
        time.sleep(PAUSE_SECONDS)
    told: list[str] = world.allgather(mine)
    return [text for text in told if text]


def describe(error: Exception) -> str:
    """Kind and text of an error, cut."""
    return f"{type(error).__name__}: {error}"[:SHOWN]


def status_of(reason: str) -> str:
    """The status of a record whose case failed for that reason."""
    return "oom" if any(sign in reason for sign in NO_MEMORY) else "failed"
