"""A program in which one rank fails at some place: `deaths/programs.py` starts it on three ranks.

python case_failing.py PLACE FILE

The lost rank writes its process number and the time into the file.
"""

import atexit
import contextlib
import importlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

PLACE, LOST = sys.argv[1], 1
NAMES = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "RANK")
IS_LOST = LOST in [int(os.environ[name]) for name in NAMES if name in os.environ]
OVER_GLOO = "TORCHELASTIC_RUN_ID" in os.environ


def note() -> None:
    """Write this rank's process number and the time into the file."""
    Path(sys.argv[2]).write_text(f"{os.getpid()} {time.time()}")


def error(*_: Any) -> None:
    """Raise an ordinary error."""
    note()
    raise LookupError("this rank is lost")


def noted(fail: Callable[[], object]) -> Callable[[], object]:
    """Return a function that calls `note` and then `fail`."""
    return lambda: (note(), fail())


def world() -> tuple[Any, int]:
    """Return the communicator of all ranks (None under torchrun), and their number."""
    if not OVER_GLOO:
        from mpi4py import MPI

        return MPI.COMM_WORLD, MPI.COMM_WORLD.size
    sys.modules["mpi4py"] = None  # type: ignore[assignment]
    from torch import distributed

    distributed.init_process_group("gloo")
    return None, distributed.get_world_size()


def at(place: str, fail: Callable[[], object] = error) -> None:
    """Call `fail` if this is rank LOST and the program was started for this place."""
    if IS_LOST and place == PLACE:
        fail()


def soon(place: str) -> None:
    """Fail half a second later on rank LOST, which then waits for the others in its next call."""
    if place == PLACE and not IS_LOST:
        time.sleep(1.5)
    at(place, lambda: signal.setitimer(signal.ITIMER_REAL, 0.5))


def fail_in_a_thread() -> None:
    """Let a thread raise an error, and wait in the main thread as if nothing had failed."""
    threading.Thread(target=error).start()
    time.sleep(60)


def report_slowly(*told: Any) -> None:
    """Print an error after a second, as on a loaded machine."""
    time.sleep(1)
    sys.__excepthook__(*told)


def fail_again() -> None:
    """Raise an error, and be interrupted by a signal while it is being reported."""
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.setitimer(signal.ITIMER_REAL, 1.0)
    error()


def exit_later() -> None:
    """Exit with code 0, and raise an error in a function that `atexit` calls."""
    atexit.register(error)
    sys.exit(0)


WAYS = {
    "SIGTERM": noted(lambda: [os.kill(os.getpid(), signal.SIGTERM), time.sleep(60)]),
    "interrupt": noted(lambda: [os.kill(os.getpid(), signal.SIGINT), time.sleep(60)]),
    "memory": noted(lambda: importlib.import_module("deaths.ways").exhaust_memory()),
    "exit": noted(lambda: sys.exit(3)),
    "_exit": noted(lambda: os._exit(3)),
    "thread": fail_in_a_thread,
}


def leave(comm: Any, size: int) -> None:
    """Leave meshes by an error that every rank handles, then end early on one rank."""
    import torch

    import sp_core as sp

    caught = contextlib.suppress(LookupError, SystemExit, sp.PeerFailed)
    for late, fail in ((0, error), (0, WAYS["exit"]), (0, error), (0, error), (4, error)):
        with caught, sp.Mesh(comm, sp=size, a=1) as mesh:
            at("left", fail)
            time.sleep(late)
            sp.all_reduce(torch.ones(2), comm=mesh["sp"])


def block(mesh: Any) -> None:
    """Communicate, and fail at one of many places."""
    import torch

    import sp_core as sp

    group = mesh["sp"]
    with contextlib.suppress(LookupError):  # a program may handle its errors
        at("caught")
    at("caught", lambda: threading.Thread(target=sys.exit, args=(3,)).start())
    x = torch.ones(1000, requires_grad=True)
    at("before")
    pending = sp.all_gather_start(x, comm=group, algorithm="ring")
    at("started")
    at("slow")
    soon("wait")
    pending.wait()
    soon("inside")
    if PLACE == "agreed":  # every rank raises
        sp.all_reduce(torch.ones(2 + IS_LOST), comm=group)
    y = sp.all_reduce(x, comm=group, algorithm="ring")
    at("backward", lambda: y.register_hook(error))
    y.sum().backward()
    at("after")
    for way, fail in WAYS.items():
        at(way, fail)
    at("free", lambda: setattr(mesh, "free", error))


def main() -> None:
    """Communicate until a rank is lost; without that, every rank would go on for ever."""
    at("import", lambda: (note(), importlib.import_module("not_here")))
    import sp_core as sp

    signal.signal(signal.SIGALRM, error)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    at("slow", lambda: setattr(sys, "excepthook", report_slowly))
    comm, size = world()
    at("early")
    if PLACE == "left":
        leave(comm, size)
        return
    with sp.Mesh(comm, sp=size) as mesh:
        block(mesh)
    at("behind")
    at("again", fail_again)
    at("exit behind", noted(lambda: sys.exit(3)))
    at("atexit", exit_later)
    for _ in range(1 if PLACE == "caught" else 10**6):
        with sp.Mesh(comm, sp=size) as mesh:
            sp.fence(comm=mesh["sp"])


if __name__ == "__main__":
    main()
