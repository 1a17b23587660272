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
from mutants.sample import Equivalent, Unreachable, room_of
from mutants.trial import Outcome

Z = 1.959964
"""Of a two-sided interval of 95 %."""
LEAST_SCORE, LEAST_IN_ROOM = 0.97, 0.95
OPEN = Outcome("open", words="not tried yet")


@dataclass(frozen=True)
class Result:
    """An edit, what became of it, and the entry that says why no test can notice it."""

    edit: Edit
    outcome: Outcome
    entry: Equivalent | Unreachable | None = None

    @property
    def killed(self) -> bool:
        """Whether a test went red."""
        return self.outcome.verdict == "killed"

    def as_dict(self) -> dict[str, Any]:
        """Plain data."""
        edit = {
            name: getattr(self.edit, name)
            for name in ("id", "file", "place", "operator", "before", "after")
        }
        return {
            **edit,
            "line": self.edit.lines[-1],
            "reason": self.entry and self.entry.reason,
            **self.outcome.as_dict(),
        }


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

        Source: Wilson, Probable inference, the law of succession, and statistical inference, JASA
            22 (1927), equation 11.
        """
        if not self.all:
            return 0.0, 1.0
        weight = Z * Z / self.all
        middle = (self.share + weight / 2) / (1 + weight)
        reach = (
            Z
            / (1 + weight)
            * math.sqrt(self.share * (1 - self.share) / self.all + weight / self.all / 4)
        )
        return middle - reach, middle + reach

    def __str__(self) -> str:
        low, high = self.interval
        return f"{self.killed} of {self.all}, {self.share:.1%} ({low:.1%} to {high:.1%})"


def score(results: Sequence[Result]) -> Score:
    """Of what was tried, without those that no test can notice."""
    counted = [result for result in results if result.entry is None and result.outcome != OPEN]
    return Score(sum(result.killed for result in counted), len(counted))


def wrong(results: Sequence[Result]) -> list[Result]:
    """Those said to change nothing, that a test has noticed."""
    return [
        result
        for result in results
        if result.entry is not None and result.outcome.verdict not in ("survived", "open")
    ]


def suffices(results: Sequence[Result]) -> bool:
    """Return whether enough edits were killed, in each room and in all."""
    rooms = grouped(results, lambda edit: room_of(edit.file)).values()
    return score(results).share >= LEAST_SCORE and all(
        score(room).share >= LEAST_IN_ROOM for room in rooms
    )


def grouped(results: Sequence[Result], key: Callable[[Edit], str]) -> dict[str, list[Result]]:
    """Results by room, or by operator."""
    names = sorted({key(result.edit) for result in results})
    return {name: [result for result in results if key(result.edit) == name] for name in names}


def markdown(results: Sequence[Result], heading: str) -> str:
    """The report for people."""
    taken = [result.outcome.seconds for result in results if result.killed]
    median = statistics.median(taken) if taken else 0.0
    lines = [
        "# Wrong edits and the tests that kill them",
        "",
        f"{heading}: {score(results)} killed, median {median:.1f} s.",
    ]
    lines += [
        "",
        f"Tried so far: {sum(result.outcome != OPEN for result in results)} of {len(results)}.",
    ]
    lines += [
        "",
        "| | edits | equivalent | cannot run here | killed | share |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for key in (lambda edit: room_of(edit.file), lambda edit: edit.operator):
        lines += [_row(name, part) for name, part in grouped(results, key).items()]
    for title, verdicts in (("Survivors", ("survived",)), ("Others", ("hung", "broken"))):
        found = [r for r in results if r.outcome.verdict in verdicts and r.entry is None]
        lines += ["", f"## {title}", "", *([*map(_told, found)] or ["None."])]
    for title, kind in (("Equivalent", Equivalent), ("Cannot run here", Unreachable)):
        found = [r for r in results if isinstance(r.entry, kind)]
        lines += [
            "",
            f"## {title}",
            "",
            *([f"{_told(r)} {r.entry.reason}" for r in found if r.entry] or ["None."]),
        ]
    return "\n".join(lines) + "\n"


def _row(name: str, part: Sequence[Result]) -> str:
    figures = score(part)
    same, elsewhere = (
        sum(isinstance(result.entry, kind) for result in part) for kind in (Equivalent, Unreachable)
    )
    return (
        f"| {name} | {len(part)} | {same} | {elsewhere} | {figures.killed} | {figures.share:.1%} |"
    )


def _told(result: Result) -> str:
    edit, words = result.edit, result.outcome.words
    before, after = (" ".join(text.split()) for text in (edit.before, edit.after))
    return f"- `{edit.id}` {edit.file} {edit.place}: `{before}` to `{after}`. {words}".rstrip()


def write(folder: Path, name: str, results: Sequence[Result], heading: str) -> None:
    """Write both reports into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.md").write_text(markdown(results, heading))
    (folder / f"{name}.json").write_text(
        json.dumps([result.as_dict() for result in results], indent=1) + "\n"
    )
