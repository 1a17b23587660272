"""Run a body on ranks that are threads."""

from __future__ import annotations

import ctypes
import faulthandler
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from sp_core import progress
from sp_core.launch import watch
from sp_core.testing.lockstep import abandon
from sp_core.testing.outcome import FINISHED, Catch, Mismatched, Outcome, failure
from sp_core.testing.session import thread
from sp_core.testing.stuck import Family
from sp_core.testing.threads import ThreadComm
from sp_core.testing.world import Stopped, ThreadCarrier, World

T = TypeVar("T")
GRACE_SECONDS = 2.0


class ThreadsHung(BaseException):
    """A rank did not arrive in time.

    No `Exception`: Hypothesis must not shrink it at half a minute for each attempt.
    """


def run_threads(size: int, body: Callable[[Any], T], *, timeout: float | None = None) -> list[T]:
    """Run a body on every rank of a communicator whose ranks are threads.

    Args:
        size: number of ranks.
        body: called with the communicator on each rank.
        timeout: seconds after which a rank that has not arrived counts as hung; default: the limit
            of one example.

    Returns:
        The results of the body, in rank order.

    Raises:
        RankFailure: a rank failed; the text says what each rank did.
        ThreadsHung: a rank hung; the stacks of all ranks are on standard error.
    """
    results, outcomes = run_ranks(size, body, timeout=timeout)
    problem = failure(outcomes)
    if problem is not None:
        raise problem
    return results


def run_ranks(
    size: int, body: Callable[[Any], T], *, timeout: float | None = None
) -> tuple[list[T], list[Outcome]]:
    """Run a body on `size` threads.

    Return each rank's result, None if it did not return, and how each rank ended.
    """
    world = World(size)
    ranks = [_Rank(world, rank, body) for rank in range(size)]
    with _one_thread_each():
        for rank in ranks:
            rank.start()
        _join(world, ranks, watch.example_seconds() if timeout is None else timeout)
    return [rank.result for rank in ranks], [rank.outcome for rank in ranks]


@contextmanager
def _one_thread_each() -> Iterator[None]:
    """Share the cores between ranks. torch is not imported for that."""
    torch: Any = sys.modules.get("torch")
    intra_op = torch.get_num_threads() if torch else 1
    if torch:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        if torch:
            torch.set_num_threads(intra_op)


class _Rank(threading.Thread):
    """One rank. It runs the body, then waits for the others to end."""

    def __init__(self, world: World, rank: int, body: Callable[[Any], Any]) -> None:
        super().__init__(name=f"rank {rank}", daemon=True)
        self._world, self._body, self.number = world, body, rank
        self._family = Family()
        self.comm = ThreadComm(ThreadCarrier(world, "comm", rank, world.size, rank), self._family)
        self.result: Any = None
        self.outcome = FINISHED
        self.crash: BaseException | None = (
            None  # a fault of the kit itself: the main thread raises it
        )
        self._sink = thread.sink

    def run(self) -> None:
        """Run the body, then end the example."""
        thread.sink = self._sink
        if "torch" in sys.modules:
            # all backward passes on a GPU share one thread, in which a rank would wait for another
            sys.modules["torch"].autograd.set_multithreading_enabled(False)  # in this thread alone
        with Catch() as caught:
            self.result, self.outcome = run_body(self._family, lambda: self._body(self.comm))
            self.outcome = self._family.finish(self.outcome)[self.number]
        # Ranks that called different things wait for each other.
        if isinstance(caught.error, Mismatched):
            self.outcome = caught.outcome
        self.crash = None if isinstance(caught.error, (Stopped, Mismatched)) else caught.error
        self._world.leave(self.number)


def run_body(family: Family, body: Callable[[], T]) -> tuple[T | None, Outcome]:
    """Run one rank's part of an example. Return its result, and how it ended."""
    result = None
    with Catch() as caught:
        result = body()
        kept = progress.of_this_rank().kept
        abandon(request for question in kept for request in question.requests)
        for member in family.members:
            member.ensure_posted("the end of the body", later=True)
    if isinstance(caught.error, Stopped):
        raise caught.error
    return result, caught.outcome


def _join(world: World, ranks: Sequence[_Rank], timeout: float) -> None:
    deadline = time.monotonic() + timeout
    for rank in ranks:
        rank.join(max(deadline - time.monotonic(), 0.0))
    late = [rank for rank in ranks if rank.is_alive()]
    if late:
        _give_up(world, late, timeout)
    for rank in ranks:
        if rank.crash is not None:
            raise rank.crash


def _give_up(world: World, late: Sequence[_Rank], timeout: float) -> None:
    numbers = [rank.number for rank in late]
    print(
        f"\nranks {numbers} of {world.size} have not arrived after {timeout:g} s; all stacks:",
        file=sys.__stderr__,
    )
    faulthandler.dump_traceback(file=sys.__stderr__ or 2, all_threads=True)
    blame = world.running()
    world.stop()
    for rank in late:  # an endless loop in Python code ends at its next instruction
        ctypes.pythonapi.PyThreadState_SetAsyncExc(
            ctypes.c_ulong(rank.ident or 0), ctypes.py_object(Stopped)
        )
    for rank in late:
        rank.join(GRACE_SECONDS)
    raise ThreadsHung(
        f"the example has not ended within {timeout:g} s; ranks {blame} of {world.size} did not "
        "wait for another rank then (stacks of all ranks are on standard error). The cause may be "
        "an endless loop, a wait without MPI, or slow code: SP_WATCHDOG_S allows more."
    )
