"""Run examples on the ranks of one launch.

Rank 0 of the world chooses them (`lead_ranks`), the other ranks follow (`follow`), and all ranks
know how each example ended. `control` is a carrier that exchanges values between all ranks of the
launch.
"""

from __future__ import annotations

import functools
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from sp_core.launch import watch
from sp_core.testing import session
from sp_core.testing.carriers import MpiCarrier
from sp_core.testing.checked import CheckedComm
from sp_core.testing.engine import lead, rerun
from sp_core.testing.outcome import (
    FINISHED,
    Kind,
    Outcome,
    capture,
    failure_class,
    first_line,
    outcome_of,
)
from sp_core.testing.plan import Example, Plan, Result, Spec, feed, is_fed
from sp_core.testing.run import run_body
from sp_core.testing.session import Remarks, keep_largest

__tracebackhide__ = True  # pytest shows no frames of this file
MAX_COMMUNICATORS = 64
MAX_RAW_EXAMPLES = 50
ABORTED = 70  # exit code of a launch after a failure of sp_core.testing itself


_pool: dict[tuple[tuple[int, ...], bool], Any] = {}
"""Communicators by world ranks and `raw`, kept for later examples; None where not a member.

All ranks change this together.
"""


def _communicator(control: MpiCarrier, example: Example) -> Any:
    """Return the communicator of an example, or None on a rank that is not one of its ranks.

    Every rank of the launch calls this. The communicator compares calls unless `example.raw`.
    """
    ranks, key = example.ranks, (example.ranks, example.raw)
    if key not in _pool:
        from mpi4py import MPI

        if len(_pool) >= MAX_COMMUNICATORS:
            oldest = _pool.pop(next(iter(_pool)))
            if oldest is not None:
                (oldest._free if isinstance(oldest, CheckedComm) else oldest.Free)()
        member = control.rank in ranks
        made = control.comm.Split(
            0 if member else MPI.UNDEFINED, ranks.index(control.rank) if member else 0
        )
        _pool[key] = None if not member else made if example.raw else CheckedComm(made)
    return _pool[key]


def lead_ranks(control: MpiCarrier, spec: Spec, plan: Plan) -> None:
    """Lead a test from rank 0: choose examples, and run each with all ranks of it.

    If the session has `raw_replay`, run some passed examples again without comparing calls. At the
    end tell the other ranks how the test ended.

    Args:
        control: exchanges values between all ranks of the launch.
        spec: the test.
        plan: chooses the examples.
    """
    stop = FINISHED
    try:
        if is_fed():
            feed(functools.partial(_order, control, spec))
            return
        replays = MAX_RAW_EXAMPLES if session.current.raw_replay else 0
        lead(spec, plan, functools.partial(_order, control), replays)
    except BaseException as error:
        stop = capture(error)
        raise
    finally:
        watch.in_flight("")
        control.gather(stop)


def follow(control: MpiCarrier, spec: Spec) -> None:
    """Run a test on a rank other than 0: its part of each example that rank 0 sends.

    When rank 0 sends an outcome instead, end the test with that outcome.
    """
    with _or_abort(control):
        while isinstance(told := control.gather(None)[0], Example):
            _take_part(control, spec, told)
    if told.kind is Kind.SKIP:
        pytest.skip(told.message)
    if told.kind is not Kind.OK:
        text = f"{first_line(told.message)} (rank 0 has the whole report)"
        raise failure_class(told.type, told.file, told.line)(text)


@contextmanager
def _or_abort(control: MpiCarrier) -> Iterator[None]:
    """Abort all ranks if the `with` block raises, because sp_core.testing itself has failed.

    A rank that left the test now would let the other ranks wait for ever.
    """
    try:
        yield
    except BaseException:
        watch.tell(
            f"the testing kit itself has failed on rank {control.rank}:\n{traceback.format_exc()}"
        )
        control.comm.Abort(ABORTED)
        raise


def _order(control: MpiCarrier, spec: Spec, example: Example) -> Result:
    """Have every rank run its part of an example, and return the result. Rank 0 calls this."""
    with _or_abort(control):
        raw = "raw replay of " if example.raw else ""
        call = f"{spec.function.__name__}({example})"
        watch.in_flight(f"{raw}{spec.test_id}\n  {call}\n  {rerun(spec)}")
        control.gather(example)
        return _take_part(control, spec, example)


def _take_part(control: MpiCarrier, spec: Spec, example: Example) -> Result:
    """Run this rank's part of an example. Return the outcomes and remarks of all ranks.

    Every rank of the launch calls this and waits for all; ranks outside the example run no body.
    """
    comm, total = _communicator(control, example), Remarks()
    with session.collected() as sink, watch.limit(watch.example_seconds()):
        outcome = FINISHED if comm is None else _ended(spec, comm, example)
        everyone = control.gather((outcome, sink))
    watch.note(f"waits for the next example of {spec.function.__name__}")
    for _, remarks in everyone:
        keep_largest(total, remarks)
    outcomes = [everyone[rank][0] for rank in example.ranks]
    if example.raw and any(outcome.kind is not Kind.OK for outcome in outcomes):
        _pool.pop((example.ranks, True), None)  # messages may be left in it
    return Result(outcomes, total)


def _ended(spec: Spec, comm: Any, example: Example) -> Outcome:
    """Run the body on this rank of the example, and return the outcome; errors are caught.

    On a communicator that compares calls, wait until every rank of the example is done. If a
    message was lost, the outcome is a mismatch. In a raw example wait for nobody.
    """
    watch.note(f"in the body of {spec.function.__name__}")
    values = {**spec.fixtures, **example.values}
    if not example.raw:
        return run_body(comm.family, lambda: spec.body(comm, **values))[1]
    return outcome_of(lambda: spec.body(comm, **values))
