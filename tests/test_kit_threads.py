"""Test ranks as threads: transfers happen in the worst order, and no rank waits for ever."""

import math
import os
import re
import threading
import time
import tracemalloc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from decimal import getcontext, localcontext
from itertools import product
from operator import methodcaller
from pathlib import Path
from typing import Any
from unittest.mock import Mock, call

import numpy as np
import pytest
import torch
from kit.failing import assert_told, failure_of, finish
from mpi4py import MPI

from sp_core.launch import watch
from sp_core.testing import carriers, run, run_threads, spmd
from sp_core.testing.carriers import Steps, Stopped, ThreadCarrier, World
from sp_core.testing.outcome import FINISHED, Mismatched, RankFailure
from sp_core.testing.run import ThreadsHung

pytestmark = pytest.mark.mpi_skip  # threads of one process are enough
GAPS = MPI.DOUBLE.Create_vector(2, 1, 2).Commit()


def test_each_rank_goes_backward_in_its_own_thread() -> None:
    assert run_threads(2, lambda _: torch._C._is_multithreading_enabled()) == [False, False]
    assert torch._C._is_multithreading_enabled()


@pytest.mark.parametrize(
    ("state", "of_thread"),
    [
        (lambda: localcontext(prec=3), lambda: getcontext().prec),
        pytest.param(
            lambda: np.errstate(divide="raise"),
            lambda: np.geterr()["divide"],
            marks=pytest.mark.skipif(
                np.__version__ < "2", reason="NumPy 1 has no context variable"
            ),
        ),
        (torch.no_grad, torch.is_grad_enabled),
        (torch.inference_mode, torch.is_inference_mode_enabled),
        (torch.inference_mode, torch.is_grad_enabled),
    ],
)
def test_ranks_begin_with_the_state_of_the_thread_that_runs_them(
    state: Callable[[], Any], of_thread: Callable[[], object]
) -> None:
    usual = of_thread()
    with state():
        changed = of_thread()
        assert run_threads(2, lambda _: of_thread()) == [changed] * 2 != [usual] * 2
        assert of_thread() == changed
    assert run_threads(2, lambda _: of_thread()) == [usual] * 2


def test_ranks_share_one_core_of_those_that_the_session_has() -> None:
    usual = os.sched_getaffinity(0)
    try:
        for cores in (usual, {min(usual)}):
            os.sched_setaffinity(0, cores)
            first, *others = run_threads(3, lambda _: os.sched_getaffinity(0))
            assert len(first) == 1
            assert first <= cores
            assert others == [first] * 2
            assert os.sched_getaffinity(0) == cores
    finally:
        os.sched_setaffinity(0, usual)


def test_each_rank_computes_with_one_thread_of_torch() -> None:
    usual = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        assert run_threads(2, lambda _: torch.get_num_threads()) == [1, 1]
        assert torch.get_num_threads() == 2
        with pytest.raises(ThreadsHung):
            run_threads(1, lambda _: time.sleep(0.5), timeout=0.1)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(usual)


@pytest.mark.parametrize(
    ("ranks", "said", "body"),
    [
        *(
            (2, f"{op}: rank {peer} is not one of the 2 ranks", methodcaller(op, np.zeros(1), peer))
            for op, peer in product(("Isend", "Irecv"), (-1, 2, None, MPI.ANY_SOURCE))
        ),
        *(
            (
                1,
                f"{op} on rank 0 of 1: no message has the tag {tag}",
                methodcaller(op, np.zeros(1), peer, tag),
            )
            for op, tag in (("Isend", MPI.ANY_TAG), ("Isend", -5), ("Irecv", -5))
            for peer in (0, MPI.PROC_NULL)
        ),
        (1, "has no 'Iprobe'. .*mpiexec, where every call of mpi4py is", methodcaller("Iprobe")),
        (1, "has no 'wait'. .* Run this test under mpiexec", lambda comm: comm.Ibarrier().wait()),
        (1, "has no 'Cancel'. .* Run this test under mpiexec", lambda x: x.Ibarrier().Cancel()),
        (1, "unhashable type: 'ThreadComm'", hash),
        (1, "unhashable type: 'ThreadRequest'", lambda comm: hash(comm.Ibarrier())),
        (2, "rank 0: finished\n", lambda comm: comm.Recv(np.zeros(1), 0) if comm.rank else None),
        # mpi4py exchanges the counts if none are given
        (
            2,
            r"4 elements are not \[1, 1\]",
            lambda comm: comm.Reduce_scatter(np.ones(4), np.ones(1 + 2 * comm.rank)),
        ),
        (
            3,
            "rank 0: failed: ValueError .*one has gaps\n  rank 1: stopped: PeerFailed",
            lambda comm: comm.Bcast([np.zeros(3), 1, GAPS] if comm.rank == 0 else np.zeros(2)),
        ),
        (
            2,
            "rank 0: stopped: PeerFailed .*\n  rank 1: failed: ValueError .* no SUM of bool",
            lambda comm: comm.Allreduce(*np.ones((2, 1), (np.int8, bool)[comm.rank])),
        ),
    ],
)
def test_what_ranks_that_are_threads_cannot_do_is_told(ranks: int, said: str, body: Any) -> None:
    """A rank that waits for one that has ended is in no deadlock."""
    with pytest.raises(RankFailure, match=said):
        run_threads(ranks, body)


