"""Which examples a test tries: those that Hypothesis draws, or one for each number of ranks."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import hypothesis
from hypothesis import strategies as st
from hypothesis.errors import FailedHealthCheck, Unsatisfiable

from sp_core.testing import profiles, session
from sp_core.testing.outcome import Kind, Outcome, RankFailure, failure
from sp_core.testing.remarks import Remarks

_COPIED = (
    "_hypothesis_internal_use_seed",
    "_hypothesis_internal_use_reproduce_failure",
    "_hypothesis_internal_add_digest",
    "hypothesis_explicit_examples",
)


@dataclass(frozen=True)
class Example:
    """What a body is run with."""

    ranks: tuple[int, ...]
    values: dict[str, Any]

    @property
    def nprocs(self) -> int | tuple[int, ...]:
        """The ranks as a person writes them: their number where they are the first ones in order."""
        return len(self.ranks) if self.ranks == tuple(range(len(self.ranks))) else self.ranks

    def __str__(self) -> str:
        return ", ".join(f"{name}={value!r}" for name, value in {"nprocs": self.nprocs, **self.values}.items())


@dataclass(frozen=True)
class Result:
    """What came of an example on all its ranks."""

    outcomes: list[Outcome]
    remarks: Remarks


Try = Callable[[Example], Result]


@dataclass(frozen=True)
class Spec:
    """One call of a test.

    Attributes:
        body: takes the communicator, then fixtures and drawn values by name.
        fixtures: from pytest.
        function: what the author wrote.
        marks: attributes that decorators have left on the test.
    """

    body: Callable[..., None]
    fixtures: dict[str, Any]
    function: Callable[..., None]
    marks: dict[str, Any]

    @property
    def test_id(self) -> str:
        """What pytest calls the test."""
        return session.current.test_id(f"{self.function.__module__}::{self.function.__qualname__}")


class Plan(Protocol):
    """A way to choose examples."""

    passed: list[Example]
    failed: dict[type[BaseException], Example]

    def run(self, spec: Spec, attempt: Try) -> None:
        """Try examples until enough have passed; raise for one that fails."""
        ...


def ranks_of(nprocs: int | tuple[int, ...]) -> tuple[int, ...]:
    """The world ranks that an `nprocs` stands for."""
    return tuple(range(nprocs)) if isinstance(nprocs, int) else tuple(nprocs)


def fits(nprocs: int | tuple[int, ...]) -> bool:
    """Whether the launch has these ranks. Threads can always be made."""
    ranks, size = ranks_of(nprocs), session.current.world_size
    if not ranks or len(set(ranks)) != len(ranks) or min(ranks) < 0:
        raise ValueError(f"nprocs={nprocs!r} is neither a number of ranks nor a tuple of different ranks")
    return size == 0 or max(ranks) < size


@dataclass
class _Attempts:
    """Examples tried so far."""

    passed: list[Example] = field(default_factory=list)
    failed: dict[type[BaseException], Example] = field(default_factory=dict)

    def judge(self, example: Example, result: Result) -> None:
        """Raise if an example failed."""
        __tracebackhide__ = True
        problem = failure(result.outcomes, example.ranks)
        if problem is not None:
            self.failed[type(problem)] = example
            raise problem from None


@dataclass
class Search(_Attempts):
    """Examples drawn by Hypothesis.

    Args:
        nprocs: draws the ranks.
        strategies: draw the rest.
        max_examples: overrides the profile's.
    """

    nprocs: st.SearchStrategy[Any] = field(default_factory=lambda: st.just(1))
    strategies: dict[str, st.SearchStrategy[Any]] = field(default_factory=dict)
    max_examples: int | None = None

    def __init__(
        self, nprocs: st.SearchStrategy[Any], strategies: dict[str, st.SearchStrategy[Any]], max_examples: int | None
    ) -> None:
        super().__init__()
        self.nprocs, self.strategies, self.max_examples = nprocs, strategies, max_examples
        self._some_fit = False

    def run(self, spec: Spec, attempt: Try) -> None:
        """Let Hypothesis draw, shrink and report."""
        __tracebackhide__ = True

        def driver(**values: Any) -> None:
            __tracebackhide__ = True
            self._one(Example(ranks_of(values.pop("nprocs")), values), attempt)

        try:
            self._decorated(spec, driver)()
        except (Unsatisfiable, FailedHealthCheck):
            if self._some_fit:
                raise
            _skip(f"draws no ranks that a launch of {session.current.world_size} has")

    def _fits(self, nprocs: int | tuple[int, ...]) -> bool:
        found = fits(nprocs)
        self._some_fit |= found
        return found

    def _one(self, example: Example, attempt: Try) -> None:
        __tracebackhide__ = True
        if not self._fits(example.nprocs):  # an explicit example for a larger launch
            hypothesis.reject()
        result = attempt(example)
        result.remarks.replay()
        self.judge(example, result)
        kinds = {outcome.kind for outcome in result.outcomes}
        if Kind.REJECT in kinds:
            hypothesis.reject()
        _skip_if_skipped(result)
        self.passed.append(example)

    def _decorated(self, spec: Spec, driver: Callable[..., None]) -> Callable[[], None]:
        names = ["nprocs", *self.strategies]
        driver.__name__, driver.__qualname__, driver.__module__ = (
            spec.function.__name__,
            spec.function.__qualname__,
            spec.function.__module__,
        )
        # by the body's source Hypothesis tells tests apart, both for its seed and in its database
        vars(driver).update(__wrapped__=spec.function)
        vars(driver).update(__signature__=inspect.Signature([inspect.Parameter(n, inspect.Parameter.KEYWORD_ONLY) for n in names]))
        copied = {name: spec.marks[name] for name in _COPIED if name in spec.marks}
        vars(driver).update(copied)
        seed = session.current.seed
        own = profiles.chosen(spec.marks.get("_hypothesis_internal_use_settings"), self.max_examples, seeded=seed is not None)
        if seed is not None and vars(driver).get("_hypothesis_internal_use_seed") is None:
            driver = hypothesis.seed(f"{seed} {spec.test_id.rpartition('::')[2]}")(driver)  # each test draws other examples
        test = hypothesis.given(nprocs=self.nprocs.filter(self._fits), **self.strategies)(own(driver))
        vars(test).update(copied)
        return test


@dataclass
class Sweep(_Attempts):
    """One example for each number of ranks."""

    sizes: Sequence[int | tuple[int, ...]] = ()

    def __init__(self, sizes: Sequence[int | tuple[int, ...]]) -> None:
        super().__init__()
        self.sizes = sizes

    def run(self, spec: Spec, attempt: Try) -> None:
        """Try each size that the launch has."""
        __tracebackhide__ = True
        fitting = [ranks_of(size) for size in self.sizes if fits(size)]
        if not fitting:
            _skip(f"needs {min(map(max, map(ranks_of, self.sizes))) + 1} ranks, the launch has {session.current.world_size}")
        for ranks in fitting:
            example = Example(ranks, {})
            result = attempt(example)
            self.judge(example, result)
            _skip_if_skipped(result)
            self.passed.append(example)


def _skip_if_skipped(result: Result) -> None:
    __tracebackhide__ = True
    if all(outcome.kind is Kind.SKIP for outcome in result.outcomes):
        _skip(result.outcomes[0].message)


def _skip(reason: str) -> None:
    __tracebackhide__ = True
    import pytest

    pytest.skip(reason)


__all__ = ["Example", "Plan", "RankFailure", "Result", "Search", "Spec", "Sweep"]
