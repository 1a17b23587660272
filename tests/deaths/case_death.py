"""Run a test session in which one rank is lost; `nox -s deaths` starts it under mpiexec."""

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from deaths.ways import WAYS
from hypothesis import strategies as st
from mpi4py import MPI

from sp_core.testing import given, spmd

DEATH = json.loads(os.environ["SP_DEATH"])
FOLDER = Path(DEATH["folder"])
RANK, SIZE = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
VICTIM = DEATH["rank"] == RANK
VICTIM_NUMBER = FOLDER / "victim"
INSIDE_SECONDS, LATE_SECONDS = 0.15, 0.25


def be_lost() -> None:
    """Write the time at which this rank ends to a file, and end it."""
    told = FOLDER / "lost"
    if not told.exists():
        told.write_text(str(time.time()))
    WAYS[DEATH["way"]]()


def lost_at(place: str) -> None:
    """End this rank if it is the one to be lost, and at this place."""
    if VICTIM and place == DEATH["place"]:
        be_lost()


def lost_soon() -> None:
    """Let the lost rank end while it waits in a collective.

    The other ranks enter the collective later. Before they do, one of them signals the lost rank.
    """
    if DEATH["place"] != "inside" or VICTIM:
        return
    time.sleep(INSIDE_SECONDS)
    if (DEATH["rank"] + 1) % SIZE == RANK:
        os.kill(int(VICTIM_NUMBER.read_text()), signal.SIGUSR2)
    time.sleep(LATE_SECONDS)


if VICTIM and DEATH["place"] == "inside":
    # Another rank ends this one by a signal: no thread of this rank can start if memory is short.
    signal.signal(signal.SIGUSR2, lambda *_: be_lost())
    VICTIM_NUMBER.write_text(str(os.getpid()))
lost_at("collection")


@spmd()
def test_of_before(comm: Any) -> None:
    total = np.empty(1)
    comm.Allreduce(np.ones(1), total)
    assert total[0] == comm.size
    lines = Path("/proc/self/maps").read_text().splitlines()
    names = {line.split()[5] for line in lines if "/dev/shm/" in line}
    (FOLDER / f"mapped-{RANK}").write_text("\n".join(names))


@pytest.fixture
def torn_down() -> Iterator[None]:
    yield
    lost_at("tear-down")


@given(nprocs=st.just(SIZE), n=st.integers(0, 9), max_examples=10)
def test_of_the_end(comm: Any, torn_down: None, n: int) -> None:
    now = n >= DEATH["first"]
    if now:
        lost_at("before")
        lost_soon()
    total = np.empty(1)
    comm.Allreduce(np.ones(1), total)
    if now:
        lost_at("after")
    comm.Barrier()
    assert total[0] == comm.size


@spmd()
def test_of_after(comm: Any) -> None:
    comm.Barrier()
