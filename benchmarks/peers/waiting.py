"""How a rank waits that has nothing to do: asleep, so that the others have its core."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

NAP_SECONDS = 0.005


def meet(world: Intracomm) -> None:
    """A barrier at which ranks sleep."""
    request = world.Ibarrier()
    while not request.Test():
        time.sleep(NAP_SECONDS)
