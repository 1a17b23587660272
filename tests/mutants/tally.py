"""Report the outcomes of wrong edits as numbers, Markdown and JSON."""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from mutants.edits import Edit
from mutants.sample import Equivalent, room_of
from mutants.trial import Outcome
from studies.records import table

Z = 1.959964
"""The normal quantile of a two-sided interval of 95 %."""
LEAST_SCORE, LEAST_IN_ROOM = 0.97, 0.95
OPEN = Outcome("open", words="not tried yet")
OTHERS = ("hung", "broken", "stale")
TOLD = ("id", "file", "place", "operator", "before", "after")


@dataclass(frozen=True)
class Result:
    """An edit, its outcome, and the entry that says why no test can notice it, if there is one."""

    edit: Edit
    outcome: Outcome
    entry: Equivalent | None = None

    @property
    def killed(self) -> bool:
        """Return whether a test failed."""
        return self.outcome.verdict == "killed"

    def as_dict(self) -> dict[str, Any]:
        """Return plain data."""
        edit = {name: getattr(self.edit, name) for name in TOLD}
        reason = self.entry.reason if self.entry else None
        return {**edit, "line": self.edit.lines[-1], "reason": reason, **asdict(self.outcome)}


@dataclass(frozen=True)
class Score:
    """The number of killed edits, and of all edits that a test could notice."""

    killed: int
    all: int

    @property
    def share(self) -> float:
        """Return the share of killed edits, or 1 if there are no edits."""
        return self.killed / self.all if self.all else 1.0

    @property
    def interval(self) -> tuple[float, float]:
        """Return the 95 % confidence interval of the share, for all edits and not only the sample.

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
    """Return the score of the edits that were tried, without those that no test can notice."""
    counted = [result for result in results if result.entry is None and result.outcome != OPEN]
    return Score(sum(result.killed for result in counted), len(counted))


def wrong(results: Sequence[Result]) -> list[Result]:
    """Return the edits that `equivalent.toml` calls unnoticeable but that did not survive."""
    return [
        result
        for result in results
        if result.entry is not None and result.outcome.verdict not in ("survived", "open")
    ]


def suffices(results: Sequence[Result]) -> bool:
    """Return whether enough edits were killed in each folder and in total."""
    rooms = grouped(results, lambda edit: room_of(edit.file)).values()
    return score(results).share >= LEAST_SCORE and all(
        score(room).share >= LEAST_IN_ROOM for room in rooms
    )


def grouped(results: Sequence[Result], key: Callable[[Edit], str]) -> dict[str, list[Result]]:
    """Group results by a key of their edit, such as its folder or operator."""
    names = sorted({key(result.edit) for result in results})
    return {name: [result for result in results if key(result.edit) == name] for name in names}


def markdown(results: Sequence[Result], heading: str) -> list[str]:
    """Return the lines of the report."""
    taken = [result.outcome.seconds for result in results if result.killed]
    tried = sum(result.outcome != OPEN for result in results)
    rooms = grouped(results, lambda edit: room_of(edit.file))
    rows = [*rooms.items(), *grouped(results, lambda edit: edit.operator).items()]
    head = ("", "edits", "equivalent", "killed", "share")
    lines = [
        "# Wrong edits and the tests that kill them",
        "",
        f"{heading}: {score(results)} killed, median {statistics.median(taken or [0.0]):.1f} s.",
        "",
        f"Tried so far: {tried} of {len(results)}.",
        "",
        *table(head, [_row(*row) for row in rows]),
    ]
    lists = {
        "Survivors": [r for r in results if r.outcome.verdict == "survived" and not r.entry],
        "Others": [r for r in results if r.outcome.verdict in OTHERS and not r.entry],
        "Equivalent": [r for r in results if r.entry],
    }
    for title, listed in lists.items():
        lines += ["", f"## {title}", "", *(map(_told, listed) if listed else ["None."])]
    return lines


def _row(name: str, part: Sequence[Result]) -> tuple[object, ...]:
    figures, same = score(part), sum(result.entry is not None for result in part)
    return name, len(part), same, figures.killed, f"{figures.share:.1%}"


def _told(result: Result) -> str:
    edit, reason = result.edit, result.entry.reason if result.entry else ""
    before, after = (" ".join(text.split()) for text in (edit.before, edit.after))
    change = f"- `{edit.id}` {edit.file} {edit.place}: `{before}` to `{after}`."
    return f"{change} {result.outcome.words} {reason}".rstrip()
