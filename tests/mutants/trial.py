"""Try one mutant: plant it in a copy of the repository, and run tests until one fails."""

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from mutants.plugin import REACH, TESTS, WITNESS
from studies.commands import APART, copied, on_ranks, outside, printed

PLUGINS = ("-p", "mutants.plugin", "-p", "no:cacheprovider")
NEAR_RANKS, ON_RANKS = "near ranks", "ranks"
"""The stages that run under mpiexec: the first tests that reach an edit, and all others."""
MORE_SECONDS = 60.0
"""Seconds beyond its limit after which a session is killed. A launch should have ended itself."""
WATCHDOG = {"SP_WATCHDOG_S": "20", "SP_WATCHDOG_PHASE_S": "45"}
"""Time limits of an example, in seconds. One takes less than a second, so a hang is soon found."""
LIMITED = ("-o", "faulthandler_timeout=60", "-o", "faulthandler_exit_on_timeout=true")
"""After 60 seconds in one test, pytest writes all stacks and ends the session."""
TIME_IS_UP = "the launch has not ended"
ENDED = "the launch was ended: "
UNENDED = "Timeout (0:"  # faulthandler's
NOTHING_FAILED = (0, 5)
TESTS_FAILED, INTERNAL_ERROR = 1, 3
DIED = 128
"""The shell adds this to the number of the signal that has ended a program."""


@dataclass(frozen=True)
class Outcome:
    """The result of trying a mutant.

    Args:
        verdict: "killed" (a test or rank failed); "survived"; "hung" (a stage did not end);
            "stale" (the text to replace is not in its file exactly once); "broken" (the tests
            could not start).
        stage: the name of the stage that decided.
        law: the id of the test that failed; or "the launcher", "the process died", "the session".
        examples: how many Hypothesis examples that test drew until it failed.
        seconds: the time of all stages, in seconds.
        words: the message of the failure.
    """

    verdict: str
    stage: str = ""
    law: str = ""
    examples: int = 0
    seconds: float = 0.0
    words: str = ""


@dataclass(frozen=True)
class Stage:
    """Tests that run in one session.

    Args:
        name: NEAR_RANKS or ON_RANKS for a launch under mpiexec; with any other name ranks are
            threads.
        files: the test files.
        seconds: the time limit.
        tests: the ids of the tests to run, in order; all tests of the files if empty.
        variables: environment variables to set.
    """

    name: str
    files: Sequence[str]
    seconds: float
    tests: Sequence[str] = ()
    variables: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Ending:
    """The end of a stage.

    Args:
        code: the exit code; None if the stage was killed.
        told: the first failure as `mutants.plugin` recorded it; empty if no test failed.
        printed: the output of pytest.
    """

    code: int | None
    told: Mapping[str, Any]
    printed: str


class Stale(Exception):
    """The text that a mutant replaces does not occur exactly once."""


def tried(file: str, planted: Callable[[str], str], stages: Iterable[Stage]) -> Outcome:
    """Plant a fault, and run stage after stage until one does not survive.

    Args:
        file: the file that is changed, below the root of the repository.
        planted: a function from the file's text to its new text.
        stages: the tests, in the order in which they run.
    """
    begin = time.monotonic()
    outcome = Outcome("survived")
    with copied() as copy:
        target = copy / file
        try:
            target.write_text(planted(target.read_text()))
        except (Stale, FileNotFoundError) as error:
            return Outcome("stale", words=str(error))
        for stage in stages:
            outcome = judged(stage.name, run_stage(copy, stage), file)
            if outcome.verdict != "survived":
                break
    return replace(outcome, seconds=round(time.monotonic() - begin, 1))


def judged(stage: str, ending: Ending, file: str) -> Outcome:
    """Return the outcome of a fault in `file` from the end of a stage.

    If the session could not start, the mutant is broken, unless the output names the file.
    An error inside pytest or the kit, or between ranks, kills it: without it the session has ended.
    """
    text, code = ending.printed, ending.code
    if ending.told:
        return Outcome("killed", stage, **ending.told)
    if code is None or TIME_IS_UP in text:
        return Outcome("hung", stage, words="no end within its time")
    if code in NOTHING_FAILED:
        return Outcome("survived", stage)
    if ENDED in text:
        words = text.partition(ENDED)[2].splitlines()[0].strip(" =")
        return Outcome("killed", stage, "the launcher", words=words)
    if code - DIED in {*signal.Signals}:
        return Outcome("killed", stage, "the process died", words=signal.Signals(code - DIED).name)
    words = f"exit code {code}: {' '.join(text.split())[-200:]}"
    if UNENDED in text:
        words = "a test has not ended, and the session was ended with all stacks"
    elif code == TESTS_FAILED:
        words = "an error above half its bound"
    elif code != INTERNAL_ERROR and file not in text:
        return Outcome("broken", stage, words=words)
    return Outcome("killed", stage, "the session", words=words)


def run_stage(copy: Path, stage: Stage) -> Ending:
    """Run the tests of a stage in a copy of the repository, up to the first failure."""
    told, tests = copy / f"{stage.name}.json", copy / "tests.txt"
    tests.write_text("\n".join(stage.tests))
    variables = outside(
        PYTHONPATH=f"{copy}{os.pathsep}{copy}/tests",
        SP_PROFILE=os.environ.get("SP_PROFILE", "quick"),  # as many examples as in `nox -s tests`
        **{WITNESS: str(told), TESTS: str(tests)},
    )
    variables |= {**WATCHDOG, **stage.variables}
    limited = () if REACH in variables else LIMITED
    options = ["-q", "-x", "--tb=short", *PLUGINS, *limited, *stage.files]
    command = [sys.executable, "-m", "pytest", *options]
    if stage.name in (NEAR_RANKS, ON_RANKS):
        command = on_ranks(stage.seconds, *options)
    code, text = printed([*APART, *command], copy, variables, stage.seconds + MORE_SECONDS)
    return Ending(code, json.loads(told.read_text()) if told.exists() else {}, text)
