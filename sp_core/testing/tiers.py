"""Running one example on all ranks: on threads, or by leading the other ranks of a launch."""

from __future__ import annotations

import warnings
from collections.abc import Callable

from sp_core.testing import feed, remarks, session
from sp_core.testing.outcome import RankFailure
from sp_core.testing.plan import Example, Plan, Result, Spec
from sp_core.testing.remarks import Remarks
from sp_core.testing.report import explained
from sp_core.testing.run import ThreadsHung, run_ranks


def run(spec: Spec, plan: Plan) -> None:
    """Run a test on this session's tier; under MPI every rank calls this, and all end alike."""
    __tracebackhide__ = True
    session.current.tally.tests += 1
    with warnings.catch_warnings():
        # Hypothesis knows only the thread that draws; `assume` works on the other ranks all the same
        warnings.filterwarnings("ignore", "Using `(assume|reject)` outside a property-based test")
        _on_this_tier(spec, plan)


def _on_this_tier(spec: Spec, plan: Plan) -> None:
    __tracebackhide__ = True
    attempt = session.current.attempt or _on_threads
    if session.current.control is None:
        _lead(spec, plan, lambda example: attempt(spec, example))
        return
    from sp_core.testing.mpitier import follow, lead_ranks

    if session.current.control.rank == 0:
        lead_ranks(spec, feed.plan() or plan, _lead)
    else:
        follow(spec)


def _lead(spec: Spec, plan: Plan, attempt: Callable[[Example], Result]) -> None:
    """Run the plan; a failure gets its example and how to run it again."""
    __tracebackhide__ = True

    def counted(example: Example) -> Result:
        tally = session.current.tally
        tally.examples += 1
        tally.sizes[len(example.ranks)] += 1
        result = attempt(example)
        tally.count(result.remarks.features)
        remarks.session.merge(Remarks(ratios=result.remarks.ratios))
        return result

    try:
        plan.run(spec, counted)
    except (RankFailure, BaseExceptionGroup, ThreadsHung) as error:
        found = explained(error, spec, plan)
    else:
        return
    raise found from None


def _on_threads(spec: Spec, example: Example) -> Result:
    sink = Remarks()
    before = remarks.enter(sink)
    try:
        _, outcomes = run_ranks(len(example.ranks), lambda comm: spec.body(comm, **spec.fixtures, **example.values))
    except ThreadsHung as hung:
        raise ThreadsHung(f"{hung}\nexample: {example}") from None
    finally:
        remarks.enter(before)
    return Result(outcomes, sink)
