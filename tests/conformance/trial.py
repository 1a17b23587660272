"""Try one capability of one library: the body that every rank runs, and the verdict.

A library sends its messages over gloo, where the kit's checked communicator does not see them.
Every error is therefore caught, and the ranks exchange their outcomes. An error on every rank is a
refusal. An error on some ranks is a fault, because the other ranks would wait for ever.
"""

import math
import time
import traceback
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from hypothesis import settings, strategies as st
from torch import Tensor

from sp_core.testing import given
from sp_core.testing.outcome import RankFailure
from sp_core.testing.tolerance import error_ratio

CELL_SECONDS = 25.0
"""Seconds after which no new problem of a capability is begun."""
TRANSPORT = (
    "gloo",
    "op.preamble",
    "timed out",
    "timeout",
    "connection closed",
    "connection reset",
    "connection refused",
)
"""Words in the errors of a process group that has failed. A library that refuses has none of them.
"""
FINE, RAISED, STUCK = "fine", "raised", "stuck"


Attempt = tuple[str, str]
"""The outcome of a problem on one rank: FINE, RAISED or STUCK, and the text of the error."""
Error = dict[str, Any]
"""The worst result of a rank: its name ("result") and the rank ("rank"). Its greatest error is
divided by the bound ("ratio"), and by the greatest expected element ("relative")."""


@dataclass
class Trial:
    """The body of a capability's property. Every rank calls it with each problem.

    Args:
        subject: the module of the problems: `conformance.attention` or `conformance.layers`.
        adapter: the module that calls the library.
        variant: the name of the library's function, as the adapter knows it.
        renew: a function that makes a new process group after an error.
        announce: a function that rank 0 calls with each problem before it is tried.
        seconds: the time after which no new problem is begun.
    """

    subject: ModuleType
    adapter: ModuleType
    variant: str
    renew: Callable[[Any], None]
    announce: Callable[[dict[str, Any]], None] = lambda problem: None
    seconds: float = CELL_SECONDS
    examples: int = 0
    refusals: Counter[str] = field(default_factory=Counter)
    failures: dict[str, dict[str, Any]] = field(default_factory=dict)
    worst: float = 0.0
    failure: dict[str, Any] | None = None
    closed: bool = False
    _began: float = 0.0

    def __call__(self, comm: Any, problem: Any) -> None:
        """Let the library compute one problem on all ranks, and compare it with the reference.

        If every rank raises an error, the library has refused the problem, which is counted and no
        failure. A problem that has failed before fails again. No new one is begun after `seconds`.

        Raises:
            AssertionError: on every rank: a result is wrong, only some ranks raised an error, or
                the process group has failed.
        """
        name = repr(problem)
        if name not in self.failures and not self.closed:
            failure = self._tried(comm, problem)
            if failure:
                self.failures[name] = {"problem": self.subject.told(problem), **failure}
        if name in self.failures:  # fail again for the same problem, even if the time is up
            self.failure = self.failures[name]
            raise AssertionError(f"{self.failure['verdict']}: {problem}")

    def _tried(self, comm: Any, problem: Any) -> dict[str, Any]:
        """Compute a problem on all ranks, and compare. Return the failure, or an empty dict."""
        self._began = self._began or time.monotonic()
        if comm.rank == 0:
            self.examples += 1
            self.announce(self.subject.told(problem))
        call, attempt, results = getattr(self.adapter, self.subject.CALL), (FINE, ""), {}
        try:
            results = self.subject.results(problem, comm.rank, call, self.variant, comm)
        except Exception as error:  # noqa: BLE001 - whatever a library raises is an answer
            attempt = _caught(error)
        late = time.monotonic() - self._began > self.seconds
        expected = self.subject.expected(problem, comm.rank)
        mine = (attempt, late, worst(expected, results, comm.rank))
        everyone, lates, errors = zip(*comm.allgather(mine), strict=True)
        self.closed = any(lates)
        if any(status != FINE for status, _ in everyone):
            # Even if every rank has refused, messages under way could match the next problem's.
            self.renew(comm)
            return self._not_fine(everyone)
        most = max(errors, key=lambda one: one["ratio"])
        self.worst = max(self.worst, min(most["ratio"], 1.0))
        said = {name: x if x != math.inf else None for name, x in most.items()}  # as in JSON
        return {} if most["ratio"] <= 1.0 else {"verdict": "wrong", **said}

    def _not_fine(self, everyone: Sequence[Attempt]) -> dict[str, Any]:
        """Return {} and count a refusal if all ranks raised an error; else say what happened.

        Then the verdict is "crashed" if some ranks raised, or "hung".
        """
        statuses = {status for status, _ in everyone}
        if statuses == {RAISED}:
            self.refusals[everyone[0][1]] += 1
            return {}
        states = (f"rank {rank}: {' '.join(one)}".strip() for rank, one in enumerate(everyone))
        verdict = "crashed" if RAISED in statuses else "hung"
        return {"verdict": verdict, "states": "; ".join(states)}

    def verdict(self) -> dict[str, Any]:
        """Return the verdict on the capability as plain data."""
        refused = sum(self.refusals.values())
        said: dict[str, Any] = {"examples": self.examples, "refused": refused, "error": self.worst}
        if self.refusals:
            said["text"] = self.refusals.most_common(1)[0][0]
        if self.failure is not None:
            return {**said, **self.failure}
        return {**said, "verdict": "refused" if refused else "pass"}


def judged(
    trial: Trial, strategy: st.SearchStrategy[Any], size: int, examples: int
) -> dict[str, Any]:
    """Test the property of a capability, called by all ranks together; return the verdict.

    Args:
        trial: the body of the property.
        strategy: the strategy that draws problems.
        size: the number of ranks.
        examples: the greatest number of problems, without those that shrink a failure.
    """

    def body(comm: Any, problem: Any) -> None:
        trial(comm, problem)

    law = given(nprocs=st.just(size), max_examples=examples, problem=strategy)(body)
    try:
        settings(report_multiple_bugs=False)(law)()
    except RankFailure:
        if trial.failure is None:
            raise
    return trial.verdict()


def worst(
    expected: Mapping[str, tuple[Tensor, Tensor]], results: dict[str, Tensor], rank: int
) -> Error:
    """Return the result of this rank with the greatest error over its bound."""
    errors = [{"result": "", "rank": 0, "relative": 0.0, "ratio": 0.0}]
    for what, (wanted, allowed) in expected.items():
        if what in results:
            found = results[what].detach().double()
            ratio, relative = error_ratio(found, wanted, allowed), _relative(found, wanted)
            errors.append({"result": what, "rank": rank, "relative": relative, "ratio": ratio})
    return max(errors, key=lambda error: error["ratio"])


def _relative(found: Tensor, expected: Tensor) -> float:
    """Return the greatest error over the greatest element; infinite if shapes differ or for NaN."""
    if found.shape != expected.shape or not bool(found.isfinite().all()):
        return float("inf")
    if not expected.numel():
        return 0.0
    return float((found - expected).abs().max()) / (float(expected.abs().max()) or 1.0)


def _caught(error: Exception) -> Attempt:
    """Return an error in one line, with the line of code that raised it if it has no words."""
    said = " ".join(str(error).split())
    if not said:
        said = traceback.extract_tb(error.__traceback__)[-1].line or ""
    text = f"{type(error).__name__}: {said}"[:400]
    stuck = any(word in text.lower() for word in TRANSPORT)
    return (STUCK if stuck else RAISED), text
