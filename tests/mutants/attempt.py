"""Trying one wrong edit: the tests that reach it, near ones first, then all others, then their files under mpiexec."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from mutants import nursery, trial
from mutants.chosen import TESTS
from mutants.edits import Edit
from mutants.reach import Reached
from mutants.trial import Ending, Outcome, copy_package, environment, judged

STAGES = ("near", "far", "ranks")
PATIENCE = 4.0
"""How much longer than without an edit tests may take: the machine may have other work."""
LEAST_SECONDS = 60.0
WATCHDOG = {"SP_WATCHDOG_S": "20", "SP_WATCHDOG_PHASE_S": "45"}
"""Examples take less than a second: the suite finds out soon that one hangs."""


def tried(edit: Edit, reached: Reached, until: str = STAGES[-1]) -> Outcome:
    """Make an edit, and run stage after stage until one decides."""
    begin = time.monotonic()
    tests = reached.tests(edit)
    if not tests:
        return Outcome("survived", "reach", words="no test reaches it")
    with tempfile.TemporaryDirectory(prefix="sp_core-edit-") as directory:
        copy = Path(directory)
        copy_package(copy)
        target = copy / edit.file
        target.write_text(edit.planted(target.read_text()))
        outcome = _decided(copy, tests, reached, until)
    return Outcome(**{**outcome.as_dict(), "seconds": round(time.monotonic() - begin, 1)})


def _decided(copy: Path, tests: Sequence[str], reached: Reached, until: str) -> Outcome:
    near = reached.near(tests)
    for stage in STAGES[: STAGES.index(until) + 1]:
        part = {"near": tests[:near], "far": tests[near:], "ranks": tests}[stage]
        if not part:
            continue
        run = _on_ranks if stage == "ranks" else _as_threads
        outcome = judged(stage, run(copy, stage, part, sum(reached.seconds[test] for test in part)))
        if outcome is not None:
            return outcome
    return Outcome("survived", until, words=f"of {len(tests)} tests that reach it")


def _as_threads(copy: Path, stage: str, tests: Sequence[str], seconds: float) -> Ending:
    listed, witness, output = copy / "tests.txt", copy / f"{stage}.json", copy / f"{stage}.txt"
    listed.write_text("\n".join(tests))
    variables = {**environment(copy, witness, "threads"), TESTS: str(listed), **WATCHDOG}
    limit = LEAST_SECONDS + PATIENCE * seconds
    code = nursery.run(["-q", "-x", "--tb=short", *nursery.plugins(), *_files(tests)], copy, output, variables, limit)
    told = json.loads(witness.read_text()) if witness.exists() else {}
    return Ending(code, told, output.read_text(errors="replace"))


def _on_ranks(copy: Path, stage: str, tests: Sequence[str], _: float) -> Ending:
    """The whole files: under mpiexec their laws cost a fraction of what their start does."""
    witness, output = copy / f"{stage}.json", copy / f"{stage}.txt"
    with output.open("w") as file:
        command, variables = trial.command(stage, _files(tests)), {**environment(copy, witness, stage), **WATCHDOG}
        code = trial.run(command, copy, file.fileno(), variables, trial.SECONDS[stage])
    told = json.loads(witness.read_text()) if witness.exists() else {}
    return Ending(code, told, output.read_text(errors="replace"))


def _files(tests: Sequence[str]) -> list[str]:
    return list(dict.fromkeys(test.partition("::")[0] for test in tests))
