"""Run a body on ranks that are threads: `run_threads`, and `run_ranks` for `given`."""

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
from sp_core.testing.carriers import Stopped, ThreadCarrier, World
from sp_core.testing.lockstep import abandon
from sp_core.testing.outcome import FINISHED, Mismatched, Outcome, capture, failure
from sp_core.testing.session import thread
from sp_core.testing.stuck import Family
from sp_core.testing.threads import ThreadComm

T = TypeVar("T")
GRACE_SECONDS = 2.0


class ThreadsHung(BaseException):
    """A rank that is a thread has not ended its body before the time limit.

    It is no subclass of `Exception`, which Hypothesis would catch: to shrink the example it would
    run it again and again, each time to the full time limit.
    """


def run_threads(size: int, body: Callable[[Any], T], *, timeout: float | None = None) -> list[T]:
    """Run a body on every rank of a communicator whose ranks are threads.

    Args:
        size: number of ranks.
        body: called with the communicator (a `ThreadComm`) on each rank.
        timeout: seconds after which a rank that has not ended counts as hung; default: the limit of
            one example (SP_WATCHDOG_S, or 30).

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
    """Run a body on `size` threads, with `timeout` as in `run_threads`.

    Returns:
        Results of the body (None if it did not return) and outcomes, each in rank order.

    Raises:
        ThreadsHung: a rank hung; the stacks of all ranks are on standard error.
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
    """Let torch use one thread in each rank, if torch is imported, as the ranks share the cores."""
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
    """The thread of one rank. It runs the body, then waits for the other ranks to end.

    Args:
        world: state shared by the ranks.
        rank: of this thread.
        body: called with the communicator.
    """

    def __init__(self, world: World, rank: int, body: Callable[[Any], Any]) -> None:
        super().__init__(name=f"rank {rank}", daemon=True)
        self._world, self._body, self.number = world, body, rank
        self._family = Family()
        self.comm = ThreadComm(ThreadCarrier(world, "comm", rank, world.size, rank), self._family)
        self.result: Any = None
        self.outcome = FINISHED
        self.crash: BaseException | None = (
            None  # a fault of sp_core.testing: the main thread raises it
        )
        self._sink = getattr(thread, "sink", None)

    def run(self) -> None:
        """Run the body, wait until all ranks are done, and keep the result and the outcome."""
        thread.sink = self._sink
        if "torch" in sys.modules:
            # all backward passes on a GPU share one thread, in which ranks would block each other
            sys.modules["torch"].autograd.set_multithreading_enabled(False)  # in this thread alone
        try:
            self.result, self.outcome = run_body(self._family, lambda: self._body(self.comm))
        except Mismatched as deadlock:
            self.outcome = capture(deadlock)
        except BaseException as error:  # noqa: BLE001  # the main thread raises it
            self.crash = error
        self._world.leave(self.number)


def run_body(family: Family, body: Callable[[], T]) -> tuple[T | None, Outcome]:
    """Run one rank's body, and wait until every rank has ended the example.

    Return the body's result (None if it did not return) and its outcome, which is a mismatch if a
    message was lost.

    Raises:
        Stopped: a rank has hung, so all are to end.
        Mismatched: ranks wait for each other for ever.
    """
    result, outcome = None, FINISHED
    try:
        result = body()
        kept = progress.of_this_rank().kept
        abandon(request for question in kept for request in question.requests)
    except Stopped:
        raise
    except BaseException as error:  # noqa: BLE001  # the ranks judge it together
        outcome = capture(error)
    watch.note(f"after the body: {outcome}")
    return result, family.finish(outcome)[family.members[0].rank]


def _join(world: World, ranks: Sequence[_Rank], timeout: float) -> None:
    """Wait for all ranks until the time limit, give up if one is late, and raise a rank's crash."""
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
    """Print all stacks, end the late ranks as far as possible, and raise `ThreadsHung`."""
    numbers = [rank.number for rank in late]
    print(
        f"\nranks {numbers} of {world.size} have not ended after {timeout:g} s; all stacks:",
        file=sys.__stderr__,
    )
    faulthandler.dump_traceback(file=sys.__stderr__ or 2, all_threads=True)
    blame = sorted({*range(world.size)} - world.away - world.waiting.keys())
    world.stopped = True
    world.touch()
    for rank in late:  # an endless loop in Python code ends at its next instruction
        ctypes.pythonapi.PyThreadState_SetAsyncExc(
            ctypes.c_ulong(rank.ident or 0), ctypes.py_object(Stopped)
        )
    for rank in late:
        rank.join(GRACE_SECONDS)
    raise ThreadsHung(
        f"the example has not ended within {timeout:g} s; ranks {blame} of {world.size} were "
        "not waiting for another rank (stacks of all ranks are on standard error). The cause may "
        "be an endless loop, a wait without MPI, or slow code: SP_WATCHDOG_S allows more."
    )
