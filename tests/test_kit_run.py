"""Test that ranks that are threads end with the thread that runs them."""

import signal
import threading
from typing import Any

import numpy as np
import pytest

from sp_core.testing import run_threads

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
