"""Simulate a machine for tests of `nox -s compare`: launches take no time, and leave records."""

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from kit import records as made

from benchmarks.compare.command import measure
from benchmarks.compare.pairs import build
from benchmarks.compare.rule import RECORDS, SCREEN_PAIRS, Key, Result, Row, Side

Json = dict[str, Any]
RING, ULYSSES, LAYER = "schemes/ring/forward", "schemes/ulysses/forward", "layers/block/forward"
CASES = (RING, ULYSSES, LAYER)


@dataclass
class Machine:
    """A `Bench` whose times are drawn at random.

    Args:
        seed: the seed of the noise.
        noise: standard deviation of the logarithm of a launch's time.
        drift: standard deviation of the logarithm of a pair's time, which both sides share.
        slower: head's time divided by base's, by case and ranks.
        broken: (side, case, ranks, stage, pair) of each record that fails.
        lost: (side, case) of each case that the side does not have.
        changes: by side, (index, parts). Records of pairs from this index on get these parts. The
            pairs of "confirm" are counted after those of "screen".
        dead: (side, ranks) whose launches leave no record.
    """

    seed: int = 0
    noise: float = 0.01
    drift: float = 0.0
    slower: dict[Key, float] = field(default_factory=dict)
    broken: set[tuple[str, str, int, str, int]] = field(default_factory=set)
    lost: set[tuple[str, str]] = field(default_factory=set)
    changes: dict[str, tuple[int, dict[str, Any]]] = field(default_factory=dict)
    dead: set[tuple[str, int]] = field(default_factory=set)
    cores: int = 2
    launches: list[tuple[str, int, str, int, tuple[str, ...]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)

    def listed(self, side: Side, ranks: Sequence[int]) -> set[Key]:
        return {(case, n) for case in CASES for n in ranks if (side.name, case) not in self.lost}

    def launch(self, side: Side, ranks: int, cases: Sequence[str], pair: Json, out: Path) -> None:
        self.launches.append((side.name, ranks, pair["stage"], pair["index"], tuple(cases)))
        if (side.name, ranks) in self.dead:
            return
        with out.open("a") as file:
            file.writelines(
                json.dumps(self._record(side, ranks, case, pair)) + "\n" for case in cases
            )

    def _record(self, side: Side, ranks: int, case: str, pair: Json) -> Json:
        if (side.name, case, ranks, pair["stage"], pair["index"]) in self.broken:
            failure = {**made.NOTHING, "status": "timeout", "reason": "it hung"}
            return {**record(case, ranks, 1.0, side, pair), **failure}
        factor = self.slower.get((case, ranks), 1.0) if side.name == "head" else 1.0
        shared = random.Random(f"{ranks} {pair['stage']} {pair['index']}")
        speed = shared.lognormvariate(0, self.drift)
        seconds = 0.01 / ranks * speed * self.random.lognormvariate(0, self.noise)
        found = record(case, ranks, seconds, side, pair, factor)
        found["transport"]["oversubscribed"] = ranks > self.cores
        since, change = self.changes.get(side.name, (0, {}))
        if pair["index"] + SCREEN_PAIRS * (pair["stage"] == "confirm") >= since:
            for part, values in change.items():
                found[part] = {**found[part], **values} if isinstance(values, dict) else values
        return found


def record(
    case: str, ranks: int, seconds: float, side: Side, pair: Json, factor: float = 1.0
) -> Json:
    """Return a record of `factor` times `seconds`; attention takes all time above `seconds`."""
    attention, waiting = 0.8 * seconds + (factor - 1) * seconds, 0.2 * seconds
    shares = {"total": seconds * factor, "attention": attention, "communication": waiting}
    parts: Json = {
        "pair": pair,
        "commit": {"sha": side.sha, "dirty": False},
        "phases": {name: {"max_s": value, "mean_s": value} for name, value in shares.items()},
        "comm": {"shift": {"bytes_sent": 64, "seconds": waiting}},
    }
    layer, scheme, variant = case.split("/")
    what = made.case(layer, scheme, variant, ranks)
    return made.dicts(made.record(what, seconds * factor, **parts))


def pair_of_sides() -> tuple[Side, Side]:
    """Return a base and a head that exist in no repository."""
    return (
        Side("base", Path("nowhere"), "base", "b" * 40),
        Side("head", Path("nowhere"), "head", "c" * 40),
    )


def compared(
    folder: Path,
    machine: Machine,
    ranks: Sequence[int] = (1, 2),
    *,
    seed: int = 11,
    strict: bool = False,
) -> Result:
    """Return the result of a whole comparison on a simulated machine."""
    sides = pair_of_sides()
    listed = {side.name: machine.listed(side, ranks) for side in sides}
    how: Any = {"seed": seed, "out": folder / RECORDS, "heard": lambda *_: None}
    measure(cast("Any", machine), sides, listed["base"] & listed["head"], **how)
    return build(folder, *sides, listed, strict=strict)


def rows_of(result: Result) -> dict[Key, Row]:
    """Return the rows of a result by case and ranks."""
    return {row.key: row for row in result.rows}
