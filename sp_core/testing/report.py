"""The text of a failure: the smallest example, what every rank did, and how to run it again."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

from sp_core.launch.places import owner
from sp_core.testing import session
from sp_core.testing.outcome import RankFailure, failure_class
from sp_core.testing.plan import Plan, Search, Spec
from sp_core.testing.run import ThreadsHung


def explained(error: BaseException, spec: Spec, plan: Plan) -> BaseException:
    """The error to raise at the end of a test.

    Args:
        error: what the plan raised.
        spec: the test.
        plan: knows which example failed.

    Returns:
        A `RankFailure` of the same class with the whole story as its text, or the error itself where it is none of the kit's.
    """
    bugs = [bug for bug in _leaves(error) if isinstance(bug, RankFailure)]
    if isinstance(error, ThreadsHung):
        return failure_class("Hung", "", 0)(f"{error}\n{rerun(spec)}")
    if not bugs:
        return error
    text = "\n\n".join(_story(bug, spec, plan) for bug in bugs)
    if isinstance(error, RankFailure):
        return type(error)(_with(text, [], spec))
    head = f"{error.args[0] if error.args else error}\n\n"
    return failure_class(type(error).__name__, "", 0)(_with(head + text, map(_useful, getattr(error, "__notes__", [])), spec))


def _leaves(error: BaseException) -> list[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        return [leaf for part in error.exceptions for leaf in _leaves(part)]
    return [error]


def _story(bug: RankFailure, spec: Spec, plan: Plan) -> str:
    lines = [str(bug), *(said for said in map(_useful, getattr(bug, "__notes__", [])) if said)]
    example = plan.failed.get(type(bug))
    if example is not None:
        lines.append(f"to keep this example: @example({example})" if isinstance(plan, Search) else f"failed with {example}")
    return "\n".join(lines)


def _useful(note: str) -> str:
    """A note of Hypothesis, without its explanation where that names only lines of the kit: those that report failures."""
    said, found, lines = note.partition("Explanation:\n")
    own = [line for line in lines.splitlines() if ":" in line and owner(line.strip().rsplit(":", 1)[0]) != "kit"]
    return note.rstrip() if not found or len(own) > 1 else said.rstrip()


def _with(text: str, notes: Iterable[str], spec: Spec) -> str:
    return "\n".join([text, *notes, rerun(spec)])


def rerun(spec: Spec) -> str:
    """The command that runs this test again."""
    chosen = {name: os.environ.get(name) for name in ("SP_PROFILE", "SP_EXAMPLES")}
    prefix = "".join(f"{name}={value} " for name, value in chosen.items() if value)
    return "run it again: " + prefix + session.current.command.format(test=f'"{spec.test_id}"')


def announce(example: Any, spec: Spec) -> str:
    """What is in flight, for the case that the launch dies of it."""
    return f"{spec.test_id}\n  {spec.function.__name__}({example})\n  {rerun(spec)}"
