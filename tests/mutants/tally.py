"""What became of the wrong edits, as numbers, Markdown and JSON."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mutants.edits import Edit
from mutants.sample import Equivalent, room_of
from mutants.trial import Outcome

Z = 1.959964
"""Of a two-sided interval of 95 %."""
LEAST_SCORE, LEAST_BOUND = 0.95, 0.92
OPEN = Outcome("open", words="not tried yet")


@dataclass(frozen=True)
class Result:
    """An edit, what became of it, and the entry that says that it changes nothing."""

    edit: Edit
    outcome: Outcome
    equivalent: Equivalent | None = None

    @property
    def killed(self) -> bool:
        """Whether a test went red."""
        return self.outcome.verdict == "killed"

    def as_dict(self) -> dict[str, Any]:
        """Plain data."""
        edit = {name: getattr(self.edit, name) for name in ("id", "file", "place", "operator", "before", "after")}
        return {**edit, "line": self.edit.lines[-1], "equivalent": self.equivalent is not None, **self.outcome.as_dict()}


@dataclass(frozen=True)
class Score:
    """How many of those that change something are killed."""

    killed: int
    all: int

    @property
    def share(self) -> float:
        """1 where there is none."""
        return self.killed / self.all if self.all else 1.0

    @property
    def interval(self) -> tuple[float, float]:
        """Where the share of all edits lies, with 95 % confidence.

        Source: Wilson, Probable inference, the law of succession, and statistical inference, JASA 22 (1927), equation 11.
        """
        if not self.all:
            return 0.0, 1.0
        weight = Z * Z / self.all
        middle = (self.share + weight / 2) / (1 + weight)
        reach = Z / (1 + weight) * math.sqrt(self.share * (1 - self.share) / self.all + weight / self.all / 4)
        return middle - reach, middle + reach

    @property
    def suffices(self) -> bool:
        """Whether the tests are as good as they must be."""
        return self.share >= LEAST_SCORE and self.interval[0] >= LEAST_BOUND

    def __str__(self) -> str:
        low, high = self.interval
        return f"{self.killed} of {self.all}, {self.share:.1%} ({low:.1%} to {high:.1%})"


def score(results: Sequence[Result]) -> Score:
    """Of what was tried, without those that change nothing."""
    counted = [result for result in results if result.equivalent is None and result.outcome != OPEN]
    return Score(sum(result.killed for result in counted), len(counted))


def wrong(results: Sequence[Result]) -> list[Result]:
    """Those said to change nothing, that a test has noticed."""
    return [result for result in results if result.equivalent is not None and result.outcome.verdict not in ("survived", "open")]


def grouped(results: Sequence[Result], key: Callable[[Edit], str]) -> dict[str, list[Result]]:
    """Results by room, or by operator."""
    names = sorted({key(result.edit) for result in results})
    return {name: [result for result in results if key(result.edit) == name] for name in names}


def markdown(results: Sequence[Result], heading: str) -> str:
    """The report for people."""
    taken = [result.outcome.seconds for result in results if result.killed]
    median = statistics.median(taken) if taken else 0.0
    lines = ["# Wrong edits and the tests that kill them", "", f"{heading}: {score(results)} killed, median {median:.1f} s."]
    lines += ["", f"Tried so far: {sum(result.outcome != OPEN for result in results)} of {len(results)}."]
    lines += ["", "| | edits | equivalent | killed | share |", "| --- | --- | --- | --- | --- |"]
    for key in (lambda edit: room_of(edit.file), lambda edit: edit.operator):
        lines += [_row(name, part) for name, part in grouped(results, key).items()]
    for title, verdicts in (("Survivors", ("survived",)), ("Others", ("hung", "broken"))):
        found = [r for r in results if r.outcome.verdict in verdicts and r.equivalent is None]
        lines += ["", f"## {title}", "", *([*map(_told, found)] or ["None."])]
    lines += ["", "## Equivalent", "", *(f"{_told(r)} {r.equivalent.reason}" for r in results if r.equivalent is not None)]
    return "\n".join(lines) + "\n"


def _row(name: str, part: Sequence[Result]) -> str:
    figures, same = score(part), sum(result.equivalent is not None for result in part)
    return f"| {name} | {len(part)} | {same} | {figures.killed} | {figures.share:.1%} |"


def _told(result: Result) -> str:
    edit, words = result.edit, result.outcome.words
    before, after = (" ".join(text.split()) for text in (edit.before, edit.after))
    return f"- `{edit.id}` {edit.file} {edit.place}: `{before}` to `{after}`. {words}".rstrip()


def write(folder: Path, results: Sequence[Result], heading: str) -> None:
    """Write both reports into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "generic.md").write_text(markdown(results, heading))
    (folder / "generic.json").write_text(json.dumps([result.as_dict() for result in results], indent=1) + "\n")
