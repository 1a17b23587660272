"""Choose the examples of a test.

An example is one choice of ranks and arguments for the body. `search` has Hypothesis draw them,
`sweep` makes one for each number of ranks, and `feed` receives them from another process.
"""

import contextlib
import copy
import functools
import inspect
import os
import pickle
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import hypothesis
import pytest
from hypothesis import strategies as st
from hypothesis.errors import FailedHealthCheck, Unsatisfiable

from sp_core.launch.watch import RUN_DIR
from sp_core.testing import profiles, session
from sp_core.testing.carriers import patiently
from sp_core.testing.keys import key_of
from sp_core.testing.outcome import Kind, Outcome, shown
from sp_core.testing.session import Remarks, keep_largest

if sys.version_info >= (3, 14):  # annotations may have names that only a type checker knows
    import annotationlib

    _signature = functools.partial(inspect.signature, annotation_format=annotationlib.Format.STRING)
else:
    _signature = inspect.signature

__tracebackhide__ = True  # pytest shows no frames of this file
_SEED = "_hypothesis_internal_use_seed"
_COPIED = (
    _SEED,
    "_hypothesis_internal_use_reproduce_failure",
    "_hypothesis_internal_add_digest",
    "hypothesis_explicit_examples",
)
_OF_DRAWS = {
    "hypothesis_explicit_examples": "example",
    "_hypothesis_internal_settings_applied": "settings",
    "_hypothesis_internal_use_reproduce_failure": "reproduce_failure",
    _SEED: "seed",
}
"""Decorators of Hypothesis by the attributes that they leave on a test."""
MAX_THREADS = 128
"""The most ranks of an example in which ranks are threads."""
MAX_DRAWS = 50
"""The most draws of ranks for one example, if none before fits the launch."""
Nprocs = int | tuple[int, ...]
"""A number p of ranks (the world ranks 0 to p-1), or world ranks in any order."""


@dataclass(frozen=True)
class Example:
    """The ranks and arguments with which a body is run.

    Args:
        ranks: world ranks, in the order of the communicator.
        values: arguments by name.
        raw: under MPI, run on a communicator without the checks between ranks.
    """

    ranks: tuple[int, ...]
    values: dict[str, Any]
    raw: bool = False

    @property
    def nprocs(self) -> Nprocs:
        """The ranks as `@example` takes them: their number if they are 0, 1, ..., else a tuple."""
        return len(self.ranks) if self.ranks == tuple(range(len(self.ranks))) else self.ranks

    def __str__(self) -> str:
        named = {"nprocs": self.nprocs, **self.values}.items()
        return ", ".join(f"{name}={shown(value)}" for name, value in named)

    def key(self) -> bytes:
        """Return bytes that tell this example apart, the same if it is drawn again."""
        return key_of(self)

    def check_values(self) -> None:
        """Raise TypeError if the values cannot be sent to the other ranks."""
        try:
            pickle.loads(pickle.dumps(self.values))
        except Exception as error:
            raise TypeError(
                f"{self} cannot be sent to the other ranks: {error}. Draw values that can be "
                "pickled, such as sizes and a seed, and make everything else in the test."
            ) from error


class Result(NamedTuple):
    """How an example ended.

    Attributes:
        outcomes: each rank's outcome, in the order of the communicator.
        remarks: the remarks of all ranks together.
    """

    outcomes: list[Outcome]
    remarks: Remarks


def combined(example: Example, everyone: Sequence[tuple[Outcome, Remarks]]) -> Result:
    """Return the result of an example, given the outcome and the remarks of every world rank."""
    total = Remarks()
    for _, remarks in everyone:
        keep_largest(total, remarks)
    return Result([everyone[rank][0] for rank in example.ranks], total)


@dataclass(frozen=True)
class Spec:
    """One run of a test.

    Attributes:
        body: takes the communicator, then fixtures and drawn arguments by name.
        fixtures: pytest's fixtures, by name.
        function: the body as its author wrote it, without `self` bound.
        marks: attributes that decorators have left on the test.
    """

    body: Callable[..., object]
    fixtures: dict[str, Any]
    function: Callable[..., object]
    marks: dict[str, Any]

    def run(self, comm: Any, example: Example) -> None:
        """Run the body on this rank. Raise TypeError if it returns anything but None.

        Each rank gets copies of the values, so no other rank and no report sees it change them.
        """
        values = example.values
        with contextlib.suppress(Exception):  # values that cannot be copied are shared
            values = copy.deepcopy(values)
        result = self.body(comm, **self.fixtures, **values)
        if result is not None:
            raise TypeError(
                f"{self.function.__name__} returned {shown(result)}. The body of a test must "
                "return None: use `assert` to check a result."
            )

    @property
    def test_id(self) -> str:
        """The id of the running test, as pytest's command line takes it."""
        function = self.function
        return session.current.node_id or f"{function.__module__}::{function.__qualname__}"


