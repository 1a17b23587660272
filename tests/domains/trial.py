"""Run rows of a subject on ranks: each result is judged, or each rank refuses the call."""

import functools
from collections.abc import Collection
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

from torch import Tensor

import sp_core as sp
from domains.declared import Pair, Row, Subject, Values
from domains.situations import CALLS
from sp_core.errors import RankError
from sp_core.launch import watch
from sp_core.testing import run_threads
from sp_core.testing.outcome import RankFailure
from sp_core.testing.run import ThreadsHung

REFUSALS = (ValueError, TypeError, RankError)


def attempt(subject: Subject, drawn: Values, comm: Any) -> tuple[str, bool]:
    """Run one row on one rank.

    Returns:
        The error with which the library refused the row, or an empty text; and whether the result
        has a number other than 0.
    """
    with ExitStack() as opened:
        try:
            call = opened.enter_context(subject.prepare(comm, drawn))
            for _ in range(CALLS[drawn.get("(call)", "first")] - 1):
                finished(call())
            result = call()
        except REFUSALS as error:
            return f"{type(error).__name__}: {error}", True
        call.judge(result)
        return "", shows(result)


def shows(result: Any) -> bool:
    """Return whether a result would show a wrong factor or sign: it is not all 0."""
    tensors = result if isinstance(result, tuple) else (result,)
    return not all(isinstance(x, Tensor) and not x.any() for x in tensors)


def finished(result: Any) -> Any:
    """Return a result, after waiting for it if the collective was only started."""
    return result.wait() if isinstance(result, sp.Pending) else result


@dataclass
class Tried:
    """Hold what the rows of a subject have drawn.

    Attributes:
        singles, pairs: the parts, and pairs of parts, of judged rows whose result is not all 0 on
            some rank. A row with at most two parts outside the base row counts in any case.
        impossible: the library's error by impossible pair of parts.
        refused: the rows that the library refused, each with its error.
        rows: the number of rows that were run.
    """

    singles: set[tuple[str, str]] = field(default_factory=set)
    pairs: set[Pair] = field(default_factory=set)
    impossible: dict[Pair, str] = field(default_factory=dict)
    refused: list[tuple[Row, str]] = field(default_factory=list)
    rows: int = 0

    def row(self, subject: Subject, row: Row, seed: int) -> str:
        """Run a row, count its parts if it is judged, and return the library's error, if any.

        Raises:
            AssertionError: a wrong result, a hang, or an error on some ranks only; names the row.
        """
        drawn = subject.draw(row, seed)
        self.rows += 1
        try:
            answers = run_threads(
                subject.ranks(drawn),
                functools.partial(attempt, subject, drawn),
                timeout=max(60.0, watch.example_seconds()),
            )
        except (ThreadsHung, RankFailure) as error:
            raise AssertionError(
                f"{subject.name}, seed {seed}, {told(subject, row)}:\n{error}"
            ) from None
        reasons = [reason for reason, _ in answers]
        if len({bool(reason) for reason in reasons}) > 1:
            raise AssertionError(
                f"{subject.name}, seed {seed}, {told(subject, row)}: some ranks refuse: {reasons}"
            )
        if reasons[0]:
            self.refused.append((row, reasons[0]))
        elif any(shown for _, shown in answers) or len(row.items() - subject.base.items()) <= 2:
            self.singles |= set(row.items())
            self.pairs |= pairs_of(row)
        return reasons[0]

    def check_refusals(self, subject: Subject, impossible: Collection[Pair]) -> None:
        """Raise `AssertionError` for a refused row none of whose pairs is impossible."""
        for row, reason in self.refused:
            if not pairs_of(row) & set(impossible):
                raise AssertionError(
                    f"{subject.name} refuses {told(subject, row)}, where no pair is impossible: "
                    f"{reason}"
                )


def pairs_of(row: Row) -> set[Pair]:
    """Return every pair of parts of a row."""
    return set(combinations(sorted(row.items()), 2))


def told(subject: Subject, row: Row) -> str:
    """Return a text of the parts of a row that are not those of the base row."""
    return ", ".join(
        f"{factor}={part}" for factor, part in row.items() if part != subject.base[factor]
    )


def draw_singles(subject: Subject, seed: int, impossible: Collection[Pair] = ()) -> Tried:
    """Draw every part in a row that is judged, and return what was drawn.

    A part that no judged row had is tried again, first together with other such parts, then in the
    base row.

    Args:
        subject: the subject whose parts are drawn.
        seed: the seed of the rows.
        impossible: the only pairs of parts that may make the library refuse a row.

    Raises:
        AssertionError: a wrong result, a hang, or a refused row without an impossible pair.
    """
    tried = Tried()
    for row in (*subject.each_part(seed), *(subject.base | row for row in subject.together)):
        tried.row(subject, row, seed)
    for row in subject.with_parts(sorted(subject.singles() - tried.singles)):
        tried.row(subject, row, seed)
    for factor, part in sorted(subject.singles() - tried.singles):
        tried.row(subject, subject.base | {factor: part}, seed)
    tried.check_refusals(subject, impossible)
    return tried


def every_pair(subject: Subject, seed: int, tried: Tried) -> None:
    """Draw every pair of parts in a row that is judged. Try missing pairs in the base row.

    Raises:
        AssertionError: a wrong result, a hang, or a refused row without an impossible pair.
    """
    for row in subject.each_pair(seed):
        tried.row(subject, row, seed)
    for pair in sorted(subject.pairs() - tried.pairs):
        if pair not in tried.pairs and (
            reason := tried.row(subject, subject.base | dict(pair), seed)
        ):
            tried.impossible[pair] = reason
    tried.check_refusals(subject, tried.impossible)
