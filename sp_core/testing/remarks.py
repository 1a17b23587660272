"""Pass events, features, targets, notes and error ratios from a body to the engine, on any rank, and count features."""

from __future__ import annotations

import json
import sys
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from typing import Any


@dataclass
class Remarks:
    """The remarks of one example, on one rank or on all."""

    events: dict[tuple[str, str], None] = field(default_factory=dict)
    targets: dict[str, float] = field(default_factory=dict)
    notes: dict[str, None] = field(default_factory=dict)
    ratios: dict[str, float] = field(default_factory=dict)
    features: dict[str, bool] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return any(vars(self).values())

    def merge(self, other: Remarks) -> None:
        """Add another rank's: each event, feature and note once, the largest of each number."""
        self.events |= other.events
        self.notes |= other.notes
        self.features |= other.features
        keep_largest(self.targets, other.targets)
        keep_largest(self.ratios, other.ratios)

    def replay(self) -> None:
        """Hand events, targets and notes to Hypothesis; called by the engine inside an example."""
        import hypothesis

        for value, payload in self.events:
            hypothesis.event(value, payload)
        for label, number in self.targets.items():
            hypothesis.target(number, label=label)
        for text in self.notes:
            hypothesis.note(text)


_lock = threading.Lock()  # ranks that are threads write to one sink
_threads = threading.local()
session = Remarks()
"""Ratios recorded outside an example."""


def current() -> Remarks | None:
    """Return where this thread's remarks go, if it runs an example."""
    return getattr(_threads, "sink", None)


def enter(sink: Remarks | None) -> None:
    """Let this thread's remarks go there."""
    _threads.sink = sink


@contextmanager
def collected() -> Iterator[Remarks]:
    """Collect the remarks of a block."""
    before, sink = current(), Remarks()
    enter(sink)
    try:
        yield sink
    finally:
        enter(before)


def event(value: str, payload: str | int | float = "") -> None:
    """Count a class of examples, as Hypothesis' `event` does; may be called on any rank.

    Args:
        value: name of the class.
        payload: more detail, counted separately.
    """
    _say("event", Remarks(events={(value, str(payload)): None}), value, payload)


def features(crossed: Mapping[str, object], alone: Iterable[str] = ()) -> None:
    """Describe the example: each feature is an event, and counted over the session; may be called on any rank.

    Args:
        crossed: the value of each dimension in which examples differ. Pairs of these are counted
            too.
        alone: features that are counted only by themselves.
    """
    named = {f"{dimension}={value}": True for dimension, value in crossed.items()} | dict.fromkeys(
        alone, False
    )
    sink = current()
    if sink is not None:
        sink.features.update(named)
    for name in named:
        event(name)


def target(observation: float, *, label: str = "") -> None:
    """Let Hypothesis look for examples that make a number large; the largest over the ranks counts.

    Args:
        observation: finite number.
        label: tells several targets of one test apart.
    """
    _say("target", Remarks(targets={label: observation}), observation, label=label)


def note(value: object) -> None:
    """Show a value with the minimal example. A note that several ranks make is shown once."""
    _say("note", Remarks(notes={str(value): None}), value)


def record_ratio(name: str, value: float) -> None:
    """Record an error divided by its bound. The worst of each name is printed at the end of the session.

    Args:
        name: of the comparison.
        value: error over bound; a session whose worst value is above the option
            `sp_max_error_ratio` (0.5) fails.
    """
    sink = current()
    with _lock:
        (session if sink is None else sink).merge(Remarks(ratios={name: value}))


def _say(name: str, remark: Remarks, *args: Any, **more: Any) -> None:
    """Keep a remark, or hand it to Hypothesis outside an example of ours."""
    sink = current()
    if sink is not None:
        with _lock:
            sink.merge(remark)
    elif "hypothesis" in sys.modules:
        import hypothesis

        if hypothesis.currently_in_test_context():
            getattr(hypothesis, name)(*args, **more)


SCHEME = "scheme="


def larger(a: float, b: float) -> float:
    """Return the larger of two numbers. NaN counts as the largest, because an error that is NaN is the worst."""
    return a if a != a or a >= b else b


def keep_largest(mine: dict[str, float], theirs: Mapping[str, float]) -> None:
    """Add numbers by name, of which the largest stays."""
    for name, value in theirs.items():
        mine[name] = larger(mine.get(name, value), value)


@dataclass
class Tally:
    """Counts of one session, or of several.

    Attributes:
        examples: drawn and run.
        raw: run once more without the checks between ranks.
        sizes: examples by number of ranks.
        features: examples by feature.
        pairs: examples by two features, in alphabetical order.
        ratios: the worst error over bound of each name.
        tests: that ran on ranks.
    """

    examples: int = 0
    raw: int = 0
    sizes: Counter[int] = field(default_factory=Counter)
    features: Counter[str] = field(default_factory=Counter)
    pairs: Counter[tuple[str, str]] = field(default_factory=Counter)
    ratios: dict[str, float] = field(default_factory=dict)
    tests: int = 0

    def count(self, features: Mapping[str, bool]) -> None:
        """Count one example by its features. Those that are True are counted in pairs too."""
        self.features.update(list(features))
        self.pairs.update(
            combinations(sorted(name for name, crossed in features.items() if crossed), 2)
        )

    def merge(self, other: Tally) -> None:
        """Add another session's counts."""
        for name, value in vars(other).items():
            if isinstance(value, Counter):
                vars(self)[name].update(value)
            elif isinstance(value, int):
                vars(self)[name] += value
        keep_largest(self.ratios, other.ratios)

    def schemes(self) -> dict[str, int]:
        """Return the examples by scheme."""
        return {
            name.removeprefix(SCHEME): n
            for name, n in sorted(self.features.items())
            if name.startswith(SCHEME)
        }

    def text(self) -> str:
        """Return JSON that `parse` reads."""
        return json.dumps(
            vars(self) | {"pairs": [[*pair, count] for pair, count in sorted(self.pairs.items())]},
            indent=0,
        )

    @classmethod
    def parse(cls, text: str) -> Tally:
        """Read the JSON of `text`."""
        told = json.loads(text)
        told["sizes"] = Counter({int(size): count for size, count in told["sizes"].items()})
        told["features"] = Counter(told["features"])
        told["pairs"] = Counter({(a, b): count for a, b, count in told["pairs"]})
        return cls(**told)

    @classmethod
    def read(cls, path: Path) -> Tally:
        """Read a file with the JSON of `text`."""
        return cls.parse(path.read_text())
