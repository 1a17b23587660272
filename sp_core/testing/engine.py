"""`given` and `spmd`: tests whose body runs on several ranks at once.

An example is one choice of ranks and arguments. One engine (Hypothesis) draws it, every rank runs
the body, and all ranks' outcomes decide. Without MPI the ranks are threads. Under mpiexec rank 0 of
the world draws the examples and the other ranks receive them, because engines of their own would
draw different examples.
"""

from __future__ import annotations

import functools
import inspect
import os
import warnings
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import settings, strategies as st

from sp_core.testing import profiles, session
from sp_core.testing.outcome import Kind, RankFailure, failure, failure_class
from sp_core.testing.plan import Example, Plan, Result, Spec, Try, search, sweep
from sp_core.testing.run import ThreadsHung, run_ranks

__tracebackhide__ = True  # pytest shows no frames of this file
Body = Callable[..., None]
MAX_RANKS = 8
SPMD_SIZES = 4
RACE = (
    "raw replay: this example passes with checked communicators and fails without, so its ranks "
    "race\n"
)


def given(
    nprocs: st.SearchStrategy[Any] | None = None,
    *,
    max_examples: int | None = None,
    max_ranks: int = MAX_RANKS,
    **strategies: st.SearchStrategy[Any],
) -> Callable[[Body], Body]:
    """Make a test that runs the body on every rank of a communicator, for each drawn example.

    The body's first argument is the communicator. Drawn arguments come by name, and all other
    parameters are pytest's fixtures. `@settings`, `@example`, `@seed` and `@reproduce_failure` go
    on top; an `@example` names `nprocs` too.

    Args:
        nprocs: draws the number of ranks p (ranks 0 to p-1), or a tuple of world ranks in any
            order. Default: 1 to `max_ranks`, and no more ranks than the launch has. A draw that
            needs more ranks is rejected; if every draw needs more, the test is skipped.
        max_examples: number of examples; default: the profile's (see `profiles`). A profile of more
            than 60 examples scales this up in proportion; `brief` and `soak` scale it down.
        max_ranks: greatest number of ranks that the default `nprocs` draws.
        strategies: each draws the argument of its name. Draw specifications (sizes, a seed), not
            data: the values are pickled and printed.

    Returns:
        A decorator, which returns the function that pytest calls.

    Communication:
        Under mpiexec every rank of the launch calls the test, and waits for the outcome of every
        example.

    Raises:
        RankFailure: when the test is called, for the smallest example that fails. Each origin of
            an error (class, file, line) has a subclass, by which Hypothesis tells bugs apart.
    """

    def plan(spec: Spec, attempt: Try) -> None:
        most = min(max_ranks, session.current.world_size or max_ranks)
        ranks = st.integers(1, most) if nprocs is None else nprocs
        search(spec, attempt, ranks, strategies, max_examples)

    return lambda body: _as_test(body, tuple(strategies), plan)


def spmd(*sizes: int | tuple[int, ...]) -> Callable[[Body], Body]:
    """Make a test that runs the body once for each number (or tuple) of ranks.

    The body's first argument is the communicator; all other parameters are pytest's fixtures.

    Args:
        sizes: numbers of ranks, or tuples of world ranks. Default: 1 to the size of the launch, or
            1 to 4 if ranks are threads. Sizes above the launch's are left out; if all are, the test
            is skipped.

    Returns:
        A decorator, which returns the function that pytest calls.

    Communication:
        Under mpiexec every rank of the launch calls the test, and waits for the outcome of every
        size.

    Raises:
        RankFailure: when the test is called, for the first size that fails.
    """

    def plan(_: Spec, attempt: Try) -> None:
        sweep(attempt, sizes or range(1, 1 + (session.current.world_size or SPMD_SIZES)))

    return lambda body: _as_test(body, (), plan)


def _as_test(body: Body, drawn: tuple[str, ...], plan: Plan) -> Body:
    """Return the function that pytest calls, with the body's fixtures as parameters.

    Args:
        body: takes the communicator, drawn arguments and fixtures.
        drawn: names of the drawn arguments.
        plan: chooses the examples.
    """

    @functools.wraps(body)
    def test(*instance: Any, **fixtures: Any) -> None:
        spec = Spec(functools.partial(body, *instance), fixtures, body, vars(test))
        run(spec, plan)

    vars(test).setdefault(
        "_hypothesis_internal_use_settings", settings(suppress_health_check=profiles.SUPPRESSED)
    )
    vars(test).update(__signature__=_signature(body, drawn), sp_core_ranks=True)
    # Hypothesis' pytest plugin requires these attributes for @settings and @example
    vars(test).update(is_hypothesis_test=True, hypothesis=SimpleNamespace(inner_test=test))
    return test


