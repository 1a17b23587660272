"""Run a body on ranks that are threads: `run_threads`, and `run_ranks` for `given`."""

import ctypes
import faulthandler
import os
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import copy_context
from typing import Any, TypeVar, cast

from sp_core import progress
from sp_core.launch import watch
from sp_core.testing.carriers import Stopped, ThreadCarrier, World
from sp_core.testing.lockstep import abandon
from sp_core.testing.outcome import (
    FINISHED,
    Kind,
    Mismatched,
    Outcome,
    capture,
    failure,
    leave,
)
from sp_core.testing.session import collected, remark, thread
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

    If all ranks call pytest's `skip` or `xfail`, or one its `exit` and none fails, so does this
    function. If Hypothesis' `assume` fails on a rank and none fails, it rejects the example.

    The ranks begin with the context variables of this thread, and with its `torch.no_grad` or
    `torch.inference_mode`.

    On Linux all ranks share one core. Python runs one thread at a time, and handing over between
    cores would take a third of the time of small examples.

    Args:
        size: number of ranks.
        body: called with the communicator (a `ThreadComm`) on each rank.
        timeout: seconds after which a rank that has not ended counts as hung; default: the limit of
            one example (SP_WATCHDOG_S, or 30).

    Returns:
        The results of the body, in rank order.

    Raises:
        ValueError: no rank, or no time.
        RankFailure: a rank failed; the text says what each rank did.
        ThreadsHung: a rank hung; the stacks of all ranks are on standard error.
    """
    if size < 1 or not (timeout is None or timeout > 0):
        raise ValueError(
            f"{size=} and {timeout=} were given; pass a size of 1 or more, and seconds above 0."
        )
    __tracebackhide__ = True  # pytest shows the line that calls this
    with assuming(), collected() as remarks:
        results, outcomes = run_ranks(size, body, timeout=timeout)
    remark(remarks)  # Hypothesis takes them in its own thread only
    kinds = {outcome.kind for outcome in outcomes}
    if Kind.SKIP in kinds:
        leave(outcomes)
    if (problem := failure(outcomes)) is not None:
        raise problem
    if Kind.REJECT in kinds:
        import hypothesis

        hypothesis.reject()
    return results


@contextmanager
def assuming() -> Iterator[None]:
    """Let ranks call Hypothesis' `assume` in a `with` block without a warning.

    Hypothesis knows only the thread that draws; `assume` works on the other ranks all the same.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Using `(assume|reject)` outside a property-based test")
        yield


def run_ranks(
    size: int, body: Callable[[Any], T], *, timeout: float | None = None
) -> tuple[list[T], list[Outcome]]:
    """Run a body on `size` threads, with `timeout` as in `run_threads`.

    Returns:
        Results of the body (None if it did not return) and outcomes, each in rank order.

    Raises:
        ThreadsHung: a rank hung; the stacks of all ranks are on standard error.
    """
    world, crashes, body = World(size), list[BaseException](), _as_in_this_thread(body)
    results: list[Any] = [None] * size
    outcomes, sink = [FINISHED] * size, getattr(thread, "sink", None)
    torch: Any = sys.modules.get("torch")

    def run(rank: int) -> None:
        thread.sink, family = sink, Family()
        try:
            if world.stopped:  # before this rank has begun
                raise Stopped
            comm = ThreadComm(ThreadCarrier(world, "comm", rank, range(size)), family)
            if torch:
                # all backward passes on a GPU share one thread; ranks would block each other there
                torch.autograd.set_multithreading_enabled(False)  # in this thread alone
            results[rank], outcomes[rank] = run_body(family, lambda: body(comm))
        except Mismatched as deadlock:
            outcomes[rank] = capture(deadlock)
        except BaseException as error:  # noqa: BLE001  # a fault of the kit, raised below
            crashes.append(error)
        world.leave(rank)

    ranks = [
        threading.Thread(target=run, args=(rank,), name=f"rank {rank}", daemon=True)
        for rank in range(size)
    ]
    intra_op = torch and torch.get_num_threads()
    try:
        if torch:
            torch.set_num_threads(1)  # the ranks share the cores
        _run_all(world, ranks, watch.example_seconds() if timeout is None else timeout)
    finally:
        if torch:
            torch.set_num_threads(intra_op)
    for crash in crashes:
        raise crash
    return results, outcomes


