"""Write the text of a failure: the smallest example, what every rank did, and the command that runs it again."""

from __future__ import annotations

import os

from sp_core.launch.places import owner
from sp_core.testing import session
from sp_core.testing.outcome import RankFailure, failure_class
from sp_core.testing.plan import Example, Plan, Spec
from sp_core.testing.run import ThreadsHung


def explained(error: BaseException, spec: Spec, plan: Plan) -> BaseException:
    """Return the error to raise at the end of a test.

    Args:
        error: raised by the plan.
        spec: the test.
        plan: knows which example failed.

    Returns:
        A `RankFailure` of the same class with the whole story as its text, or the error itself if it is none of the kit's.
    """
    if isinstance(error, ThreadsHung):
        return failure_class("Hung", "", 0)(f"{error}\n{rerun(spec)}")
    stories = [_story(bug, plan) for bug in _leaves(error) if isinstance(bug, RankFailure)]
    if not stories:
        return error
    if isinstance(error, RankFailure):
        return type(error)(f"{stories[0]}\n{rerun(spec)}")
    head, notes = error.args[0] if error.args else error, map(_useful, getattr(error, "__notes__", []))
    return failure_class(type(error).__name__, "", 0)("\n".join([f"{head}\n", "\n\n".join(stories), *notes, rerun(spec)]))


def _leaves(error: BaseException) -> list[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        return [leaf for part in error.exceptions for leaf in _leaves(part)]
    return [error]


def _story(bug: RankFailure, plan: Plan) -> str:
    lines = [str(bug), *filter(None, map(_useful, getattr(bug, "__notes__", [])))]
    if type(bug) in plan.failed:
        lines.append(plan.keeps.format(plan.failed[type(bug)]))
    return "\n".join(lines)


def _useful(note: str) -> str:
    """Return a note of Hypothesis, without its explanation if that names only lines of the kit: those that report failures."""
    said, found, lines = note.partition("Explanation:\n")
    own = [line for line in lines.splitlines() if ":" in line and owner(line.strip().rsplit(":", 1)[0]) != "kit"]
    return note.rstrip() if not found or len(own) > 1 else said.rstrip()


def rerun(spec: Spec) -> str:
    """Return the command that runs this test again."""
    prefix = "".join(f"{name}={os.environ[name]} " for name in ("SP_PROFILE", "SP_EXAMPLES") if os.environ.get(name))
    return "run it again: " + prefix + session.current.command.format(test=f'"{spec.test_id}"')


def announce(example: Example, spec: Spec) -> str:
    """Return what is in flight, for the case that the launch dies of it."""
    return f"{spec.test_id}\n  {spec.function.__name__}({example})\n  {rerun(spec)}"
