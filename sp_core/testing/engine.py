"""`given` and `spmd`: tests whose body runs on several ranks at once.

An example is one choice of ranks and arguments. One engine (Hypothesis) draws it, every rank runs
the body, and all ranks' outcomes decide. Without MPI the ranks are threads. Under mpiexec rank 0 of
the world draws the examples (`_lead_ranks`) and the other ranks receive them (`_follow`), because
separate engines would draw different examples. There `control` is a carrier that exchanges values
between all ranks of the launch.
"""

import functools
import inspect
import os
import shlex
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from hypothesis import settings, strategies as st

from sp_core.launch import watch
from sp_core.testing import session
from sp_core.testing.carriers import MpiCarrier
from sp_core.testing.checked import CheckedComm
from sp_core.testing.outcome import (
    FINISHED,
    Kind,
    RankFailure,
    capture,
    failure,
    failure_class,
    first_line,
    leave,
    outcome_of,
)
from sp_core.testing.plan import (
    Example,
    Nprocs,
    Plan,
    Result,
    Spec,
    Try,
    combined,
    feed,
    is_fed,
    require_strategies,
    search,
    signature,
    sweep,
)
from sp_core.testing.run import ThreadsHung, assuming, run_body, run_ranks

__tracebackhide__ = True  # pytest shows no frames of this file
Body = Callable[..., None]
MAX_RANKS = 8
SPMD_SIZES = 4
RACE = (
    "raw replay: this example passes with checked communicators and fails without. So its ranks "
    "race, or the body cannot run twice with the same fixtures (--sp-no-raw-replay leaves the "
    "second run out).\n"
)
MAX_COMMUNICATORS = 64
MAX_RAW_EXAMPLES = 50
ABORTED = 70  # exit code of a launch after a failure of sp_core.testing itself

_pool: dict[tuple[tuple[int, ...], bool], Any] = {}
"""Communicators kept for later examples, by world ranks and `raw`; None on all other ranks.

All ranks add and remove the same keys in the same order.
"""


def given(
    nprocs: st.SearchStrategy[Any] | Nprocs | None = None,
    *,
    max_examples: int | None = None,
    max_ranks: int = MAX_RANKS,
    **strategies: st.SearchStrategy[Any],
) -> Callable[[Body], Body]:
    """Make a test that runs the body on every rank of a communicator, for each drawn example.

    The body's first argument is the communicator. Drawn arguments come by name, and all other
    parameters are pytest's fixtures. `@settings`, `@example`, `@seed` and `@reproduce_failure` go
    on top; an `@example` names `nprocs` too. A deadline has no effect: it would count the time in
    which ranks wait for each other. SP_WATCHDOG_S limits the seconds of an example.

    Args:
        nprocs: draws the number of ranks p (ranks 0 to p-1), or a tuple of world ranks in any
            order; or is such a number or tuple itself. Default: 1 to `max_ranks`, and no more ranks
            than the launch has. A draw that needs more ranks is made again; if every draw needs
            more, the test is skipped.
        max_examples: number of examples; default: the profile's (see `profiles`), which may be one
            that the project itself has registered and loaded. A profile of the kit with more than
            60 examples scales this up in proportion; `brief` and `soak` scale it down. Pass 100
            here: `@settings(max_examples=100)`, Hypothesis' default, counts as not given.
        max_ranks: greatest number of ranks that the default `nprocs` draws.
        strategies: each draws the argument of its name. Draw specifications (sizes, a seed), not
            data: the values are pickled and printed. Each rank gets copies.

    Returns:
        A decorator, which returns the function that pytest calls.

    Communication:
        Under mpiexec every rank of the launch calls the test, and waits for the outcome of every
        example.

    Raises:
        TypeError: an argument is no strategy, `st.data()` or `st.randoms()`, or the body is
            `async`, has a `yield`, lacks a parameter, uses pytest's `subtests`, or has @mock.patch
            or another @given or @spmd.
        RankFailure: when the test is called, for the smallest example that fails. Each origin of
            an error (class, file, line) has a subclass, by which Hypothesis tells bugs apart.
    """

    def plan(spec: Spec, attempt: Try) -> None:
        most = min(max_ranks, session.current.world_size or max_ranks)
        ranks = st.integers(1, most) if named is None else named
        search(spec, attempt, ranks, strategies, max_examples)

    named = st.just(nprocs) if isinstance(nprocs, int | tuple) else nprocs
    require_strategies(strategies if named is None else {"nprocs": named, **strategies})
    return lambda body: _as_test(body, tuple(strategies), plan)


