"""What is known of a soak: a file of lines that grows run by run, and the report made of it."""

from __future__ import annotations

import json
import os
import random
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from soak.runs import RANKS, Ended, Run

from benchmarks.files import write_json
from benchmarks.launching import commit

LINES, REPORT, PLAIN = "soak.jsonl", "soak.md", "soak.json"


class Soak:
    """The runs of one soak that have ended, kept in a folder.

    Args:
        folder: where its files lie; one that was interrupted is gone on with.
        seed: that the runs' seeds are drawn from; None for that of the folder, or any.

    Raises:
        SystemExit: the folder is another soak's.
    """

    def __init__(self, folder: Path, seed: int | None) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.commit = commit()
        lines = _whole_lines(folder / LINES)
        found = {line["soak"] for line in lines}
        if found - {seed if seed is not None else next(iter(found), None)}:
            raise SystemExit(
                f"{folder / LINES} is a soak with seed {found}, {seed} was given. Give that seed or another --out."
            )
        self.seed: int = (
            seed if seed is not None else next(iter(found), random.SystemRandom().randrange(2**31))
        )
        self.ended = {ended.run.key: ended for ended in map(Ended.from_dict, lines)}
        self._commits = {json.dumps(line["commit"]) for line in lines}

    def add(self, ended: Ended) -> None:
        """Keep a run that has ended; it outlives whatever happens next."""
        self.ended[ended.run.key] = ended
        self._commits.add(json.dumps(self.commit))
        with (self.folder / LINES).open("a") as file:
            file.write(
                json.dumps({"soak": self.seed, **ended.as_dict(), "commit": self.commit}) + "\n"
            )
            file.flush()
            os.fsync(file.fileno())

    def write(self, keys: Sequence[tuple[str, int]], tests: Sequence[str]) -> None:
        """Write the report about these runs."""
        chosen = [self.ended[key] for key in keys]
        commits = sorted(map(json.loads, self._commits), key=str)
        plain = {
            "seed": self.seed,
            "commits": commits,
            "cores": os.cpu_count(),
            "tests": list(tests),
        }
        write_json(self.folder / PLAIN, {**plain, "runs": [ended.as_dict() for ended in chosen]})
        (self.folder / REPORT).write_text(markdown(chosen, plain))


def _whole_lines(path: Path) -> list[dict[str, Any]]:
    """The lines of a file; a last one that was cut short is removed, because the next one would be glued to it."""
    text = path.read_text() if path.exists() else ""
    whole = text[: text.rfind("\n") + 1]
    if whole != text:
        path.write_text(whole)
    return [json.loads(line) for line in whole.splitlines()]


def told(ended: Ended) -> str:
    """A run in a line, and one for each failure."""
    seconds = " + ".join(f"{seconds:.0f} s {stage}" for stage, seconds in ended.seconds.items())
    line = f"{ended.run.kind:6} {ended.run.number:3} seed {ended.run.seed:10} {ended.as_dict()['verdict']:6} {seconds}"
    failures = [
        f"  {one.stage}: {one.test}: {one.words}\n  {one.command}" for one in ended.failures
    ]
    return "\n".join([line, *failures])


def markdown(runs: Sequence[Ended], plain: dict[str, Any]) -> str:
    """The report for people."""
    lines = ["# The suite again and again", "", *map(_summary, _kinds(runs).items()), ""]
    lines += [
        f"Each run has a seed of its own, drawn from {plain['seed']}, and two stages: ranks as threads, then `mpiexec -n {RANKS}`. "
        f"{plain['cores']} cores; commit {', '.join(_short(one) for one in plain['commits'])}; test files: {len(plain['tests'])}.",
        "",
        "| run | seed | verdict | seconds | tests | load when it began |",
        "| --- | --- | --- | --- | --- | --- |",
        *map(_row, runs),
    ]
    failures = [(ended, one) for ended in runs for one in ended.failures]
    if failures:
        lines += ["", "## What failed", ""]
        lines += [
            f"- {_name(e.run)}, seed {e.run.seed}, {f.test}: {f.words}\n\n      {f.command}"
            for e, f in failures
        ]
    return "\n".join(lines) + "\n"


def _kinds(runs: Sequence[Ended]) -> dict[str, list[Ended]]:
    return {
        kind: [ended for ended in runs if ended.run.kind == kind]
        for kind in dict.fromkeys(e.run.kind for e in runs)
    }


def _summary(kind: tuple[str, list[Ended]]) -> str:
    name, runs = kind
    took = [sum(ended.seconds.values()) for ended in runs]
    where = (
        "with a busy process on each core"
        if name == "loaded"
        else "with nothing of their own beside them"
    )
    passed = sum(ended.passed for ended in runs)
    return f"- {passed} of {len(runs)} runs passed {where}; median {statistics.median(took):.0f} s, longest {max(took):.0f} s"


def _row(ended: Ended) -> str:
    seconds, tests = (
        " + ".join(f"{value:g}" for value in part.values()) for part in (ended.seconds, ended.tests)
    )
    return f"| {_name(ended.run)} | {ended.run.seed} | {ended.as_dict()['verdict']} | {seconds} | {tests} | {ended.load:g} |"


def _name(run: Run) -> str:
    return f"{run.kind} {run.number}"


def _short(told: dict[str, Any]) -> str:
    return f"{(told['sha'] or 'unknown')[:10]}{' with changes' if told['dirty'] else ''}"
