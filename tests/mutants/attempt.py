"""Try one wrong edit: the tests that reach it, near ones first, then all others, then those that reach it under mpiexec."""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from importlib.util import cache_from_source
from pathlib import Path

from mutants import nursery, trial
from mutants.chosen import TESTS
from mutants.edits import Edit
from mutants.reach import BRIEF, Reached
from mutants.trial import Ending, Outcome, copy_package, environment, judged

STAGES = ("near", "far", "ranks")
PATIENCE = 4.0
"""How much longer than without an edit tests may take: the machine may have other work."""
LEAST_SECONDS = 90.0
WATCHDOG = {"SP_WATCHDOG_S": "20", "SP_WATCHDOG_PHASE_S": "45"}
"""Examples take less than a second: the suite finds out soon that one hangs."""
TEST_SECONDS = 60
"""No test may take so long: pytest then writes all stacks and ends."""
UNENDED = ("-o", f"faulthandler_timeout={TEST_SECONDS}", "-o", "faulthandler_exit_on_timeout=true")


def tried(edit: Edit, reached: Reached, until: str = STAGES[-1]) -> Outcome:
    """Make an edit, and run stage after stage until one decides."""
    begin = time.monotonic()
    stages = reached.stages(edit)
    if not stages:
        return Outcome(
            "survived", "reach" if until == STAGES[-1] else until, words="no test reaches it"
        )
    with tempfile.TemporaryDirectory(
        prefix="sp_core-edit-", ignore_cleanup_errors=True
    ) as directory:
        copy = Path(directory)
        copy_package(copy)
        target = copy / edit.file
        target.write_text(edit.planted(target.read_text()))
        Path(cache_from_source(target)).unlink(missing_ok=True)
        outcome = _decided(edit, copy, stages, until)
    return replace(outcome, seconds=round(time.monotonic() - begin, 1))


def _decided(
    edit: Edit, copy: Path, stages: dict[str, tuple[list[str], float]], until: str
) -> Outcome:
    for stage in STAGES[: STAGES.index(until) + 1]:
        if stage in stages:
            ending = _run(copy, stage, *stages[stage])
            if (outcome := judged(stage, ending)) is not None:
                return blamed(outcome, ending, edit)
    counts = ", ".join(f"{len(part)} {stage}" for stage, (part, _) in stages.items())
    return Outcome("survived", until, words=f"tests that reach it: {counts}")


def blamed(outcome: Outcome, ending: Ending, edit: Edit) -> Outcome:
    """Count a session that does not even begin as red if the edited file stands in what it printed; else it says nothing."""
    if outcome.verdict == "broken" and edit.file in ending.printed:
        return replace(outcome, verdict="killed", law="the session")
    return outcome


def _run(copy: Path, stage: str, tests: Sequence[str], seconds: float) -> Ending:
    listed, witness, output = copy / "tests.txt", copy / f"{stage}.json", copy / f"{stage}.txt"
    listed.write_text("\n".join(tests))
    files = list(dict.fromkeys(test.partition("::")[0] for test in tests))
    limit = LEAST_SECONDS + PATIENCE * seconds
    variables = {**environment(copy, witness, stage), TESTS: str(listed), **WATCHDOG}
    if stage == "ranks":
        command = [
            sys.executable,
            "-m",
            "mutants.apart",
            *trial.command(stage, files, limit, nursery.CHOSEN),
        ]
        with output.open("w") as file:
            code = trial.run(command, copy, file.fileno(), variables | BRIEF, limit + LEAST_SECONDS)
    else:
        code = nursery.run(
            ["-q", "-x", "--tb=short", *nursery.plugins(), *UNENDED, *files],
            copy,
            output,
            variables,
            limit,
        )
    told = json.loads(witness.read_text()) if witness.exists() else {}
    return Ending(code, told, output.read_text(errors="replace"))