def ring(comm: Any, meddle: str) -> float:
    """Pass a number to the next rank in a ring; `meddle` names a buffer to touch too early."""
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    out, into = np.full(4, float(comm.rank)), np.full(4, -1.0)
    requests = [comm.Irecv(into, left), comm.Isend(out, right)]
    early = float(into[0])
    if meddle == "send buffer":
        out[:] = 99.0
    finish(*requests)
    return early if meddle == "receive buffer" else float(into[0])


@pytest.mark.parametrize(
    ("meddle", "found"),
    [("", [2.0, 0.0, 1.0]), ("send buffer", [99.0] * 3), ("receive buffer", [np.nan] * 3)],
)
def test_a_buffer_that_is_touched_too_early_is_wrong_every_time(
    meddle: str, found: list[float]
) -> None:
    for _ in range(20):
        np.testing.assert_equal(run_threads(3, lambda comm: ring(comm, meddle)), found)


def test_mpi4py_names_a_request_of_threads_that_it_cannot_take() -> None:
    """The tutorial quotes this error, which names a remedy."""

    def body(comm: Any) -> str:
        request = comm.Irecv(np.zeros(1), MPI.PROC_NULL)
        with pytest.raises(TypeError) as caught:
            MPI.Request.Waitall([request])
        request.Wait()
        return str(caught.value)

    tutorial = Path(__file__).resolve().parents[1] / "docs" / "tutorials" / "testing.md"
    assert f"`{run_threads(1, body)[0]}`" in tutorial.read_text()


