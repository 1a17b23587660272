"""A program in which one rank fails in some way: `test_failing.py` starts it on all ranks.

python case_failing.py WAY
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from typing import Any

import torch

import sp_core as sp

WAY, LOST = sys.argv[1], 1


def world() -> Any:
    """All ranks, of MPI or of torchrun."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        from mpi4py import MPI

        return MPI.COMM_WORLD
    torch.distributed.init_process_group("gloo")
    return None


def size_of(comm: Any) -> int:
    """The number of ranks."""
    return torch.distributed.get_world_size() if comm is None else int(comm.size)


def fail(where: str, mesh: sp.Mesh | None = None) -> None:
    """Fail on one rank, if it is to be here."""
    if where != WAY or (mesh is not None and mesh.rank != LOST):
        return
    raise LookupError("this rank is lost")


def lost_in(way: str) -> None:
    """The ways that are no plain error at a place."""
    if way == "memory":
        raise MemoryError("this rank is lost")
    if way == "interrupt":
        raise KeyboardInterrupt
    if way == "exit":
        sys.exit(3)
    if way == "SIGTERM":
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60)
    if way == "thread":
        thread = threading.Thread(target=lambda: fail("thread"))
        thread.start()
        thread.join()
        time.sleep(60 if "TORCHELASTIC_RUN_ID" not in os.environ else 0)


def main() -> None:
    """Communicate until a rank is lost; every rank would go on for ever."""
    comm = world()
    with sp.Mesh(comm, sp=size_of(comm)) as mesh:
        group, is_lost = mesh["sp"], mesh.rank == LOST
        with contextlib.suppress(LookupError):  # a program may handle its errors
            fail("caught", mesh)
        x = torch.ones(1000, requires_grad=True)
        fail("before", mesh)
        pending = sp.all_gather_start(x, comm=group, algorithm="ring")
        fail("started", mesh)
        pending.wait()
        if WAY == "agreed":  # every rank raises
            sp.all_reduce(torch.ones(2 + is_lost), comm=group)
        y = sp.all_reduce(x, comm=group, algorithm="ring")
        if is_lost:
            lost_in(WAY)
            y.register_hook(lambda grad: fail("backward"))
        y.sum().backward()
        fail("after", mesh)
        sp.fence(comm=group)
    if WAY == "behind" and is_lost:
        raise LookupError("this rank is lost")
    for _ in range(1 if WAY == "caught" else 10**6):
        with sp.Mesh(comm, sp=size_of(comm)) as mesh:
            sp.fence(comm=mesh["sp"])


if __name__ == "__main__":
    main()