def _as_in_this_thread(body: Callable[[Any], T]) -> Callable[[Any], T]:
    """Return `body` with the context variables and the gradient mode that this thread has now."""
    context, torch = copy_context(), cast("Any", sys.modules.get("torch"))

    def run(comm: Any) -> T:
        return context.copy().run(body, comm)

    if not torch:
        return run
    if torch.is_inference_mode_enabled():
        mode = torch.inference_mode()
    else:  # inference_mode(False) would also let backward passes share a thread
        mode = torch.set_grad_enabled(torch.is_grad_enabled())
    return cast("Callable[[Any], T]", mode(run))


@contextmanager
def _on_one_core() -> Iterator[None]:
    """Let threads that start inside run on the core of this thread only."""
    usual = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {ctypes.CDLL(None).sched_getcpu()})
        yield
    finally:
        os.sched_setaffinity(0, usual)


def run_body(family: Family, body: Callable[[], T]) -> tuple[T | None, Outcome]:
    """Run a test's body on this rank, and wait until it has ended on every rank.

    Return the body's result (None if it raised an error) and its outcome. The outcome is a mismatch
    if a message was sent and not received.

    Raises:
        Stopped: a rank hangs, so all ranks must end.
        Mismatched: the ranks are in a deadlock.
    """
    result, outcome, family.held = None, FINISHED, True
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


def _run_all(world: World, ranks: Sequence[threading.Thread], timeout: float) -> None:
    """Start all ranks, and wait for them until the time limit.

    If one is late, print all stacks, end the late ranks as far as possible, and raise
    `ThreadsHung`. Also end them after any exception in this thread, such as one from a signal.
    """
    deadline = time.monotonic() + min(timeout, watch.LONGEST_SECONDS)
    try:
        with _on_one_core():
            for rank in ranks:
                rank.start()
        for number, rank in enumerate(ranks):
            _join(world, number, rank, deadline - time.monotonic())
    except BaseException:
        _end(world, ranks)
        raise
    late = [number for number, rank in enumerate(ranks) if rank.is_alive()]
    if not late:
        return
    print(
        f"\nranks {late} of {world.size} have not ended after {timeout:g} s; all stacks:",
        file=sys.__stderr__,
    )
    faulthandler.dump_traceback(file=sys.__stderr__ or 2, all_threads=True)
    blame = _end(world, ranks)
    raise ThreadsHung(
        f"the example has not ended within {timeout:g} s; ranks {blame} of {world.size} were "
        "not waiting for another rank (stacks of all ranks are on standard error). The cause may "
        "be an endless loop, a wait without MPI, or slow code: SP_WATCHDOG_S allows more."
    )


def _end(world: World, ranks: Sequence[threading.Thread]) -> list[int]:
    """End all ranks that have begun as far as possible, and let no other begin.

    Return those of them that were not waiting for another rank.
    """
    world.stopped = True  # a rank that begins from now on does nothing
    begun = {number: rank for number, rank in enumerate(ranks) if rank.ident}
    blame = sorted(
        number for number in begun.keys() - world.waiting if not world.ended[number].is_set()
    )
    world.stop()
    for _ in range(2):
        # twice, because Python drops an exception raised in the callback of a weak reference
        for rank in [begun[number] for number in blame if begun[number].is_alive()]:
            # an endless loop in Python code ends at its next instruction
            ctypes.pythonapi.PyThreadState_SetAsyncExc(
                ctypes.c_ulong(rank.ident or 0), ctypes.py_object(Stopped)
            )
        for number, rank in begun.items():
            _join(world, number, rank, GRACE_SECONDS / 2)
    return blame


def _join(world: World, number: int, rank: threading.Thread, seconds: float) -> None:
    """Wait until a rank's thread has ended.

    A signal that raises an exception in `join` makes Python take a running thread for ended. So
    `join` is called at the very end of the thread only.
    """
    if world.ended[number].wait(max(seconds, 0.0)):
        rank.join(GRACE_SECONDS)