def spmd(*sizes: int | tuple[int, ...]) -> Callable[[Body], Body]:
    """Make a test that runs the body once for each number (or tuple) of ranks.

    The body's first argument is the communicator; all other parameters are pytest's fixtures.

    Args:
        sizes: numbers of ranks, or tuples of world ranks. Default: 1 to the size of the launch, or
            1 to 4 if ranks are threads. Sizes above the launch's are left out. The test is skipped
            if none is left, or if the body skips or rejects each.

    Returns:
        A decorator, which returns the function that pytest calls.

    Communication:
        Under mpiexec every rank of the launch calls the test, and waits for the outcome of every
        size.

    Raises:
        TypeError: a size is neither a number nor a tuple, or the body is `async`, has a `yield`,
            lacks a parameter, uses pytest's `subtests`, or has @mock.patch or another @given or
            @spmd; when the test is called: it has a decorator of Hypothesis.
        RankFailure: when the test is called, for the first size that fails.
    """
    if not all(isinstance(size, int | tuple) for size in sizes):
        raise TypeError(f"@spmd got {sizes}. Pass numbers or tuples of ranks, or write @spmd().")

    def plan(spec: Spec, attempt: Try) -> None:
        sweep(spec, attempt, sizes or range(1, 1 + (session.current.world_size or SPMD_SIZES)))

    return lambda body: _as_test(body, (), plan)


def _as_test(body: Body, drawn: tuple[str, ...], plan: Plan) -> Body:
    """Return the function that pytest calls, with the body's fixtures as parameters.

    Args:
        body: takes the communicator, drawn arguments and fixtures.
        drawn: names of the drawn arguments.
        plan: chooses the examples.
    """

    @functools.wraps(body)
    def test(*args: Any, **fixtures: Any) -> None:
        taken = inspect.signature(test)
        taken.bind(*args, **fixtures)  # names an argument that is missing
        named = dict(zip(taken.parameters, args, strict=False)) | fixtures
        own = [named.pop("self")] if "self" in taken.parameters else []
        run(Spec(functools.partial(body, *own), named, body, vars(test)), plan)

    vars(test).update(
        __signature__=signature(body, drawn),
        sp_core_ranks=True,
        sp_core_base=settings.default,  # a module that is imported later may load another profile
        # Hypothesis' pytest plugin requires these attributes for @settings and @example
        is_hypothesis_test=True,
        hypothesis=SimpleNamespace(inner_test=test),
    )
    return test


def run(spec: Spec, plan: Plan) -> None:
    """Run all examples of a test. Under MPI every rank calls this, and all raise or none.

    Args:
        spec: the test with its fixtures.
        plan: chooses the examples; under MPI it is used on rank 0 only.
    """
    current = session.current
    current.tally.tests += 1
    with assuming():
        if current.control is None:
            _lead(spec, plan, current.attempt or _on_threads)
        elif current.control.rank == 0:
            _lead_ranks(current.control, spec, plan)
        else:
            _follow(current.control, spec)


def _lead(
    spec: Spec, plan: Plan, attempt: Callable[[Spec, Example], Result], replays: int = 0
) -> None:
    """Run the examples that the plan chooses, and count them.

    Args:
        spec: the test.
        plan: chooses the examples.
        attempt: runs one example on its ranks.
        replays: the most passed examples that are run once more, on communicators without the
            checks between ranks. The messages of these checks can hide a race.

    Raises:
        RankFailure: an example failed. The text has each bug, its example, and the command to
            repeat the test. Other errors of the plan are raised as they are.
    """
    passed: dict[bytes, Example] = {}

    def judged(example: Example, keeps: str) -> set[Kind]:
        result = attempt(spec, example)
        session.current.tally.count(len(example.ranks), result.remarks, raw=example.raw)
        session.replay(result.remarks)
        leave(result.outcomes)
        if problem := failure(result.outcomes, example.ranks, RACE if example.raw else ""):
            problem.add_note(keeps.format(example))
            raise problem from None
        kinds = {outcome.kind for outcome in result.outcomes}
        runs_again = replays and all(each.replayable for each in result.outcomes)
        if runs_again and Kind.REJECT not in kinds:
            passed[example.key()] = example  # different values may look alike
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
        kind = (
            type(error)
            if isinstance(error, RankFailure)
            else failure_class(type(error).__name__, "", 0)
        )
        raise kind(f"{_told(error)}\n{_rerun(spec)}") from None


