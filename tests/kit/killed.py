"""A program whose last rank is killed in the middle of a collective in shared memory.

Rank 0 prints which files in /dev/shm it has mapped.
"""

import os
import signal
import time

from mpi4py import MPI

import sp_core as sp

world = MPI.COMM_WORLD
with sp.Mesh(world, transport="window", sp=world.size) as mesh:
    x = sp.shared_empty((1 << 16,), comm=mesh["sp"])
    with open("/proc/self/maps") as maps:  # noqa: PTH123
        mapped = {line.split()[5] for line in maps if "/dev/shm/" in line}
    if world.rank == 0:
        print(f"mapped: {' '.join(sorted(mapped))}", flush=True)
    sp.all_reduce(x, comm=mesh["sp"])
    time.sleep(1)
    if world.rank == world.size - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    sp.all_reduce(x, comm=mesh["sp"])