def signature(body: Callable[..., object], drawn: Collection[str]) -> inspect.Signature:
    """Return the signature of a test without its communicator and the arguments that are drawn.

    Args:
        body: the test function.
        drawn: names of the parameters whose values Hypothesis draws.

    Raises:
        TypeError: the test has no first parameter for a communicator, or none of a name in `drawn`;
            it is a coroutine or generator, has @given, @spmd or @mock.patch already, or asks for
            `subtests`.
    """
    if getattr(body, "is_hypothesis_test", False):
        raise TypeError(f"{body.__qualname__} has @given or @spmd already. Use one of ours, once.")
    if hasattr(body, "patchings"):  # ranks that are threads would patch and restore at any time
        raise TypeError(f"{body.__qualname__} has @mock.patch. Put it above @given or @spmd.")
    kinds = (inspect.iscoroutinefunction, inspect.isgeneratorfunction, inspect.isasyncgenfunction)
    if any(is_kind(body) for is_kind in kinds):
        raise TypeError(
            f"{body.__qualname__} is `async` or has a `yield`, so that a call would not run it. "
            "Write a function with neither."
        )
    parameters = list(_signature(body).parameters.values())
    instance = [p for p in parameters[:1] if p.name == "self"]
    rest = parameters[len(instance) :]
    missing = sorted({*drawn} - {p.name for p in rest[1:]})
    if not rest or missing:
        raise TypeError(
            f"{body.__qualname__} needs a communicator as its first parameter, and parameters "
            f"named {missing or 'as drawn'}"
        )
    left = [p for p in rest[1:] if p.name not in drawn]
    if any(p.name == "subtests" for p in left):  # ranks that are threads would mix up its captures
        raise TypeError(
            f"{body.__qualname__} cannot use `subtests` on ranks. Use pytest.mark.parametrize."
        )
    return inspect.Signature([*instance, *left])


def require_strategies(strategies: Mapping[str, Any]) -> None:
    """Raise TypeError unless each value is a strategy that draws before the body begins."""
    randoms: Any = st.randoms()  # lazy: Hypothesis makes it, and what maps it, at the first draw
    late = type(st.data()), type(randoms.wrapped_strategy)
    for name, strategy in strategies.items():
        if not isinstance(strategy, st.SearchStrategy):
            raise TypeError(
                f"@given got {name}={strategy!r}. Pass a strategy of Hypothesis; nprocs may also "
                "be a number or a tuple of ranks."
            )
        made: Any = strategy
        if getattr(strategy, "function", None) is randoms.function:
            made = made.wrapped_strategy
        if isinstance(made, late):
            raise TypeError(
                f"@given got {name}=st.{strategy}, by which each rank would draw alone. Draw only "
                "through the arguments of @given, so that all ranks see the same example."
            )


def ranks_of(nprocs: Nprocs) -> tuple[int, ...]:
    """Return the world ranks that an `nprocs` stands for."""
    return tuple(range(nprocs)) if isinstance(nprocs, int) else tuple(nprocs)


def fits(nprocs: Nprocs) -> bool:
    """Return whether the launch has the ranks of `nprocs`. MAX_THREADS threads can always be made.

    Raises:
        ValueError: `nprocs` is neither a number of ranks nor a tuple of different ranks, or ranks
            are threads and it needs more than MAX_THREADS.
    """
    size, ranks = session.current.world_size, [nprocs - 1] if isinstance(nprocs, int) else nprocs
    if (
        not (isinstance(ranks, tuple | list) and ranks)
        or not all(isinstance(rank, int) and rank >= 0 for rank in ranks)
        or len({*ranks}) != len(ranks)
        or (size == 0 and max(ranks) >= MAX_THREADS)
    ):
        raise ValueError(
            f"nprocs={nprocs!r} is neither a number of ranks nor a tuple of different ranks, or "
            f"it needs more than {MAX_THREADS} threads. The first argument of @given draws the "
            "ranks; pass other strategies by name. Without it at most `max_ranks` ranks are drawn."
        )
    return size == 0 or max(ranks) < size


Try = Callable[..., set[Kind]]
"""Runs an example and returns the `Kind`s of its ranks' ends; raises if it failed or was skipped.

The second argument is the format of a line that says how to run an example that failed.
"""
Plan = Callable[[Spec, Try], None]
"""Tries examples of a test until enough have passed. Raises for an example that fails."""