def _on_threads(spec: Spec, example: Example) -> Result:
    """Run one example on ranks that are threads, and return its result."""
    with session.collected() as sink:
        try:
            _, outcomes = run_ranks(len(example.ranks), lambda comm: spec.run(comm, example))
        except ThreadsHung as hung:
            hung.add_note(f"example: {example}")
            raise
    return Result(outcomes, sink)


def _told(error: BaseException) -> str:
    """Return an error's text and notes (PEP 678), and those of all errors in an exception group."""
    lines = [str(error)]
    if isinstance(error, BaseExceptionGroup):
        lines = [f"{error.message}\n", "\n\n".join(map(_told, error.exceptions))]
    return "\n".join([*lines, *filter(None, map(str.rstrip, getattr(error, "__notes__", [])))])


def _rerun(spec: Spec) -> str:
    """Return text with the command that runs this test again."""
    variables = [name for name in ("SP_PROFILE", "SP_EXAMPLES") if os.environ.get(name)]
    prefix = "".join(f"{name}={os.environ[name]} " for name in variables)
    current = session.current
    launch = f"python -m sp_core.testing.launch -n {current.world_size} -- "
    options = {
        "--with-mpi": current.world_size,
        f"--sp-device {current.device}": current.device != "cpu",
        "--sp-share-gpu": current.share_gpu,
        shlex.quote(f"--hypothesis-profile={current.profile}"): current.profile,
        shlex.quote(f"--hypothesis-seed={current.seed}"): current.seed is not None,
    }
    chosen = "".join(f"{option} " for option, wanted in options.items() if wanted)
    head = f"run it again: {prefix}{launch if current.world_size else ''}python -m pytest "
    return f"{head}{chosen}{shlex.quote(spec.test_id)}"


def _communicator(control: MpiCarrier, example: Example) -> Any:
    """Return the communicator of an example, or None on a rank that is not one of its ranks.

    Every rank of the launch calls this. The ranks check calls with each other unless `example.raw`.
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


def _lead_ranks(control: MpiCarrier, spec: Spec, plan: Plan) -> None:
    """Lead a test from rank 0: choose examples, and run each with all ranks of it.

    If the session has `raw_replay`, run some passed examples again without the checks between
    ranks. At the end tell the other ranks how the test ended.

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
        _lead(spec, plan, functools.partial(_order, control), replays)
    except BaseException as error:
        stop = capture(error)
        raise
    finally:
        watch.in_flight("")
        control.gather(stop)


def _follow(control: MpiCarrier, spec: Spec) -> None:
    """Run a test on a rank other than 0: run this rank's part of each example that rank 0 sends.

    When rank 0 sends an outcome instead, end the test with that outcome.
    """
    with _or_abort(control):
        while isinstance(told := control.gather(None)[0], Example):
            _take_part(control, spec, told)
    leave([told])
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
    example.check_values()
    with _or_abort(control):
        raw = "raw replay of " if example.raw else ""
        call = f"{spec.function.__name__}({example})"
        watch.in_flight(f"{raw}{spec.test_id}\n  {call}\n  {_rerun(spec)}")
        control.gather(example)
        return _take_part(control, spec, example)


def _take_part(control: MpiCarrier, spec: Spec, example: Example) -> Result:
    """Run this rank's part of an example. Return the outcomes and remarks of all ranks.

    Every rank of the launch calls this and waits for all; ranks outside the example run no body.
    """
    comm, outcome = _communicator(control, example), FINISHED
    with session.collected() as sink, watch.limit(watch.example_seconds()):
        if comm is not None:
            watch.note(f"in the body of {spec.function.__name__}")
            body = functools.partial(spec.run, comm, example)
            # a rank does not wait for the other ranks of a raw example
            outcome = outcome_of(body) if example.raw else run_body(comm.family, body)[1]
        everyone = control.gather((outcome, sink))
    watch.note(f"waits for the next example of {spec.function.__name__}")
    result = combined(example, everyone)
    if any(not x.reusable or (example.raw and x.kind is not Kind.OK) for x in result.outcomes):
        left = _pool.pop((example.ranks, example.raw))  # messages may be left in it
        if isinstance(left, CheckedComm):
            left._give_back()
    return result