def _signature(body: Body, drawn: tuple[str, ...]) -> inspect.Signature:
    """Return the signature of the body without the communicator and the drawn arguments."""
    parameters = list(inspect.signature(body).parameters.values())
    instance = [p for p in parameters[:1] if p.name == "self"]
    rest = parameters[len(instance) :]
    missing = sorted(set(drawn) - {p.name for p in rest[1:]})
    if not rest or missing:
        raise TypeError(
            f"{body.__qualname__} needs a communicator as its first parameter, and parameters "
            f"named {missing or 'as drawn'}"
        )
    return inspect.Signature([*instance, *(p for p in rest[1:] if p.name not in drawn)])


def run(spec: Spec, plan: Plan) -> None:
    """Run all examples of a test. Under MPI every rank calls this, and all raise or none.

    Args:
        spec: the test with its fixtures.
        plan: chooses the examples; under MPI it is used on rank 0 only.
    """
    current = session.current
    current.tally.tests += 1
    attempt = current.attempt or _on_threads
    with warnings.catch_warnings():
        # Hypothesis knows only the thread that draws; `assume` works on the other ranks all the
        # same
        warnings.filterwarnings("ignore", "Using `(assume|reject)` outside a property-based test")
        if current.control is None:
            lead(spec, plan, attempt)
            return
        from sp_core.testing.mpitier import follow, lead_ranks

        if current.control.rank == 0:
            lead_ranks(current.control, spec, plan)
        else:
            follow(current.control, spec)


def lead(
    spec: Spec, plan: Plan, attempt: Callable[[Spec, Example], Result], replays: int = 0
) -> None:
    """Run the examples that the plan chooses, and count them.

    Args:
        spec: the test.
        plan: chooses the examples.
        attempt: runs one example on its ranks.
        replays: run at most so many of the examples that passed once more, on communicators that do
            not compare calls. The exchanges of the comparison can hide a race.

    Raises:
        RankFailure: an example failed. The text has each bug, its example, and the command to
            repeat the test. Other errors of the plan are raised as they are.
    """
    passed: dict[str, Example] = {}

    def judged(example: Example, keeps: str) -> set[Kind]:
        result = attempt(spec, example)
        session.current.tally.count(len(example.ranks), result.remarks, raw=example.raw)
        session.replay(result.remarks)
        problem = failure(result.outcomes, example.ranks)
        if problem is not None:
            problem = type(problem)(f"{RACE if example.raw else ''}{problem}")
            problem.add_note(keeps.format(example))
            raise problem from None
        kinds = {outcome.kind for outcome in result.outcomes}
        if kinds == {Kind.SKIP}:
            pytest.skip(result.outcomes[0].message)
        if Kind.REJECT not in kinds:
            passed[str(example)] = example
        return kinds

    try:
        plan(spec, judged)
        chosen, step = [*passed.values()], max(len(passed) / max(replays, 1), 1.0)
        for index in range(min(len(chosen), replays)):
            again = replace(chosen[int(index * step)], raw=True)
            judged(again, f"example: {spec.function.__name__}({{}})")
    except (RankFailure, ThreadsHung, BaseExceptionGroup) as error:
        if isinstance(error, BaseExceptionGroup) and error.subgroup(RankFailure) is None:
            raise
        own = type(error) if isinstance(error, RankFailure) else None
        kind = own or failure_class(type(error).__name__, "", 0)
        found = kind(f"{_told(error)}\n{rerun(spec)}")
        raise found from None


def _on_threads(spec: Spec, example: Example) -> Result:
    """Run one example on ranks that are threads, and return its result."""
    with session.collected() as sink:
        try:
            _, outcomes = run_ranks(
                len(example.ranks), lambda comm: spec.body(comm, **spec.fixtures, **example.values)
            )
        except ThreadsHung as hung:
            hung.add_note(f"example: {example}")
            raise
    return Result(outcomes, sink)


def _told(error: BaseException) -> str:
    """Return the text of an error with its notes (PEP 678), and of all errors in a group."""
    lines = [str(error)]
    if isinstance(error, BaseExceptionGroup):
        lines = [f"{error.message}\n", "\n\n".join(map(_told, error.exceptions))]
    return "\n".join([*lines, *filter(None, map(str.rstrip, getattr(error, "__notes__", [])))])


def rerun(spec: Spec) -> str:
    """Return text with the command that runs this test again."""
    given = {name: os.environ.get(name) for name in ("SP_PROFILE", "SP_EXAMPLES")}
    prefix = "".join(f"{name}={value} " for name, value in given.items() if value)
    current = session.current
    launch = f"python -m sp_core.testing.launch -n {current.world_size} -- "
    options = {
        "--with-mpi": current.world_size,
        f"--sp-device {current.device}": current.device != "cpu",
        "--sp-share-gpu": current.share_gpu,
        f"--hypothesis-seed={current.seed}": current.seed is not None,
    }
    chosen = "".join(f"{option} " for option, wanted in options.items() if wanted)
    head = f"run it again: {prefix}{launch if current.world_size else ''}python -m pytest "
    return f'{head}{chosen}"{spec.test_id}"'
