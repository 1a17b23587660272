"""Test that ranks that are threads end with the thread that runs them."""

import signal
import threading
from contextlib import suppress
from typing import Any

import numpy as np
import pytest

from sp_core.testing import run_threads
from sp_core.testing.carriers import Stopped, World

pytestmark = pytest.mark.mpi_skip  # threads of one process are enough


@pytest.mark.parametrize("begun", [1, 2])
def test_ranks_end_with_an_exception_of_the_thread_that_waits_for_them(
    begun: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The signal may come before every rank has begun."""
    inside = threading.Event()

    def body(comm: Any) -> None:
        inside.set()
        while comm.rank:
            pass
        comm.Recv(np.zeros(1), 1)

    def alarm(*_: object) -> None:
        raise InterruptedError("the time of the test is up")

    def begin(thread: threading.Thread) -> None:
        if thread.name == f"rank {begun}":
            inside.wait()
            signal.raise_signal(signal.SIGALRM)
        start(thread)

    start = threading.Thread.start
    monkeypatch.setattr(threading.Thread, "start", begin)
    before, usual = threading.active_count(), signal.signal(signal.SIGALRM, alarm)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.3 * (begun == 2))
        with pytest.raises(InterruptedError, match="is up"):
            run_threads(2, body, timeout=5)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, usual)
    assert threading.active_count() == before


def test_a_rank_that_begins_after_the_end_of_the_others_does_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A signal may come while a thread is being started."""
    entered, late, start = list[int](), list[threading.Thread](), threading.Thread.start

    def begin(thread: threading.Thread) -> None:
        if thread.name == "rank 1":
            late.append(thread)
            raise InterruptedError
        start(thread)

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", begin)
        with pytest.raises(InterruptedError):
            run_threads(2, lambda comm: entered.append(comm.rank))
    late[0].start()
    late[0].join(10)
    assert 1 not in entered


def test_a_rank_that_waits_after_the_end_of_the_others_ends() -> None:
    world = World(2)
    world.stop()
    ended = threading.Event()

    def wait() -> None:
        with suppress(Stopped):
            world.sleep(0, world.versions[0], "a message", ending=False)
        ended.set()

    threading.Thread(target=wait, daemon=True).start()
    assert ended.wait(10)
