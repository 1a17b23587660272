"""How often each feature of the drawn examples came up, alone and in pairs; counts of several sessions add up."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path

from sp_core.testing.remarks import larger

SCHEME = "scheme="


@dataclass
class Tally:
    """Counts of one session, or of several.

    Attributes:
        examples: drawn and run.
        raw: run once more without the checks between ranks.
        sizes: examples by number of ranks.
        features: examples by feature.
        pairs: examples by two features, in alphabetical order.
        ratios: the worst error over bound by what was compared.
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
        """Count one example.

        Args:
            features: its features; True for those that are counted in pairs too.
        """
        self.features.update(list(features))
        self.pairs.update(combinations(sorted(name for name, crossed in features.items() if crossed), 2))

    def merge(self, other: Tally) -> None:
        """Add another session's."""
        self.tests += other.tests
        self.examples += other.examples
        self.raw += other.raw
        self.sizes.update(other.sizes)
        self.features.update(other.features)
        self.pairs.update(other.pairs)
        for name, ratio in other.ratios.items():
            self.ratios[name] = larger(self.ratios.get(name, ratio), ratio)

    def schemes(self) -> dict[str, int]:
        """Examples by scheme."""
        return {name.removeprefix(SCHEME): n for name, n in sorted(self.features.items()) if name.startswith(SCHEME)}

    def text(self) -> str:
        """JSON that `parse` reads."""
        return json.dumps(vars(self) | {"pairs": [[*pair, count] for pair, count in sorted(self.pairs.items())]}, indent=0)

    def write(self, path: Path) -> None:
        """Write to a JSON file that `read` reads."""
        path.write_text(self.text())

    @classmethod
    def parse(cls, text: str) -> Tally:
        """What `text` has told."""
        told = json.loads(text)
        told["sizes"] = Counter({int(size): count for size, count in told["sizes"].items()})
        told["features"] = Counter(told["features"])
        told["pairs"] = Counter({(a, b): count for a, b, count in told["pairs"]})
        return cls(**told)

    @classmethod
    def read(cls, path: Path) -> Tally:
        """What `write` has written."""
        return cls.parse(path.read_text())
