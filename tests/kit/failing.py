"""Run tests that must fail, and check their reports."""

import re
import time
from collections.abc import Callable, Generator
from typing import Any

import numpy as np
import pytest
from hypothesis import settings

from sp_core.testing import session, spmd
from sp_core.testing.outcome import RankFailure

SEARCH = settings(max_examples=120)
"""Enough examples to find a planted fault in any profile, with any seed."""


class Alike(int):
    """A number that looks like every other."""

    def __repr__(self) -> str:
        return "0"


def leads() -> bool:
    """Return whether this process has the whole report; ranks other than 0 have one line."""
    return session.current.control is None or session.current.control.rank == 0


def finish(*requests: Any) -> None:
    """Wait for requests as the library does: test each one until it is complete."""
    for request in requests:
        while request is not None and not request.Test():
            time.sleep(0)


def failure_of(test: Callable[[], None]) -> str:
    """Run a test that must fail on every rank; return class and text of the failure.

    The text is without the parameters of the running test, in which an expected text may be.
    """
    with pytest.raises(RankFailure) as caught:
        test()
    text = re.sub(r"(run it again: .*?)\[.*", r"\1", str(caught.value))
    return f"{type(caught.value).__name__}: {text}"


def driven(hook: Generator[None, Any, Any], value: Any) -> Any:
    """Run a hook that wraps others, which return `value` or raise it, and return its result."""
    resume = hook.throw if isinstance(value, BaseException) else hook.send
    next(hook)
    try:
        resume(value)
    except StopIteration as end:
        return end.value
    raise AssertionError("it goes on")


def assert_told(text: str, *said: str) -> None:
    """Assert that a report has these texts, if this process has the whole report."""
    assert not leads() or [words for words in said if words not in text] == []


@spmd(2)
def assert_clean(comm: Any) -> None:
    """Check that no message of a failed example arrives in the next one."""
    sent, received = np.arange(2.0), np.zeros(2)
    comm.Sendrecv(sent + comm.rank, 1 - comm.rank, 0, received, 1 - comm.rank, 0)
    assert received.tolist() == (sent + 1 - comm.rank).tolist()


def assert_fails(test: Callable[[], None], name: str, *said: str) -> str:
    """Assert that a test fails by an error of this class (a pattern), says this, and is cleaned up.

    Returns:
        The class and the text of the failure.
    """
    text = failure_of(test)
    assert_clean()  # on every rank, so before the asserts that only rank 0 can fail
    assert re.match(rf"RankFailure\[({name})", text), text
    assert_told(text, *said)
    return text


def as_two(zero: Callable[[Any], Any], one: Callable[[Any], Any]) -> Callable[[], None]:
    """Return a test in which rank 0 calls `zero` and rank 1 calls `one`."""

    def body(comm: Any) -> None:
        (one if comm.rank else zero)(comm)

    return spmd(2)(body)
