"""Count each feature of the drawn examples, alone and in pairs. Counts of several sessions add up."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path

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
        self.pairs.update(combinations(sorted(name for name, crossed in features.items() if crossed), 2))

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
        return {name.removeprefix(SCHEME): n for name, n in sorted(self.features.items()) if name.startswith(SCHEME)}

    def text(self) -> str:
        """Return JSON that `parse` reads."""
        return json.dumps(vars(self) | {"pairs": [[*pair, count] for pair, count in sorted(self.pairs.items())]}, indent=0)

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
