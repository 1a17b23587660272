"""One capability of one library on trial: the body that every rank runs for each problem, and the verdict that follows.

A library talks over gloo, where no checked communicator sees it. So whatever it raises is caught first, and the ranks tell each
other: an error on every rank is a refusal, an error on some is a fault, because the others would wait for ever.
"""

from __future__ import annotations

import math
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, Protocol

import torch
from hypothesis import settings
from hypothesis import strategies as st
from torch import Tensor

from conformance.capabilities import Posed, told
from sp_core.testing import given
from sp_core.testing.attention_check import Shards
from sp_core.testing.outcome import RankFailure
from sp_core.testing.tolerance import error_ratio

CELL_SECONDS = 25.0
"""So long may the problems of a capability take; then none is tried that is not known yet. A library that hangs uses it up."""
TRANSPORT = ("gloo", "op.preamble", "timed out", "timeout", "connection closed", "connection reset", "connection refused")
"""Words of a process group in trouble: not of a library that refuses."""
FINE, RAISED, STUCK = "fine", "raised", "stuck"


class Adapter(Protocol):
    """What a module of `conformance.adapters` has."""

    def prepare(self, comm: Any, variant: str) -> None:
        """Get ready for a new process group over all ranks."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, **definition: Any) -> Tensor:
        """This rank's tokens attended to, (B, S/P, H, D)."""


@dataclass(frozen=True)
class Attempt:
    """What became of a problem on one rank."""

    status: str = FINE
    text: str = ""


@dataclass(frozen=True)
class Error:
    """The worst of a rank's results: error over bound, and error relative to the greatest element."""

    ratio: float = 0.0
    relative: float = 0.0
    result: str = ""
    rank: int = 0


@dataclass
class Trial:
    """The body of a capability's property; called on every rank.

    Args:
        adapter: how the library is called.
        variant: which of its functions.
        renew: makes a new process group after one has broken.
        announce: is told each problem before it is tried, by rank 0.
        seconds: after which no further problem is tried.
    """

    adapter: Adapter | ModuleType
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

    def __call__(self, comm: Any, problem: Posed) -> None:
        """Try one problem.

        Raises:
            AssertionError: on every rank: a wrong result, or ranks that did not end alike.
        """
        if repr(problem) in self.failures:
            self._fail(problem, self.failures[repr(problem)])
        if self.closed:
            return
        self._began = self._began or time.monotonic()
        if comm.rank == 0:
            self.announce(told(problem))
        shards = Shards(problem, comm.rank, comm.size, torch.device("cpu"))
        mine, results = self._attempt(shards, comm)
        late = time.monotonic() - self._began > self.seconds
        everyone, lates = zip(*comm.allgather((mine, late)), strict=True)
        self.closed = any(lates)
        if comm.rank == 0:
            self.examples += 1
        if any(attempt.status != FINE for attempt in everyone):
            self.renew(comm)  # also where every rank has refused: messages may be under way, and would meet the next problem's
            self._not_fine(problem, everyone)
            return
        error = max(comm.allgather(worst(shards, results)), key=lambda e: e.ratio)
        self.worst = max(self.worst, min(error.ratio, 1.0))
        if not error.ratio <= 1.0:
            said = {"result": error.result, "rank": error.rank, "relative": finite(error.relative), "ratio": finite(error.ratio)}
            self._fail(problem, {"verdict": "wrong", "problem": told(problem), **said})

    def _not_fine(self, problem: Posed, everyone: Sequence[Attempt]) -> None:
        text = next(a.text for a in everyone if a.status != FINE)
        if all(attempt.status == RAISED for attempt in everyone):
            self.refusals[text] += 1
            return
        hung = not any(attempt.status == RAISED for attempt in everyone)
        states = "; ".join(f"rank {rank}: {a.status} {a.text}".strip() for rank, a in enumerate(everyone))
        self._fail(problem, {"verdict": "hung" if hung else "crashed", "problem": told(problem), "states": states})

    def _fail(self, problem: Posed, failure: dict[str, Any]) -> None:
        """The same failure again whenever this problem comes again, also when there is no time to try it."""
        self.failure = self.failures[repr(problem)] = failure
        raise AssertionError(f"{failure['verdict']}: {problem}")

    def _attempt(self, shards: Shards, comm: Any) -> tuple[Attempt, dict[str, Tensor]]:
        def scheme(q: Tensor, k: Tensor, v: Tensor, *, mask: Any, softmax_scale: float | None, **_: Any) -> tuple[Tensor, None]:
            problem = shards.problem
            seen = {"causal": mask.causal, "window": mask.window, "documents": mask.documents}
            rest = {"variant": self.variant, "layout": problem.layout, "softmax_scale": softmax_scale}
            return self.adapter.attend(q, k, v, **seen, **rest, shards=problem.shards, comm=comm), None

        try:
            out, lse = shards.run(scheme)
            return Attempt(), {"out": out.detach(), **shards.gradients(out, lse)}
        except Exception as error:  # noqa: BLE001 - whatever a library raises is an answer
            return _caught(error), {}

    def verdict(self) -> dict[str, Any]:
        """What was found, as plain data."""
        refused = sum(self.refusals.values())
        said = {"examples": self.examples, "refused": refused, "error": self.worst}
        if self.refusals:
            said["text"] = self.refusals.most_common(1)[0][0]
        if self.failure is not None:
            return {**said, **self.failure}
        return {**said, "verdict": "refused" if refused else "pass"}


def judged(trial: Trial, strategy: st.SearchStrategy[Posed], size: int, examples: int) -> dict[str, Any]:
    """Run the property of a capability to its end, on every rank together.

    Args:
        trial: the body.
        strategy: draws problems.
        size: number of ranks.
        examples: at most so many, beside those that make a failure smaller.
    """

    def body(comm: Any, problem: Posed) -> None:
        trial(comm, problem)

    law = settings(report_multiple_bugs=False)(given(nprocs=st.just(size), max_examples=examples, problem=strategy)(body))
    try:
        law()
    except RankFailure:
        if trial.failure is None:
            raise
    return trial.verdict()


def worst(shards: Shards, results: dict[str, Tensor]) -> Error:
    """The worst of this rank's results."""
    errors = [Error()]
    for what, (expected, allowed) in shards.expected().items():
        if what in results:
            found = results[what].detach().double()
            ratio = error_ratio(found, expected, allowed)
            errors.append(Error(ratio, relative(found, expected), what, shards.rank))
    return max(errors, key=lambda error: error.ratio)


def relative(found: Tensor, expected: Tensor) -> float:
    """Greatest error over the greatest expected element; infinite for other shapes and for NaN."""
    if found.shape != expected.shape or not bool(found.isfinite().all()):
        return float("inf")
    if not expected.numel():
        return 0.0
    return float((found - expected).abs().max() / expected.abs().max().clamp_min(1e-300))


def finite(number: float) -> float | None:
    """JSON knows no infinity."""
    return number if math.isfinite(number) else None


def _caught(error: Exception) -> Attempt:
    """An error in one line, with the line of code that raised it where it has no words of its own."""
    said = " ".join(str(error).split())
    if not said:
        said = traceback.extract_tb(error.__traceback__)[-1].line or ""
    text = f"{type(error).__name__}: {said}"[:400]
    stuck = any(word in text.lower() for word in TRANSPORT)
    return Attempt(STUCK if stuck else RAISED, text)
