"""`given` and `spmd`: tests whose body runs on several ranks at once.

One engine draws the example, every rank runs the body, and all ranks' outcomes decide. Without MPI the ranks are threads. Under
mpiexec rank 0 of the world owns the engine and the others follow it, because engines of their own would draw different examples.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st

from sp_core.testing import profiles, session
from sp_core.testing.plan import Plan, Search, Spec, Sweep
from sp_core.testing.tiers import run

Body = Callable[..., None]
MAX_RANKS = 8
SPMD_SIZES = 4


def given(
    nprocs: st.SearchStrategy[Any] | None = None,
    *,
    max_examples: int | None = None,
    max_ranks: int = MAX_RANKS,
    **strategies: st.SearchStrategy[Any],
) -> Callable[[Body], Body]:
    """A property: the body runs on every rank of a communicator for each drawn example.

    The body's first argument is the communicator, the drawn ones come by name, and all others are pytest's. `@settings`,
    `@example`, `@seed` and `@reproduce_failure` go on top; an `@example` names `nprocs` too.

    Args:
        nprocs: draws the number of ranks p (ranks 0 to p-1), or a tuple of world ranks in any order. Default: 1 to `max_ranks`, and
            no more than the launch has. What does not fit the launch is not drawn; where nothing does, the test is skipped.
        max_examples: how many examples; default: the profile's. A profile with more examples than `pr` takes more here too.
        max_ranks: bound of the default `nprocs`.
        strategies: what to draw. Draw specifications (sizes, a seed), not data: the values are pickled and printed.

    Raises:
        RankFailure: when called, for the smallest example that fails; a subclass for each bug.
    """

    def plan() -> Plan:
        most = min(max_ranks, session.current.world_size or max_ranks)
        return Search(st.integers(1, most) if nprocs is None else nprocs, strategies, max_examples)

    return lambda body: _as_test(body, tuple(strategies), plan)


def spmd(*sizes: int | tuple[int, ...]) -> Callable[[Body], Body]:
    """A test without drawing: the body runs once for each number (or tuple) of ranks.

    Args:
        sizes: default: 1 to the size of the launch, or 1 to 4 where ranks are threads. Sizes above the launch's are left out.

    Raises:
        RankFailure: when called, for the first size that fails.
    """

    def plan() -> Plan:
        return Sweep(sizes or tuple(range(1, 1 + (session.current.world_size or SPMD_SIZES))))

    return lambda body: _as_test(body, (), plan)


def _as_test(body: Body, drawn: tuple[str, ...], plan: Callable[[], Plan]) -> Body:
    """The function that pytest calls, with its fixtures."""

    @functools.wraps(body)
    def test(*instance: Any, **fixtures: Any) -> None:
        __tracebackhide__ = True
        spec = Spec(functools.partial(body, *instance), fixtures, body, vars(test))
        run(spec, plan())

    vars(test).setdefault("_hypothesis_internal_use_settings", settings(suppress_health_check=profiles.SUPPRESSED))
    vars(test).update(__signature__=_signature(body, drawn), sp_core_ranks=True)
    # what Hypothesis' own pytest plugin looks for before it accepts @settings and @example on a test
    vars(test).update(is_hypothesis_test=True, hypothesis=SimpleNamespace(inner_test=test))
    return test


def _signature(body: Body, drawn: tuple[str, ...]) -> inspect.Signature:
    """What is left of the body's parameters without the communicator and what is drawn."""
    parameters = list(inspect.signature(body).parameters.values())
    instance = [p for p in parameters[:1] if p.name == "self"]
    rest = parameters[len(instance) :]
    missing = sorted(set(drawn) - {p.name for p in rest[1:]})
    if not rest or missing:
        raise TypeError(
            f"{body.__qualname__} needs a communicator as its first parameter, and parameters named {missing or 'as drawn'}"
        )
    return inspect.Signature([*instance, *(p for p in rest[1:] if p.name not in drawn)])
