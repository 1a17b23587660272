"""`nox -s generic_mutants`: try a sample of small wrong edits of the library, or of its testing kit with `--kit`.

Each edit is tried alone, by the tests that reach it. The session exits with 1 if fewer are killed
than must be, with 2 if nothing can be said, and with 3 if the time was up before the end:
`--resume` goes on from there.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path

from mutants import nursery, reach, sample, tally
from mutants.attempt import STAGES, tried
from mutants.catalogue import ROOT
from mutants.edits import Edit
from mutants.tally import Result
from mutants.trial import Outcome

NUMBER, NUMBER_OF_KIT = 500, 150


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line.

    Returns:
        The exit code.
    """
    options = _parsed(arguments)
    found = sample.candidates(kit=options.kit)
    if old := sample.stale(sample.equivalents(), [*found, *sample.candidates(kit=not options.kit)]):
        print(
            *(f"stale: {one.file} {one.place}: {one.before} -> {one.after}" for one in old),
            sep="\n",
            flush=True,
        )
        return 2
    chosen = selected(sample.drawn(found, options.number, options.seed), options.only)
    heading = f"Commit {_commit()}, seed {options.seed}, {len(chosen)} of {len(found)} edits"
    print(heading, flush=True)
    nursery.compile_all(ROOT)
    late = _clock(options.seconds)
    with ThreadPoolExecutor(options.jobs) as pool:
        try:
            reached = _reached(pool, late, options.until)
        except reach.Red as error:
            print(error, flush=True)
            return 2
        if reached is None:
            return 3
        results, left = _results(pool, chosen, reached, options, late)
    tally.write(options.out, options.name, results, heading)
    for result in (wrong := tally.wrong(results)):
        print(
            f"said to go unnoticed, but {result.outcome.law}: {result.edit.id} {result.edit.after}",
            flush=True,
        )
    print(
        f"{tally.score(results)} killed, {left} are left; {options.out}/{options.name}.md",
        flush=True,
    )
    return 3 if left else int(bool(wrong) or not tally.suffices(results))


def selected(edits: Sequence[Edit], only: Sequence[str]) -> list[Edit]:
    """Those of some rooms, operators, files or ids."""
    return [
        edit
        for edit in edits
        if not only or {sample.room_of(edit.file), edit.operator, edit.file, edit.id} & set(only)
    ]


def _parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="nox -s generic_mutants --", description=__doc__)
    parser.add_argument(
        "--kit",
        action="store_true",
        help="edit sp_core/testing and sp_core/launch instead of the library",
    )
    parser.add_argument(
        "--seed",
        type=int,
        default=int(f"{datetime.now(UTC):%Y%m%d}"),
        help="of the sample (default: the date)",
    )
    parser.add_argument(
        "--number", type=int, help=f"of edits (default: {NUMBER}, of the kit {NUMBER_OF_KIT})"
    )
    parser.add_argument(
        "--only",
        nargs="+",
        default=[],
        metavar="NAME",
        help="rooms, operators, files or ids of the sample",
    )
    parser.add_argument(
        "--jobs",
        type=int,
        default=os.cpu_count() or 1,
        help="how many at a time (default: one per core)",
    )
    parser.add_argument(
        "--until", choices=STAGES, default=STAGES[-1], help="the last stage (default: %(default)s)"
    )
    parser.add_argument(
        "--seconds", type=float, default=float("inf"), help="begin nothing after that time"
    )
    parser.add_argument(
        "--resume", action="store_true", help="keep what was found before, and go on"
    )
    parser.add_argument(
        "--again",
        nargs="+",
        default=[],
        metavar="VERDICT",
        help="with --resume: try these once more",
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=ROOT / "reports",
        help="folder of the reports (default: reports)",
    )
    options = parser.parse_args(arguments)
    options.number = options.number or (NUMBER_OF_KIT if options.kit else NUMBER)
    options.name = "generic_kit" if options.kit else "generic"
    return options