def test_an_endless_loop_ends(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Rank 1 is to blame: rank 0 waits for it, and rank 2 has nothing more to do."""

    @spmd(3)
    def body(comm: Any) -> None:
        try:
            while comm.rank == 1:
                pass
        finally:
            time.sleep(0.2 * (comm.rank == 1))  # its end is awaited
        if comm.rank == 0:
            comm.Recv(np.zeros(1), 1)

    monkeypatch.setenv("SP_WATCHDOG_S", "0.5")
    begin, before = time.monotonic(), threading.active_count()
    stuck = "not ended within 0.5 s; ranks [1] of 3 were not waiting"
    assert_told(failure_of(body), stuck, "example: nprocs=3")
    assert time.monotonic() - begin < 10
    assert threading.active_count() == before
    printed = capfd.readouterr().err
    assert "ranks [0, 1, 2] of 3 have not ended after 0.5 s; all stacks:" in printed
    assert re.search(r"test_kit_threads.py\", line \d+ in body", printed)


def test_ranks_that_wait_for_one_that_cannot_be_ended_are_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(run, "GRACE_SECONDS", 0.5)
    go_on, before = threading.Event(), {*threading.enumerate()}

    def body(comm: Any) -> None:
        while comm.rank == 0 and not go_on.is_set():
            with suppress(Stopped):
                go_on.wait(60)
        comm.Barrier()

    with pytest.raises(ThreadsHung, match=r"ranks \[0(, 1)?\] of 2"):
        run_threads(2, body, timeout=0.2)
    left = sorted({*threading.enumerate()} - before, key=lambda thread: thread.name)
    for thread in left[1:]:
        thread.join(60)
    assert [thread.name for thread in left if thread.is_alive()] == ["rank 0"]
    go_on.set()
    left[0].join(60)


@pytest.mark.parametrize(
    ("size", "timeout"), [(0, None), (-1, None), (2, 0.0), (2, -1.0), (2, math.nan)]
)
def test_no_ranks_and_no_time_are_refused(size: int, timeout: float | None) -> None:
    text = rf"^{size=} and {timeout=} were given; pass a size of 1 or more, and seconds above 0\.$"
    with pytest.raises(ValueError, match=text):
        run_threads(size, lambda comm: comm.rank, timeout=timeout)


def test_a_fault_of_the_kit_is_raised_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    fault = LookupError("of the kit")
    monkeypatch.setattr(run, "run_body", Mock(side_effect=fault))
    with pytest.raises(LookupError) as caught:
        run_threads(2, lambda comm: None)
    assert caught.value is fault


def test_how_each_rank_has_left_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    noted: list[str] = []
    monkeypatch.setattr(watch, "note", noted.append)
    results, outcomes = run.run_ranks(2, lambda comm: 1 // comm.rank)
    assert results == [None, 1]
    assert outcomes[1] == FINISHED
    lasts = [text for text in noted if text.startswith("after the body: ")]
    assert sorted(lasts) == sorted(f"after the body: {outcome}" for outcome in outcomes)


@pytest.mark.parametrize("timeout", [10, 1e12, math.inf])
def test_a_wait_outside_of_mpi_hands_over_what_was_sent(timeout: float) -> None:
    there: list[bool] = []

    def body(comm: Any) -> None:
        if comm.rank:
            comm.Recv(np.zeros(1), 0)
            there.append(True)
            return
        request = comm.Isend(np.ones(1), 1)
        while not there:
            comm.watch("the flag of rank 1")
        request.Wait()

    run_threads(2, body, timeout=timeout)
    assert there


def test_a_message_that_is_there_counts_though_its_sender_has_failed_since() -> None:
    """Otherwise the outcome would depend on when the receiving rank waits."""

    @spmd(2)
    def body(comm: Any) -> None:
        if comm.rank == 1:
            time.sleep(0.1)
            assert comm.Isend(np.ones(1), 0).Test()
            raise LookupError
        request = comm.Irecv(np.zeros(1), 1)
        time.sleep(0.3)
        request.Wait()
        raise KeyError

    assert "rank 0: failed: KeyError" in failure_of(body)


def never() -> Steps[None]:
    while True:
        yield


@pytest.mark.parametrize("ending", [*product([False, True], repeat=3), (True,), (False,)])
def test_ranks_that_wait_only_for_others_to_end_learn_of_a_deadlock_last(
    ending: tuple[bool, ...],
) -> None:
    """One more rank has ended before. Ranks that learn of the deadlock end, too."""
    size = len(ending)
    world = World(size + 1)
    world.leave(size)

    def waits(rank: int) -> str:
        carrier = ThreadCarrier(world, "comm", rank, range(size))
        with pytest.raises(Mismatched) as caught:
            carrier.drive(never(), f"waits {rank}", ending=ending[rank])
        world.leave(rank)
        return str(caught.value)

    with ThreadPoolExecutor(size) as pool:
        said = [*pool.map(waits, range(size), timeout=60)]
    for rank, last in enumerate(ending):
        waiting = [other for other in range(size) if not last or ending[other]]
        lines = [f"  rank {other}: waits {other}" for other in waiting]
        assert said[rank].splitlines()[1:] == lines


def test_a_wait_sleeps_longer_each_time_and_then_looks_for_a_deadlock(substitute: Any) -> None:
    """The clock advances by a second with each call, and the sixth poll ends the wait."""
    did, polls = Mock(), Mock(side_effect=[None, 0, (), False, "", "ready"])
    did.perf_counter.side_effect = range(5, 99)
    substitute(carriers, time=did, AFTER_SECONDS=3, LONGEST_PAUSE=0.6, PAUSE_SHARE=0.25)
    assert carriers.patiently(polls, did.stuck) == "ready"
    assert [each for each in did.mock_calls if each != call.perf_counter()] == [
        *(call.sleep(0.25), call.sleep(0.5), call.sleep(0.6)),
        *(call.stuck(), call.sleep(0.6)) * 2,
    ]


def test_a_wait_goes_on_after_a_receive_that_the_rank_itself_has_posted() -> None:
    """Else a rank that sends to itself would sleep for ever after it has posted the receive."""

    def body(comm: Any) -> list[float]:
        out, into = np.array([1.0, 2.0]), np.zeros(2)

        def steps() -> Steps[None]:
            send = comm.Isend(out, 0)
            yield
            receive = comm.Irecv(into, 0)
            yield
            while not (send.Test() and receive.Test()):
                yield

        comm.lockstep.carrier.drive(steps(), "a message to itself")
        return into.tolist()

    assert run_threads(1, body) == [[1.0, 2.0]]


def test_a_rank_counts_from_0_with_each_counter_and_may_be_alone() -> None:
    def body(comm: Any) -> list[object]:
        counters, alone = [comm.make_counter() for _ in range(2)], comm.alone()
        mine = [[counter.take() for _ in range(2)] for counter in counters]
        found = [sorted(number for part in comm.allgather(one) for number in part) for one in mine]
        for counter in counters:
            counter.free()
        return [found, alone.size, alone.allgather(comm.rank), comm.Split(-1) == MPI.COMM_NULL]

    numbers = [[0, 1, 2, 3]] * 2
    assert run_threads(2, body) == [[numbers, 1, [rank], True] for rank in range(2)]


def test_what_a_collective_has_moved_is_not_kept() -> None:
    def body(comm: Any) -> int:
        before, (moved, got) = tracemalloc.get_traced_memory()[0], np.zeros((2, 2**17))
        for _ in range(8):
            comm.Allreduce(moved, got)
        comm.Barrier()
        return tracemalloc.get_traced_memory()[0] - before

    tracemalloc.start()
    try:
        grown = run_threads(2, body)
    finally:
        tracemalloc.stop()
    assert max(grown) < 2**23  # bytes; half of what the ranks have sent
