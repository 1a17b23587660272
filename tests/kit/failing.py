"""Tests that must fail."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import settings

from sp_core.testing import session, spmd
from sp_core.testing.outcome import RankFailure

SEARCH = settings(max_examples=120)
"""Enough examples to find what is there in any profile, with any seed."""


def leads() -> bool:
    """Whether this process has the whole report; other ranks have one line."""
    return session.current.control is None or session.current.control.rank == 0


def failure_of(test: Callable[[], None]) -> str:
    """Class and text of the failure that a test must end with, on every rank."""
    with pytest.raises(RankFailure) as caught:
        test()
    return f"{type(caught.value).__name__}: {caught.value}"


def assert_told(text: str, *said: str) -> None:
    """See that a report has these words, where it is whole."""
    assert not leads() or [words for words in said if words not in text] == []


def as_two(zero: Callable[[Any], Any], one: Callable[[Any], Any]) -> str:
    """The failure where rank 0 and rank 1 make these calls."""
    return failure_of(spmd(2)(lambda comm: (one if comm.rank else zero)(comm)))
