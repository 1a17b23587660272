"""Ranks that say different things: every call and argument gives its documented result, or one error on all ranks."""

from __future__ import annotations

from typing import Any

import pytest
from domains.declared import Subject
from domains.differing import alone, faults
from domains.subjects import SUBJECTS

from sp_core.agreement import _gather_texts
from sp_core.testing import spmd

SPLIT = ("comm.", "mesh.", "logits.")
"""What the factors of a call over ranks begin with."""

ON_RANKS = [s for s in SUBJECTS if any(factor.startswith(SPLIT) for factor in s.factors) and not s.alone]
BY_RANKS = {size: [s for s in ON_RANKS if s.ranks(s.draw(s.base, 1)) == size] for size in (2, 4)}


TWO = pytest.mark.parametrize("subject", BY_RANKS[2], ids=lambda subject: subject.name)
FOUR = pytest.mark.parametrize("subject", BY_RANKS[4], ids=lambda subject: subject.name)


def check_arguments(comm: Any, subject: Subject) -> None:
    """Change each argument on one rank and on all."""
    found = list(faults(subject, subject.draw(subject.base, 1), comm))
    assert len(found) > 5
    assert not any(found), "\n".join(filter(None, found))


def check_calls(comm: Any, subject: Subject) -> None:
    """Let one rank call once more than the others, then once less."""
    for is_extra in (True, False):
        told = _gather_texts(comm, alone(subject, subject.draw(subject.base, 1), comm, is_extra=is_extra))
        assert len(set(told)) == 1, told
        assert bool(told[0]) == ("a call on one rank" not in subject.allowed), told


@TWO
@spmd(2)
def test_two_ranks_with_other_arguments_are_told_so_or_get_their_result(comm: Any, subject: Subject) -> None:
    check_arguments(comm, subject)


@FOUR
@spmd(4)
def test_four_ranks_with_other_arguments_are_told_so_or_get_their_result(comm: Any, subject: Subject) -> None:
    check_arguments(comm, subject)


@TWO
@spmd(2)
def test_two_ranks_with_another_number_of_calls_are_told_so(comm: Any, subject: Subject) -> None:
    check_calls(comm, subject)


@FOUR
@spmd(4)
def test_four_ranks_with_another_number_of_calls_are_told_so(comm: Any, subject: Subject) -> None:
    check_calls(comm, subject)
