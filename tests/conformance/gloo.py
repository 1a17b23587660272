"""Make a torch process group for the ranks of an MPI launch, and a new one after an error."""

import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist


class Gloo:
    """Make torch's default process group, whose ranks find each other through a file.

    Args:
        folder: a folder to which all ranks can write.
        comm: the communicator of all ranks.
        patience: the time that a rank waits for another, in seconds.
        backend: the name of the torch.distributed backend.
    """

    def __init__(self, folder: Path, comm: Any, patience: float, backend: str = "gloo") -> None:
        if Path("/sys/class/net/lo").exists():
            # otherwise gloo looks up the host name, which containers may not know
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        self._folder, self._made, self._patience = folder, 0, timedelta(seconds=patience)
        self._backend = backend
        self._start(comm)

    def renew(self, comm: Any) -> None:
        """Destroy the group, and make a new one."""
        dist.destroy_process_group()
        self._start(comm)

    def _start(self, comm: Any) -> None:
        self._made += 1
        meeting = self._folder / f"gloo-{self._made}"
        who = {"rank": comm.rank, "world_size": comm.size}
        dist.init_process_group(
            self._backend, init_method=f"file://{meeting}", timeout=self._patience, **who
        )