def _commit() -> str:
    """Return the commit whose sources are edited, with a mark if they differ from it."""
    told = subprocess.run(
        ["git", "describe", "--always", "--dirty"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    )
    return told.stdout.strip()


def _clock(seconds: float) -> Callable[[], bool]:
    begin = time.monotonic()
    return lambda: time.monotonic() - begin > seconds


def _reached(
    pool: ThreadPoolExecutor, late: Callable[[], bool], until: str
) -> reach.Reached | None:
    """Return what the tests reach. Measure what is not known. Return None if the time is up."""
    _, missing, on_ranks = reach.gathered()
    list(pool.map(lambda part: late() or reach.measured(*part), missing))
    if on_ranks and until == STAGES[-1] and not late():
        reach.measured_on_ranks(on_ranks)
    reached, left, left_on_ranks = reach.gathered()
    known = f"{len(reached.seconds)} tests, {sum(reached.seconds.values()):.0f} s"
    print(f"{known}; measured {len(missing) - len(left)} files, {len(left)} are left", flush=True)
    return None if left or (left_on_ranks and until == STAGES[-1]) else reached


def kept(journal: Path, again: Sequence[str]) -> dict[str, Outcome]:
    """What is known of edits by their ids, without what is to be tried once more. The last line of an edit counts."""
    lines = (
        [json.loads(line) for line in journal.read_text().splitlines()] if journal.exists() else []
    )
    outcomes = {line.pop("id"): Outcome(**line) for line in lines}
    return {name: outcome for name, outcome in outcomes.items() if outcome.verdict not in again}


def is_final(outcome: Outcome, until: str) -> bool:
    """Whether nothing is to be tried up to a stage that has not been."""
    return (
        outcome.verdict != "survived"
        or outcome.stage not in STAGES
        or STAGES.index(outcome.stage) >= STAGES.index(until)
    )


def _results(
    pool: ThreadPoolExecutor,
    chosen: Sequence[Edit],
    reached: reach.Reached,
    options: argparse.Namespace,
    late: Callable[[], bool],
) -> tuple[list[Result], int]:
    """What became of the edits, written down one by one, and how many are left because the time was up."""
    options.out.mkdir(parents=True, exist_ok=True)
    journal = options.out / f"{options.name}.jsonl"
    if not options.resume:
        journal.unlink(missing_ok=True)
    outcomes = kept(journal, options.again)
    entries = _entries(chosen, reached)
    until = {edit.id: STAGES[0] if edit.id in entries else options.until for edit in chosen}

    def is_done(edit: Edit) -> bool:
        return edit.id in outcomes and is_final(outcomes[edit.id], until[edit.id])

    def attempt(edit: Edit) -> None:
        if is_done(edit) or late():
            return
        outcome = tried(edit, reached, until[edit.id])
        with journal.open("a") as file:
            file.write(json.dumps({"id": edit.id, **outcome.as_dict()}) + "\n")
        outcomes[edit.id] = outcome
        print(_line(edit, outcome), flush=True)

    list(pool.map(attempt, chosen))
    results = [
        Result(edit, outcomes.get(edit.id, tally.OPEN), entries.get(edit.id)) for edit in chosen
    ]
    return results, sum(not is_done(edit) for edit in chosen)


def _entries(
    chosen: Sequence[Edit], reached: reach.Reached
) -> dict[str, sample.Equivalent | sample.Unreachable]:
    """Return by id what is known of edits: they change nothing, or stand where no test here comes."""
    never = [edit for edit in chosen if not reached.stages(edit)]
    far = {edit.id: one for edit in never for one in sample.unreachable() if one.holds(edit)}
    return {
        **far,
        **{edit.id: one for edit in chosen for one in sample.equivalents() if one.is_that(edit)},
    }


def _line(edit: Edit, outcome: Outcome) -> str:
    change = (
        f"{edit.before.splitlines()[0]} -> {edit.after.splitlines()[0]}"
        if edit.before
        else edit.after
    )
    where = (
        f"{outcome.stage:5} {outcome.seconds:6.1f} s {edit.file}:{edit.lines[-1]} {edit.operator}"
    )
    return f"{edit.id} {outcome.verdict:8} {where}: {change} | {outcome.law} {outcome.words}"


if __name__ == "__main__":
    sys.exit(main())
