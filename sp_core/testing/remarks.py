"""What a body tells the engine while it runs: events, features, targets, notes and error ratios, from whichever rank."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field


@dataclass
class Remarks:
    """What was said during one example, on one rank or on all."""

    events: dict[tuple[str, str], None] = field(default_factory=dict)
    targets: dict[str, float] = field(default_factory=dict)
    notes: dict[str, None] = field(default_factory=dict)
    ratios: dict[str, float] = field(default_factory=dict)
    features: dict[str, bool] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.events or self.targets or self.notes or self.ratios or self.features)

    def merge(self, other: Remarks) -> None:
        """Add another rank's: each event and note once, the largest of each number."""
        self.events.update(other.events)
        self.notes.update(other.notes)
        self.features.update(other.features)
        for mine, theirs in ((self.targets, other.targets), (self.ratios, other.ratios)):
            for name, value in theirs.items():
                mine[name] = larger(mine.get(name, value), value)

    def replay(self) -> None:
        """Hand events, targets and notes to Hypothesis; called by the engine inside an example."""
        import hypothesis

        for value, payload in self.events:
            hypothesis.event(value, payload)
        for label, number in self.targets.items():
            hypothesis.target(number, label=label)
        for text in self.notes:
            hypothesis.note(text)


def larger(a: float, b: float) -> float:
    """The larger of two numbers; NaN counts as larger than all, because an error that is NaN is the worst."""
    return a if a != a or a >= b else b


_lock = threading.Lock()  # ranks that are threads write to one sink
_threads = threading.local()
session = Remarks()
"""Ratios recorded outside an example."""


def current() -> Remarks | None:
    """Where this thread's remarks go, if it runs an example."""
    sink: Remarks | None = getattr(_threads, "sink", None)
    return sink


def enter(sink: Remarks | None) -> Remarks | None:
    """Let this thread's remarks go there.

    Returns:
        Where they went before.
    """
    before = current()
    _threads.sink = sink
    return before


def merged(parts: Sequence[Remarks]) -> Remarks:
    """The remarks of all ranks as one."""
    total = Remarks()
    for part in parts:
        total.merge(part)
    return total


def event(value: str, payload: str | int | float = "") -> None:
    """Count a class of examples, as Hypothesis' `event` does; may be called on any rank.

    Args:
        value: name of the class.
        payload: more detail, counted separately.
    """
    sink = current()
    if sink is not None:
        sink.events[value, str(payload)] = None
    elif _in_hypothesis():
        import hypothesis

        hypothesis.event(value, payload)


def features(crossed: Mapping[str, object], alone: Iterable[str] = ()) -> None:
    """Say what kind of example this is: each feature is an event, and counted over the session; may be called on any rank.

    Args:
        crossed: the value of each dimension in which examples differ; how often two values come together is counted too.
        alone: what is only counted by itself.
    """
    named = {f"{dimension}={value}": True for dimension, value in crossed.items()} | dict.fromkeys(alone, False)
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
    sink = current()
    if sink is not None:
        with _lock:
            sink.targets[label] = larger(sink.targets.get(label, observation), observation)
    elif _in_hypothesis():
        import hypothesis

        hypothesis.target(observation, label=label)


def note(value: object) -> None:
    """Show a value with the minimal example; a note that several ranks make is shown once."""
    sink = current()
    if sink is not None:
        sink.notes[str(value)] = None
    elif _in_hypothesis():
        import hypothesis

        hypothesis.note(value)


def record_ratio(name: str, value: float) -> None:
    """Record an error divided by its bound; the worst of each name is printed at the end of the session.

    Args:
        name: what was compared.
        value: error over bound; a session whose worst value is above the option `sp_max_error_ratio` (0.5) fails.
    """
    sink = current()
    ratios = (session if sink is None else sink).ratios
    with _lock:
        ratios[name] = larger(ratios.get(name, value), value)


def _in_hypothesis() -> bool:
    if "hypothesis" not in sys.modules:
        return False
    from hypothesis import currently_in_test_context

    return currently_in_test_context()