def search(
    spec: Spec,
    attempt: Try,
    nprocs: st.SearchStrategy[Any],
    strategies: dict[str, st.SearchStrategy[Any]],
    max_examples: int | None,
) -> None:
    """Let Hypothesis draw examples, and shrink one that fails.

    The test is skipped if every draw needs ranks that the launch does not have.

    Args:
        spec: the test.
        attempt: runs an example.
        nprocs: draws the ranks.
        strategies: draw the arguments, by name.
        max_examples: overrides the number of the profile, if not None.
    """
    fitting: list[Nprocs] = []

    def is_fitting(nprocs: Nprocs) -> bool:
        fitting.extend([nprocs] if fits(nprocs) else [])
        return nprocs in fitting

    def driver(**values: Any) -> None:
        if not is_fitting(nprocs := values.pop("nprocs")):  # an `@example` for a larger launch
            hypothesis.reject()
        example = Example(ranks_of(nprocs), values)
        if Kind.REJECT in attempt(example, "to keep this example: @example({})"):
            hypothesis.reject()

    @st.composite
    def fitting_ranks(draw: Callable[[st.SearchStrategy[Any]], Any]) -> Any:
        draws = (draw(nprocs) for _ in range(MAX_DRAWS))
        return next(filter(is_fitting, draws), None) or hypothesis.reject()

    drawn = {"nprocs": fitting_ranks(), **strategies}
    try:
        _decorated(spec, driver, drawn, max_examples)()
    except (Unsatisfiable, FailedHealthCheck):
        if fitting:
            raise
        size = session.current.world_size
        pytest.skip(f"no number of ranks that it draws fits a launch of {size}")


def _decorated(
    spec: Spec,
    driver: Callable[..., None],
    strategies: dict[str, st.SearchStrategy[Any]],
    max_examples: int | None,
) -> Callable[[], None]:
    """Return `driver`, which runs one example, as a Hypothesis test with `spec.marks`."""
    # Hypothesis tells tests apart by the body's name and source, for its seed and in its database
    driver = functools.wraps(spec.function, updated=())(driver)
    parameters = [inspect.Parameter(x, inspect.Parameter.KEYWORD_ONLY) for x in strategies]
    copied = {name: spec.marks[name] for name in _COPIED if name in spec.marks}
    vars(driver).update(copied, __signature__=inspect.Signature(parameters))
    seed = session.current.seed
    own = profiles.chosen(spec.marks, max_examples, seeded=seed is not None)
    if seed is not None and copied.get(_SEED) is None:  # each test draws different examples
        driver = hypothesis.seed(f"{seed} {spec.test_id.rpartition('::')[2]}")(driver)
    test = hypothesis.given(**strategies)(own(driver))
    vars(test).update(copied)
    return test


def sweep(spec: Spec, attempt: Try, sizes: Sequence[Nprocs]) -> None:
    """Try one example for each size that the launch has.

    The test is skipped if the launch has none of them, or if the body runs to its end with none.
    It ends as an expected failure if the body calls pytest's `xfail` with any size.

    Args:
        spec: the test.
        attempt: runs an example.
        sizes: numbers of ranks, or tuples of world ranks.

    Raises:
        TypeError: the test has a decorator that changes what Hypothesis draws.
    """
    if names := [name for mark, name in _OF_DRAWS.items() if mark in spec.marks]:
        raise TypeError(
            f"{spec.function.__qualname__} has @{names[0]}, but @spmd draws nothing. Remove "
            f"@{names[0]}, or use @given."
        )
    fitting = [Example(ranks_of(size), {}) for size in sizes if fits(size)]
    if not fitting:
        least = min(max(ranks_of(size)) for size in sizes) + 1
        pytest.skip(f"needs {least} ranks, the launch has {session.current.world_size}")
    left, rejected = list[BaseException](), 0
    for example in fitting:
        try:
            rejected += Kind.REJECT in attempt(example, "failed with {}")
        except (pytest.skip.Exception, pytest.xfail.Exception) as error:
            left.append(error)
    ended = len(left) + rejected < len(fitting)
    for way in left:
        if isinstance(way, pytest.xfail.Exception) or not ended:
            raise way
    if not ended:
        pytest.skip("`assume` rejects every size")


UNASKED, EXAMPLE, RESULT = "feed", "example.pickle", "example-result.pickle"
"""Files in the launch's directory by which `shrink_crash` sends examples and gets results.

The file UNASKED is there until the test asks for its first example.
"""


def is_fed() -> bool:
    """Return whether the examples of this launch come from another process."""
    return RUN_DIR in os.environ and Path(os.environ[RUN_DIR], UNASKED).exists()


def feed(attempt: Callable[[Example], Result]) -> None:
    """Read examples from a file one by one, run each and write its result, until None is read."""
    directory = Path(os.environ[RUN_DIR])
    (directory / UNASKED).unlink()
    while (example := patiently(lambda: taken(directory / EXAMPLE))[0]) is not None:
        hand_over(directory / RESULT, attempt(example))


def hand_over(path: Path, value: object) -> None:
    """Write the pickle of a value to a file, which appears only when it is complete."""
    path.with_suffix(".new").write_bytes(pickle.dumps(value))
    path.with_suffix(".new").replace(path)


def taken(path: Path) -> tuple[Any] | None:
    """Read the pickled value in a file, remove the file, and return the value in a 1-tuple.

    Return None if there is no file.
    """
    if not path.exists():
        return None
    value = pickle.loads(path.read_bytes())
    path.unlink()
    return (value,)
