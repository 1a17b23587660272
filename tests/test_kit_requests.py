"""Requests in the least favourable order that MPI allows, and to their end: the same for threads and for MPI."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from kit.failing import failure_of, leads

from sp_core.testing import spmd

pytestmark = pytest.mark.ranks


def finish(request: Any) -> None:
    while not request.Test():
        pass


@pytest.mark.parametrize("end", ["body", "Free"])
@pytest.mark.parametrize("forgotten", ["Isend", "Iallreduce"])
def test_what_was_begun_must_be_found_complete_before_the_end(forgotten: str, end: str) -> None:
    @spmd(2)
    def body(comm: Any) -> None:
        twin, peer, memory = comm.Dup(), 1 - comm.rank, np.zeros((3, 1))
        if forgotten == "Isend":
            twin.announce_exchange(sends=[(peer, 8)], recvs=[(peer, 8)])
            twin.Isend(memory[0], peer)
            finish(twin.Irecv(memory[1], peer))
        else:
            twin.Iallreduce(memory[0], memory[1])
        if end == "Free":
            twin.Free()

    text = failure_of(body)
    assert "CollectiveMismatch" in text
    if leads():
        assert "before these were found complete by Test or Wait" in text


@spmd(2, 3)
def test_a_message_is_not_sent_before_somebody_waits_for_it(comm: Any) -> None:
    if not hasattr(comm, "announce_exchange"):
        return  # a plain communicator may keep a short one
    sends, recvs = ([(1, 8)] if comm.rank == 0 else []), ([(0, 8)] if comm.rank == 1 else [])
    comm.announce_exchange(sends=sends, recvs=recvs, later=True)
    sent = [comm.Isend(np.zeros(1), peer) for peer, _ in sends]
    comm.Barrier()
    assert not any(request.Test() for request in sent for _ in range(5))
    comm.Barrier()
    for request in [*sent, *(comm.Irecv(np.zeros(1), peer) for peer, _ in recvs)]:
        finish(request)
