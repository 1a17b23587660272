"""Give numbers to ranks by one-sided access to one rank's memory: nobody has to answer."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import numpy as np

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

HOME = 0
"""The rank whose memory holds the number."""


class MpiCounter:
    """Give 0, 1, 2, ... to whichever rank asks next.

    The MPI library adds atomically in a window of eight bytes.

    Args:
        comm: an mpi4py communicator; all its ranks make this together.

    Source: MPI 4.1, section 12.3.4, MPI_Fetch_and_op.
    """

    def __init__(self, comm: Intracomm) -> None:
        from mpi4py import MPI

        self._sum = MPI.SUM
        self._window = MPI.Win.Allocate(8 if comm.rank == HOME else 0, 8, comm=comm)
        if comm.rank == HOME:
            self._window.Lock(HOME, MPI.LOCK_EXCLUSIVE)
            np.frombuffer(cast("bytes", self._window.tomemory()), np.int64)[:] = 0
            self._window.Unlock(HOME)
        comm.Barrier()
        self._window.Lock_all(MPI.MODE_NOCHECK)

    def take(self) -> int:
        """Return the next number, which no other rank gets."""
        one, got = np.ones(1, np.int64), np.empty(1, np.int64)
        self._window.Fetch_and_op(one, got, HOME, 0, self._sum)
        self._window.Flush(HOME)
        return int(got[0])

    def free(self) -> None:
        """Give the memory back; every rank calls this."""
        self._window.Unlock_all()
        self._window.Free()
