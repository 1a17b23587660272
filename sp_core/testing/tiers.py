"""Run a test on the ranks of this session: on threads, or by leading the other ranks of a launch."""

from __future__ import annotations

import warnings
from collections.abc import Callable

from sp_core.testing import remarks, session
from sp_core.testing.outcome import RankFailure
from sp_core.testing.plan import Example, Fed, Plan, Result, Spec
from sp_core.testing.remarks import Remarks
from sp_core.testing.report import explained
from sp_core.testing.run import ThreadsHung, run_ranks


def run(spec: Spec, plan: Plan) -> None:
    """Run a test. Under MPI every rank calls this, and all end alike."""
    __tracebackhide__ = True
    current = session.current
    current.tally.tests += 1
    attempt = current.attempt or _on_threads
    with warnings.catch_warnings():
        # Hypothesis knows only the thread that draws; `assume` works on the other ranks all the same
        warnings.filterwarnings("ignore", "Using `(assume|reject)` outside a property-based test")
        if current.control is None:
            _lead(spec, plan, lambda example: attempt(spec, example))
            return
        from sp_core.testing.mpitier import follow, lead_ranks

        if current.control.rank == 0:
            lead_ranks(spec, Fed() if Fed.is_wanted() else plan, _lead)
        else:
            follow(spec)


def _lead(spec: Spec, plan: Plan, attempt: Callable[[Example], Result]) -> None:
    """Run the plan. A failure gets its example and the command that runs it again."""
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
    with remarks.collected() as sink:
        try:
            _, outcomes = run_ranks(len(example.ranks), lambda comm: spec.body(comm, **spec.fixtures, **example.values))
        except ThreadsHung as hung:
            raise ThreadsHung(f"{hung}\nexample: {example}") from None
    return Result(outcomes, sink)
