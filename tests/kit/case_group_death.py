"""Ranks of process groups die, or leave with an error: `test_torchrun.py` starts these processes.

python case_group_death.py PROCESS PROCESSES FOLDER

The processes that live make one group after the other. In each group one rank is lost.
"""

import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
from torch import distributed

import sp_core as sp

LIMIT = timedelta(seconds=90)
LOST = 1
LOSSES = (("error", "ring"), ("error", "fence"), ("exit", "gloo"), ("kill", "window"))
"""Ways to lose rank 1 of a group, and the call in which the others wait for it."""


def lose(way: str) -> None:
    """End this rank, or leave the mesh with an error and stay alive."""
    if way == "exit":
        os._exit(3)
    if way == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    raise KeyError("lost")


def call(mesh: sp.Mesh, name: str) -> None:
    """Wait for the lost rank."""
    comm = mesh["sp"]
    sharding = sp.Sharding.zigzag(seq_len=64, size=comm.size)
    q = sharding.shard(torch.ones(1, 64, 2, 8), comm.rank, dim=1)
    if name == "fence":
        sp.fence(comm=comm)
    elif name == "ring":
        sp.ring_attention(q, q, q, comm=comm, sharding=sharding)
    else:
        sp.all_reduce(torch.ones(1000), comm=comm)


def told(rank: int, size: int, store: Path, way: str, name: str) -> str:
    """Return the name of the error that this rank of a new group gets, or "nothing"."""
    where = f"file://{store}"
    distributed.init_process_group("gloo", where, timeout=LIMIT, rank=rank, world_size=size)
    transport = "window" if name == "window" else "auto"
    try:
        with sp.Mesh(None, transport=transport, check="off", sp=size) as mesh:
            sp.fence(comm=mesh["sp"])
            if rank == LOST:
                lose(way)
            call(mesh, name)
    except (sp.PeerFailed, KeyError) as error:
        return type(error).__name__
    return "nothing"


if __name__ == "__main__":
    mine, folder = int(sys.argv[1]), Path(sys.argv[3])
    living = list(range(int(sys.argv[2])))
    for way, name in LOSSES:
        text = told(living.index(mine), len(living), folder / "store" / name, way, name)
        (folder / f"{name}.{mine}").write_text(text)
        if way != "error":
            living.pop(LOST)
        while len(list(folder.glob(f"{name}.[0-9]"))) < len(living):
            time.sleep(0.05)  # until all ranks have a result: the end of one is an error of others
        distributed.destroy_process_group()
    os._exit(0)
