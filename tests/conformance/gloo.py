"""Make a process group for the ranks of an MPI launch, again if a library broke it."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist


class Gloo:
    """The default process group; ranks find each other through a file.

    Args:
        folder: that all ranks can write to.
        comm: of all ranks.
        patience: seconds that a rank waits for another.
        backend: of torch.distributed, gloo or another one.
    """

    def __init__(self, folder: Path, comm: Any, patience: float, backend: str = "gloo") -> None:
        if Path("/sys/class/net/lo").exists():
            os.environ.setdefault(
                "GLOO_SOCKET_IFNAME", "lo"
            )  # else gloo looks the host name up, which containers may not know
        self._folder, self._made, self._patience = folder, 0, timedelta(seconds=patience)
        self._backend = backend
        self._prepare: Callable[[Any], None] = lambda comm: None
        self._start(comm)

    def serve(self, prepare: Callable[[Any], None]) -> None:
        """Work for a library from now on.

        Args:
            prepare: what it does with a new group.
        """
        from mpi4py import MPI

        self._prepare = prepare
        prepare(MPI.COMM_WORLD)

    def renew(self, comm: Any) -> None:
        """End the group and make another."""
        dist.destroy_process_group()
        self._start(comm)
        self._prepare(comm)

    def _start(self, comm: Any) -> None:
        self._made += 1
        meeting = self._folder / f"gloo-{self._made}"
        who = {"rank": comm.rank, "world_size": comm.size}
        dist.init_process_group(
            self._backend, init_method=f"file://{meeting}", timeout=self._patience, **who
        )
