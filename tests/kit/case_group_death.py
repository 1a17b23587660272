"""A rank of a process group dies, or leaves with an error: `test_torchrun.py` starts this.

python case_group_death.py RANK SIZE STORE WAY CALL
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
from torch import distributed

import sp_core as sp

LIMIT = timedelta(seconds=90)
LOST = 1


def lose(way: str) -> None:
    """End this rank, or leave the mesh with an error and stay alive."""
    if way == "exit":
        os._exit(3)
    if way == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    raise KeyError("lost")


def calls(mesh: sp.Mesh) -> dict[str, Callable[[], object]]:
    """What the other ranks wait in."""
    comm, x = mesh["sp"], torch.ones(1000)
    sharding = sp.Sharding.zigzag(seq_len=64, size=comm.size)
    q = sharding.shard(torch.ones(1, 64, 2, 8), comm.rank, dim=1)
    return {
        "fence": lambda: sp.fence(comm=comm),
        "gloo": lambda: sp.all_reduce(x, comm=comm),
        "ring": lambda: sp.ring_attention(q, q, q, comm=comm, sharding=sharding),
    }


def main(rank: int, size: int, store: Path, way: str, call: str) -> str:
    """Return what this rank has been told."""
    where = f"file://{store}"
    distributed.init_process_group("gloo", where, timeout=LIMIT, rank=rank, world_size=size)
    transport = "window" if call == "window" else "auto"
    try:
        with sp.Mesh(None, transport=transport, check="off", sp=size) as mesh:
            sp.fence(comm=mesh["sp"])
            if rank == LOST:
                lose(way)
            calls(mesh).get(call, calls(mesh)["gloo"])()
        return "nothing"
    except (sp.PeerFailed, KeyError) as error:
        return f"{type(error).__name__}: {error}"


if __name__ == "__main__":
    number, ranks, path = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    told = main(number, ranks, path, *sys.argv[4:])
    path.with_suffix(f".{number}").write_text(told)
    while len(list(path.parent.glob("*.[0-9]"))) < ranks - (sys.argv[4] != "error"):
        time.sleep(0.05)  # until all the others have been told, nobody's end tells them
    os._exit(0)
