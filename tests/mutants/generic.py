"""`nox -s generic_mutants`: try a sample of small wrong edits of the library.

`--kit` edits the testing kit instead. Each edit is tried alone, by the tests that reach its lines;
an edit of the kit only by the tests of the kit (`reach.OF_KIT`).
The exit code is 1 if too few edits are killed. It is 2 if a test fails without an edit, no edit is
chosen, the machine cannot run tests apart, or `equivalent.toml` is stale. It is 3 if the time was
up too early; `--resume` then continues. A signal ends the command when the running trials have
ended.
"""

import argparse
import compileall
import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from mutants import reach, sample, tally
from mutants.edits import Edit
from mutants.reach import NEAR, STAGES
from mutants.tally import Result
from mutants.trial import ON_RANKS, Outcome, tried
from studies.commands import ROOT, refused
from studies.records import add_line, named, read_lines, write

from benchmarks import launching
from benchmarks.checkout import commit
from benchmarks.launching import UsageError

NUMBER, NUMBER_OF_KIT = 500, 150
OPTIONS: dict[str, dict[str, Any]] = {
    "--kit": {"action": "store_true", "help": "edit sp_core/testing and sp_core/launch instead"},
    "--seed": {"type": int, "help": "of the sample (default: the date)"},
    "--number": {"type": int, "help": f"of edits (default: {NUMBER}, of the kit {NUMBER_OF_KIT})"},
    "--only": {"nargs": "+", "default": [], "help": "rooms, operators, files or ids of the sample"},
    "--jobs": {"type": int, "default": os.cpu_count() or 1, "help": "how many at a time"},
    "--until": {"choices": STAGES, "default": ON_RANKS, "help": "the last stage"},
    "--seconds": {"type": float, "default": float("inf"), "help": "begin nothing after that time"},
    "--resume": {"action": "store_true", "help": "keep what was found before, and go on"},
    "--out": {"type": Path, "default": ROOT / "reports", "help": "folder of the reports"},
}


@launching.program("nox -s generic_mutants --", __doc__, OPTIONS)
def main(options: argparse.Namespace) -> int:
    """Run the command line; return the exit code."""
    complete(options)
    found = sample.candidates(kit=options.kit)
    entries = sample.equivalents()
    if old := sample.stale(entries, [*found, *sample.candidates(kit=not options.kit)]):
        print(*(f"stale: {entry}" for entry in old), sep="\n", flush=True)
        return 2
    chosen = selected(sample.drawn(found, options.number, options.seed), options.only)
    if problem := refused() if chosen else "no edit of the sample is chosen":
        raise UsageError(problem)
    heading = f"Commit {named(commit())}, seed {options.seed}, {len(chosen)} of {len(found)} edits"
    print(heading, flush=True)
    end = time.monotonic() + options.seconds
    compileall.compile_dir(ROOT / "sp_core", quiet=1)  # otherwise every copy would compile again
    with ThreadPoolExecutor(options.jobs) as pool:
        try:
            reached = _reached(pool, end, options)
        except reach.Red as error:
            print(error, flush=True)
            return 2
        if reached is None:
            return 3
        results, left = _results(pool, chosen, entries, reached, options, end)
    plain = [result.as_dict() for result in results]
    write(options.out, options.name, tally.markdown(results, heading), plain)
    for result in (wrong := tally.wrong(results)):
        print(f"said to go unnoticed, but {result.outcome.law}: {result.edit}", flush=True)
    print(f"{tally.score(results)} killed, {left} are left", flush=True)
    return 3 if left else int(bool(wrong) or not tally.suffices(results))


def complete(options: argparse.Namespace) -> None:
    """Fill in the seed, the number of edits and the name of the report."""
    options.seed = int(f"{datetime.now(UTC):%Y%m%d}") if options.seed is None else options.seed
    options.number = options.number or (NUMBER_OF_KIT if options.kit else NUMBER)
    options.name = "generic_kit" if options.kit else "generic"


def selected(edits: Sequence[Edit], only: Sequence[str]) -> list[Edit]:
    """Return the edits whose folder, operator, file or id is in `only`, or all if it is empty."""
    return [
        edit
        for edit in edits
        if not only or {sample.room_of(edit.file), edit.operator, edit.file, edit.id} & set(only)
    ]


def _reached(
    pool: ThreadPoolExecutor, end: float, options: argparse.Namespace
) -> reach.Reached | None:
    """Return which lines each test reaches, measuring where needed; None if the time is up."""

    def missing() -> list[tuple[str, str]]:
        left = reach.gathered(kit=options.kit)[1]
        return [
            (file, stage) for file, stage in left if stage == "threads" or options.until != NEAR
        ]

    def measure(one: tuple[str, str]) -> None:
        if time.monotonic() <= end:
            reach.measure(*one)

    list(pool.map(measure, missing()))
    reached, left = reach.gathered(kit=options.kit)[0], len(missing())
    known = f"{len(reached.seconds)} tests, {sum(reached.seconds.values()):.0f} s"
    print(f"{known}; {left} measurements are left", flush=True)
    return None if left else reached


def is_final(outcome: Outcome, until: str) -> bool:
    """Return whether no stage up to `until` is left to try after this outcome."""
    return outcome.verdict != "survived" or STAGES.index(outcome.stage) >= STAGES.index(until)


def attempt(edit: Edit, reached: reach.Reached, until: str) -> Outcome:
    """Run the tests that reach an edit, with the edit planted, up to the stage `until`."""
    stages = [
        stage for stage in reached.stages(edit) if STAGES.index(stage.name) <= STAGES.index(until)
    ]
    outcome = tried(edit.file, edit.planted, stages) if stages else Outcome("survived")
    if outcome.verdict != "survived":
        return outcome
    counts = ", ".join(f"{len(stage.tests)} {stage.name}" for stage in stages) or "none"
    return replace(outcome, stage=until, words=f"tests that reach it: {counts}")


def _results(
    pool: ThreadPoolExecutor,
    chosen: Sequence[Edit],
    known: Sequence[sample.Equivalent],
    reached: reach.Reached,
    options: argparse.Namespace,
    end: float,
) -> tuple[list[Result], int]:
    """Return the result of every edit, and how many edits are left because the time was up.

    An edit that no test can notice is tried in the first stage only.
    """
    options.out.mkdir(parents=True, exist_ok=True)
    journal = options.out / f"{options.name}.jsonl"
    if not options.resume:
        journal.unlink(missing_ok=True)
    outcomes = {line.pop("id"): Outcome(**line) for line in read_lines(journal)}
    entries = {edit.id: next((one for one in known if one.holds(edit)), None) for edit in chosen}
    until = {edit.id: NEAR if entries[edit.id] else options.until for edit in chosen}

    def is_done(edit: Edit) -> bool:
        return edit.id in outcomes and is_final(outcomes[edit.id], until[edit.id])

    def try_one(edit: Edit) -> None:
        if not is_done(edit) and time.monotonic() <= end:
            outcomes[edit.id] = outcome = attempt(edit, reached, until[edit.id])
            add_line(journal, {"id": edit.id, **asdict(outcome)})
            said = (outcome.verdict, outcome.stage, f"{outcome.seconds} s", edit.file, edit.after)
            print(edit.id, *said, outcome.law, outcome.words, flush=True)

    list(pool.map(try_one, chosen))
    results = [Result(edit, outcomes.get(edit.id, tally.OPEN), entries[edit.id]) for edit in chosen]
    return results, sum(not is_done(edit) for edit in chosen)


if __name__ == "__main__":
    launching.main(main)
